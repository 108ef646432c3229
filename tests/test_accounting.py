"""Accounting: exact cents, no debt, the same numbers one order at a time or many runs at once, and a true optimum."""
import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stocker.trading.accounting import (
    ALL_SHARES, affordable_quantity, fill_batch, fill_order, greedy_orders, max_drawdown, optimal_orders,
    requested_batch, share_limit, simulate)
from stocker.market.core import StockerError
from stocker.market.episodes import TASKS, load_task

HOLD, BUY, SELL = 0, 1, 2
money = st.floats(0.0, 1e9, allow_subnormal=False)
prices = st.floats(0.01, 1e6)
costs = st.floats(0.0, 0.5)
quantities = st.one_of(st.integers(-100, 10_000), st.sampled_from([10**15, 2**53 + 1, 2**63 - 1, -10**15, -2**63]))
often = settings(deadline=None, database=None, max_examples=200)


def play(orders, cash=10_000.0, cost=0.001):
    "Orders (side, quantity, price) one after another; what is left, and what each traded."
    shares, trades = 0.0, []
    for side, quantity, price in orders:
        cash, shares, traded, invalid = fill_order(cash, shares, side, quantity, price, cost)
        trades.append((traded, invalid))
    return cash, shares, trades


# --- single orders, to the cent ---

def test_the_fee_counts_when_asking_what_cash_can_buy():
    "1,000 USD at 100 with a fee of 0.1 % is 9 shares and 99.10 left, never 10 and a debt of 1.00."
    cash, shares, traded, invalid = fill_order(1000.0, 0.0, BUY, 10, 100.0, 0.001)
    assert (round(cash, 10), shares, traded, invalid) == (99.10, 9.0, 9.0, False)


def test_the_fee_is_paid_on_the_sale_too():
    cash, shares, _ = play([(BUY, 10, 100.0), (SELL, 10, 100.0)])
    assert round(cash, 8) == 9998.00 and shares == 0.0


def test_a_position_is_valued_at_the_last_price_without_being_sold():
    orders = np.array([[ALL_SHARES], [0.0]])
    result = simulate(np.array([100.0, 110.0]), np.array([100.0, 110.0]), orders, 10_000.0, 0.001)
    assert result.traded[:, 0].tolist() == [99.0, 0.0]
    assert round(result.cash[0, 0], 8) == 90.10
    assert round(result.value[-1, 0], 8) == 10980.10


@pytest.mark.parametrize('held, wanted', [(5, 8), (5, 5), (5, 10**15), (1, 2**63 - 1)])
def test_a_sale_is_cut_to_what_is_held_and_leaves_exactly_nothing(held, wanted):
    cash, shares, traded, invalid = fill_order(0.0, float(held), SELL, wanted, 100.0, 0.001)
    assert (shares, traded, invalid) == (0.0, -held, False)
    assert cash == pytest.approx(held * 99.9, rel=1e-15)


def test_ten_single_purchases_and_one_sale_leave_exactly_nothing():
    cash, shares, trades = play([(BUY, 1, 0.1)] * 10 + [(SELL, 10, 0.1)])
    assert shares == 0.0 and trades[-1] == (-10.0, False)
    assert cash == pytest.approx(10_000 - 2 * 10 * 0.1 * 0.001, rel=1e-15)


@pytest.mark.parametrize('cash, shares, side, quantity', [
    (10_000.0, 0.0, SELL, 5), (100.0, 0.0, BUY, 1), (0.0, 0.0, BUY, 1), (10_000.0, 3.0, BUY, 0),
    (10_000.0, 3.0, SELL, 0),
    (10_000.0, 3.0, BUY, -1), (10_000.0, 3.0, SELL, -3), (10_000.0, 3.0, SELL, -10**15)])
def test_an_order_that_cannot_trade_changes_nothing_and_is_invalid(cash, shares, side, quantity):
    assert fill_order(cash, shares, side, quantity, 100.0, 0.001) == (cash, shares, 0.0, True)


@pytest.mark.parametrize('quantity', [0, 5, -5, 10**15])
def test_holding_is_never_invalid(quantity):
    assert fill_order(10_000.0, 3.0, HOLD, quantity, 100.0, 0.001) == (10_000.0, 3.0, 0.0, False)


def test_cash_that_is_exactly_enough_is_enough():
    for price, count in itertools.product([0.5, 1.0, 2.5, 64.0, 100.0], [1, 7, 99]):
        assert affordable_quantity(price * count, price) == count
        assert affordable_quantity(np.nextafter(price * count, 0), price) == count - 1


# --- properties ---

@often
@given(money, st.integers(0, 10**6), st.integers(0, 2), quantities, prices, costs)
def test_value_is_conserved_but_for_the_fee_and_nothing_goes_below_zero(cash, held, side, quantity, price, cost):
    after, shares, traded, invalid = fill_order(cash, float(held), side, quantity, price, cost)
    assert after >= 0.0 and shares >= 0.0 and shares == int(shares)
    assert shares == held + traded and abs(traded) <= max(0, quantity) * (side != HOLD)
    assert invalid == (side != HOLD and traded == 0.0)
    before, fee = cash + held * price, abs(traded) * price * cost
    assert after + shares * price + fee == pytest.approx(before, rel=1e-12, abs=1e-12)
    assert traded >= 0 if side == BUY else traded <= 0


