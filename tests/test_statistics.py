"""Tables of policies and the intervals around their differences: fair baselines, and no figure from nothing."""
import json
from dataclasses import replace
from io import BytesIO

import numpy as np
import pandas as pd
import pytest

from stocker.trading.orders import ALL_SHARES
from stocker.market.core import Decision, StockerError, TradeAction, plain
from stocker.council.council import vote_mean, vote_mean_all_in
from stocker.trading.env import StockerEnv
from stocker.council.evaluation import performance
from stocker.trading.reward import RewardWeights
from stocker.studies.statistics import (
    BASELINE_POLICIES, FEWEST_BLOCKS, TOO_CLOSE, Difference, OrderMaker, block_interval, bootstrap_means, compare_with,
    difference_figure, evaluate, every_draw, joint_name, paired_difference, play_policies, rotated_runs, run_row,
    student_quantile, summarise, tail_share, time_blocks, verdict)
from stocker.studies.worlds import follow, placebo_world, planted_world


@pytest.fixture(scope='module')
def world(): return planted_world(201, episodes=20, steps=30)


@pytest.fixture(scope='module')
def table(world):
    return evaluate({'follow': follow('news'), 'echo': vote_mean_all_in, **BASELINE_POLICIES}, world.episodes,
                    random_like=['follow'], draws=4)


def made_table(differences, months=1, start='2010-01-01', column='total_reward'):
    "A table in which `one` lies above `other` by given differences, an episode every so many months."
    firsts = pd.date_range(start, periods=len(differences), freq=f'{months}MS').strftime('%Y-%m-%d')
    rows = [{'policy': name, 'episode': str(i), 'timing': 'close', 'first': day, column: value * (name == 'one')}
            for i, (day, value) in enumerate(zip(firsts, differences)) for name in ('one', 'other')]
    return pd.DataFrame(rows)


# Evaluation

def test_moderators_and_order_makers_are_played_alike(world):
    def buy_first(votes, portfolio):
        quantity = 10_000 if portfolio.step == 0 else 0
        return Decision(TradeAction(side='buy' if quantity else 'hold', quantity=quantity), 'once')
    for voted in world.episodes[:3]:
        runs = play_policies({'asked': buy_first, **BASELINE_POLICIES}, voted, RewardWeights())
        for name in ('rewards', 'values', 'traded'):
            assert getattr(runs['asked'], name).tolist() == getattr(runs['buy and hold'], name).tolist()


def test_rewards_are_those_of_the_environment(world):
    voted, weights = world.episodes[0], RewardWeights(transaction_cost=0.002)
    run = play_policies({'optimum': BASELINE_POLICIES['optimum']}, voted, weights)['optimum']
    env, rewards = StockerEnv(voted.episode, voted.timing, weights), []
    env.reset()
    for traded in run.traded:
        rewards.append(env.step((0 if traded == 0 else 1 if traded > 0 else 2, int(abs(traded))))[1])
    assert rewards == run.rewards.tolist()


def test_nobody_beats_the_optimum(table):
    returns = table.pivot(index='episode', columns='policy', values='return')
    assert (returns.sub(returns['optimum'], axis=0) <= 1e-12).all(axis=None)


