"""Levels, orders and share counts are those of the day; a split multiplies a holding and moves no value."""
import shutil
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stocker.council.cache import observation_digest
from stocker.council.council import Council, collect_votes, moderate_episode, play, rule_council
from stocker.council.evaluation import baselines
from stocker.council.moderators import moves_ahead
from stocker.council.specialists import RULE_ANALYSTS
from stocker.llm.prompts import trade_messages, vote_messages
from stocker.market.charts import chart_png
from stocker.market.core import DataError, Decision, Timing, TradeAction, canonical_json, digest
from stocker.market.data import FolderSource, YahooSource, load_prices, read_split_file, read_table, write_table
from stocker.market.episodes import TASKS, Episode, Market, as_paid, comparable, load_task
from stocker.market.facts import load_splits, source_splits, split_between, split_factors
from stocker.market.histories import (
    Histories, HistoriesSource, episode_from_source, folder_histories, load_corpus, packaged_histories,
    save_histories)
from stocker.pages.inspection import inspect
from stocker.pages.report import report_html
from stocker.pages.svg import candles_svg
from stocker.studies.rules import corpus_path
from stocker.studies.seats import outcomes
from stocker.studies.statistics import rotated_runs, run_row
from stocker.studies.tuning import group_rewards, replay, sweep
from stocker.trading import engine
from stocker.trading.engine import (
    Run, Runs, Start, beginnings, market_path, play_orders, prepare_path, shares_held, simulate, stack_paths)
from stocker.trading.env import Snapshot, StockerEnv, simulate_rewards
from stocker.trading.orders import fill_order, optimal_orders, split_holding
from stocker.trading.reward import RewardWeights

ARRAYS = ('rewards', 'values', 'traded', 'invalid')
often = settings(deadline=None, database=None, max_examples=60)
RATIOS = (2.0, 3.0, 4.0, 20.0, 1.5, 0.1, 1 / 3, 0.75)
NVDA = ('NVDA', '2024-05-20', '2024-06-28') # ten for one on 2024-06-10


def of(ticker, start, end, **options):
    "An episode from the data set's prices and splits."
    options = {'share_splits': load_splits(ticker)} | options
    return Episode.from_prices(load_prices(ticker), ticker, start, end, **options)


def split_market(rng, steps=14, ratios=RATIOS):
    "Prices of a made-up share that is split once or twice on the way, and perhaps once more after it."
    close = 10 ** rng.uniform(0, 2.5) * np.exp(rng.normal(0, 0.03, steps)).cumprod()
    fill, mark = (close * rng.uniform(0.97, 1.03, steps) for _ in range(2))
    scales = np.full(steps, rng.choice([1.0, 4.0]))
    for day in rng.choice(np.arange(1, steps), rng.integers(1, 3), replace=False): scales[:day] *= rng.choice(ratios)
    return as_paid(Market(fill, mark, close), scales)


def orders(rng, shape):
    "Sides and quantities: small ones, all there is, and those that cannot trade."
    quantities = rng.integers(-5, 300, shape)
    quantities[rng.random(shape) < 0.1] = 10 ** 15
    return rng.integers(0, 3, shape), quantities


def plainly_or_not(compile):
    "Choose the form in which many runs are played."
    engine.PLAIN_STEPS['played'] = engine.WORTH_COMPILING if compile else -10**9
    if not compile: engine.compiled.cache_clear()


def by_hand(path, sides, quantities, weights=RewardWeights()):
    "One run through `Run`."
    run, rows = Run(path, weights), []
    for side, quantity in zip(sides.tolist(), quantities.tolist()):
        traded, invalid, terms = run.trade(side, quantity)
        rows.append((terms.reward, run.value, traded, invalid))
    return [list(column) for column in zip(*rows)]


# levels of the day

