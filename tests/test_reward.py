"""The reward: the three branches of its formula, its bounds, and the totals that are on record."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stocker.market.core import StockerError
from stocker.trading.engine import Run, market_path
from stocker.trading.env import StockerEnv
from stocker.market.episodes import TASKS, load_task
from stocker.trading.reward import (
    BONUS_LIMIT, FREE_DRAWDOWN, LEAST_SCALE, RewardWeights, ideal_scale, inflation_growth, reward_terms,
    trajectory_bonus)

often = settings(deadline=None, database=None, max_examples=200)
profits = st.floats(-1.0, 20.0)
parts = st.floats(0.0, 5.0)


def performance_as_written(gap, scale):
    "The performance factor in its three cases."
    if gap < 0: return 1 + min(1, abs(gap) / scale)
    if gap <= scale: return 1 - gap / scale
    return -min(1, (gap - scale) / scale)


def graded(pnl, ideal, scale=0.1, growth=0.0, penalty=0.0, bonus=0.0, w_performance=0.7, w_inflation=0.3):
    return reward_terms(pnl, ideal, scale, growth, penalty, bonus, w_performance, w_inflation)


# --- the formula ---

@pytest.mark.parametrize('gap, expected', [
    (-0.3, 2.0), (-0.1, 2.0), (-0.05, 1.5), (0.0, 1.0), (0.05, 0.5), (0.1, 0.0), (0.15, -0.5), (0.2, -1.0),
    (0.9, -1.0)])
def test_each_branch_and_each_border(gap, expected):
    terms = graded(0.0, gap)
    assert (terms.gap, terms.performance) == (gap, pytest.approx(expected, abs=1e-12))


@often
@given(profits, profits, st.floats(0.05, 10.0), st.floats(0.0, 0.5))
def test_performance_is_the_formula_as_written(pnl, ideal, scale, growth):
    terms = graded(pnl, ideal, scale, growth)
    assert terms.real_pnl_pct == (1 + pnl) / (1 + growth) - 1
    assert terms.gap == ideal - terms.real_pnl_pct
    assert terms.performance == pytest.approx(performance_as_written(terms.gap, scale), abs=1e-9)
    assert terms.inflation == terms.real_pnl_pct - pnl <= 1e-15


@often
@given(profits, profits, st.floats(0.05, 10.0), st.floats(0.0, 0.5), parts, st.floats(-0.1, 0.1), parts, parts)
def test_the_reward_is_the_weighted_sum_within_one(pnl, ideal, scale, growth, penalty, bonus, performance, inflation):
    terms = graded(pnl, ideal, scale, growth, penalty, bonus, w_performance=performance, w_inflation=inflation)
    total = performance * terms.performance + inflation * terms.inflation - penalty + bonus
    assert -1.0 <= terms.reward <= 1.0
    assert terms.reward == pytest.approx(min(1, max(-1, total)), abs=1e-12)


@pytest.mark.parametrize('penalty, bonus', [(0.0, 0.0), (0.01, 0.0), (0.0, 0.1), (0.01, -0.1)])
def test_without_weights_only_penalty_and_bonus_are_left(penalty, bonus):
    terms = graded(0.3, 0.7, growth=0.02, penalty=penalty, bonus=bonus, w_performance=0.0, w_inflation=0.0)
    assert terms.reward == bonus - penalty


def test_without_weights_a_run_of_holding_earns_its_bonus_only():
    env = StockerEnv('task_easy', weights=RewardWeights(w_performance=0.0, w_inflation=0.0))
    env.reset()
    rewards = [env.step((0, 0))[1] for _ in range(43)]
    assert rewards[:-1] == [0.0] * 42 and rewards[-1] == BONUS_LIMIT # the share fell by more than a tenth


def test_prices_grow_by_the_yearly_rate_in_252_sessions():
    growth = inflation_growth(0.05, 253)
    assert growth[0] == 0.0 and growth[252] == pytest.approx(0.05, rel=1e-12)
    assert np.array_equal(inflation_growth(0.0, 10), np.zeros(10))


@pytest.mark.parametrize('total, scale', [(0.0, LEAST_SCALE), (0.1, 0.05), (0.2, 0.1), (-0.4, 0.2), (1.5, 0.75)])
def test_the_scale_is_half_of_what_the_ideal_made_and_at_least_five_hundredths(total, scale):
    assert ideal_scale(total) == pytest.approx(scale)


# --- the bonus ---

@pytest.mark.parametrize('value, fall, bonus', [
    (10_000, 0.0, 0.0), (10_500, 0.0, 0.05), (11_000, 0.0, 0.1), (20_000, 0.0, 0.1), (9_000, 0.0, 0.0),
    (10_000, FREE_DRAWDOWN, 0.0), (10_000, 0.10, -0.05), (10_000, 0.15, -0.1), (10_000, 1.0, -0.1),
    (11_000, 0.15, 0.0)])
def test_the_bonus_rewards_beating_buy_and_hold_and_takes_off_deep_falls(value, fall, bonus):
    assert trajectory_bonus(float(value), 10_000.0, fall) == pytest.approx(bonus, abs=1e-12)


@often
@given(st.floats(0.0, 1e9), st.floats(1.0, 1e9), st.floats(0.0, 1.0))
def test_the_bonus_stays_within_a_tenth(value, buy_and_hold, fall):
    assert -BONUS_LIMIT <= trajectory_bonus(value, buy_and_hold, fall) <= BONUS_LIMIT


@pytest.mark.parametrize('task', TASKS)
def test_the_bonus_comes_with_the_last_step_only(task):
    env = StockerEnv(task)
    env.reset()
    bonuses = [env.step((1, 10))[4]['terms'].bonus for _ in range(env.episode.steps)]
    assert not any(bonuses[:-1])
    assert bonuses[-1] == trajectory_bonus(env.run.value, env._path.buy_and_hold[-1], env.run.max_drawdown) != 0.0


# --- weights ---

@pytest.mark.parametrize('name', ['w_performance', 'w_inflation', 'annual_inflation', 'transaction_cost',
                                  'invalid_penalty'])
@pytest.mark.parametrize('value', [-0.1, float('nan'), float('inf'), True, None, '0.1'])
def test_a_weight_that_means_nothing_is_refused_by_name(name, value):
    with pytest.raises(StockerError, match=name) as error: RewardWeights(**{name: value})
    assert '\n' not in str(error.value)


def test_a_fee_of_the_whole_trade_is_refused():
    with pytest.raises(StockerError, match='transaction_cost'): RewardWeights(transaction_cost=1.0)
    assert RewardWeights(transaction_cost=0.5).transaction_cost == 0.5


# --- figures on record ---

def held(weights, ideal_cost=0.001, task='task_easy'):
    "The total of holding cash, with the ideal curve drawn at a cost of its own."
    run = Run(market_path(load_task(task), 'close', ideal_cost), weights)
    return sum(run.trade(0, 0)[2].reward for _ in range(len(run.path.fills)))


def test_holding_cash_through_task_easy_totals_what_is_on_record():
    env = StockerEnv('task_easy')
    env.reset()
    total = sum(env.step({'side': 'hold', 'quantity': 0})[1] for _ in range(43))
    assert round(total, 4) == 0.3801 and round(total, 5) == 0.38011
    assert total == pytest.approx(held(RewardWeights()), abs=1e-12)


def test_the_other_totals_of_holding_cash():
    assert round(held(RewardWeights(1.0, 0.0, 0.05)), 4) == 0.5726
    assert round(held(RewardWeights(0.5, 0.3, 0.05, 0.001)), 4) == 0.2851


def test_holding_does_not_depend_on_the_fee_but_through_the_ideal():
    assert held(RewardWeights(transaction_cost=0.2)) == held(RewardWeights())
    assert held(RewardWeights(), ideal_cost=0.01) != held(RewardWeights())
