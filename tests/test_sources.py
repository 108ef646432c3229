"The source is changed after a day, everything is built again, and what was seen up to that day stays as it was."
import ast
import os
import re
from contextlib import nullcontext
from datetime import date, datetime, timezone
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from stocker.council.specialists import RULE_ANALYSTS
from stocker.llm.prompts import nothing_to_judge, vote_messages
from stocker.market import core, episodes, headlines, histories
from stocker.market.core import DataError, Headline, Timing, canonical_json
from stocker.market.data import drop_unfinished, load_prices, load_table, write_table
from stocker.market.episodes import Earnings, Episode, Facts, Timeline, load_facts
from stocker.market.histories import (
    Histories, HistoriesSource, corpus_episode, episode_from_source, folder_histories, packaged_histories, relations_of,
    save_histories)
from stocker.studies.worlds import martingale_prices
from stocker.trading.dataset import using_data
from stocker.trust import sources

# a stranger's script: it knows the folder of price files, the timings and when a future's day ends, and nothing else

WHOLE = os.environ.get('STOCKER_WHOLE_AUDIT') # 300 decisions in place of 20
MARKET = os.environ.get('STOCKER_MARKET') # a folder of price files in place of invented ones
SHARES = ('AAPL', 'MSFT', 'INTC', 'META', 'AMD', 'NVDA', 'GOOGL', 'KO', 'PEP', 'XOM', 'CVX', 'JPM', 'BAC', 'WMT', 'HD',
          'JNJ', 'UNH', 'CAT', 'BA', 'DIS')
SYMBOLS = tuple(dict.fromkeys(symbol for share in SHARES for symbol in (share, *relations_of(share))))


def starting_tables():
    "Price tables of twenty shares and of what stands beside them."
    if MARKET:
        tables = folder_histories(MARKET).tables
        return {symbol: tables[symbol].loc['2018':] for symbol in SYMBOLS}
    sessions = [day for day in episodes.session_closes(core.data_path('calendar.parquet')) if '2021-06' <= day < '2024']
    return {symbol: martingale_prices(np.random.default_rng(number), sessions, 300)
            for number, symbol in enumerate(SYMBOLS)}


def rebuilt(tables, folder):
    "The tables as files, and what the project makes of the files."
    save_histories(Histories(tables), folder)
    return folder_histories(folder, folder/'copies')


def changed(tables, day, timing, rng, how):
    "Every row after a day is another one, or is gone; a future's row of the day itself is later than the close."
    other = {}
    for symbol, table in tables.items():
        side = 'left' if symbol.endswith('=F') and timing == 'close' else 'right'
        keep = int(table.index.searchsorted(pd.Timestamp(day), side))
        if how == 'gone': other[symbol] = table[:keep]
        else:
            factors = np.where(np.arange(len(table)) < keep, 1.0, rng.uniform(1.1, 1.5, len(table)))
            other[symbol] = table.mul(factors, axis=0)
            gone = other[symbol].index[min(len(table) - 1, keep + 60):][:3] # and a few rows are missing
            other[symbol] = other[symbol].drop(gone)
    return other


def bytes_seen(episode, timing, day):
    "Everything at a day and before it."
    upto = episode.dates.index(day) + 1
    looks = episode.observations(timing)[:upto]
    seen = [canonical_json(looks), episode.features[:upto].tobytes().hex()]
    for role, analyst in RULE_ANALYSTS.items():
        seen.append(canonical_json(analyst(looks[-1])))
        if nothing_to_judge(role, looks[-1]) is None: seen.append(canonical_json(vote_messages(role, looks[-1])))
    return seen


def window_around(index, ticker, day):
    "The window of a share that a day lies in."
    own = index[(index['ticker'] == ticker) & (index['first'] <= day) & (index['last'] > day)]
    return own.iloc[0].to_dict() if len(own) else None


