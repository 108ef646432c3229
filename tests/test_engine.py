"""The engine: one step, many runs, many fees, many episodes and any start give the same numbers to the last bit."""
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stocker.market.core import StockerError
from stocker.market.episodes import TASKS, Market, load_task
from stocker.trading import engine
from stocker.trading.engine import (
    Run, Runs, Start, beginnings, market_path, max_drawdown, play_orders, prepare_path, simulate, stack_paths)
from stocker.trading.orders import fill_order
from stocker.trading.reward import RewardWeights

ARRAYS = ('rewards', 'values', 'traded', 'invalid')
often = settings(deadline=None, database=None, max_examples=100)


def walk(rng, steps=30):
    "Prices of one made-up episode, with a night between the close known and the fill."
    close = 10 ** rng.uniform(-1, 3) * np.exp(rng.normal(0, 0.05, steps)).cumprod()
    return Market(close * rng.uniform(0.95, 1.05, steps), close * rng.uniform(0.95, 1.05, steps), close)


def orders(rng, shape):
    "Sides and quantities: small ones, all there is, and those that cannot trade."
    quantities = rng.integers(-5, 300, shape)
    quantities[rng.random(shape) < 0.05] = 10 ** 15
    return rng.integers(0, 3, shape), quantities


def by_hand(path, sides, quantities, weights, start=None):
    "One run through `Run`."
    run, rows = Run(path, weights, start), []
    for side, quantity in zip(sides.tolist(), quantities.tolist()):
        if run.over: break
        traded, invalid, terms = run.trade(side, quantity)
        rows.append((terms.reward, run.value, traded, invalid))
    return [list(column) for column in zip(*rows)]


@often
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.001, 0.02]), st.floats(0, 0.5), st.booleans())
def test_compiled_runs_plain_runs_and_single_steps_are_the_same(seed, cost, inflation, compile):
    rng, weights = np.random.default_rng(seed), RewardWeights(annual_inflation=inflation, invalid_penalty=0.1)
    path = prepare_path(walk(rng), 10_000.0, cost)
    sides, quantities = orders(rng, (30, 8))
    engine.PLAIN_STEPS['played'] = engine.WORTH_COMPILING if compile else -10**9
    played = simulate(path, sides, quantities, weights)
    for j in range(8):
        expected = by_hand(path, sides[:, j], quantities[:, j], weights)
        assert [getattr(played, name)[:, j].tolist() for name in ARRAYS] == expected


def test_without_numba_the_same_numbers_come_out(monkeypatch):
    rng = np.random.default_rng(0)
    path, (sides, quantities) = market_path(load_task('task_hard'), 'next_open'), orders(rng, (42, 200))
    with_numba = simulate(path, sides, quantities)
    monkeypatch.setitem(sys.modules, 'numba', None)
    engine.compiled.cache_clear()
    without = simulate(path, sides, quantities)
    engine.compiled.cache_clear()
    assert all(np.array_equal(getattr(with_numba, name), getattr(without, name)) for name in ARRAYS)


def test_shared_among_threads_the_numbers_are_the_same(monkeypatch):
    rng = np.random.default_rng(0)
    path, (sides, quantities) = market_path(load_task('task_easy')), orders(rng, (43, 700))
    alone = simulate(path, sides, quantities)
    monkeypatch.setattr(engine, 'WORTH_THREADS', 1)
    monkeypatch.setattr(engine.os, 'cpu_count', lambda: 3)
    shared = simulate(path, sides, quantities)
    assert all(np.array_equal(getattr(alone, name), getattr(shared, name)) for name in ARRAYS)


def test_a_path_under_several_fees_is_each_fee_alone():
    episode, fees = load_task('task_medium'), np.array([0.0, 0.0005, 0.001, 0.01, 0.2])
    together = prepare_path(episode.market(), episode.starting_cash, fees)
    for place, fee in enumerate(fees.tolist()):
        alone = market_path(episode, 'close', fee)
        for name in ('fills', 'marks', 'closes', 'ideal_pnl_pct', 'buy_and_hold', 'scale', 'starting_cash'):
            assert np.array_equal(getattr(together.path(place), name), getattr(alone, name))


@often
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_settings_side_by_side_are_each_setting_alone(seed, compile):
    "What a sweep does: one series of orders, every setting a run on the path of its fee."
    rng = np.random.default_rng(seed)
    market, count, fees = walk(rng), 9, np.array([0.0, 0.001, 0.03])
    many = SimpleNamespace(w_performance=rng.random(count), w_inflation=rng.random(count),
                           annual_inflation=0.1 * rng.random(count), invalid_penalty=0.1 * rng.random(count))
    place, (sides, quantities) = rng.integers(0, 3, count), orders(rng, (30, 1))
    engine.PLAIN_STEPS['played'] = engine.WORTH_COMPILING if compile else -10**9
    swept = simulate(prepare_path(market, 10_000.0, fees), np.repeat(sides, count, 1), np.repeat(quantities, count, 1),
                     many, place)
    for j in range(count):
        weights = RewardWeights(many.w_performance[j], many.w_inflation[j], many.annual_inflation[j], fees[place[j]],
                                many.invalid_penalty[j])
        path = prepare_path(market, 10_000.0, weights.transaction_cost)
        expected = by_hand(path, sides[:, 0], quantities[:, 0], weights)
        assert swept.rewards[:, j].tolist() == expected[0] and swept.values[:, j].tolist() == expected[1]