@often
@given(money, prices, costs)
def test_one_share_more_than_affordable_cannot_be_paid(cash, price, cost):
    unit = price + price * cost
    most = affordable_quantity(cash, unit)
    assert most * unit <= cash < (most + 1) * unit


@often
@given(st.lists(st.tuples(money, st.integers(0, 10**6), st.integers(0, 2), quantities), min_size=1, max_size=8),
       prices, costs)
def test_a_batch_of_orders_equals_single_orders_bit_for_bit(runs, price, cost):
    cash, held, sides, wanted = (np.array(column) for column in zip(*runs, strict=True))
    found = fill_batch(cash, held.astype(float), requested_batch(sides, wanted), price, cost)
    single = [fill_order(c, float(h), s, q, price, cost) for c, h, s, q in runs]
    for ours, theirs in zip(found, zip(*(row[:3] for row in single), strict=True), strict=True):
        assert ours.tolist() == list(theirs)
    assert ((sides != HOLD) & (found[2] == 0.0)).tolist() == [row[3] for row in single]


@often
@given(st.lists(st.tuples(st.integers(0, 2), quantities, prices), min_size=1, max_size=30), costs, st.floats(1.0, 1e7))
def test_a_whole_run_equals_single_orders_bit_for_bit(orders, cost, start):
    sides, wanted, fills = (np.array(column) for column in zip(*orders, strict=True))
    marks = fills * 1.25
    result = simulate(fills, marks, requested_batch(sides, wanted)[:, None], start, cost)
    cash, shares = start, 0.0
    for t, (side, quantity, price) in enumerate(orders):
        cash, shares, traded, _ = fill_order(cash, shares, side, quantity, price, cost)
        assert (result.cash[t, 0], result.shares[t, 0], result.traded[t, 0]) == (cash, shares, traded)
        assert result.value[t, 0] == cash + shares * marks[t]
        assert cash >= 0.0 and shares >= 0.0


@pytest.mark.parametrize('kind', [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64])
def test_the_type_of_the_numbers_changes_no_order(kind):
    "An unsigned side code must not turn a sale into a large purchase."
    sides, wanted = np.array([0, 1, 2, 1, 2]), np.array([7, 7, 7, 0, 0])
    assert requested_batch(sides.astype(kind), wanted).tolist() == [0, 7, -7, 0, 0]
    assert requested_batch(sides, wanted.astype(kind)).tolist() == [0, 7, -7, 0, 0]
    assert requested_batch(sides.astype(kind), wanted.astype(kind)).tolist() == [0, 7, -7, 0, 0]


def test_a_cost_for_each_run_equals_runs_of_one_cost():
    rng = np.random.default_rng(0)
    fills, orders, cost = rng.uniform(50, 150, 30), rng.integers(-40, 40, (30, 6)).astype(float), np.linspace(0, 0.5, 6)
    together = simulate(fills, fills, orders, 10_000.0, cost)
    for j in range(6):
        alone = simulate(fills, fills, orders[:, j:j + 1], 10_000.0, float(cost[j]))
        for name in ('cash', 'shares', 'traded', 'value'):
            assert np.array_equal(getattr(together, name)[:, j], getattr(alone, name)[:, 0])


@often
@given(st.lists(st.floats(0.0, 1e9), min_size=1, max_size=40), st.floats(1.0, 1e9))
def test_the_drawdown_is_the_deepest_fall_from_a_peak(value, start):
    found, curve = max_drawdown(np.array(value), start), [start, *value]
    for t in range(len(value)):
        falls = [1 - curve[j] / curve[i] for i in range(t + 2) for j in range(i, t + 2) if curve[i] > 0]
        assert found[t] == pytest.approx(max(falls), abs=1e-12)


def test_a_fall_from_the_starting_cash_counts():
    assert max_drawdown(np.array([9_000.0, 9_500.0, 8_000.0]), 10_000.0).tolist() == pytest.approx([0.1, 0.1, 0.2])


# --- hindsight ---

def final(fills, marks, orders, cash, cost):
    return simulate(fills, marks, np.stack(orders, axis=1), cash, cost).value[-1]


def best_by_search(fills, last, cash, cost):
    "The highest final value over every sequence of orders."
    states = {(cash, 0.0)}
    for price in fills:
        after = set()
        for money_left, shares in states:
            most = int(affordable_quantity(money_left, price + price * cost))
            orders = [(BUY, n) for n in range(most + 1)] + [(SELL, n) for n in range(1, int(shares) + 1)]
            after |= {fill_order(money_left, shares, side, n, price, cost)[:2] for side, n in orders}
        states = after
    return max(money_left + shares * last for money_left, shares in states)


@settings(deadline=None, database=None, max_examples=60)
@given(st.lists(st.floats(0.8, 3.0), min_size=1, max_size=5), st.floats(0.5, 4.0),
       st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.3]))
