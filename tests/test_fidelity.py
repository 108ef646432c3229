"""Whether a reward ranks policies as their later results do: the arithmetic, the statistics and the canaries."""
import math

import numpy as np
import pandas as pd
import pytest

from stocker.market.core import StockerError, Timing
from stocker.market.histories import load_corpus
from stocker.council.council import VotedEpisode
from stocker.trading.engine import market_path, play_orders
from stocker.trading.orders import switch_orders
from stocker.studies.fidelity import (
    CANARIES, HINDSIGHT, RECOMMENDED, Graded, block_of, block_starts, canary_table, deflated_sharpe, fidelity,
    grade_bank, halves, kendall_tau, luckiest_sharpe, mean_by_day, overfitting_probability, play_bank, price_rules,
    read_trials, record_trials, reference_policies, relative_rank, sharpe_probability, split_sharpe, weights_verdict)
from stocker.trading.reward import RewardWeights
from stocker.studies.statistics import OrderMaker
from stocker.studies.worlds import follow, placebo_world, planted_world

SETTINGS = [RewardWeights(performance, inflation, rate, fee, penalty)
            for performance, inflation, rate, fee, penalty in (
                (0.7, 0.3, 0.05, 0.001, 0.01), (1.0, 0.0, 0.05, 0.0, 0.01), (0.3, 0.5, 0.08, 0.002, 0.2),
                (0.0, 1.0, 0.02, 0.001, 0.0))]


@pytest.fixture(scope='module')
def episodes(): return [VotedEpisode(one, Timing.CLOSE, ()) for one in load_corpus('training', tickers=['AAPL'])[:14]]


@pytest.fixture(scope='module')
def bank(): return reference_policies(votes=False)


@pytest.fixture(scope='module')
def graded(episodes, bank): return grade_bank(bank, episodes, SETTINGS)


# The bank

def test_the_bank_is_large_and_every_policy_its_own(episodes, bank):
    assert 28 <= len(bank) <= 40
    orders = {name: np.concatenate([policy.make(voted, RewardWeights()) for voted in episodes]).tobytes()
              for name, policy in bank.items()}
    assert len(set(orders.values())) == len(orders)


@pytest.mark.parametrize('timing', list(Timing))
def test_no_policy_but_hindsight_sees_the_future(bank, timing):
    whole = VotedEpisode(load_corpus('training', tickers=['SPY'])[5], timing, ())
    prices = whole.episode.prices.copy()
    after = whole.episode.first + 20
    prices.iloc[after:, :5] = prices.iloc[after:, :5] * np.linspace(2, 5, len(prices) - after)[:, None]
    other = VotedEpisode(type(whole.episode)(whole.episode.name, 'SPY', prices, whole.episode.first,
                                             whole.episode.steps), timing, ())
    for name, policy in bank.items():
        same = np.array_equal(*(policy.make(one, RewardWeights())[:20] for one in (whole, other)))
        assert same or name in HINDSIGHT, name


def test_momentum_is_long_exactly_after_a_rise(episodes):
    voted = episodes[0]
    close, first = voted.episode.prices['close'].to_numpy(), voted.episode.first
    long = [close[first + t] > close[first + t - 20] for t in range(voted.episode.steps)]
    assert np.array_equal(price_rules()['momentum 20'].make(voted, None), switch_orders(np.array(long)))


def test_random_policies_are_the_same_in_every_run_and_keep_their_exposure(episodes):
    policy = reference_policies(votes=False)['random 75%, 1']
    orders = [policy.make(voted, None) for voted in episodes]
    assert all(np.array_equal(policy.make(voted, None), one) for voted, one in zip(episodes, orders))
    assert 0.6 < np.mean([np.cumsum(np.sign(one)).mean() for one in orders]) < 0.9


# Grading

@pytest.mark.parametrize('timing', ['close', 'next_open'])
def test_totals_are_the_environments(bank, timing):
    world = planted_world(301, 2, timing=timing)
    grades = grade_bank({**bank, 'follow': follow('news')}, world.episodes, SETTINGS)
    for row, voted in enumerate(world.episodes):
        for column, setting in enumerate(SETTINGS):
            orders = np.stack([policy.make(voted, setting) for policy in bank.values()], axis=1)
            alone = play_orders(market_path(voted.episode, timing, setting.transaction_cost), orders, setting)
            assert grades.totals[row, column, :-1].tolist() == alone.rewards.sum(axis=0).tolist()