@pytest.mark.parametrize('ticker, day, close', [ # as they stood on the screen
    ('NVDA', '2024-03-01', 822.79), ('GOOGL', '2019-07-17', 1146.74), ('GOOGL', '2022-07-15', 2235.55),
    ('GOOGL', '2022-07-18', 109.03), ('AAPL', '2020-08-28', 499.23), ('NVDA', '2021-07-19', 751.19),
    ('NVDA', '2024-06-10', 121.79)])
def test_a_close_is_what_stood_on_the_screen(ticker, day, close):
    after = load_prices(ticker).index[load_prices(ticker).index.get_loc(day) + 2]
    episode = of(ticker, day, f'{after:%Y-%m-%d}')
    look = episode.observations()[0]
    assert look.close == pytest.approx(close, abs=0.006) and not look.split_adjusted
    assert f'{look.close:.2f}' in vote_messages('indicator', look)[1]['content']
    assert Run.on(episode).portfolio.price == episode.market().closes[0] == look.close
    assert f'{look.close:.2f} USD' in trade_messages({}, Run.on(episode).portfolio)[1]['content']


@pytest.mark.parametrize('ticker, day, close, split', [
    ('NVDA', '2024-03-01', 822.79, 'embargo'), ('GOOGL', '2019-07-17', 1146.74, None)])
def test_the_corpus_shows_the_levels_of_the_day(ticker, day, close, split):
    episode = next(one for one in load_corpus(split, tickers=[ticker]) if one.dates[0] <= day <= one.dates[-1])
    look = episode.observations()[episode.dates.index(day)]
    assert look.close == pytest.approx(close, abs=0.006)
    assert look.indicators['sma_20'] == pytest.approx(np.mean([bar.close for bar in look.bars[-20:]]))
    assert look.season.high_252 == pytest.approx(max(bar.high for bar in look.bars[-252:]))


def test_ratios_do_not_depend_on_the_table():
    episode, other = of(*NVDA), of(*NVDA, share_splits=None)
    assert np.array_equal(episode.features, other.features)
    for look, plain in zip(episode.observations(), other.observations()):
        scale = 10 if look.date < '2024-06-10' else 1
        assert (look.indicators['rsi_14'], look.peers) == (plain.indicators['rsi_14'], plain.peers)
        assert look.season[:5] == plain.season[:5]
        assert look.close == plain.close * scale
        assert [bar.volume for bar in look.bars] == [bar.volume / scale for bar in plain.bars]


def test_the_three_tasks_are_what_they_were():
    for name in TASKS:
        episode = load_task(name)
        assert episode.share_splits is not None and (episode.scales[episode.first:episode.first + 60] == 1).all()
        for look in episode.observations():
            assert 'split_adjusted' not in canonical_json(look)
            assert observation_digest(look) == digest(look)
            assert 'adjusted' not in canonical_json(vote_messages('indicator', look))
    assert [load_task(name).observations()[0].close for name in TASKS] == [
        load_prices(TASKS[name].ticker).loc[TASKS[name].start, 'close'] for name in TASKS]


def test_without_a_table_observation_chart_prompt_picture_and_report_say_split_adjusted():
    unknown, known = (of('NVDA', '2024-03-01', '2024-03-08', share_splits=splits)
                      for splits in (None, load_splits('NVDA')))
    look = unknown.observations()[0]
    assert look.split_adjusted and '"split_adjusted":true' in canonical_json(look)
    assert look.close == load_prices('NVDA').loc['2024-03-01', 'close']
    assert 'NVDA, 2024-03-01, prices split-adjusted\n' in vote_messages('indicator', look)[1]['content']
    assert observation_digest(look) == digest(look) != observation_digest(replace(look, split_adjusted=False))
    assert unknown.chart(0) == chart_png(look.bars, 'NVDA 2024-03-01, split-adjusted')
    for episode, said in ((unknown, True), (known, False)):
        inspection = inspect(play(StockerEnv(episode), rule_council()), episode)
        sentence = 'Prices are split-adjusted: whether NVDA was split later is not known.'
        assert (sentence in report_html(inspection)) is said
        assert ('NVDA, USD, split-adjusted' in candles_svg(inspection.trace, episode)) is said