def test_no_sequence_of_orders_beats_the_optimum(fills, last, cost):
    cash, path = 5.0137, np.array(fills)
    marks = np.append(path[1:], last)
    best = best_by_search(fills, last, cash, cost)
    assert final(path, marks, [optimal_orders(path, marks, cash, cost)], cash, cost)[0] == pytest.approx(best, rel=1e-9)


def test_where_the_last_bit_of_cash_decides_the_optimum_is_at_most_one_share_away():
    "Paying in two parts can round in one's favour where cash is a whole number of shares but for its last bit."
    fills, cash, cost = np.array([1.0, 1.0, 1.0, 3.0]), 6.0059999999999985, 0.001
    best = best_by_search(fills.tolist(), 3.0, cash, cost)
    found = final(fills, fills, [optimal_orders(fills, fills, cash, cost)], cash, cost)[0]
    assert best - fills[-1] <= found <= best


def rivals(fills, marks, rng, count=40):
    first_day = np.where(np.arange(len(fills)) == 0, ALL_SHARES, 0.0)
    chance = [rng.integers(-60, 60, len(fills)).astype(float) for _ in range(count)]
    all_in = [rng.choice([-ALL_SHARES, 0.0, ALL_SHARES], len(fills)) for _ in range(count)]
    return [greedy_orders(fills, marks), first_day, np.zeros(len(fills)), *chance, *all_in]


def reachable_shares(fills, cash, cost):
    try: return share_limit(fills, cash, cost)
    except StockerError: return float('inf')


@settings(deadline=None, database=None, max_examples=60)
@given(st.lists(st.floats(20.0, 300.0), min_size=1, max_size=40), costs, st.integers(0, 2**32 - 1))
def test_the_optimum_is_ahead_of_greedy_and_of_chance(fills, cost, seed):
    rng, path, cash = np.random.default_rng(seed), np.array(fills), 10_013.7
    marks = path * rng.uniform(0.9, 1.1, len(path))
    assume(reachable_shares(path, cash, cost) < 100_000)
    best, *others = final(path, marks, [optimal_orders(path, marks, cash, cost), *rivals(path, marks, rng)], cash, cost)
    assert max(others) <= best * (1 + 1e-9)


@pytest.mark.parametrize('timing', ['close', 'next_open'])
@pytest.mark.parametrize('task', TASKS)
def test_on_the_tasks_the_optimum_is_ahead_at_every_cost_and_cost_never_helps_it(task, timing):
    market, rng, best = load_task(task).market(timing), np.random.default_rng(0), []
    for cost in (0.0, 0.0005, 0.001, 0.01, 0.05, 0.2, 0.5):
        plan = optimal_orders(market.fills, market.marks, 10_000.0, cost)
        values = final(market.fills, market.marks, [plan, *rivals(market.fills, market.marks, rng)], 10_000.0, cost)
        assert values[1:].max() <= values[0] * (1 + 1e-9) and values[0] >= 10_000.0
        best.append(values[0])
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in itertools.pairwise(best))
    assert best[-1] == 10_000.0 # at such a fee the best is to stay out


def test_no_cost_ever_helps_a_sequence_of_orders():
    rng = np.random.default_rng(0)
    fills = rng.uniform(50, 150, 40)
    orders = np.tile(rng.integers(-3, 3, (40, 1)).astype(float), 6) # small enough to be filled at any cost
    value = simulate(fills, fills, orders, 1e6, np.array([0.0, 0.001, 0.01, 0.1, 0.3, 0.5])).value
    assert (np.diff(value, axis=1) <= 1e-6).all() and value[-1, 0] > value[-1, -1]


def test_greedy_is_long_when_the_next_price_is_higher_and_flat_otherwise():
    orders = greedy_orders(np.array([100.0, 101.0, 102.0, 101.0, 101.0, 105.0]), np.array([1, 1, 1, 1, 1, 104.0]))
    assert np.sign(orders).tolist() == [1, 0, -1, 0, 1, -1]


def test_greedy_pays_for_its_blindness_to_fees():
    path = np.tile([100.0, 100.05], 10)
    plan = [greedy_orders(path, path), optimal_orders(path, path, 10_000.0, 0.001)]
    greedy, best = final(path, path, plan, 10_000.0, 0.001)
    assert greedy < 10_000.0 == best


def test_the_share_limit_is_never_reached():
    rng = np.random.default_rng(0)
    for cost in (0.0, 0.001, 0.1):
        path = rng.uniform(50, 150, 40)
        orders = np.stack(rivals(path, path, rng), axis=1)
        assert simulate(path, path, orders, 10_000.0, cost).shares.max() <= share_limit(path, 10_000.0, cost)


def test_a_market_too_wild_for_the_search_is_refused_in_one_line():
    "From a cent to a million and back again: more shares than memory has room for."
    path = np.array([0.01, 1e6, 0.01])
    with pytest.raises(StockerError) as error: optimal_orders(path, path, 10_000.0, 0.0)
    assert '\n' not in str(error.value)
