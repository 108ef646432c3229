"""Episodes: nothing later than the decision is seen, all before it is, and a bad table says what is wrong."""
import json
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

import warnings

import numpy as np
import pandas as pd
import pytest

from stocker.market.charts import chart_png
from stocker.market.core import (
    DataError, ForumPost, Headline, MacroEvent, MarketObservation, StockerError, Timing, canonical_json)
from stocker.market.data import load_prices, load_table
from stocker.market.facts import import_forum
from stocker.market.episodes import (
    BAR_SESSIONS, COMMODITIES, FACT_TABLES, FEATURES, MACRO_DAYS, MARKET, NEWS_DAYS, TASKS, Earnings, Episode, Facts,
    Timeline, decision_time, facts_of, fundamentals, load_facts, load_task, relations_of, season, window_rows)

NEW_YORK = ZoneInfo('America/New_York')
TIMINGS = {'close': (15, 55), 'next_open': (18, 0)} # New York time on a day of usual length
UNITS = ('s', 'ms', 'us', 'ns')
RESULTS = [('task_easy', '2023-08-03'), ('task_medium', '2024-01-25'), ('task_hard', '2022-10-26')]


@cache
def sessions():
    return pd.DatetimeIndex(load_table('calendar')['session'])


def walk(first='2020-01-02', last='2021-12-31', seed=0, level=100.0):
    "A made-up price table over the exchange's sessions."
    dates = sessions()[(sessions() >= first) & (sessions() <= last)].rename('date')
    rng = np.random.default_rng(seed)
    close = level * np.exp(np.cumsum(rng.normal(0, 0.02, len(dates))))
    opens = close * (1 + rng.normal(0, 0.005, len(dates)))
    columns = {'open': opens, 'high': np.maximum(opens, close) * 1.01, 'low': np.minimum(opens, close) * 0.99,
               'close': close, 'adj_close': close, 'volume': rng.integers(1, 10**8, len(dates)).astype(float)}
    return pd.DataFrame(columns, dates)


def playable(start='2021-03-01', end='2021-04-30', **options):
    return Episode.from_prices(walk(), 'XYZ', start, end, **options)


def one_line(error):
    assert '\n' not in str(error.value)
    return str(error.value)


# --- nothing later is seen ---

def later_changed(prices, keep, rng):
    "A price table in which every number after the first `keep` rows is another one."
    changed = prices.copy()
    changed.iloc[keep:] *= rng.uniform(0.2, 5.0, (len(prices) - keep, 1))
    return changed


def later_replaced(facts, moment, name):
    "Facts in which everything released after a moment says something else, and much is added right after it."
    known = [fact for fact in facts if datetime.fromisoformat(fact.released_at) <= moment]
    later = [fact for fact in facts if datetime.fromisoformat(fact.released_at) > moment]
    swap = dict.fromkeys(('headline', 'tone', 'stance', 'title', 'text', 'kind', 'fiscal_quarter'), 'changed')
    swap |= {'score': 10**6, 'trailing_eps': 99.0}
    changer = replace if name == 'earnings' else lambda fact, **new: fact._replace(**new)
    fields = (known or later)[0].__dataclass_fields__ if name == 'earnings' else (known or later)[0]._fields
    new = {field: value for field, value in swap.items() if field in fields}
    soon = [changer(fact, **new, released_at=(moment + timedelta(seconds=1 + i)).isoformat())
            for i, fact in enumerate((known + later)[:3])]
    return Timeline([*known, *soon, *(changer(fact, **new) for fact in later)])


