"""Orders: exact shares, no debt, and an optimum that nothing beats."""
import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stocker.market.core import StockerError
from stocker.market.episodes import TASKS, Market, load_task
from stocker.trading.engine import play_orders, prepare_path
from stocker.trading.orders import (
    ALL_SHARES, ROUNDING, affordable_quantity, fill_order, fractional_limit, greedy_orders, optimal_orders)

money = st.floats(0.0, 1e9, allow_subnormal=False)
prices = st.floats(0.01, 1e6)
costs = st.floats(0.0, 0.5)
wishes = st.one_of(st.integers(-10_000, 10_000), st.sampled_from([10**15, -10**15])).map(float)
often = settings(deadline=None, database=None, max_examples=200)


# --- single orders, to the cent ---

@pytest.mark.parametrize('cash, price, shares', [(7.35, 1.05, 7), (30.90, 1.03, 30), (1000.0, 100.1, 9)])
def test_an_exact_multiple_keeps_its_last_share_and_leaves_no_cash_behind(cash, price, shares):
    after, held, traded = fill_order(cash, 0.0, ALL_SHARES, price, 0.0)
    assert held == traded == shares and after == (0.0 if cash != 1000.0 else pytest.approx(99.1))
    twice = np.array([price, price])
    path = prepare_path(Market(twice, twice, twice), cash, 0.0)
    assert path.buy_and_hold[0] == after + shares * price
    plan = optimal_orders(np.array([price, 2 * price]), np.array([price, 2 * price]), cash, 0.0)
    assert plan.tolist() == [shares, -shares] or plan.tolist() == [shares, 0.0]


def test_no_exact_multiple_in_cents_loses_a_share():
    rng = np.random.default_rng(0)
    for price, count in zip(rng.integers(1, 100_000, 20_000).tolist(), rng.integers(1, 1_000, 20_000).tolist()):
        cash = float(Fraction(price * count, 100))
        assert affordable_quantity(cash, price / 100) == count
        assert fill_order(cash, 0.0, ALL_SHARES, price / 100, 0.0)[0] == 0.0


@pytest.mark.parametrize('held, wanted', [(5, -8), (5, -5), (5, -10**15), (1, -2**63)])
def test_a_sale_is_cut_to_what_is_held_and_leaves_exactly_nothing(held, wanted):
    cash, shares, traded = fill_order(0.0, float(held), float(wanted), 100.0, 0.001)
    assert (shares, traded) == (0.0, -held) and cash == pytest.approx(held * 99.9, rel=1e-15)


@pytest.mark.parametrize('cash, shares, wanted', [
    (10_000.0, 0.0, -5.0), (100.0, 0.0, 1.0), (0.0, 0.0, 1.0), (9.0, 3.0, 0.0)])
def test_an_order_that_cannot_trade_changes_nothing(cash, shares, wanted):
    assert fill_order(cash, shares, wanted, 100.0, 0.001) == (cash, shares, 0.0)


@often
@given(money, st.integers(0, 10**6), wishes, prices, costs)
def test_value_is_conserved_but_for_the_fee_and_nothing_goes_below_zero(cash, held, wanted, price, cost):
    after, shares, traded = fill_order(cash, float(held), wanted, price, cost)
    assert after >= 0.0 and shares >= 0.0 and shares == int(shares) == held + traded
    assert abs(traded) <= abs(wanted) and traded * wanted >= 0
    before, fee = cash + held * price, abs(traded) * price * cost
    assert after + shares * price + fee == pytest.approx(before, rel=1e-12, abs=1e-12)


@often
@given(money, prices, costs)
def test_one_share_more_than_affordable_cannot_be_paid(cash, price, cost):
    unit = price + price * cost
    most = affordable_quantity(cash, unit)
    assert most * unit <= cash * (1 + ROUNDING) and cash < (most + 1) * unit


# --- hindsight ---

def final(fills, marks, orders, cash, cost):
    path = prepare_path(Market(fills, marks, fills), cash, cost)
    return play_orders(path, np.stack(orders, axis=1)).values[-1]


def best_by_search(fills, last, cash, cost):
    "The highest final value over every sequence of orders."
    states = {(cash, 0.0)}
    for price in fills:
        states = {fill_order(money_left, shares, float(wanted), price, cost)[:2] for money_left, shares in states
                  for wanted in range(-int(shares), int(affordable_quantity(money_left, price + price * cost)) + 1)}
    return max(money_left + shares * last for money_left, shares in states)


@settings(deadline=None, database=None, max_examples=60)
@given(st.lists(st.floats(0.8, 3.0), min_size=1, max_size=5), st.floats(0.5, 4.0),
       st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.3]))
def test_no_sequence_of_orders_beats_the_optimum(fills, last, cost):
    cash, path = 5.0137, np.array(fills)
    marks = np.append(path[1:], last)
    best = best_by_search(fills, last, cash, cost)
    assert final(path, marks, [optimal_orders(path, marks, cash, cost)], cash, cost)[0] == pytest.approx(best, rel=1e-9)


def rivals(fills, marks, rng, count=40):
    first_day = np.where(np.arange(len(fills)) == 0, ALL_SHARES, 0.0)
    chance = [rng.integers(-60, 60, len(fills)).astype(float) for _ in range(count)]
    all_in = [rng.choice([-ALL_SHARES, 0.0, ALL_SHARES], len(fills)) for _ in range(count)]
    return [greedy_orders(fills, marks), first_day, np.zeros(len(fills)), *chance, *all_in]


@settings(deadline=None, database=None, max_examples=60)
@given(st.lists(st.floats(20.0, 300.0), min_size=1, max_size=40), costs, st.integers(0, 2**32 - 1))
def test_the_optimum_is_ahead_of_greedy_and_of_chance(fills, cost, seed):
    rng, path, cash = np.random.default_rng(seed), np.array(fills), 10_013.7
    marks = path * rng.uniform(0.9, 1.1, len(path))
    assume(fractional_limit(path, cash, cost)[2] < 100_000)
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


def test_greedy_pays_for_its_blindness_to_fees():
    path = np.tile([100.0, 100.05], 10)
    plan = [greedy_orders(path, path), optimal_orders(path, path, 10_000.0, 0.001)]
    greedy, best = final(path, path, plan, 10_000.0, 0.001)
    assert greedy < 10_000.0 == best


def test_a_market_too_wild_for_the_search_is_refused_in_one_line():
    "From a cent to a million and back again: more shares than memory has room for."
    path = np.array([0.01, 1e6, 0.01])
    with pytest.raises(StockerError) as error: optimal_orders(path, path, 10_000.0, 0.0)
    assert '\n' not in str(error.value)