@pytest.mark.parametrize('timing', ['close', 'next_open'])
def test_a_baseline_begins_with_the_same_cash_on_the_same_day(timing):
    voted = planted_world(202, 1, timing=timing).episodes[0]
    row = evaluate({'buy and hold': BASELINE_POLICIES['buy and hold']}, [voted]).iloc[0]
    market = voted.episode.market(timing)
    unit = market.fills[0] * 1.001
    shares = int(10_000 // unit)
    assert row['return'] == pytest.approx((10_000 - shares * unit + shares * market.marks[-1]) / 10_000 - 1, abs=1e-12)


def test_the_share_of_unreadable_answers_is_not_a_decision_to_hold(world):
    def silent(votes, portfolio):
        return Decision(TradeAction(side='hold'), 'no JSON in it', unreadable=portfolio.step % 2 == 0)
    means = summarise(evaluate({'silent': silent, **BASELINE_POLICIES}, world.episodes[:2]))
    assert means['unreadable'].to_dict() == {'silent': 0.5, 'hold': 0, 'buy and hold': 0, 'vote mean': 0, 'optimum': 0}


def test_orders_that_cannot_trade_are_counted(world):
    spam = OrderMaker(lambda voted, weights: np.full(voted.episode.steps, -1.0))
    row = evaluate({'spam': spam}, world.episodes[:1]).iloc[0]
    assert (row['invalid'], row['trades'], row['turnover'], row['exposure']) == (1.0, 0, 0.0, 0.0)


def test_sharpe_needs_half_a_year_of_sessions():
    short, long = planted_world(203, 1, steps=125).episodes, planted_world(203, 1, steps=126).episodes
    buy = {'buy and hold': BASELINE_POLICIES['buy and hold'], 'hold': BASELINE_POLICIES['hold']}
    assert evaluate(buy, short)['sharpe'].isna().all()
    rows = evaluate(buy, long).set_index('policy')
    assert np.isfinite(rows.loc['buy and hold', 'sharpe']) and pd.isna(rows.loc['hold', 'sharpe'])
    assert rows.loc['hold', 'note'] == 'the returns do not vary'


def test_a_portfolio_that_falls_to_nothing_has_a_return_and_a_drawdown_only():
    figures = performance(np.concatenate([[100.0], np.zeros(200)]), 100.0)
    assert (figures.total_return, figures.max_drawdown, figures.sharpe, figures.annual_return) == (-1, 1, None, None)
    json.dumps(plain(figures), allow_nan=False)


def test_timings_are_not_averaged_together():
    both = [planted_world(206, 2, timing=timing).episodes for timing in ('close', 'next_open')]
    buy = {'buy and hold': BASELINE_POLICIES['buy and hold']}
    means = summarise(pd.concat([evaluate(buy, episodes) for episodes in both]))
    assert list(means.index) == [('buy and hold', 'close'), ('buy and hold', 'next_open')]
    assert means.loc[('buy and hold', 'close'), 'return'] == summarise(evaluate(buy, both[0]))['return'].item()


def test_nothing_to_evaluate_is_refused():
    with pytest.raises(StockerError, match='nothing to evaluate'): evaluate(BASELINE_POLICIES, [])


# Random rivals

@pytest.mark.parametrize('moderator', [vote_mean, vote_mean_all_in, follow('news'), follow('geopolitics')])
def test_a_random_rival_keeps_exposure_and_turnover(world, moderator):
    for voted in world.episodes[:4]:
        run = play_policies({'own': moderator}, voted, RewardWeights())['own']
        rival = rotated_runs(voted, run, np.arange(1, 30), RewardWeights())[7]
        again = {'rival': OrderMaker(lambda voted, weights, rival=rival: rival.traded)}
        replayed = play_policies(again, voted, RewardWeights())
        assert replayed['rival'].rewards.tolist() == pytest.approx(rival.rewards.tolist(), abs=0.0101)
        row = run_row(voted, rival)
        own = run_row(voted, run)
        assert row['exposure'] == pytest.approx(own['exposure'], abs=0.08)
        assert abs(row['trades'] - own['trades']) <= 4
        assert row['invalid'] <= own['invalid'] + 0.1


def test_without_timing_there_is_nothing_to_rotate(world):
    rows = evaluate({'hold': BASELINE_POLICIES['hold'], 'buy and hold': BASELINE_POLICIES['buy and hold']},
                    world.episodes[:3], random_like=['hold', 'buy and hold']).set_index(['episode', 'policy'])
    for name in ('hold', 'buy and hold'):
        own, rival = (rows.xs(policy, level='policy')['return'] for policy in (name, f'random like {name}'))
        assert (own - rival).abs().max() < 1e-12


def test_the_same_seed_gives_the_same_table(world):
    one, same = (evaluate({'follow': follow('news')}, world.episodes[:3], random_like=['follow'], draws=2, seed=5)
                 for _ in range(2))
    pd.testing.assert_frame_equal(one, same)


# Intervals

def test_means_of_draws_agree_with_scipy_where_every_episode_is_a_block():
    stats = pytest.importorskip('scipy.stats')
    sample = np.random.default_rng(1).exponential(2, 40)
    means = bootstrap_means(sample, np.arange(40), np.random.default_rng(2), 50_000)
    theirs = stats.bootstrap((sample,), np.mean, n_resamples=50_000, method='percentile', rng=np.random.default_rng(3))
    assert np.quantile(means, [0.025, 0.975]) == pytest.approx(list(theirs.confidence_interval), abs=0.02)
    assert means.std(ddof=1) == pytest.approx(theirs.standard_error, rel=0.02)


def test_blocks_of_different_size_agree_with_scipys_paired_bootstrap():
    stats = pytest.importorskip('scipy.stats')
    rng = np.random.default_rng(4)
    blocks = np.sort(rng.integers(0, 15, 90))
    blocks = np.unique(blocks, return_inverse=True)[1]
    sample = rng.standard_normal(90) + rng.standard_normal(15)[blocks]
    sums, counts = np.bincount(blocks, sample), np.bincount(blocks)
    def ratio(sums, counts, axis=-1): return sums.sum(axis=axis) / counts.sum(axis=axis)
    theirs = stats.bootstrap((sums, counts), ratio, paired=True, vectorized=True, n_resamples=50_000,
                             method='percentile', rng=rng)
    means = bootstrap_means(sample, blocks, rng, 50_000)
    assert np.quantile(means, [0.025, 0.975]) == pytest.approx(list(theirs.confidence_interval), abs=0.02)


def test_student_quantiles_agree_with_scipy():
    stats = pytest.importorskip('scipy.stats')
    for freedom in (5, 8, 12, 40, 400):
        for probability in (0.9, 0.95, 0.975, 0.995):
            assert student_quantile(probability, freedom) == pytest.approx(stats.t.ppf(probability, freedom), rel=0.01)


@pytest.mark.parametrize('blocks', [8, 12, 30])
@pytest.mark.parametrize('heavy', [False, True])
def test_intervals_hold_the_truth_as_often_as_they_promise(blocks, heavy):
    rng, inside, trials = np.random.default_rng(blocks), 0, 400
    for _ in range(trials):
        sample = rng.standard_t(4, blocks) if heavy else rng.standard_normal(blocks)
        low, high, _ = block_interval(sample, np.arange(blocks), 0.95, 1000, rng)
        inside += low <= 0 <= high
    assert 0.91 <= inside / trials <= 0.985


def test_every_draw_that_is_counted_comes_as_often_as_it_is_drawn():
    rng, blocks = np.random.default_rng(21), np.repeat(np.arange(9), [1, 5, 2, 8, 3, 3, 1, 6, 4])
    sample = rng.standard_normal(33) + rng.standard_normal(9)[blocks]
    times, chances = every_draw(9)
    assert len(times) == 24_310 and chances.sum() == pytest.approx(1) and (times.sum(axis=1) == 9).all()
    low, high, _ = block_interval(sample, blocks, 0.95, 1, rng)
    share, drawn = tail_share(0.95, 9), bootstrap_means(sample, blocks, rng, 400_000)
    assert np.quantile(drawn, [share, 1 - share]) == pytest.approx([low, high], abs=0.02)


@pytest.mark.parametrize('blocks', [9, 20])
def test_no_seed_decides_a_verdict(blocks):
    "Ten thousand draws gave a verdict of 49 seeds in 60."
    level, sample = 1 - 0.05 / 6, np.random.default_rng(3).standard_normal(blocks)
    places, first = np.arange(blocks), np.random.default_rng(0)
    sample += 0.02 * sample.std() - block_interval(sample, places, level, 100_000, first)[0]
    found = [paired_difference(made_table(sample, months=3), 'one', 'other', level=level, seed=seed)
             for seed in range(60)]
    assert {one.blocks for one in found} == {blocks}
    assert {(one.significant, one.close_call) for one in found} == {(True, False)}


def test_what_no_number_of_draws_can_settle_is_too_close_to_call():
    sample, level = np.random.default_rng(3).standard_normal(20), 1 - 0.05 / 6
    sample -= block_interval(sample, np.arange(20), level, 100_000, np.random.default_rng(5))[0]
    found = paired_difference(made_table(sample, months=3), 'one', 'other', level=level, resamples=10_000)
    assert found.close_call and not found.significant
    assert verdict(found).startswith('Too close to call between one and other') and TOO_CLOSE in verdict(found)


def test_more_blocks_leave_out_more():
    shares = [tail_share(0.95, blocks) for blocks in (6, 7, 10, 30, 100, 10_000)]
    assert shares == sorted(shares) and shares[-1] == pytest.approx(0.025, abs=1e-4)


def test_blocks_follow_the_calendar():
    days = ['2019-12-31', '2020-01-01', '2020-03-31', '2020-04-01', '2021-01-04']
    assert time_blocks(days, 'M').tolist() == [0, 1, 2, 3, 4]
    assert time_blocks(days, 'Q').tolist() == [0, 1, 1, 2, 3]
    assert time_blocks(days, 'Y').tolist() == [0, 1, 1, 1, 2]
    assert time_blocks([]).tolist() == []


def test_a_known_difference_is_found_and_its_sign_turns_with_the_order():
    differences = np.random.default_rng(6).normal(0.5, 1, 200)
    table = made_table(differences)
    found, turned = (paired_difference(table, *names) for names in (('one', 'other'), ('other', 'one')))
    assert found.significant and found.mean == pytest.approx(differences.mean())
    assert turned.mean == pytest.approx(-found.mean) and turned.high < 0
    assert 'higher' in verdict(found) and 'lower' in verdict(turned)


def test_units_do_not_matter():
    differences = np.random.default_rng(7).normal(0, 1, 60)
    found, scaled = (paired_difference(made_table(differences * factor), 'one', 'other') for factor in (1, 1000))
    assert scaled.low == pytest.approx(1000 * found.low) and scaled.high == pytest.approx(1000 * found.high)


@pytest.mark.parametrize('count', [0, 1, FEWEST_BLOCKS - 1])
def test_too_few_blocks_give_no_interval_and_no_verdict(count):
    found = paired_difference(made_table([1.0] * count or [np.nan], months=3), 'one', 'other')
    assert found.low is None and not found.significant and found.episodes == count
    assert verdict(found).startswith('No verdict') and 'too few' in verdict(found)


def test_many_episodes_of_one_quarter_are_one_block():
    table = made_table(np.random.default_rng(8).normal(1, 0.1, 3))
    assert paired_difference(table, 'one', 'other').note == '1 block of time, too few for an interval'


@pytest.mark.parametrize('constant', [0.0, 0.25, -3.0])
def test_differences_without_variation_are_a_point(constant):
    found = paired_difference(made_table([constant] * 40), 'one', 'other')
    assert found.low == pytest.approx(constant) == found.high
    assert found.note == 'the difference is the same in every episode'
    assert found.significant == (constant != 0)
    json.dumps(plain(found), allow_nan=False)


def test_nearly_constant_differences_do_not_become_huge_figures():
    found = paired_difference(made_table(np.full(40, 0.1) + 1e-16 * np.arange(40)), 'one', 'other')
    assert found.low == pytest.approx(0.1) and found.high == pytest.approx(0.1)


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf, None])
def test_a_missing_figure_takes_its_episode_out(bad):
    table = made_table(np.random.default_rng(9).normal(1, 0.2, 40))
    table['total_reward'] = table['total_reward'].astype(object)
    table.loc[3, 'total_reward'] = bad
    found = paired_difference(table, 'one', 'other')
    assert (found.episodes, found.note) == (39, '1 episode left out, where a figure is missing')
    assert np.isfinite([found.mean, found.low, found.high]).all()