def test_days_are_the_mean_over_the_episodes_that_run():
    rows = np.arange(12.0).reshape(6, 2)
    days, means = mean_by_day(['b', 'a', 'b', 'c', 'a', 'a'], rows)
    assert days == ('a', 'b', 'c')
    assert means.tolist() == [rows[which].mean(axis=0).tolist() for which in ([1, 4, 5], [0, 2], [3])]


def test_total_rewards_take_one_setting_as_well(episodes, bank):
    (one, values), (many, same) = (play_bank(bank, episodes[0], SETTINGS[:1] * count) for count in (1, 3))
    assert np.array_equal(many, np.repeat(one, 3, axis=0)) and np.array_equal(values, same)


def test_nothing_to_grade_is_refused(episodes, bank):
    for arguments in (({}, episodes, SETTINGS), (bank, episodes, [])):
        with pytest.raises(StockerError, match='nothing to grade'): grade_bank(*arguments)


# Rankings

def test_kendalls_tau_agrees_with_scipy():
    stats = pytest.importorskip('scipy.stats')
    rng = np.random.default_rng(1)
    for _ in range(25):
        one, other = rng.integers(0, rng.integers(2, 40), 20), rng.integers(0, 12, 20)
        theirs = stats.kendalltau(one, other).statistic
        assert kendall_tau(one, other) == pytest.approx(theirs, nan_ok=True)


def test_many_taus_at_once():
    rng = np.random.default_rng(2)
    one, other = rng.random((7, 3, 12)), rng.random((7, 3, 12))
    assert kendall_tau(one, other)[4, 2] == pytest.approx(float(kendall_tau(one[4, 2], other[4, 2])))


def test_tau_does_not_depend_on_scale_and_turns_with_the_sign():
    one, other = np.random.default_rng(3).random((2, 25))
    assert kendall_tau(10 * one + 3, other) == kendall_tau(one, other) == -kendall_tau(-one, other)


def test_the_ratio_of_a_split_is_that_of_its_days():
    returns, block = np.random.default_rng(4).normal(0.0005, 0.01, (300, 5)), np.repeat(np.arange(6), 50)
    for chosen, ratios in zip(halves(6), split_sharpe(returns, block, halves(6))):
        kept = returns[chosen[block]]
        assert ratios == pytest.approx(kept.mean(axis=0) / kept.std(axis=0, ddof=1) * 252 ** 0.5)


@pytest.mark.parametrize('curve', [np.zeros(40), 1.001 ** np.arange(41)[1:] / 1.001 ** np.arange(40) - 1])
def test_returns_that_do_not_vary_have_a_ratio_of_zero(curve):
    assert (split_sharpe(curve[:, None], np.repeat(np.arange(4), 10), halves(4)) == 0).all()


# Blocks of time