def test_a_share_never_split_is_told_from_one_of_which_nothing_is_known():
    assert (load_splits('META'), load_splits('XOM')) == ((), None)
    told, untold = (of('META', '2024-03-01', '2024-03-08', share_splits=splits) for splits in ((), None))
    assert [one.observations()[0].split_adjusted for one in (told, untold)] == [False, True]
    assert told.observations()[0].bars == untold.observations()[0].bars
    for timing in Timing:
        a, b = told.market(timing), untold.market(timing)
        assert a.splits is b.splits is None
        assert all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ('fills', 'marks', 'closes'))


@pytest.mark.parametrize('timing', Timing)
def test_a_split_after_the_decision_does_not_show(timing):
    "A download after another split of four for one: earlier prices are a quarter, and the table has a line more."
    prices, last = load_prices('NVDA'), '2025-03-31'
    later = prices.loc[:last].copy()
    later[['open', 'high', 'low', 'close', 'adj_close']] /= 4
    later['volume'] *= 4
    before = of('NVDA', '2024-06-03', '2024-06-28').observations(timing)
    after = Episode.from_prices(later, 'NVDA', '2024-06-03', '2024-06-28',
                                share_splits=(*load_splits('NVDA'), ('2025-03-20', 4.0))).observations(timing)
    assert [canonical_json(look) for look in before] == [canonical_json(look) for look in after] # 4 divides exactly


def test_earnings_a_share_follow_the_split():
    splits = (('2024-06-10', 10.0),)
    assert split_between(splits, '2024-05-22', '2024-06-09') == 1
    assert split_between(splits, '2024-05-22', '2024-06-10') == 10
    assert split_between(splits, '2024-06-10', '2024-08-28') == 1


# a split inside an episode

def test_ten_for_one_multiplies_the_holding_and_moves_no_value():
    episode = of(*NVDA)
    for timing in Timing:
        run, split = Run.on(episode, timing), episode.dates.index('2024-06-10')
        run.trade(1, 5)
        for _ in range(1, split): run.trade(0, 0)
        assert run.shares == 5 and run.portfolio.shares == 50 and run.portfolio.step == split
        assert run.portfolio.cash == run.cash
        if timing is Timing.NEXT_OPEN: assert run.portfolio.value == pytest.approx(run.value, rel=1e-12)
        traded, invalid, _ = run.trade(2, 50)
        assert (traded, invalid, run.shares) == (-50, False, 0)


def test_one_for_ten_pays_the_rest_in_cash():
    price = np.array([2.0, 2.0, 20.0, 20.0])
    path = prepare_path(Market(price, price, price, np.array([1.0, 1.0, 0.1, 1.0])), 100.0, 0.0)
    run = Run(path)
    run.trade(1, 25)
    run.trade(0, 0)
    assert (run.cash, run.shares, run.portfolio.cash, run.portfolio.shares) == (50.0, 25.0, 60.0, 2)
    run.trade(0, 0)
    assert (run.cash, run.shares, run.value) == (60.0, 2.0, 100.0)


@often
@given(st.integers(0, 2**32 - 1))
def test_value_is_conserved_through_a_split(seed):
    rng = np.random.default_rng(seed)
    cash, shares, price = rng.uniform(0, 1e6), float(rng.integers(0, 10_000)), 10 ** rng.uniform(-1, 4)
    ratio = rng.integers(1, 40) / rng.integers(1, 40)
    after, held = split_holding(cash, shares, ratio, price)
    assert held == np.floor(held) and after >= cash
    assert after + held * price == pytest.approx(cash + shares * ratio * price, rel=1e-12)
    whole = float(rng.integers(1, 100))
    assert split_holding(cash, shares, whole, price) == (cash, shares * whole)