def without_future(episode, step, timing, seed):
    "The one decision of an episode, made again from tables in which everything later is different."
    rng, session = np.random.default_rng(seed), pd.Timestamp(episode.dates[step])
    hour, minute = TIMINGS[timing]
    moment = datetime(session.year, session.month, session.day, hour, minute, tzinfo=NEW_YORK)
    peers = {}
    for symbol, (relation, table) in episode.peers.items():
        today_is_later = symbol in COMMODITIES and timing == 'close' # their day ends in the evening
        keep = int((table.index < session).sum() if today_is_later else (table.index <= session).sum())
        peers[symbol] = relation, later_changed(table, keep, rng)
    facts = Facts(**{name: later_replaced(getattr(episode.facts, name).facts, moment, name) for name in FACT_TABLES})
    prices = later_changed(episode.prices, episode.first + step + 1, rng)
    return replace(episode, prices=prices, first=episode.first + step, steps=1, facts=facts, peers=peers)


@pytest.mark.parametrize('timing', TIMINGS)
@pytest.mark.parametrize('task', TASKS)
def test_no_byte_of_an_observation_depends_on_what_comes_after_the_decision(task, timing):
    "On every decision day: the observation, the row of features, and the bars that the chart is drawn from."
    episode = load_task(task)
    looks = episode.observations(timing)
    for step, look in enumerate(looks):
        again = without_future(episode, step, timing, seed=step)
        other = again.observations(timing)[0]
        assert repr(other.bars) == repr(look.bars), look.date
        assert canonical_json(replace(other, bars=())) == canonical_json(replace(look, bars=())), look.date
        assert again.features.tobytes() == episode.features[step:step + 1].tobytes(), look.date


def test_the_three_tasks_hold_126_decision_days():
    assert [load_task(name).steps for name in TASKS] == [43, 41, 42]
    assert [load_task(name).dates[0] for name in TASKS] == [task.start for task in TASKS.values()]
    assert [load_task(name).dates[-1] for name in TASKS] == [task.end for task in TASKS.values()]


@pytest.mark.parametrize('task, step', [('task_easy', 0), ('task_hard', 38)])
def test_the_chart_does_not_depend_on_later_bars(task, step):
    episode = load_task(task)
    look = episode.observations()[step]
    again = without_future(episode, step, 'close', seed=1).observations()[0]
    title = f'{episode.ticker} {look.date}'
    assert chart_png(again.bars, title) == chart_png(look.bars, title)


@pytest.mark.parametrize('timing', TIMINGS)
def test_every_kind_of_later_change_would_have_been_noticed_a_day_earlier(timing):
    "The tables that are changed above matter: the same changes before the decision are seen."
    episode = load_task('task_easy')
    look = episode.observations(timing)[20]
    again = without_future(episode, 0, timing, seed=0)
    again = replace(again, first=episode.first + 20).observations(timing)[0]
    for part in ('bars', 'indicators', 'season', 'fundamentals', 'news', 'forum', 'macro', 'peers'):
        assert getattr(again, part) != getattr(look, part), part


def test_a_commodity_counts_from_the_evening_on_and_a_peer_from_the_close():
    for timing, late in (('close', True), ('next_open', False)):
        for look in load_task('task_medium').observations(timing):
            for move in look.peers:
                assert move.date < look.date if late and move.symbol in COMMODITIES else move.date <= look.date
            assert next(move for move in look.peers if move.symbol == MARKET).date == look.date


# --- results, early closes, daylight saving ---

@pytest.mark.parametrize('task, evening', RESULTS)
def test_results_after_the_close_are_first_visible_on_the_next_session_or_the_same_evening(task, evening):
    episode = load_task(task)
    day = episode.dates.index(evening)
    for timing, first in (('close', day + 1), ('next_open', day)):
        looks = episode.observations(timing)
        told = [step for step, look in enumerate(looks) if any(
            line.kind == 'earnings' and line.released_at.startswith(evening) for line in look.news)]
        assert told[0] == first
        assert looks[first].fundamentals.fiscal_quarter != looks[first - 1].fundamentals.fiscal_quarter