def test_episodes_that_one_policy_has_not_played_are_left_out():
    table = made_table(np.random.default_rng(10).normal(1, 0.2, 40))
    found = paired_difference(table.drop(index=[0, 5]), 'one', 'other')
    assert (found.episodes, found.note) == (38, '2 episodes left out, where a figure is missing')


@pytest.mark.parametrize('names, joint', [
    (['a'], 'a'), (['grpo-1', 'grpo-2'], 'grpo'), (['seed 1', 'seed 2'], 'seed 1 and seed 2')])
def test_seeds_share_a_name(names, joint):
    assert joint_name(names) == joint


def test_many_comparisons_share_one_level():
    rng, wrong = np.random.default_rng(11), 0
    for _ in range(30):
        table = pd.concat([made_table(rng.standard_normal(48)).assign(policy=lambda rows, k=k: rows['policy'].where(
            rows['policy'] == 'other', f'one {k}')) for k in range(3)])
        table = table.drop_duplicates(['policy', 'episode'])
        wrong += any(paired_difference(table, f'one {k}', 'other', level=0.983, resamples=500).significant
                     for k in range(3))
    assert wrong <= 6 # 5 % expected
    levels = [found.level for found in compare_with(table, 'one 0', ['other', 'one 1'])]
    assert levels == pytest.approx([0.975, 0.975])