@often
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.001, 0.02]), st.booleans())
def test_compiled_runs_plain_runs_and_single_steps_are_the_same(seed, cost, compile):
    rng = np.random.default_rng(seed)
    path = prepare_path(split_market(rng), 10_000.0, cost)
    sides, quantities = orders(rng, (14, 8))
    plainly_or_not(compile)
    played = simulate(path, sides, quantities)
    expected = [by_hand(path, sides[:, j], quantities[:, j]) for j in range(8)]
    assert all([getattr(played, name)[:, j].tolist() for name in ARRAYS] == expected[j] for j in range(8))
    piece, runs = int(rng.integers(1, 13)), Runs(path, beginnings(path, np.zeros(8, int)))
    halves = [runs.trade(sides[:piece], quantities[:piece])]
    standing = [column.tolist() for column in runs.standing]
    start = Start(np.zeros(8, int), runs.step, *runs.state.copy())
    halves.append(runs.trade(sides[piece:], quantities[piece:]))
    for j in range(8):
        run = Run(path)
        for t in range(piece): run.trade(int(sides[t, j]), int(quantities[t, j]))
        assert [run.portfolio.cash, run.portfolio.shares] == [standing[0][j], standing[1][j]]
    assert np.array_equal(np.concatenate([half.values for half in halves]), played.values)
    assert np.array_equal(Runs(path, start).trade(sides[piece:], quantities[piece:]).rewards, played.rewards[piece:])


@often
@given(st.integers(0, 2**32 - 1))
def test_paths_side_by_side_split_on_days_of_their_own(seed):
    rng = np.random.default_rng(seed)
    plain = np.exp(rng.normal(0, 0.05, 9)).cumprod() * 40
    paths = [prepare_path(market, 5_000.0, 0.001) for market in
             (split_market(rng), Market(plain, plain, plain), split_market(rng, 11))]
    both = stack_paths(paths)
    place = rng.integers(0, 3, 12)
    sides, quantities = orders(rng, (14, 12))
    plainly_or_not(bool(seed % 2))
    played = Runs(both, beginnings(both, place)).trade(sides, quantities)
    for j, number in enumerate(place):
        steps = len(paths[number].fills)
        assert [getattr(played, name)[:steps, j].tolist() for name in ARRAYS] == by_hand(
            paths[number], sides[:steps, j], quantities[:steps, j])
        assert both.path(int(number)).split_steps == paths[number].split_steps
    assert stack_paths(paths[1:2] * 2).splits is None


@often
@given(st.integers(0, 2**32 - 1))
def test_without_splits_nothing_changes_to_the_last_bit(seed):
    rng = np.random.default_rng(seed)
    close = np.exp(rng.normal(0, 0.05, 12)).cumprod() * 70
    market = Market(close, np.roll(close, -1), close)
    ones = replace(market, splits=np.ones(12))
    sides, quantities = orders(rng, (12, 5))
    paths = [prepare_path(one, 10_000.0, np.array([0.0, 0.01])) for one in (market, ones)]
    for name in ('ideal_pnl_pct', 'buy_and_hold', 'scale'):
        assert getattr(paths[0], name).tolist() == getattr(paths[1], name).tolist()
    place = rng.integers(0, 2, 5)
    one, other = (simulate(path, sides, quantities, place=place) for path in paths)
    assert all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ARRAYS)
    assert paths[0].path(1).optimal_orders.tolist() == paths[1].path(1).optimal_orders.tolist()


@often
@given(st.integers(0, 2**32 - 1))
def test_whole_splits_change_no_return_where_shares_are_small(seed):
    "With very many shares, a run on the prices paid ends where the same run on adjusted prices does."
    rng = np.random.default_rng(seed)
    market = split_market(rng, ratios=(2.0, 4.0, 20.0))
    adjusted = Market(*(comparable(market, name) for name in ('fills', 'marks', 'closes')))
    paid, level = (prepare_path(one, 1e9, 0.001) for one in (market, adjusted))
    assert paid.ideal_pnl_pct == pytest.approx(level.ideal_pnl_pct, rel=1e-4, abs=1e-5)
    assert paid.buy_and_hold == pytest.approx(level.buy_and_hold, rel=1e-5)