@pytest.mark.parametrize('task, evening', RESULTS)
def test_an_order_of_that_evening_is_filled_after_the_gap(task, evening):
    episode = load_task(task)
    day = episode.dates.index(evening)
    after = episode.prices.iloc[episode.first + day + 1]
    market = episode.market('next_open')
    assert (market.fills[day], market.marks[day]) == (after['open'], after['close'])
    assert episode.market('close').fills[day] == episode.prices['close'].iloc[episode.first + day]


def test_meta_fell_by_a_quarter_in_that_night_and_the_close_could_not_know():
    closes = load_prices('META')['close']
    assert closes['2022-10-27'] / closes['2022-10-26'] - 1 == pytest.approx(-0.246, abs=5e-4)


@pytest.mark.parametrize('session, close, evening', [
    ('2023-11-24', '2023-11-24T12:55:00-05:00', '2023-11-24T18:00:00-05:00'),
    ('2023-07-03', '2023-07-03T12:55:00-04:00', '2023-07-03T18:00:00-04:00'),
    ('2023-11-03', '2023-11-03T15:55:00-04:00', '2023-11-03T18:00:00-04:00'),
    ('2023-11-06', '2023-11-06T15:55:00-05:00', '2023-11-06T18:00:00-05:00'),
    ('2024-03-08', '2024-03-08T15:55:00-05:00', '2024-03-08T18:00:00-05:00'),
    ('2024-03-11', '2024-03-11T15:55:00-04:00', '2024-03-11T18:00:00-04:00')])
def test_decisions_follow_half_days_and_daylight_saving(session, close, evening):
    assert decision_time(session, Timing.CLOSE).isoformat() == close
    assert decision_time(session, Timing.NEXT_OPEN).isoformat() == evening


@pytest.mark.parametrize('day', ['2023-11-23', '2023-11-25', '2024-01-01', 'today', ''])
def test_a_day_without_a_session_has_no_decision(day):
    with pytest.raises(DataError) as error: decision_time(day, Timing.CLOSE)
    one_line(error)


def headlines(*times):
    return Timeline([Headline(time, 'product', f'at {time}', 'neutral', 'made up') for time in times])


def seen_on(session, timing, facts):
    episode = playable('2021-11-01', '2021-12-01', facts=facts)
    look = next(look for look in episode.observations(timing) if look.date == session)
    return [line.released_at for line in look.news]


def test_on_a_half_day_the_afternoon_is_too_late_for_the_close_but_not_for_the_evening():
    facts = Facts(news=headlines('2021-11-26T12:55:00-05:00', '2021-11-26T12:55:01-05:00', '2021-11-26T15:00:00-05:00'))
    assert seen_on('2021-11-26', 'close', facts) == ['2021-11-26T12:55:00-05:00']
    assert len(seen_on('2021-11-26', 'next_open', facts)) == 3


@pytest.mark.parametrize('timing, moment', [('close', '15:55:00'), ('next_open', '18:00:00')])
def test_a_fact_of_exactly_the_decision_time_is_visible_and_one_second_later_it_is_not(timing, moment):
    late = moment[:-1] + '1'
    facts = Facts(news=headlines(f'2021-11-10T{moment}-05:00', f'2021-11-10T{late}-05:00'))
    assert seen_on('2021-11-10', timing, facts) == [f'2021-11-10T{moment}-05:00']
    assert seen_on('2021-11-11', timing, facts)[-1] == f'2021-11-10T{late}-05:00'


def test_the_look_back_is_seven_days_of_24_hours_also_over_daylight_saving():
    "On 9 November 15:55 EST, seven days ago is 2 November 16:55 EDT; that very moment is just too old."
    facts = Facts(news=headlines('2021-11-02T16:55:00-04:00', '2021-11-02T16:55:01-04:00'))
    assert NEWS_DAYS == 7
    assert seen_on('2021-11-09', 'close', facts) == ['2021-11-02T16:55:01-04:00']