def test_the_placebo_world_gives_no_winner():
    table = evaluate({'follow': follow('news'), 'all in': vote_mean_all_in, **BASELINE_POLICIES},
                     placebo_world(204, episodes=30, steps=20).episodes)
    for name in ('follow', 'all in', 'vote mean', 'buy and hold'):
        assert paired_difference(table, name, 'hold', 'return', level=0.99).low <= 0


def test_the_planted_world_has_one_winner(table):
    for name in ('vote mean', 'hold', 'buy and hold', 'random like follow', 'echo'):
        assert paired_difference(table, 'follow', name).low > 10


# Pictures and words

def test_pictures_do_not_depend_on_what_was_found(table):
    found = paired_difference(table, 'follow', 'hold')
    for differences in ([found], [replace(found, low=None, high=None), replace(found, mean=None, low=None)]):
        difference_figure(differences, 'title').savefig(BytesIO())


def test_a_verdict_says_what_it_rests_on():
    found = Difference('a', 'b', 'total_reward', 0.5, 0.1, 0.9, 0.95, 30, 12, (0.5,), '')
    assert verdict(found) == ('a has a higher total reward than b: +0.5 (95 % interval +0.1 to +0.9; 30 episodes in 12 '
                              'blocks of time).')
    open_ended = replace(found, low=-0.1)
    assert verdict(open_ended).startswith('No significant difference between a and b in total reward: +0.5')


def test_an_order_maker_may_order_more_than_it_can_pay():
    voted = planted_world(205, 1).episodes[0]
    greedy = OrderMaker(lambda voted, weights: np.full(voted.episode.steps, ALL_SHARES))
    row = evaluate({'greedy': greedy}, [voted]).iloc[0]
    assert row['trades'] >= 1 and row['exposure'] > 0.98 and row['turnover'] < 1.2