@pytest.mark.parametrize('seed', range(12))
def test_the_optimum_is_the_best_of_all_policies(seed):
    rng = np.random.default_rng(seed)
    market, cost = split_market(rng, 4, (2.0, 3.0, 0.5, 1 / 3)), float(rng.choice([0.0, 0.02]))
    cash = 3.4 * market.fills[0]
    states = {(cash, 0.0)}
    for t, price in enumerate(market.fills):
        if market.splits is not None:
            states = {tuple(map(float, split_holding(*state, market.splits[t], market.closes[t]))) for state in states}
        states = {fill_order(*state, float(wanted), price, cost)[:2]
                  for state, wanted in product(states, range(-40, 41))}
    best = max(money + shares * market.marks[-1] for money, shares in states)
    path = prepare_path(market, cash, cost)
    assert cash * (1 + path.optimal_pnl_pct[-1]) == pytest.approx(best, rel=1e-12)
    rivals = play_orders(path, rng.integers(-9, 10, (4, 300)).astype(float))
    assert rivals.values[-1].max() <= best * (1 + 1e-12)
    again = optimal_orders(market.fills, market.marks, cash, cost, market.splits, market.closes)
    assert again.tolist() == path.optimal_orders.tolist()


@pytest.mark.parametrize('timing', Timing)
def test_run_trace_replay_sweep_snapshot_and_batch_agree_across_a_split(timing):
    episode, rng = of(*NVDA), np.random.default_rng(3)
    script = [TradeAction(side=side, quantity=int(quantity)) for side, quantity in zip(
        rng.choice(['buy', 'sell', 'hold'], episode.steps, p=[0.5, 0.3, 0.2]), rng.integers(0, 30, episode.steps))]
    answers = iter(script)
    council = Council(dict(RULE_ANALYSTS), lambda votes, portfolio: Decision(next(answers), ''), 'script')
    trace, weights = play(StockerEnv(episode, timing), council), RewardWeights()
    rewards, values = [step.terms.reward for step in trace.steps], [step.value for step in trace.steps]
    assert replay(trace, weights, episode).reward.tolist() == rewards
    sides, quantities = trace.orders
    batch = simulate_rewards(episode, sides, quantities, timing)
    assert (batch.rewards[:, 0].tolist(), batch.values[:, 0].tolist()) == (rewards, values)
    table = sweep(trace, pd.DataFrame([{'w_performance': 0.7, 'w_inflation': 0.3, 'annual_inflation': 0.05,
                                        'transaction_cost': 0.001}]), episode)
    assert table['final_value'][0] == values[-1] and table['total'][0] == pytest.approx(sum(rewards), abs=1e-12)
    env, other, split = StockerEnv(episode, timing), StockerEnv(episode, timing), episode.dates.index('2024-06-10')
    env.reset()
    for number, action in enumerate(script):
        if number == split:
            seen = other.restore(Snapshot.from_json(canonical_json(env.snapshot())))
            assert np.array_equal(seen, env.restore(env.snapshot())) and other.portfolio == env.portfolio
            assert seen[-4] == pytest.approx(env.portfolio.shares * env.portfolio.price / 10_000, rel=1e-6)
            env = other
        assert env.step(action)[1] == rewards[number]
    held = shares_held(batch.traded, episode.market(timing).splits)[:, 0]
    assert held.tolist() == [step.shares for step in trace.steps]
    inspection = inspect(trace, episode)
    assert inspection.portfolios[split].shares == trace.steps[split - 1].shares * 10 > 0
    assert 'Split on 2024-06-10: 10 shares for one.' in report_html(inspection)
    assert (inspection.regrets < 0.2).all() # a split is no fall