def test_macro_looks_back_fourteen_days():
    events = [MacroEvent(f'2021-11-{day:02}T08:30:00-05:00', 'US', 'jobs', 'x', 'neutral', 'made up')
              for day in range(8, 31)]
    look = playable('2021-11-01', '2021-12-01', facts=Facts(macro=Timeline(events))).observations()[-1]
    ages = [datetime.fromisoformat(look.decided_at) - datetime.fromisoformat(event.released_at) for event in look.macro]
    assert MACRO_DAYS == 14 and max(ages) < timedelta(days=14) and len(ages) == 14 - 1


def test_facts_in_any_order_come_out_oldest_first():
    times = ['2021-11-10T10:00:00-05:00', '2021-11-08T10:00:00-05:00', '2021-11-09T16:00:00+00:00']
    assert seen_on('2021-11-10', 'close', Facts(news=headlines(*times))) == [times[1], times[2], times[0]]


def test_one_moment_written_with_two_offsets_is_one_moment():
    exact, late = '2021-11-10T20:55:00+00:00', '2021-11-10T20:55:01+00:00'
    posts = Timeline([ForumPost(time, 'talk', 1, 'title', '', 'imported') for time in (exact, late)])
    look = next(look for look in playable('2021-11-01', '2021-12-01', facts=Facts(forum=posts)).observations()
                if look.date == '2021-11-10')
    assert [post.released_at for post in look.forum] == [exact]


def test_an_imported_export_is_seen_at_its_time(tmp_path):
    created = [int(datetime(2021, 11, 10, 20, minute, tzinfo=ZoneInfo('UTC')).timestamp()) for minute in (54, 56)]
    lines = [json.dumps({'created_utc': time, 'subreddit': 'talk', 'score': 3, 'title': f'at {time}', 'selftext': ''})
             for time in created]
    (tmp_path/'posts.jsonl').write_text('\n'.join(lines))
    posts = import_forum(tmp_path/'posts.jsonl', 'XYZ')
    tables = {name: load_table(name) for name in FACT_TABLES} | {'forum': posts}
    episode = playable('2021-11-01', '2021-12-01', facts=facts_of('XYZ', tables))
    looks = {look.date: look for look in episode.observations()}
    assert [post.released_at for post in looks['2021-11-10'].forum] == ['2021-11-10T15:54:00-05:00']
    assert len(looks['2021-11-11'].forum) == 2 and looks['2021-11-11'].forum[0].origin == 'imported'


@pytest.mark.parametrize('time', ['2021-11-10T10:00:00', 'yesterday', ''])
def test_a_fact_without_a_readable_time_and_offset_is_refused(time):
    "A time without an offset would mean another moment on every machine."
    with pytest.raises(StockerError) as error: headlines(time)
    one_line(error)


def test_earnings_count_from_their_release_and_losses_have_no_ratio():
    released = [Earnings('2021-01-05T16:30:00-05:00', '2020Q3', None),
                Earnings('2021-03-05T16:30:00-05:00', '2020Q4', 4.0),
                Earnings('2021-04-05T16:30:00-04:00', '2021Q1', -1.0),
                Earnings('2021-05-05T16:30:00-04:00', '2021Q2', 0.0)]
    line = Timeline(released)
    at = lambda text: fundamentals(line, datetime.fromisoformat(text), 100.0)
    assert at('2021-01-05T16:29:59-05:00') is None
    assert at('2021-01-05T16:30:00-05:00')[1:] == (None, None)
    assert at('2021-03-06T15:55:00-05:00') == ('2020Q4', 4.0, 25.0)
    assert at('2021-04-06T15:55:00-04:00') == ('2021Q1', -1.0, None)
    assert at('2021-05-06T15:55:00-04:00') == ('2021Q2', 0.0, None)


# --- what an observation holds ---