@often
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_runs_from_anywhere_on_paths_of_any_length_go_on_as_they_would_alone(seed, compile):
    "What a trainer does: an order in each of many states, and holding for a while."
    rng, weights, rows = np.random.default_rng(seed), RewardWeights(), 6
    paths = [prepare_path(walk(rng, steps), 10_000.0, 0.001) for steps in (12, 30, 7)]
    states = []
    for place in rng.integers(0, 3, 10).tolist():
        run = Run(paths[place], weights)
        for order in zip(*(column.tolist() for column in orders(rng, rng.integers(0, 7)))): run.trade(*order)
        states.append(Start(place, run.step, run.cash, run.shares, run.peak, run.max_drawdown))
    sides, quantities = orders(rng, (rows, 10))
    engine.PLAIN_STEPS['played'] = engine.WORTH_COMPILING if compile else -10**9
    columns = Start(*(np.array(column) for column in zip(*states)))
    played = Runs(stack_paths(paths), columns, weights).trade(sides, quantities)
    for j, start in enumerate(states):
        expected = by_hand(paths[start.place], sides[:, j], quantities[:, j], weights, start)
        length = len(expected[0]) if expected else 0
        for name, column in zip(ARRAYS, expected): assert getattr(played, name)[:length, j].tolist() == column
        assert not played.rewards[length:, j].any() and not played.traded[length:, j].any()


def test_trading_day_by_day_is_trading_at_once():
    rng = np.random.default_rng(3)
    path, (sides, quantities) = market_path(load_task('task_easy')), orders(rng, (43, 5))
    whole, runs = simulate(path, sides, quantities), Runs(path, beginnings(path, np.zeros(5, int)))
    days = [runs.trade(sides[t:t + 1], quantities[t:t + 1]) for t in range(43)]
    assert np.array_equal(np.concatenate([day.rewards for day in days]), whole.rewards)
    assert np.array_equal(runs.cash + runs.shares * path.marks[-1], whole.values[-1])


@pytest.mark.parametrize('kind', [np.int8, np.int32, np.uint8, np.uint64])
def test_the_type_of_the_numbers_changes_no_order(kind):
    "An unsigned side code must not turn a sale into a large purchase."
    path, rng = market_path(load_task('task_easy')), np.random.default_rng(0)
    sides, quantities = rng.integers(0, 3, (43, 20)), rng.integers(0, 60, (43, 20))
    expected, found = simulate(path, sides, quantities), simulate(path, sides.astype(kind), quantities.astype(kind))
    assert all(np.array_equal(getattr(found, name), getattr(expected, name)) for name in ARRAYS)


@pytest.mark.parametrize('sides, quantities', [
    (np.ones((42, 1), int), np.ones((42, 1), int)), (np.ones((43, 2), int), np.ones((43, 1), int)),
    (np.ones(43, int), np.ones(43, int)), (np.ones((43, 1)), np.ones((43, 1), int)),
    (np.full((43, 1), 3), np.ones((43, 1), int)), (np.full((43, 1), -1), np.ones((43, 1), int)),
    (np.ones((43, 1), bool), np.ones((43, 1), int)), (np.array([['buy']] * 43), np.ones((43, 1), int))])
def test_a_batch_that_cannot_be_played_is_refused(sides, quantities):
    with pytest.raises(StockerError) as error: simulate(market_path(load_task('task_easy')), sides, quantities)
    assert '\n' not in str(error.value)


def test_a_batch_of_no_runs_is_empty():
    none = np.ones((43, 0), int)
    assert simulate(market_path(load_task('task_easy')), none, none).rewards.shape == (43, 0)


@often
@given(st.lists(st.floats(0.0, 1e9), min_size=1, max_size=40), st.floats(1.0, 1e9))
def test_the_drawdown_is_the_deepest_fall_from_a_peak(value, start):
    found, curve = max_drawdown(np.array(value), start), [start, *value]
    for t in range(len(value)):
        falls = [1 - curve[j] / curve[i] for i in range(t + 2) for j in range(i, t + 2) if curve[i] > 0]
        assert found[t] == pytest.approx(max(falls), abs=1e-12)


@pytest.mark.parametrize('task', TASKS)
def test_what_runs_are_compared_with_is_what_its_own_orders_come_to(task):
    path = market_path(load_task(task))
    value = play_orders(path, path.optimal_orders[:, None]).values[:, 0]
    assert np.array_equal(path.optimal_pnl_pct, value / 10_000.0 - 1.0)
    assert path.optimal_pnl_pct[-1] >= path.ideal_pnl_pct[-1] > 0.0
    assert path.scale == max(0.05, 0.5 * path.ideal_pnl_pct[-1])
    cash, shares, _ = fill_order(10_000.0, 0.0, 1e15, path.fills[0], 0.001)
    assert path.buy_and_hold.tolist() == (cash + shares * path.marks).tolist()


def test_a_cost_changes_the_reward_of_trading_but_a_frozen_portfolio_would_not_show_it():
    sides, quantities = np.tile([[1], [2]], (22, 1))[:43], np.full((43, 1), 10)
    totals = [simulate(market_path(load_task('task_easy'), 'close', cost), sides, quantities).rewards.sum()
              for cost in (0.0, 0.001, 0.01)]
    assert len(set(totals)) == 3


def test_no_cost_ever_helps_a_sequence_of_orders():
    rng = np.random.default_rng(0)
    price, wanted = rng.uniform(50, 150, 40), np.tile(rng.integers(-3, 3, (40, 1)).astype(float), 6)
    path = prepare_path(Market(price, price, price), 1e6, np.array([0.0, 0.001, 0.01, 0.1, 0.3, 0.5]))
    value = play_orders(path, wanted, place=np.arange(6)).values
    assert (np.diff(value, axis=1) <= 1e-6).all() and value[-1, 0] > value[-1, -1]