@pytest.mark.parametrize('timing', Timing)
def test_votes_moderators_and_statistics_agree_across_a_split(timing):
    episode = of(*NVDA)
    voted = collect_votes(RULE_ANALYSTS, episode, timing)
    always = np.zeros((episode.steps, 1))
    always[0] = 10 ** 15
    run = play_orders(market_path(episode, timing), always).run(0)
    hold = next(one for one in baselines(episode, timing, RewardWeights()) if one.policy == 'buy and hold')
    assert hold.values.tolist() == run.values.tolist() == market_path(episode, timing).buy_and_hold.tolist()
    assert 0.9 < run_row(voted, run)['exposure'] <= 1
    turned = rotated_runs(voted, run, np.arange(1, 4), RewardWeights())
    assert all(0.9 < run_row(voted, one)['exposure'] <= 1 for one in turned)
    moderated = moderate_episode(voted, rule_council().moderator)
    trace = play(StockerEnv(episode, timing), rule_council())
    assert moderated.rewards.tolist() == [step.terms.reward for step in trace.steps]
    whole = group_rewards(trace, RewardWeights(), 3, episode, np.array([0.0]))[:, 0]
    for start in (0, episode.dates.index('2024-06-10') - 1, episode.dates.index('2024-06-10')):
        run = Run.on(episode, timing)
        for step in trace.steps[:start]: run.trade(step.decision.action.side.code, step.decision.action.quantity)
        begun = Run(run.path, start=Start(0, start, run.cash, run.shares, 10_000.0, 0.0))
        assert whole[start] == pytest.approx(sum(begun.trade(0, 0)[2].reward for _ in range(3)), abs=1e-12)


def test_no_study_takes_a_split_for_a_fall():
    episode = of(*NVDA)
    for timing in Timing:
        assert np.abs(outcomes(episode.market(timing))).max() < 0.1
        assert np.abs(moves_ahead(collect_votes({}, episode, timing), 5)).max() < 0.255
        path = market_path(episode, timing)
        assert np.ptp(np.diff(path.buy_and_hold) / path.buy_and_hold[:-1]) < 0.2
        assert 0 < path.ideal_pnl_pct[-1] <= path.optimal_pnl_pct[-1] * 1.02


def test_rules_on_the_corpus_are_played_on_the_prices_of_each_episode():
    corpus, weights = load_corpus(None, tickers=['NVDA', 'META', 'GOOGL', 'AAPL']), RewardWeights()
    rows = corpus.index[(corpus.index['last'] >= '2020-08-01') & (corpus.index['first'] <= '2020-09-15')
                        | (corpus.index['first'] <= '2021-07-20') & (corpus.index['last'] >= '2021-07-20')]
    rows = rows[rows['split'] != 'tasks']
    for timing in Timing:
        path = corpus_path(rows, corpus.histories, 42, timing, weights.transaction_cost)
        for place, number in enumerate(rows.index):
            own = market_path(corpus[number], timing)
            for name in ('fills', 'marks', 'closes', 'ideal_pnl_pct', 'buy_and_hold'):
                assert getattr(path.path(place), name).tolist() == getattr(own, name).tolist()
            assert path.path(place).split_steps == own.split_steps
    assert any(market_path(corpus[number]).split_steps for number in rows.index)


# where splits come from