def test_every_task_has_its_averages_on_the_first_day_and_260_bars():
    for name in TASKS:
        look = load_task(name).observations()[0]
        assert len(look.bars) == BAR_SESSIONS and look.bars[-1].date == look.date
        assert all(value is not None for value in look.indicators.values())


def test_an_observation_is_plain_finite_json():
    for look in load_task('task_hard').observations('next_open')[::6]:
        assert json.loads(canonical_json(look))['date'] == look.date
        assert 'NaN' not in canonical_json(look)


def test_observations_are_built_once():
    assert load_task('task_easy').observations('close') is load_task('task_easy').observations(Timing.CLOSE)


def test_an_indicator_of_an_episode_is_that_of_the_whole_series():
    table = load_table('indicators')
    rows = table[table['ticker'] == 'INTC'].set_index('date')
    for look in load_task('task_medium').observations()[::10]:
        assert look.indicators == pytest.approx(rows.loc[look.date].drop('ticker').to_dict(), rel=1e-12)


@pytest.mark.parametrize('day', ['2024-02-29', '2024-02-28', '2023-02-28', '2024-03-01'])
def test_a_leap_day_has_a_season(day):
    "The same calendar day in earlier years, 28 February for the 29th, and only years that had ended by then."
    prices = load_prices('INTC')
    today = prices.index.get_loc(pd.Timestamp(day))
    expected = []
    for year in range(2015, int(day[:4])):
        start = prices.index.searchsorted(pd.Timestamp(f"{year}-{day[5:].replace('02-29', '02-28')}"))
        expected.append(prices['close'].iloc[start + 21] / prices['close'].iloc[start] - 1)
    found = season(prices, today)
    assert found.years == len(expected)
    assert found.mean_return == pytest.approx(np.mean(expected), rel=1e-12)
    assert found.share_positive == np.mean(np.array(expected) > 0)


@pytest.mark.parametrize('unit', UNITS)
def test_the_unit_of_the_dates_changes_nothing(unit):
    whole = load_task('task_easy')
    peers = {symbol: (relation, table.set_axis(table.index.as_unit(unit)))
             for symbol, (relation, table) in whole.peers.items()}
    prices = whole.prices.set_axis(whole.prices.index.as_unit(unit))
    task = TASKS['task_easy']
    episode = Episode.from_prices(prices, 'AAPL', task.start, task.end, facts=whole.facts, peers=peers,
                                  share_splits=whole.share_splits)
    assert (episode.first, episode.steps, episode.dates) == (whole.first, whole.steps, whole.dates)
    for ours, theirs in zip(episode.observations('next_open'), whole.observations('next_open'), strict=True):
        assert ours == theirs
    assert canonical_json(episode.observations()[20]) == canonical_json(whole.observations()[20])
    assert episode.features.tobytes() == whole.features.tobytes()


# --- any share and window ---

@pytest.mark.parametrize('ticker, start, end',
                         [('NVDA', '2024-05-20', '2024-07-01'), ('SNAP', '2022-07-01', '2022-08-31')])
def test_a_share_of_the_data_set_over_a_window_of_its_own(ticker, start, end):
    peers = {symbol: (relation, load_prices(symbol)) for symbol, relation in relations_of(ticker).items()
             if symbol != 'ORCL'} # not in the data set
    episode = Episode.from_prices(load_prices(ticker), ticker, start, end, facts=load_facts(ticker), peers=peers)
    assert episode.dates[0] >= start and episode.dates[-1] <= end and len(episode.features) == episode.steps
    assert np.isfinite(episode.features).all() and episode.features.shape[1] == len(FEATURES)
    for timing in TIMINGS:
        looks = episode.observations(timing)
        assert len(looks) == episode.steps and all(isinstance(look, MarketObservation) for look in looks)
        assert {move.symbol for move in looks[0].peers} == set(peers)
        assert len(episode.market(timing).fills) == episode.steps
    assert episode.chart(0).startswith(b'\x89PNG')


