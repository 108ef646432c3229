"""Evaluation: baselines under the same rules as the run, and no figure that the data cannot carry."""
import json
from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest

from stocker.market.core import Portfolio, Side, TradeAction, canonical_json
from stocker.council.council import Council, rule_council
from stocker.market.data import load_table
from stocker.trading.engine import market_path, play_orders
from stocker.trading.env import StockerEnv
from stocker.market.episodes import TASKS, Episode, load_task
from stocker.council.evaluation import (
    BASELINES, FEWEST_SESSIONS, baselines, compare, headline, performance)
from stocker.council.pictures import episode_picture
from stocker.trading.reward import RewardWeights

EVERYWHERE = [(task, timing) for task in TASKS for timing in ('close', 'next_open')]
YEARLY = ('annual_return', 'annual_volatility', 'sharpe')


def made_up(closes):
    "A share that stood at 100 for 252 sessions and then closed as given."
    dates = pd.DatetimeIndex(load_table('calendar')['session'])
    dates = dates[dates >= '2020-01-02'][:252 + len(closes)].rename('date')
    close = np.concatenate([np.full(252, 100.0), closes])
    table = pd.DataFrame(dict.fromkeys(('open', 'high', 'low', 'close', 'adj_close'), close), dates)
    return Episode.from_prices(table.assign(volume=1e6), 'XYZ', *(str(dates[i].date()) for i in (252, -1)))


def following(decide):
    "A council without specialists whose moderator does as told."
    return Council({}, lambda votes, portfolio: (decide(portfolio), 'told to'), 'follower')


def all_at_once(portfolio: Portfolio):
    return TradeAction(side=Side.BUY, quantity=10**6) if portfolio.step == 0 else TradeAction(side=Side.HOLD)


@pytest.fixture(scope='module')
def comparison(): return compare(load_task('task_hard'), rule_council(), 'next_open')


# --- what a value curve says ---

@pytest.mark.parametrize('sessions', [1, 4, FEWEST_SESSIONS, 500])
def test_cash_alone_has_no_sharpe_ratio(sessions):
    found = performance(np.full(sessions, 10_000.0), 10_000.0)
    assert (found.total_return, found.max_drawdown, found.sharpe) == (0.0, 0.0, None) and found.note


def test_yearly_figures_begin_at_half_a_year():
    rng = np.random.default_rng(0)
    curve = 10_000 * np.cumprod(1 + rng.normal(0.0005, 0.01, FEWEST_SESSIONS))
    assert performance(curve[:-1], 10_000.0).sharpe is None
    assert performance(curve, 10_000.0).sharpe is not None and performance(curve, 10_000.0).note == ''


@pytest.mark.parametrize('curve', [[0.0, 0.0], [0.0], [100.0] * 200 + [0.0], [50.0] + [0.0] * 300])
def test_a_value_of_zero_is_a_loss_of_everything_and_nothing_more(curve):
    found = performance(np.array(curve), 100.0)
    assert (found.total_return, found.max_drawdown) == (-1.0, 1.0) and found.note
    assert all(getattr(found, name) is None for name in YEARLY)
    assert 'Infinity' not in json.dumps(asdict(found)) and 'NaN' not in json.dumps(asdict(found))


@pytest.mark.parametrize('values, total', [([10_100.0], 0.01), ([], 0.0)])
def test_one_session_and_none_are_no_error(values, total):
    found = performance(np.array(values), 10_000.0)
    assert found.total_return == pytest.approx(total, abs=1e-12) and found.max_drawdown == 0.0
    assert all(getattr(found, name) is None for name in YEARLY) and 'too few' in found.note


def test_every_figure_is_plain_json():
    for curve in (np.full(300, 1e4), np.linspace(1e4, 2e4, 300), np.zeros(300), np.array([1e4])):
        assert all(value is None or type(value) in (float, str) for value in asdict(performance(curve, 1e4)).values())


# --- baselines ---