@pytest.mark.parametrize('timing', ['close', 'next_open'])
def test_a_changed_folder_of_price_files_changes_no_byte_of_what_was_seen(tmp_path, timing):
    tables, rng, looked_at = starting_tables(), np.random.default_rng(5), 0
    before = rebuilt(tables, tmp_path/'before')
    index = histories.corpus_index(before)
    days = index['first'].unique()
    days = [day for day in days if (index['first'] == day).sum() >= len(SHARES)] # on which every share has a window
    for number in range(15 if WHOLE else 1):
        row = index[index['first'] == days[len(days) * (number + 1) // 17]].iloc[0]
        sessions = before.tables['SPY'].loc[row['first']:row['last']].index
        day = f'{sessions[int(rng.integers(2, len(sessions) - 1))]:%Y-%m-%d}'
        after = {how: rebuilt(changed(tables, day, timing, rng, how), tmp_path/f'{how} {number}')
                 for how in ('gone', 'other')}
        other_index = histories.corpus_index(after['other'])
        for ticker in SHARES:
            place = window_around(index, ticker, day)
            seen = bytes_seen(corpus_episode(place, before), timing, day)
            again = corpus_episode(window_around(other_index, ticker, day), after['other'])
            assert bytes_seen(again, timing, day) == seen
            whole = episode_from_source(ticker, place['first'], place['last'], HistoriesSource(before))
            cut = episode_from_source(ticker, place['first'], day, HistoriesSource(after['gone']))
            assert bytes_seen(cut, timing, day) == bytes_seen(whole, timing, day)
            looked_at += 1
        past = [table[table['last'] < day].to_json() for table in (index, other_index)]
        assert past[0] == past[1]
    assert looked_at == (300 if WHOLE else 20)


# earnings: whether they are too old is decided at each decision

def data_with(folder, change):
    "A copy of the data set with other earnings."
    folder.mkdir()
    for name in ('prices', 'calendar', 'news', 'macro', 'forum', 'earnings', 'splits'):
        table = load_table(name)
        write_table(change(table) if name == 'earnings' else table, folder/f'{name}.parquet')
    return using_data(folder)


def seen_at(ticker, start, end, upto):
    "Observations before a day, both timings, and what the season's analyst makes of them."
    rows = {'name': 'x', 'ticker': ticker, 'first': start, 'last': end, 'split': 'embargo'}
    found = []
    fetched = episode_from_source(ticker, start, end, HistoriesSource(packaged_histories()))
    for episode in (corpus_episode(rows), fetched):
        for timing in Timing:
            looks = [look for look in episode.observations(timing) if look.date < upto]
            found += [canonical_json([looks, [RULE_ANALYSTS['seasonal_trend'](look) for look in looks]])]
    return found


def test_a_release_that_is_still_to_come_changes_nothing_before(tmp_path):
    later = pd.DataFrame({'ticker': ['AAPL'], 'released_at': pd.to_datetime(['2023-11-20T21:30Z']),
                          'fiscal_quarter': ['2023Q4'], 'trailing_eps': [6.13]})
    window = 'AAPL', '2023-11-01', '2024-01-02'
    before = seen_at(*window, '2023-11-20')
    assert '2023Q3' in before[0]
    with data_with(tmp_path/'more', lambda table: pd.concat([table, later]).astype(table.dtypes)):
        assert seen_at(*window, '2023-11-20') == before
        assert seen_at(*window, '2023-11-22') != before


def test_without_a_later_release_nothing_before_it_changes(tmp_path):
    window = 'INTC', '2024-01-02', '2024-04-30'
    before = seen_at(*window, '2024-01-25')
    def less(table): return table[~((table['ticker'] == 'INTC') & (table['released_at'] > '2024-01-25'))]
    with data_with(tmp_path/'less', less): assert seen_at(*window, '2024-01-25') == before


def test_earnings_are_seen_until_they_are_too_old_and_not_by_the_end_of_a_window():
    episode = episode_from_source('AAPL', '2023-11-01', '2024-01-02', HistoriesSource(packaged_histories()))
    known = {look.date: look.fundamentals is not None for look in episode.observations()}
    assert [day for day in known if known[day]][-1] == '2023-11-30' and not known['2023-12-01'] and known['2023-11-01']


# bars: the symbol's own session decides

def every_day(change=1.0, day='2023-08-01'):
    "A table with a bar each day, that of one day changed."
    days = pd.date_range('2022-01-03', '2023-09-29', name='date').as_unit('us')
    table = load_prices('SPY').reindex(days).ffill().bfill()
    table.loc[day] *= change
    return table


@pytest.mark.parametrize(('symbol', 'close', 'evening'), [
    ('BTC-USD', '2023-07-31', '2023-07-31'), ('GC=F', '2023-07-31', '2023-08-01'),
    ('EURUSD=X', '2023-07-31', '2023-08-01'),
    ('MSFT', '2023-08-01', '2023-08-01'), ('^VIX', '2023-07-31', '2023-08-01'), ('7203.T', '2023-07-31', '2023-07-31')])
@pytest.mark.parametrize('relation', ['peer', 'commodity', 'market'])
def test_the_last_bar_of_another_symbol_is_the_last_that_had_ended(symbol, close, evening, relation):
    for timing, last in (('close', close), ('next_open', evening)):
        moves = []
        for change in (1.0, 1.5):
            episode = Episode.from_prices(load_prices('AAPL'), 'AAPL', '2023-08-01', '2023-09-29',
                                          peers={symbol: (relation, every_day(change))})
            moves.append(episode.observations(timing)[0].peers[0])
        assert moves[0].date == last and (moves[0] == moves[1]) == (last == '2023-07-31')


def test_on_a_short_day_shares_end_at_one_and_futures_do_not():
    table = pd.concat([every_day(), every_day().set_axis(every_day().index + pd.Timedelta(days=635))])
    table = table[~table.index.duplicated()].rename_axis('date')
    peers = dict.fromkeys(('MSFT', 'GC=F'), ('peer', table))
    episode = Episode.from_prices(load_prices('AAPL'), 'AAPL', '2023-11-22', '2023-11-27', peers=peers)
    looks = {timing: episode.observations(timing)[1] for timing in Timing}
    assert {timing.value: [move.date for move in look.peers] for timing, look in looks.items()} == {
        'close': ['2023-11-24', '2023-11-23'], 'next_open': ['2023-11-24', '2023-11-24']}


def test_what_ends_after_the_decision_is_not_traded():
    prices = load_prices('AAPL')
    for symbol, timing, ends in (('BTC-USD', 'close', True), ('BTC-USD', 'next_open', True), ('GC=F', 'close', True),
                                 ('GC=F', 'next_open', False), ('AAPL', 'close', False)):
        episode = Episode.from_prices(prices, symbol, '2023-08-01', '2023-08-31')
        with pytest.raises(DataError, match='ends after the decision') if ends else nullcontext():
            episode.observations(timing)


@pytest.mark.parametrize(('symbol', 'now', 'last'), [
    ('BTC-USD', '2024-01-04T23:30Z', '2024-01-03'), ('BTC-USD', '2024-01-05T02:00Z', '2024-01-04'),
    ('AAPL', '2024-01-04T22:59Z', '2024-01-03'), ('AAPL', '2024-01-04T23:00Z', '2024-01-04'),
    ('GC=F', '2024-01-04T23:59Z', '2024-01-03'), ('GC=F', '2024-01-05T00:00Z', '2024-01-04'),
    ('EURUSD=X', '2024-01-04T23:59Z', '2024-01-03')])
def test_a_bar_is_kept_when_its_own_session_is_over(symbol, now, last):
    days = pd.date_range('2023-12-20', '2024-01-06', name='date').as_unit('us')
    table = pd.DataFrame(1.0, days, ['open', 'high', 'low', 'close', 'adj_close', 'volume'])
    assert str(drop_unfinished(table, pd.Timestamp(now), symbol).index[-1].date()) == last


# dates without a time

MIDNIGHT = 1_690_848_000


@pytest.mark.parametrize('form', [
    '2023-08-01', '20230801', '2023-08-01T00:00:00Z', '2023-08-01 00:00', MIDNIGHT, float(MIDNIGHT), np.int64(MIDNIGHT),
    np.float64(MIDNIGHT), date(2023, 8, 1), datetime(2023, 8, 1), datetime(2023, 8, 1, tzinfo=timezone.utc),
    pd.Timestamp('2023-08-01'), pd.Timestamp('2023-08-01', tz='UTC'), np.datetime64('2023-08-01'),
    np.datetime64('2023-08-01T00:00:00.000000000')], ids=repr)
def test_a_date_ends_with_its_day_however_it_is_written(form):
    assert headlines.release_time(form, 'UTC') == '2023-08-01T23:59:59-04:00'


def test_a_date_in_a_timeline_a_file_of_facts_or_an_export_ends_with_its_day(tmp_path):
    from stocker.council.advice import read_story
    from stocker.market.facts import import_forum, read_headlines
    def seconds(text): return pd.Timestamp(text).timestamp()
    line = Timeline([Headline(text, '', '', '', '') for text in ('2023-08-01T00:00:00+00:00', '2023-08-01')])
    assert set(line.seconds) == {seconds('2023-08-01T23:59:59-04:00')}
    (tmp_path/'headlines.csv').write_text('ticker,released_at,kind,headline,tone,origin\n'
                                          'AAPL,2023-08-01T00:00+00:00,x,x,neutral,x\n')
    (tmp_path/'posts.jsonl').write_text(f'{{"created_utc": {MIDNIGHT}, "subreddit": "x", "title": "x"}}')
    for table in (read_headlines(tmp_path/'headlines.csv'), import_forum(tmp_path/'posts.jsonl', 'AAPL')):
        assert table['released_at'][0] == pd.Timestamp('2023-08-01T23:59:59-04:00')
    assert read_story({'title': 'x', 'pubDate': '2023-08-01T00:00:00Z'}).released_at == '2023-08-01T23:59:59-04:00'


# the audit finds what is undone

@pytest.mark.parametrize('mutant', sources.UNDONE, ids=lambda mutant: mutant.name)
def test_the_audit_fails_with_a_repair_undone(mutant):
    with mutant.plant(): assert not sources.check_sources().holds
    assert next(sources.source_faults(Timing.CLOSE, sources.observation_seen), None) is None


def test_every_mutant_is_killed_and_none_by_a_check_that_looks_at_nothing():
    found = sources.check_mutants(quick=False)
    assert found.faults == () and found.counted['killed'] == found.counted['mutants'] >= 30
    blind = sources.check_mutants(faults=lambda timing: iter(()))
    assert not blind.holds and len(blind.faults) == blind.counted['mutants']


def test_the_facts_of_an_episode_do_not_depend_on_its_last_day():
    facts = Facts(earnings=Timeline([Earnings('2023-08-03T16:30:00-04:00', '2023Q3', 5.95)]))
    looks = [Episode.from_prices(load_prices('AAPL'), 'AAPL', '2023-11-01', end, facts=facts).observations()[0]
             for end in ('2023-11-10', '2024-04-30')]
    assert looks[0] == looks[1] and looks[0].fundamentals
    assert load_facts('AAPL').earnings.facts[-1].fiscal_quarter == '2023Q3' and Path(core.__file__).is_file()


# one function compares times

TIME_WORDS = re.compile(r"released|decided|moment|\bnow\b|session\b|\bdates?\b|\bday\b|today|cutoff|_at\b|\.index\b|"
                        r"'(first|last|date)'|Timestamp|iso_day|datetime|_day\b")
AUDITS = ('trust/leaks.py', 'trust/sources.py') # they work out a second time what was known
ALLOWED = { # where it stands: what is compared there, and why it decides nothing about what is known
    'market/core.py known': 'the one place',
    'market/data.py as_day': 'years that a file may name',
    'market/data.py missed_splits': 'places of days that are in the table',
    'market/data.py row_faults': 'rows out of order are a fault of the file',
    'market/data.py in_window': 'rows are chosen from a file that may be out of order',
    'market/episodes.py season': 'a number of rows',
    'market/histories.py whole_windows': 'places of days that are looked up, and then compared for equality',
    'market/indicators.py gapless': 'rows out of order are refused',
    'pages/report.py split_note': 'what a page says of a run that is over',
    'studies/statistics.py block_interval': 'chances, not times',
    'studies/rules.py side_by_side': 'places of days that are in the table',
    'studies/rules.py corpus_baselines': 'places of days that are in the calendar',
    'studies/fidelity.py breakout': 'prices, on the days of a table',
    'serving/limits.py _sweep': 'seconds of a clock, after which an idle session ends',
    'trading/engine.py _look_up': 'numbers of rows',
    'trading/engine.py _play_columns': 'numbers of rows'}


def comparisons(path):
    "Ordered comparisons of times and searches in sorted ones, as function and code."
    tree = ast.parse(path.read_text(encoding='utf-8'))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            if not any(isinstance(sign, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) for sign in node.ops): continue
            if not TIME_WORDS.search(ast.unparse(node)): continue
        elif not (isinstance(node, ast.Call) and re.search(r'searchsorted|bisect|asof', ast.unparse(node.func))):
            continue
        inside = [one.name for one in functions if one.lineno <= node.lineno <= one.end_lineno]
        yield inside[-1] if inside else '', ast.unparse(node)


def test_nothing_but_known_compares_times():
    package = Path(core.__file__).parents[1]
    found = {}
    for path in sorted(package.rglob('*.py')):
        place = path.relative_to(package).as_posix()
        if place in AUDITS or path.name == '_modidx.py': continue
        for function, code in comparisons(path): found.setdefault(f'{place} {function}', []).append(code)
    assert {place: code for place, code in found.items() if place not in ALLOWED} == {}
    assert set(ALLOWED) <= set(found), 'remove what is no longer there'