def test_a_window_may_begin_and_end_on_a_weekend():
    weekend = playable('2021-02-27', '2021-05-02')
    assert weekend.dates == playable('2021-03-01', '2021-04-30').dates


def test_constant_prices_without_volume_give_finite_features():
    prices = walk()
    prices[['open', 'high', 'low', 'close', 'adj_close']], prices['volume'] = 100.0, 0.0
    with pytest.raises(DataError, match='FLAT, 2020-01-02: nothing was traded in 505 sessions'):
        Episode.from_prices(prices, 'FLAT', '2021-03-01', '2021-04-30')
    episode = Episode('flat', 'FLAT', prices, prices.index.get_loc('2021-03-01'), 44)
    assert np.isfinite(episode.features).all()
    assert episode.observations()[0].indicators['rsi_14'] == 50


def test_a_window_without_any_trade_is_refused_and_one_trade_is_enough():
    prices = walk()
    prices.loc['2021-03-01':'2021-04-30', 'volume'] = 0.0
    with pytest.raises(DataError, match='XYZ, 2021-03-01: nothing was traded in 44 sessions, up to 2021-04-30'):
        Episode.from_prices(prices, 'XYZ', '2021-03-01', '2021-04-30')
    prices.loc['2021-03-10', 'volume'] = 1.0
    assert Episode.from_prices(prices, 'XYZ', '2021-03-01', '2021-04-30').steps == 44


def test_a_split_that_was_not_applied_is_refused_where_the_table_says_so():
    prices = walk()
    prices.loc['2021-03-10':, ['open', 'high', 'low', 'close', 'adj_close']] /= 2
    assert Episode.from_prices(prices, 'XYZ', '2021-03-01', '2021-04-30').steps == 44 # it could be true
    with pytest.raises(DataError, match='XYZ, 2021-03-10: .* the split of 2 for 1 was not applied'):
        window_rows(prices, 'XYZ', '2021-03-01', '2021-04-30', (('2021-03-10', 2.0),))


def test_a_share_of_another_exchange_is_told_plainly():
    prices = with_day_of_rest(walk(), '2021-04-02') # Good Friday
    with pytest.raises(DataError, match='7203.T, 2021-04-02: .* shares are on the calendar of the New York Stock Exch'):
        Episode.from_prices(prices, '7203.T', '2021-03-01', '2021-04-30')


@pytest.mark.parametrize('cash', [10**400, -10**400, float('nan'), float('inf'), None, 'much', True, 0, []])
def test_starting_cash_that_is_no_amount_is_told(cash):
    with pytest.raises(StockerError, match='starting_cash = .*it has to be a finite number above zero'):
        replace(load_task('task_easy'), starting_cash=cash)


def with_cell(prices, date, column, value):
    prices = prices.copy()
    prices.loc[date, column] = value
    return prices


def with_day_of_rest(prices, day):
    return pd.concat([prices, prices.iloc[[-1]].set_axis([pd.Timestamp(day)])]).sort_index()


