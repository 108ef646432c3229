"""Rules on a corpus: graded as the environment grades, never above the limit, never ahead of their time."""
import numpy as np
import pytest

from stocker.market.core import StockerError, Timing, data_path
from stocker.market.histories import Histories, exchange_days, load_corpus
from stocker.studies.rules import (
    RULES, baseline_table, corpus_baselines, corpus_path, difficulty, easy_first, grouped_error)
from stocker.studies.worlds import martingale_prices
from stocker.trading.engine import market_path, play_orders, signed_orders, simulate
from stocker.trading.env import StockerEnv
from stocker.trading.orders import switch_orders
from stocker.trading.reward import RewardWeights

DAYS = exchange_days(data_path('calendar.parquet'))


def walk(seed, volatility=0.02, level=1.0):
    "Made-up prices on the exchange's sessions from 2015 to April 2026."
    days = DAYS[(DAYS >= np.datetime64('2015-01-02')) & (DAYS <= np.datetime64('2026-04-30'))]
    prices = martingale_prices(np.random.default_rng(seed), days, 0, volatility)
    prices.iloc[:, :5] *= level
    return prices


@pytest.mark.parametrize('timing', list(Timing))
@pytest.mark.parametrize('weights', [RewardWeights(), RewardWeights(0.3, 1.0, 0.2, 0.02, 0.5),
                                     RewardWeights(transaction_cost=0.0)])
def test_side_by_side_equals_the_environment(timing, weights):
    histories = Histories({'CHEAP': walk(1, level=0.0005), 'DEAR': walk(2, level=90.0), 'WILD': walk(3, 0.2)})
    corpus = load_corpus(histories=histories, length=23, stride=170)
    path = corpus_path(corpus.index, histories, 23, timing, weights.transaction_cost)
    random = np.random.default_rng(4)
    shape = path.fills.shape
    for wanted in (random.integers(-3, 4, shape).astype(float), switch_orders(random.random(shape) > 0.5)):
        mine = play_orders(path, wanted, weights, np.arange(len(corpus)))
        assert mine.invalid.any()
        for number, episode in enumerate(corpus):
            own = market_path(episode, timing, weights.transaction_cost)
            np.testing.assert_array_equal(path.ideal_pnl_pct[:, number], own.ideal_pnl_pct)
            alone = simulate(own, *signed_orders(wanted[:, [number]]), weights)
            for name in ('rewards', 'values', 'traded', 'invalid'):
                np.testing.assert_array_equal(getattr(mine, name)[:, number], getattr(alone, name)[:, 0])


def test_a_step_of_the_environment_gives_the_same_reward():
    corpus = load_corpus('test')[:4]
    path = corpus_path(corpus.index, corpus.histories, 42, Timing.CLOSE, 0.001)
    orders = switch_orders(path.closes > path.closes[0])
    run = play_orders(path, orders, place=np.arange(4))
    for number, episode in enumerate(corpus):
        env = StockerEnv(episode)
        env.reset()
        for t, wish in enumerate(orders[:, number]):
            reward = env.step((1 if wish > 0 else 2 if wish < 0 else 0, int(abs(wish))))[1]
            assert reward == run.rewards[t, number]


@pytest.mark.parametrize('timing', list(Timing))
def test_nothing_beats_the_limit(timing):
    corpus = load_corpus('test')
    results = corpus_baselines(corpus, timing)
    assert (results['total_return'] <= results['limit'] + 1e-12).all()
    limit = results.drop_duplicates('name').set_index('name')['limit']
    for episode in corpus[:12]:
        assert limit[episode.name] >= market_path(episode, timing).optimal_pnl_pct[-1] - 1e-12


def test_rules_never_look_ahead():
    close = walk(9)['close']
    for name, rule in RULES.items():
        whole = rule(close)
        for end in (1, 30, 300, 2000):
            np.testing.assert_array_equal(whole[:end], rule(close.iloc[:end]), err_msg=name)


def test_the_table_counts_right():
    results = corpus_baselines(load_corpus('validation'))
    table = baseline_table(results, 'ticker')
    part = results[(results['ticker'] == 'AMD') & (results['policy'] == 'momentum')]
    assert table.loc[('AMD', 'momentum'), 'reward'] == pytest.approx(part['reward'].mean())
    error = part['reward'].std(ddof=1) / len(part) ** 0.5
    assert table.loc[('AMD', 'momentum'), 'reward_error'] == pytest.approx(error)
    assert set(baseline_table(results, 'regime').index.get_level_values(0)) == set(results['regime'])


def test_copies_of_the_same_day_do_not_make_a_mean_more_certain():
    values = np.random.default_rng(0).normal(size=50)
    days = np.arange(50)
    assert grouped_error(np.repeat(values, 40), np.repeat(days, 40)) == pytest.approx(grouped_error(values, days))


def test_difficulty_is_a_share_of_the_limit():
    results = corpus_baselines(load_corpus())
    hard = difficulty(results)
    assert hard.between(0, 1).all() and hard.index.is_unique
    name = hard.index[5]
    part = results[results['name'] == name].set_index('policy')
    best = part.loc[list(RULES), 'total_return'].max()
    assert hard[name] == pytest.approx(1 - best / part['limit'].iloc[0])


def test_a_curriculum_lets_more_in_and_ends_with_all():
    hard = np.random.default_rng(0).random(101)
    sizes = [easy_first(hard, progress).sum() for progress in np.linspace(0, 1, 11)]
    assert sizes == sorted(sizes) and sizes[0] == 31 and sizes[-1] == 101
    assert hard[easy_first(hard, 0.0) > 0].max() < hard[easy_first(hard, 0.0) == 0].min()
    for progress, start in ((-0.1, 0.3), (1.1, 0.3), (0.5, 0.0), (0.5, 1.5), (float('nan'), 0.3)):
        with pytest.raises(StockerError, match='use 0 to 1'): easy_first(hard, progress, start)