def test_a_folder_says_its_splits_in_a_file_of_its_own(tmp_path):
    histories = Histories({ticker: load_prices(ticker) for ticker in ('NVDA', 'AMD', 'META', 'SPY')},
                          splits={'NVDA': load_splits('NVDA'), 'META': ()})
    save_histories(histories, tmp_path)
    again = folder_histories(tmp_path, tmp_path/'cache')
    assert dict(again.splits) == dict(histories.splits)
    assert not again.problems and set(again.tables) == set(histories.tables)
    window = 'NVDA', '2024-03-01', '2024-04-01'
    for source in (FolderSource(tmp_path), HistoriesSource(again)):
        assert [source_splits(source, ticker) for ticker in ('NVDA', 'META', 'AMD')] == [load_splits('NVDA'), (), None]
    episode = episode_from_source(*window, FolderSource(tmp_path), peers=['AMD'], commodities=[])
    assert episode.observations()[0].close == pytest.approx(822.79, abs=0.006)
    (tmp_path/'splits.csv').unlink()
    episode = episode_from_source(*window, FolderSource(tmp_path), peers=['AMD'], commodities=[])
    assert episode.observations()[0].split_adjusted
    corpus = load_corpus(None, tickers=['NVDA'], histories=folder_histories(tmp_path))
    assert all(one.observations()[0].split_adjusted for one in corpus[:3])


def test_a_table_of_splits_that_cannot_be_is_refused(tmp_path):
    path = tmp_path/'splits.csv'
    for line in ('NVDA,2024-06-10,-10', 'NVDA,2024-06-10,', 'NVDA,10.06.2024,10', 'NVDA,20240610,10',
                 'NVDA,2024-06-10,inf', 'NVDA,2024-06-31,10', 'NVDA,2024-06-10,nan', 'NVDA,2024-06-10,1e999999'):
        path.write_text(f'ticker,date,ratio\n{line}\n')
        with pytest.raises(DataError, match=r'splits.csv, NVDA: line 2: no split is'): read_split_file(path)
    path.write_text('ticker,ratio\nNVDA,10\n')
    with pytest.raises(DataError, match='the columns are'): read_split_file(path)
    path.write_text('ticker,date,ratio\nNVDA,2024-06-10,10\nNVDA,2024-06-10,10\n')
    with pytest.raises(DataError, match='NVDA, 2024-06-10: the split comes twice'): read_split_file(path)


def test_yahoo_is_asked_for_all_splits_and_may_not_know():
    def listed(symbol):
        assert symbol == 'BRK-B'
        return pd.Series([50.0], pd.DatetimeIndex(['2010-01-21'], tz='America/New_York'))
    assert source_splits(YahooSource(split_list=listed), 'BRK.B') == (('2010-01-21', 50.0),)
    def silent(symbol): raise OSError('no network')
    with pytest.warns(UserWarning, match='levels stay split-adjusted'):
        assert source_splits(YahooSource(split_list=silent), 'AAPL') is None
    assert source_splits(object(), 'AAPL') is None


def test_a_data_set_without_the_table_is_read_and_says_so(tmp_path, monkeypatch):
    from stocker.market.core import data_path
    folder = tmp_path/'data'
    shutil.copytree(data_path(), folder, ignore=shutil.ignore_patterns('charts', 'pocket', 'recordings'))
    monkeypatch.setenv('STOCKER_DATA', str(folder))
    assert load_task('task_hard').observations()[0].split_adjusted is False
    table = read_table(folder/'splits.parquet')
    write_table(table[table['ticker'] != 'NVDA'], folder/'splits.parquet')
    assert (load_splits('NVDA'), load_splits('AAPL')) == (None, (('2020-08-31', 4.0),))
    assert 'NVDA' not in packaged_histories().splits
    (folder/'splits.parquet').unlink()
    assert load_splits('AAPL') is None and not packaged_histories().splits


@often
@given(st.integers(0, 2**32 - 1))
def test_factors_are_the_product_of_later_splits(seed):
    rng = np.random.default_rng(seed)
    days = pd.bdate_range('2020-01-01', periods=60)
    splits = tuple((f'{days[day]:%Y-%m-%d}', float(rng.choice(RATIOS)))
                   for day in sorted(rng.choice(60, rng.integers(0, 4), replace=False)))
    factors = split_factors(days, splits)
    for day, factor in zip(days, factors):
        assert factor == pytest.approx(split_between(splits, f'{day:%Y-%m-%d}', '2099-01-01'))