BAD_TABLES = {
    'empty': (lambda p: p.iloc[:0], ['XYZ', 'no prices']),
    'date twice': (lambda p: pd.concat([p, p.loc[['2021-03-10']]]).sort_index(),
                   ['XYZ', '2021-03-10', 'more than once']),
    'missing close': (lambda p: with_cell(p, '2021-03-10', 'close', np.nan), ['XYZ', '2021-03-10', 'close']),
    'missing volume long before': (lambda p: with_cell(p, '2020-03-10', 'volume', np.nan),
                                   ['XYZ', '2020-03-10', 'volume']),
    'infinite': (lambda p: with_cell(p, '2021-03-10', 'high', np.inf), ['XYZ', '2021-03-10', 'high']),
    'zero': (lambda p: with_cell(p, '2021-03-10', 'low', 0.0), ['XYZ', '2021-03-10', 'low']),
    'negative': (lambda p: p.assign(**dict.fromkeys(['open', 'high', 'low', 'close', 'adj_close'], -37.63)),
                 ['XYZ', '-37.63']),
    'low above close': (lambda p: with_cell(p, '2021-03-10', 'low', p.loc['2021-03-10', 'high']),
                        ['XYZ', '2021-03-10', 'low']),
    'backwards': (lambda p: p.iloc[::-1], ['XYZ', 'comes after']),
    'another order of columns': (lambda p: p[['close', 'high', 'low', 'open', 'adj_close', 'volume']],
                                 ['XYZ', 'columns']),
    'no adjusted close': (lambda p: p.drop(columns='adj_close'), ['XYZ', 'columns']),
    'text': (lambda p: p.astype({'close': str}), ['XYZ', 'close', 'not floats']),
    'time of day': (lambda p: p.set_axis(p.index + pd.Timedelta(hours=16)), ['XYZ', 'midnight']),
    'time zone': (lambda p: p.tz_localize('UTC'), ['XYZ', 'time zone']),
    'numbered rows': (lambda p: p.reset_index(drop=True), ['XYZ', 'dates']),
    'a day of rest': (lambda p: with_day_of_rest(p, '2021-03-13'), ['2021-03-13', 'not a session'])}


@pytest.mark.parametrize('name', BAD_TABLES)
def test_a_table_that_cannot_be_played_says_why_where_and_what_to_do(name):
    change, words = BAD_TABLES[name]
    with pytest.raises(DataError) as error: Episode.from_prices(change(walk()), 'XYZ', '2021-03-01', '2021-04-30')
    text = one_line(error)
    assert all(word in text for word in words) and error.value.remedy


@pytest.mark.parametrize('start, end, words', [
    ('2021-03-01', '2021-03-01', ['XYZ', 'holds 1 sessions']),
    ('2021-04-30', '2021-03-01', ['XYZ', 'holds 0 sessions']),
    ('2021-03-06', '2021-03-07', ['XYZ', 'holds 0 sessions']),
    ('2010-03-01', '2010-04-30', ['XYZ', 'holds 0 sessions', '2020-01-02']),
    ('2030-03-01', '2030-04-30', ['XYZ', 'holds 0 sessions', '2021-12-31']),
    ('2020-06-01', '2020-07-31', ['XYZ', '2020-06-01', 'warm-up', '252']),
    ('2021-03-01', '2030-04-30', ['XYZ', '2021-12-31']),
    ('2021-13-01', '2021-04-30', ['2021-13-01']),
    ('soon', 'later', ['soon'])])
def test_a_window_that_cannot_be_played_says_why(start, end, words):
    with pytest.raises(DataError) as error: playable(start, end)
    text = one_line(error)
    assert all(word in text for word in words) and error.value.remedy


def test_exactly_252_sessions_of_warm_up_are_enough():
    prices = walk()
    first, short = (prices.index[i].strftime('%Y-%m-%d') for i in (252, 251))
    assert Episode.from_prices(prices, 'XYZ', first, '2021-04-30').first == 252
    with pytest.raises(DataError, match='251 sessions of warm-up'):
        Episode.from_prices(prices, 'XYZ', short, '2021-04-30')


def test_a_session_that_is_missing_inside_the_window_is_named():
    "The next open would silently be that of a later day."
    with pytest.raises(DataError, match='2021-03-10') as error:
        Episode.from_prices(walk().drop(pd.Timestamp('2021-03-10')), 'XYZ', '2021-03-01', '2021-04-30')
    one_line(error)


def test_the_order_of_the_last_day_is_not_filled_on_a_day_of_rest():
    prices = with_day_of_rest(walk(), '2021-05-01')
    with pytest.raises(DataError, match='2021-05-01'):
        Episode.from_prices(prices, 'XYZ', '2021-03-01', '2021-04-30').market('next_open')