def test_halves_are_all_and_mirrored():
    for blocks in (4, 6, 12):
        ways = halves(blocks)
        assert len(ways) == math.comb(blocks, blocks // 2) == len({way.tobytes() for way in ways})
        assert (ways.sum(axis=1) == blocks // 2).all()
    for wrong in (3, 2, 18, 0):
        with pytest.raises(StockerError, match='blocks'): halves(wrong)


def test_windows_of_one_day_stay_together():
    first = np.repeat([f'2020-{month:02d}-01' for month in range(1, 13)], 5)
    starts = block_starts(first, 4)
    assert starts == ['2020-01-01', '2020-04-01', '2020-07-01', '2020-10-01']
    assert block_of(first, starts).tolist() == np.repeat(range(4), 15).tolist()
    assert block_of(['2020-03-31', '2020-04-01', '2031-01-01'], starts).tolist() == [0, 1, 3]
    with pytest.raises(StockerError, match='blocks'): block_starts(first, 13)


# Overfitting

def test_overfitting_is_one_where_halves_contradict_each_other():
    inside = np.random.default_rng(6).random((50, 9))
    assert overfitting_probability(inside, -inside) == 1 and overfitting_probability(inside, inside) == 0


def test_a_case_worked_by_hand():
    # Four blocks, three policies, their sums. Chosen on one pair of blocks, judged on the other.
    sums = np.array([[4.0, 1, 2], [3, 2, 1], [-1, 0, 1], [-2, 1, 0]])
    ways = halves(4)
    inside, outside = ways @ sums, ~ways @ sums
    # On blocks 0 and 1 the sums are 7, 3, 3; 0 and 2: 3, 1, 3; 0 and 3: 2, 2, 2; 1 and 2: 2, 2, 2; 1 and 3: 1, 3, 1;
    # 2 and 3: -3, 1, 1. The first of the largest is chosen.
    assert inside.argmax(axis=1).tolist() == [0, 0, 0, 0, 1, 1]
    # On the rest it is last, level with the last, level with all twice, last, and level with the last.
    assert relative_rank(outside, inside.argmax(axis=1)).tolist() == [0.25, 0.375, 0.5, 0.5, 0.25, 0.375]
    assert overfitting_probability(inside, outside) == 1.0


# The deflated Sharpe ratio

def test_the_luckiest_of_many_is_as_lucky_as_simulated():
    rng = np.random.default_rng(7)
    for trials in (5, 50, 500):
        best = rng.normal(0, 0.04, (4000, trials)).max(axis=1).mean()
        assert luckiest_sharpe(0.04, trials) == pytest.approx(best, rel=0.06)


def test_probability_of_a_ratio():
    assert sharpe_probability(0.1, 0.1, 500) == pytest.approx(0.5)
    assert sharpe_probability(0.1, 0.0, 500) == pytest.approx(0.9868, abs=1e-3) # z = 0.1 * sqrt(499) / sqrt(1.005)
    assert sharpe_probability(0.1, 0.0, 500, skewness=-2, kurtosis=12) < sharpe_probability(0.1, 0.0, 500)


def test_more_trials_deflate_more_and_skill_survives():
    rng = np.random.default_rng(8)
    returns, tried = rng.normal(0.003, 0.01, 1500), rng.normal(0, 0.5, 40)
    probabilities = [deflated_sharpe(returns, tried, trials) for trials in (2, 40, 10_000)]
    assert probabilities == sorted(probabilities, reverse=True) and probabilities[-1] > 0.95


@pytest.mark.parametrize('returns, tried, trials', [
    (np.zeros(50), np.array([0.1, 0.5]), 10), (np.random.default_rng(9).random(50), np.full(5, 0.3), 10),
    (np.random.default_rng(9).random(50), np.array([0.1, 0.5]), 1)])
def test_nothing_to_deflate(returns, tried, trials):
    assert deflated_sharpe(returns, tried, trials) is None


# The ledger

def test_a_trial_counts_once(tmp_path):
    ledger = tmp_path/'deep'/'trials.jsonl'
    assert read_trials(ledger) == []
    assert record_trials(ledger, []) == 0 and not ledger.exists()
    assert record_trials(ledger, [{'a': 1, 'b': 2.0}, {'b': 2.0, 'a': 1}]) == 1
    assert record_trials(ledger, [{'a': 1, 'b': 2.0}, {'a': 1, 'b': 3.0}]) == 2
    assert len(read_trials(ledger)) == 2
    assert record_trials(ledger, [RECOMMENDED, RewardWeights()]) == 4


def test_a_damaged_ledger_is_named(tmp_path):
    ledger = tmp_path/'trials.jsonl'
    ledger.write_text('{"a":1}\n{"a":')
    with pytest.raises(StockerError, match='trials.jsonl, line 2'): record_trials(ledger, [{'a': 3}])
    assert ledger.read_text() == '{"a":1}\n{"a":' # nothing was overwritten


# Fidelity

def made_graded(totals, returns, settings=(RewardWeights(),)):
    "A bank whose episodes are one a month and whose days are given."
    first = tuple(day.strftime('%Y-%m-%d') for day in pd.date_range('2010-01-01', periods=len(totals), freq='MS'))
    days = tuple(day.strftime('%Y-%m-%d') for day in pd.date_range('2010-01-01', periods=len(returns), freq='D'))
    names = tuple(f'policy {i}' for i in range(totals.shape[-1]))
    return Graded(names, settings, first, totals, days, {0.001: returns})


def test_a_reward_that_is_the_result_has_a_tau_of_one():
    rng = np.random.default_rng(10)
    skill = np.linspace(-0.01, 0.01, 9)
    totals = np.repeat(skill[None, None], 40, axis=0) + 0 * rng.random((40, 1, 9))
    found = fidelity(made_graded(totals, skill + rng.normal(0, 0.001, (1200, 9)))).table
    assert found.loc[0, 'tau'] == pytest.approx(1) and found.loc[0, 'overfitting'] == 0
    assert found.loc[0, 'best'] == 'policy 8'
    backwards = fidelity(made_graded(-totals, skill + rng.normal(0, 0.001, (1200, 9)))).table
    assert backwards.loc[0, 'tau'] == pytest.approx(-1) and backwards.loc[0, 'overfitting'] == 1


def test_a_reward_of_noise_has_a_tau_of_zero():
    rng = np.random.default_rng(11)
    found = [fidelity(made_graded(rng.random((40, 1, 30)), rng.normal(0, 0.01, (1200, 30)))).table for _ in range(12)]
    assert abs(np.mean([one.loc[0, 'tau'] for one in found])) < 0.08


def test_scale_of_the_weights_does_not_matter():
    rng = np.random.default_rng(12)
    totals, returns = rng.random((40, 1, 20)), rng.normal(0, 0.01, (1200, 20))
    one, other = (fidelity(made_graded(factor * totals, returns)).table for factor in (1, 100))
    pd.testing.assert_frame_equal(one, other)


def test_hindsight_is_not_ranked(graded):
    with_it, without = fidelity(graded, without=(), blocks=4).table, fidelity(graded, blocks=4).table
    assert not set(without['best']) & set(HINDSIGHT) and set(with_it['best']) <= set(HINDSIGHT)
    reward = without['ranked by'] == 'reward'
    assert (with_it['tau'][reward] > without['tau'][reward]).sum() >= 3
    assert len(without) == len(SETTINGS) + 2 * 3


def test_a_reward_that_ranks_better_is_said_to():
    rng, skill = np.random.default_rng(13), np.linspace(-0.01, 0.01, 9)
    totals = np.stack([rng.random((40, 9)), np.repeat(skill[None], 40, axis=0)], axis=1)
    settings = (RewardWeights(), RewardWeights(w_performance=0.5))
    found = fidelity(made_graded(totals, skill + rng.normal(0, 0.001, (1200, 9)), settings))
    assert weights_verdict(found, settings[0]).startswith('Other weights rank better')
    assert weights_verdict(found, settings[1]).startswith('No difference')


# Canaries

@pytest.mark.parametrize('timing', ['close', 'next_open'])
def test_no_canary_comes_near_what_is_worth_learning(timing):
    world = planted_world(302, 10, timing=timing)
    settings = [RECOMMENDED, *SETTINGS[:3]]
    grades = grade_bank({**CANARIES, 'follow': follow('news')}, world.episodes, settings)
    assert (canary_table(grades, ['follow']) == 1).all(axis=None)
    means = pd.DataFrame(grades.totals.mean(axis=0), columns=grades.policies)
    assert (means.loc[0, list(CANARIES)] < 0.2 * means.loc[0, 'follow']).all()


def test_impossible_orders_cost_more_than_trading_blindly():
    world = placebo_world(303, 25)
    blind = OrderMaker(lambda voted, weights: 5.0 * (-1.0) ** np.arange(voted.episode.steps))
    grades = grade_bank({**CANARIES, 'blind': blind}, world.episodes, [RECOMMENDED, RewardWeights()])
    table = pd.DataFrame(grades.totals.mean(axis=0), ['recommended', 'default'], grades.policies)
    assert table.loc['recommended', 'invalid spam'] < table.loc['recommended', 'blind']
    assert table.loc['default', 'invalid spam'] == pytest.approx(table.loc['default', 'always hold'] - 0.4)