def test_buy_and_hold_pays_its_fee_once_and_keeps_its_spare_cash():
    episode = made_up([100.0, 105.0, 110.0])
    result = baselines(episode, StockerEnv(episode).timing, RewardWeights())[1]
    assert result.policy == 'buy and hold' and result.traded.tolist() == [99.0, 0.0, 0.0]
    assert round(float(result.values[0]), 8) == 9990.10 and round(float(result.values[-1]), 8) == 10980.10


@pytest.mark.parametrize('task, timing', EVERYWHERE)
def test_a_council_that_buys_everything_at_once_ties_with_buy_and_hold_exactly(task, timing):
    found = compare(load_task(task), following(all_at_once), timing)
    run, _, buy_and_hold, *_ = found.results
    assert np.array_equal(run.values, buy_and_hold.values) and np.array_equal(run.rewards, buy_and_hold.rewards)
    assert {**run.row, 'policy': ''} == {**buy_and_hold.row, 'policy': ''}
    assert 'level with buy and hold' in headline(found)


@pytest.mark.parametrize('task, timing', EVERYWHERE)
def test_a_council_that_never_trades_ties_with_hold_exactly(task, timing):
    found = compare(load_task(task), following(lambda portfolio: TradeAction(side=Side.HOLD)), timing)
    run, hold, *_ = found.results
    assert np.array_equal(run.rewards, hold.rewards) and set(run.values) == {10_000.0}
    assert run.row['trades'] == 0 and run.row['max_drawdown'] == 0.0


@pytest.mark.parametrize('cost', [0.0, 0.001, 0.05])
@pytest.mark.parametrize('task, timing', EVERYWHERE)
def test_the_baselines_are_in_their_order_and_none_is_ahead_of_the_optimum(task, timing, cost):
    episode, weights = load_task(task), RewardWeights(transaction_cost=cost)
    results = baselines(episode, StockerEnv(episode, timing).timing, weights)
    assert [result.policy for result in results] == list(BASELINES)
    hold, _, _, optimum = (result.values[-1] for result in results)
    assert hold == 10_000.0 and all(result.values[-1] <= optimum * (1 + 1e-9) for result in results)
    assert all(np.isfinite(result.rewards).all() and np.abs(result.rewards).max() <= 1.0 for result in results)


@pytest.mark.parametrize('task, timing', EVERYWHERE)
def test_no_baseline_order_is_invalid(task, timing):
    path = market_path(load_task(task), timing)
    for run in baselines(load_task(task), StockerEnv(task, timing).timing, RewardWeights()):
        again = play_orders(path, run.traded[:, None])
        assert not again.invalid.any() and np.array_equal(again.values[:, 0], run.values)


@pytest.mark.parametrize('task, change', [('task_easy', -0.125), ('task_medium', -0.099), ('task_hard', -0.437)])
def test_the_tasks_did_what_their_description_says(task, change):
    closes = load_task(task).market().closes
    assert closes[-1] / closes[0] - 1 == pytest.approx(change, abs=5e-4)


# --- a comparison ---


def test_the_summary_is_finite_json_and_counts_every_vote(comparison):
    summary = json.loads(canonical_json(comparison.summary))
    assert summary['votes'] + summary['abstentions'] == 7 * summary['sessions'] == 7 * 42
    assert (summary['first'], summary['last']) == ('2022-09-01', '2022-10-31')
    assert RewardWeights(**summary['weights']) == RewardWeights()
    assert all(row['sharpe'] is None and row['annual_return'] is None for row in summary['results'])


def test_a_comparison_does_not_depend_on_what_was_compared_before(comparison):
    compare(load_task('task_hard'), rule_council('vote_mean_all_in'), 'close')
    again = compare(load_task('task_hard'), rule_council(), 'next_open')
    assert canonical_json(again.summary) == canonical_json(comparison.summary)


def test_a_council_without_some_roles_can_be_drawn():
    found = compare(load_task('task_easy'), following(all_at_once))
    assert (204, 204, 204) in {colour for _, colour in episode_picture(found).getcolors(10_000)}