def test_the_last_order_needs_a_session_after_the_window():
    episode = playable('2021-11-01', '2021-12-31')
    assert len(episode.market('close').fills) == episode.steps
    with pytest.raises(DataError, match='2021-12-31') as error: episode.market('next_open')
    assert "timing='close'" in one_line(error)


@pytest.mark.parametrize('cash', [0.0, -1.0, float('nan'), float('inf')])
def test_an_episode_needs_money_to_begin_with(cash):
    with pytest.raises(StockerError) as error: playable(starting_cash=cash)
    one_line(error)


@pytest.mark.parametrize('name', ['task_x', '', 'TASK_EASY', None, 5])
def test_an_unknown_task_is_told_the_known_ones(name):
    with pytest.raises(StockerError) as error: load_task(name)
    assert all(task in one_line(error) for task in TASKS)


@pytest.mark.parametrize('timing', ['open', '', None, 'CLOSE'])
def test_an_unknown_timing_is_told_the_known_ones(timing):
    with pytest.raises(StockerError) as error: load_task('task_easy').observations(timing)
    assert "'close'" in one_line(error) and "'next_open'" in str(error.value)


def test_a_task_belongs_to_its_data_set(tmp_path, monkeypatch):
    monkeypatch.setenv('STOCKER_DATA', str(tmp_path))
    with pytest.raises(DataError, match='prices.parquet') as error: load_task('task_easy')
    assert 'missing' in one_line(error)
    monkeypatch.undo()
    assert load_task('task_easy').steps == 43


def test_specialists_cannot_change_what_others_see():
    look = load_task('task_easy').observations()[0]
    before = canonical_json(look)
    try: look.indicators['rsi_14'] = -1.0
    except TypeError: pass
    else:
        now, _ = canonical_json(look), look.indicators.update(json.loads(before)['indicators'])
        assert now == before


@pytest.mark.parametrize('ticker', ['../x', 'A/B', '', '.', 'AAPL\nx'])
def test_a_chart_is_never_looked_for_outside_its_folder(ticker, tmp_path):
    episode = replace(playable(chart_folder=tmp_path/'charts'), ticker=ticker)
    with pytest.raises(StockerError) as error: episode.chart(0)
    one_line(error)


def test_changing_the_table_afterwards_changes_no_episode():
    prices = walk()
    episode = Episode.from_prices(prices, 'XYZ', '2021-03-01', '2021-04-30')
    before = canonical_json(episode.observations()[0]), episode.market().fills.tolist()
    prices.iloc[:] *= 2
    assert (canonical_json(episode.observations()[0]), episode.market('next_open').closes.tolist()) == before


@pytest.mark.parametrize('change, word', [
    (lambda table: table.iloc[::-1], 'date'), (lambda table: table.assign(close=np.nan), 'missing')])
def test_a_peer_with_a_bad_table_is_refused_by_its_name(change, word):
    with pytest.raises(DataError, match='PEER') as error: playable(peers={'PEER': ('peer', change(walk(seed=1)))})
    assert word in one_line(error)


def test_a_share_dearer_than_all_cash_is_said_when_the_episode_is_made():
    closes = playable().market().fills
    for cash, when in ((closes.min() / 2, 'every day'), (np.sort(closes)[-3] + 1e-6, f'2 of {len(closes)} days')):
        with pytest.warns(UserWarning, match=f'^XYZ, .*on {when} one share costs more than all cash.*starting_cash$'):
            playable(starting_cash=cash)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        playable(starting_cash=closes.max())


def test_a_run_in_which_nothing_could_be_bought_says_so_in_its_headline():
    from stocker.council.council import rule_council
    from stocker.council.evaluation import compare, headline
    with pytest.warns(UserWarning, match='every day'): poor = playable(starting_cash=1.0)
    assert 'all cash buys no share' in headline(compare(poor, rule_council()))
    assert 'all cash' not in headline(compare(playable(), rule_council()))
