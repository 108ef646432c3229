"""What histories must never do: mix splits, look ahead, swallow a damaged file."""
import gzip
import os
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stocker.market.histories as histories_module
from stocker.market.core import DataError, StockerError, canonical_json, Timing, data_path
from stocker.market.data import FolderSource, RateLimited, YahooSource, load_prices
from stocker.market.episodes import SECTORS, Episode, load_task, peers_of, relations_of
from stocker.market.histories import (
    INDEX_COLUMNS, PERIODS, SPLITS, Histories, HistoriesSource, corpus_episode, corpus_index, episode_from_source,
    exchange_days, folder_histories, load_corpus, missing_sessions, packaged_histories, price_files,
    read_episode_name, read_universe, regimes, save_histories, source_histories)
from stocker.trading.env import StockerEnv

DAYS = exchange_days(data_path('calendar.parquet'))
LARGE = Path(__file__).resolve().parents[2]/'shared'/'market'
needs_large = pytest.mark.skipif(not LARGE.is_dir(), reason='no folder of market data beside the checkout')


def write_csv(folder, ticker, table):
    table.reset_index().to_csv(Path(folder)/f"{ticker.replace('=', '_')}.csv", index=False)


@pytest.fixture
def folder(tmp_path):
    "Three sound price files."
    for ticker in ('AMD', 'META', 'SPY'): write_csv(tmp_path, ticker, load_prices(ticker))
    return tmp_path


def walk(seed, start='2015-01-02', end='2026-04-30', price=100.0, volatility=0.02):
    "A made-up price table on the exchange's sessions."
    random = np.random.default_rng(seed)
    days = DAYS[(DAYS >= np.datetime64(start)) & (DAYS <= np.datetime64(end))]
    close = price * np.exp(np.cumsum(random.normal(0, volatility, len(days))))
    opened = close * np.exp(random.normal(0, volatility / 3, len(days)))
    index = pd.DatetimeIndex(days, name='date').as_unit('us')
    return pd.DataFrame({'open': opened, 'high': np.maximum(opened, close) * 1.001,
                         'low': np.minimum(opened, close) * 0.999, 'close': close, 'adj_close': close,
                         'volume': random.integers(1, 10**6, len(days)).astype(float)}, index)


# ---------------------------------------------------------------- windows and splits

@pytest.mark.parametrize(('length', 'stride'), [(42, 42), (42, 21), (42, 1), (5, 5), (63, 42), (126, 63), (2, 7)])
def test_no_session_of_one_split_lies_in_another(length, stride):
    index = corpus_index(length=length, stride=stride)
    used = {split: (part['first'].min(), part['last'].max()) for split, part in index.groupby('split')}
    order = [used[split] for split in SPLITS if split in used]
    for (_, last), (first, _) in zip(order, order[1:]):
        following = DAYS[np.searchsorted(DAYS, np.datetime64(last)) + 1]
        assert np.datetime64(first) > following, 'the session of the last fill counts as well'
    borders = [day for _, day in PERIODS[1:]]
    grid = index[index['split'] != 'tasks']
    for border in borders: assert not ((grid['first'] < border) & (grid['last'] >= border)).any()


def test_split_of_each_window_follows_from_its_days():
    limits = {'training': ('2000-01-03', '2020-12-31'), 'validation': ('2021-03-01', '2022-06-30'),
              'test': ('2025-02-01', '2099-01-01')}
    for _, row in corpus_index(stride=11).iterrows():
        if row['split'] == 'tasks': continue
        inside = [split for split, (first, last) in limits.items() if first <= row['first'] and row['last'] <= last]
        assert inside == ([row['split']] if row['split'] != 'embargo' else [])


def test_windows_of_a_share_do_not_overlap():
    index = corpus_index()
    for _, part in index[index['split'] != 'tasks'].groupby('ticker'):
        assert (part['first'].to_numpy()[1:] > part['last'].to_numpy()[:-1]).all()
    assert index['name'].is_unique and list(index) == list(INDEX_COLUMNS)


def test_the_grid_is_the_same_for_every_share_and_history():
    late = Histories({'AMD': walk(1, '2018-02-07'), 'SPY': walk(2)})
    mine = corpus_index(late)
    packaged = set(corpus_index()['first'])
    assert set(mine['first']) <= packaged


def test_every_window_has_its_warm_up_and_the_session_after():
    for _, row in corpus_index(stride=30).iterrows():
        table = load_prices(row['ticker'])
        first = table.index.get_loc(row['first'])
        last = table.index.get_loc(row['last'])
        assert first >= 252 and last + 1 < len(table)


@pytest.mark.parametrize('days', [['2018-06-05'], ['2018-06-05', '2018-06-06'], ['2016-01-04']])
def test_a_missing_session_costs_exactly_the_windows_that_need_it(days):
    whole = walk(3)
    gap = whole.drop(pd.DatetimeIndex(days))
    before, after = (corpus_index(Histories({'XYZ': table})) for table in (whole, gap))
    lost = before[~before['name'].isin(after['name'])]
    assert set(after['name']) <= set(before['name'])
    numbers = {day: np.searchsorted(DAYS, np.datetime64(day)) for day in days}
    for _, row in before.iterrows():
        first, last = (np.searchsorted(DAYS, np.datetime64(row[name])) for name in ('first', 'last'))
        needed = any(first - 252 <= number <= last + 1 for number in numbers.values())
        assert (row['name'] in set(lost['name'])) == needed
    assert days[0] in missing_sessions(gap, 'XYZ')


def test_a_row_without_a_session_costs_windows_and_is_told():
    whole = walk(3)
    row = whole.loc[['2018-06-08']].set_axis(pd.DatetimeIndex(['2018-06-09'], name='date').as_unit('us'))
    extra = pd.concat([whole, row]).sort_index()
    before, after = (corpus_index(Histories({'XYZ': table})) for table in (whole, extra))
    assert 0 < len(after) < len(before)
    assert '2018-06-09' in missing_sessions(extra, 'XYZ')
    for _, part in after[::8].iterrows(): Episode.from_prices(extra, 'XYZ', part['first'], part['last'])


def test_a_surplus_row_does_not_make_up_for_a_missing_one():
    whole = walk(3)
    row = whole.loc[['2018-06-08']].set_axis(pd.DatetimeIndex(['2018-06-09'], name='date').as_unit('us'))
    swapped = pd.concat([whole, row]).sort_index().drop(pd.Timestamp('2018-06-12'))
    for _, part in corpus_index(Histories({'XYZ': swapped}))[::4].iterrows():
        Episode.from_prices(swapped, 'XYZ', part['first'], part['last']).market('next_open')


def test_rows_before_the_known_calendar_make_no_windows():
    early = walk(4, '2000-01-03', '2003-12-31')
    days = pd.bdate_range('1998-01-01', '1999-12-31', name='date').as_unit('us')
    old = pd.DataFrame(np.full((len(days), 6), 100.0), days, list(early))
    both = corpus_index(Histories({'XYZ': pd.concat([old, early])}))
    assert both['name'].tolist() == corpus_index(Histories({'XYZ': early}))['name'].tolist()


def test_every_row_of_the_index_can_be_played_under_both_timings():
    index = corpus_index(stride=97)
    for _, row in index[index['split'] != 'tasks'].iloc[::29].iterrows():
        episode = Episode.from_prices(load_prices(row['ticker']), row['ticker'], row['first'], row['last'])
        assert episode.name == row['name']
        for timing in Timing: episode.market(timing)


# ---------------------------------------------------------------- regimes

def test_the_regime_follows_its_definition():
    random = np.random.default_rng(0)
    closes = 50 * np.exp(np.cumsum(random.normal(0, 0.02, (200, 42)), axis=1))
    table = regimes(closes)
    for row, close in zip(table.itertuples(), closes, strict=True):
        returns = np.diff(np.log(close))
        score = returns.sum() / (returns.std(ddof=1) * np.sqrt(len(returns)))
        trend = 'rising' if score > 0.43 else 'falling' if score < -0.43 else 'sideways'
        mood = 'calm' if returns.std(ddof=1) * 252 ** 0.5 < 0.25 else 'volatile'
        assert row.regime == f'{trend} {mood}'
        assert row.change == pytest.approx(close[-1] / close[0] - 1)


def test_the_regime_does_not_depend_on_the_price_level():
    closes = np.exp(np.cumsum(np.random.default_rng(1).normal(0, 0.01, (50, 42)), axis=1))
    assert regimes(closes)['regime'].tolist() == regimes(closes * 1000)['regime'].tolist()


def test_two_sessions_and_constant_prices_have_a_regime():
    assert regimes(np.array([[1.0, 2.0], [2.0, 1.0], [1.0, 1.0]]))['regime'].tolist() == [
        'rising calm', 'falling calm', 'sideways calm']


def test_no_observation_tells_the_regime_or_the_split():
    episode = load_corpus('test')[0]
    text = canonical_json(episode.observations()[0])
    for word in ('regime', 'rising', 'falling calm', 'volatile', 'split', 'test'): assert word not in text


# ---------------------------------------------------------------- episodes


def test_the_future_of_a_history_changes_nothing():
    row = load_corpus('validation', tickers=['META']).index.iloc[2].to_dict()
    table = load_prices('META')
    cut = table.loc[:row['last']]
    changed = pd.concat([cut, table.loc[row['last']:].iloc[1:] * 3])
    first, second = (corpus_episode(row, Histories({'META': prices})) for prices in (table, changed))
    np.testing.assert_array_equal(first.features, second.features)
    assert first.observations() == second.observations()


def test_stale_earnings_are_not_used():
    for episode in load_corpus('test', tickers=['AAPL', 'INTC', 'META'])[::4]:
        assert all(look.fundamentals is None for look in episode.observations())
    assert load_task('task_easy').observations()[0].fundamentals is not None


def test_roles_without_data_have_nothing_before_them():
    look = load_corpus('training', tickers=['NVDA'])[0].observations()[0]
    assert (look.news, look.forum, look.macro, look.fundamentals) == ((), (), (), None)
    assert 'CL=F' not in {move.symbol for move in look.peers}  # oil is on record from May 2020 on


def test_episodes_are_made_when_asked_for_and_once(monkeypatch):
    made = []
    real = histories_module.corpus_episode
    monkeypatch.setattr(histories_module, 'corpus_episode', lambda row, _: made.append(row['name']) or real(row))
    corpus = load_corpus('training')
    assert made == []
    assert corpus[7] is corpus[7] and corpus[-1].name == corpus.index['name'].iloc[-1]
    assert len(made) == 2
    with pytest.raises(IndexError): corpus[len(corpus)]


def test_a_corpus_is_a_sequence():
    corpus = load_corpus('validation')
    assert [episode.name for episode in corpus[:3]] == corpus.index['name'].tolist()[:3]
    assert len(corpus[10:2]) == 0 and len(corpus.choose(np.array([4, 4]))) == 2
    assert [one.name for one in corpus.choose(corpus.index['ticker'] == 'SPY')] == [
        name for name in corpus.index['name'] if name.startswith('SPY')]
    assert {one.steps for one in corpus[:3]} == {42}


def test_the_tasks_are_the_tasks():
    assert [episode is load_task(episode.name) for episode in load_corpus('tasks')] == [True] * 3
    assert not any(load_corpus().index['split'] == 'embargo')


def test_the_environment_plays_a_corpus():
    env = StockerEnv(load_corpus('test', tickers=['AMD'])[:3])
    env.reset(seed=1)
    *_, terminated, _, _ = env.step({'side': 'buy', 'quantity': 3})
    assert not terminated


def test_sectors_name_each_share_once():
    shares = [ticker for tickers in SECTORS.values() for ticker in tickers]
    assert len(shares) == len(set(shares))
    for ticker in shares:
        assert ticker not in peers_of(ticker) and len(peers_of(ticker)) <= 2
        assert list(relations_of(ticker).values()).count('market') == 1
    assert 'CL=F' in relations_of('XOM') and 'GC=F' not in relations_of('XOM')
    assert 'SPY' not in relations_of('SPY')


# ---------------------------------------------------------------- folders

def test_a_folder_gives_what_the_package_holds(folder, tmp_path):
    histories = folder_histories(folder, tmp_path/'cache')
    assert histories.problems == ()
    for ticker in ('AMD', 'META', 'SPY'): pd.testing.assert_frame_equal(histories.tables[ticker], load_prices(ticker))
    again = folder_histories(folder, tmp_path/'cache')
    for ticker in ('AMD', 'META', 'SPY'): pd.testing.assert_frame_equal(again.tables[ticker], load_prices(ticker))


DAMAGE = {
    'empty': b'', 'header only': b'date,open,high,low,close,adj_close,volume\n', 'binary': bytes(range(256)) * 40,
    'other columns': b'date,price\n2020-01-02,3\n', 'text': b'this is no table\n',
    'torn line': b'date,open,high,low,close,adj_close,volume\n2020-01-02,1,1,1\n',
    'negative price': b'date,open,high,low,close,adj_close,volume\n2020-01-02,-1,1,-1,1,1,5\n',
    'twice a day': b'date,open,high,low,close,adj_close,volume\n2020-01-02,1,1,1,1,1,5\n2020-01-02,1,1,1,1,1,5\n',
    'not a number': b'date,open,high,low,close,adj_close,volume\n2020-01-02,1,1,1,nan,1,5\n'}


@pytest.mark.parametrize('damage', DAMAGE)
def test_a_damaged_file_is_reported_and_the_others_are_read(folder, damage):
    (folder/'META.csv').write_bytes(DAMAGE[damage])
    for _ in range(2):  # a second time from the copies
        histories = folder_histories(folder, folder/'cache')
        assert sorted(histories.tables) == ['AMD', 'SPY']
        [problem] = histories.problems
        assert problem.startswith('META.csv') and 'the file is left out' in problem


def test_a_torn_archive_is_reported(folder):
    packed = gzip.compress((folder/'META.csv').read_bytes())
    (folder/'META.csv').unlink()
    (folder/'META.csv.gz').write_bytes(packed[:len(packed) // 2])
    [problem] = folder_histories(folder, folder/'cache').problems
    assert 'META' in problem and 'damaged' in problem


def test_files_that_are_no_prices_are_reported(folder):
    (folder/'my notes.csv').write_text('hello')
    shutil.copy(folder/'AMD.csv', folder/'AMD.csv.bak')
    (folder/'SPY.csv.gz').write_bytes(gzip.compress((folder/'SPY.csv').read_bytes()))
    files, problems = price_files(folder)
    assert sorted(files) == ['AMD', 'META', 'SPY'] and len(problems) == 2
    assert files['SPY'].name == 'SPY.csv.gz'


def test_a_changed_file_is_read_anew_even_with_the_same_size_and_time(folder):
    path = folder/'AMD.csv'
    first = folder_histories(folder, folder/'cache').tables['AMD']
    times = path.stat()
    text = path.read_text()
    day = '2020-06-01'
    line = next(line for line in text.splitlines() if line.startswith(day))
    volume = line.rsplit(',', 1)[1]
    other = volume.replace(volume[0], str((int(volume[0]) % 9) + 1), 1)
    path.write_text(text.replace(line, line.rsplit(',', 1)[0] + ',' + other))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_size == times.st_size
    second = folder_histories(folder, folder/'cache').tables['AMD']
    assert second.loc[day, 'volume'] == float(other) != first.loc[day, 'volume']


def test_an_unchanged_file_is_not_read_again(folder, monkeypatch):
    folder_histories(folder, folder/'cache')
    for path in folder.glob('*.csv'): path.touch()

    def refuse(path, ticker): raise AssertionError(f'{path} was read again')
    monkeypatch.setattr(histories_module, 'read_price_file', refuse)
    assert len(folder_histories(folder, folder/'cache').tables) == 3


def test_a_damaged_copy_is_made_again(folder):
    folder_histories(folder, folder/'cache')
    for number, copy in enumerate(sorted((folder/'cache').rglob('*.npy'))):
        copy.write_bytes([b'', b'garbage', copy.read_bytes()[:1000]][number])
    for ticker, table in folder_histories(folder, folder/'cache').tables.items():
        pd.testing.assert_frame_equal(table, load_prices(ticker))


def test_a_place_that_cannot_be_written_only_costs_speed(folder):
    (folder/'blocked').write_text('a file where a folder should be')
    with pytest.warns(UserWarning, match='no copy of .* is kept'):
        histories = folder_histories(folder, folder/'blocked')
    assert len(histories.tables) == 3


def test_gaps_are_reported_but_the_share_stays(folder):
    write_csv(folder, 'META', load_prices('META').drop(pd.Timestamp('2019-05-01')))
    histories = folder_histories(folder, folder/'cache')
    assert len(histories.tables) == 3 and '2019-05-01' in histories.problems[0]


def test_a_folder_without_prices_is_refused(tmp_path):
    with pytest.raises(DataError, match='holds no price file'): folder_histories(tmp_path, tmp_path/'cache')
    with pytest.raises(DataError, match='no such folder'): folder_histories(tmp_path/'none', tmp_path/'cache')


@needs_large
def test_the_large_folder_carries_the_packaged_windows(tmp_path):
    for name in ('AAPL', 'SNAP', 'SPY', 'CL_F', 'XOM'): shutil.copy(LARGE/f'{name}.csv.gz', tmp_path)
    histories = folder_histories(tmp_path, tmp_path/'cache')
    index, packaged = corpus_index(histories), corpus_index()
    assert histories.problems == () and 'CL=F' not in set(index['ticker'])
    own = packaged[packaged['ticker'].isin(['AAPL', 'SNAP', 'SPY'])]
    assert set(own['name']) <= set(index['name'])
    assert index['first'].min() < '2001-06' and set(corpus_episode(
        index[index['ticker'] == 'XOM'].iloc[-1].to_dict(), histories).peers) == {'CL=F', 'SPY'}


# ---------------------------------------------------------------- universes and sources

def test_a_universe_is_read_strictly(tmp_path):
    path = tmp_path/'mine.txt'
    path.write_text('\ufeff# mine\n\naapl\nBRK.B # class B\nAAPL\n')
    assert read_universe(path) == ['AAPL', 'BRK.B']
    for text in ('', '# nothing\n', 'AAPL MSFT\n', '../etc\n'):
        path.write_text(text)
        with pytest.raises(DataError, match='one ticker on each line'): read_universe(path)
    with pytest.raises(DataError, match='cannot be read'): read_universe(tmp_path/'none.txt')


def yahoo_answer(refused=()):
    "A stand-in for Yahoo that answers from the data set."
    def download(symbol, start, end):
        if symbol in refused: return None
        table = load_prices(symbol).loc[start:end].iloc[:-1]
        names = {name: name.title().replace('_', ' ') for name in table}
        return table.rename(columns=names).tz_localize('America/New_York')
    return YahooSource(download)


def test_a_universe_can_come_from_yahoo():
    histories = source_histories(yahoo_answer(), ['NVDA', 'SPY'], '2016-01-04', '2020-12-31', wait=lambda _: None)
    assert {'NVDA', 'AMD', 'INTC', 'GC=F', 'SPY'} <= set(histories.tables)
    assert len(corpus_index(histories)) > 0


def test_what_a_source_refuses_is_reported(tmp_path):
    histories = source_histories(yahoo_answer(['INTC']), ['NVDA'], '2016-01-04', '2020-12-31', wait=lambda _: None)
    assert 'INTC' not in histories.tables and any('INTC' in problem for problem in histories.problems)
    with pytest.raises(DataError, match='no prices at all'):
        source_histories(FolderSource(tmp_path), ['NVDA'], wait=lambda _: None)


def test_histories_are_written_and_read(tmp_path):
    save_histories(Histories({'GC=F': load_prices('GC=F'), 'AMD': load_prices('AMD')}), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.glob('*.gz')}
    save_histories(Histories({'GC=F': load_prices('GC=F'), 'AMD': load_prices('AMD')}), tmp_path)
    assert before == {path.name: path.read_bytes() for path in tmp_path.glob('*.gz')}
    histories = folder_histories(tmp_path, tmp_path/'cache')
    for ticker in ('GC=F', 'AMD'): pd.testing.assert_frame_equal(histories.tables[ticker], load_prices(ticker))


# ---------------------------------------------------------------- any episode

@pytest.mark.parametrize('text', [
    '', 'NVDA', 'NVDA:2024-03-01', 'NVDA:2024-03-01:2024-04-30:x', ':2024-03-01:2024-04-30', 'task_easy',
    'NVDA:2024-3-1:2024-04-30', 'NVDA:2024-02-30:2024-04-30', '../x:2024-03-01:2024-04-30',
    'NVDA:2024-04-30:2024-03-01', 'NVDA:2024-03-01:2024-03-01'])
def test_names_that_are_none_are_refused_in_one_line(text):
    with pytest.raises(StockerError) as caught: read_episode_name(text)
    assert '\n' not in str(caught.value)


def test_an_episode_from_yahoo():
    episode = episode_from_source('NVDA', '2024-03-01', '2024-04-30', yahoo_answer(), wait=lambda _: None)
    assert (episode.name, episode.steps) == ('NVDA:2024-03-01:2024-04-30', 42)
    assert {symbol: kind for symbol, (kind, _) in episode.peers.items()} == relations_of('NVDA')
    for timing in Timing: assert len(episode.observations(timing)) == 42


def test_peers_and_commodities_can_be_given():
    episode = episode_from_source('NVDA', '2024-03-01', '2024-04-30', yahoo_answer(), ['META'], ['CL=F'])
    assert list(episode.peers) == ['SPY', 'META', 'CL=F'] and episode.peers['CL=F'][0] == 'commodity'


def test_a_chosen_peer_may_be_missing_and_a_named_one_not():
    source = yahoo_answer(['AMD', 'META'])
    with pytest.warns(UserWarning, match='goes without AMD'):
        assert 'AMD' not in episode_from_source('NVDA', '2024-03-01', '2024-04-30', source).peers
    with pytest.raises(DataError, match='META'):
        episode_from_source('NVDA', '2024-03-01', '2024-04-30', source, peers=['META'])


@pytest.mark.parametrize(('ticker', 'start', 'end', 'told'), [
    ('SNAP', '2017-06-01', '2017-08-31', 'warm-up'), ('NVDA', '2035-03-01', '2035-04-30', 'no prices'),
    ('NVDA', '2024-03-02', '2024-03-03', 'sessions')])
@pytest.mark.filterwarnings('ignore:.*goes without')
def test_windows_that_cannot_be_played_say_why(ticker, start, end, told):
    with pytest.raises(DataError, match=told) as caught: episode_from_source(ticker, start, end, yahoo_answer())
    assert ticker in str(caught.value)


def test_a_source_that_refuses_is_asked_again_and_then_told():
    class Busy:
        name = adjustment = 'busy'
        asked = 0

        def fetch(self, ticker, start, end):
            self.asked += 1
            raise RateLimited(f'{ticker}: too many questions; wait')
    busy, waits = Busy(), []
    with pytest.raises(DataError, match='too many questions'):
        episode_from_source('NVDA', '2024-03-01', '2024-04-30', busy, [], [], waits.append)
    assert busy.asked == 6 and waits == [10.0, 20.0] * 2  # the share and the market


# ---------------------------------------------------------------- data that cannot be true

@pytest.mark.filterwarnings('ignore:.*goes without')
def test_a_window_before_the_data_names_the_day_that_was_asked_for():
    source = HistoriesSource(packaged_histories())
    with pytest.raises(DataError) as caught: episode_from_source('AAPL', '2014-01-01', '2014-03-01', source)
    assert str(caught.value).startswith('AAPL, 2014-01-01: no prices for a window from 2014-01-01 to 2014-03-01')
    assert 'choose days from 2015-01-02 to 2026-04-30' in str(caught.value) and '2009' not in str(caught.value.date)
    with pytest.raises(DataError, match='AAPL, 2015-12-01: only 230 sessions .*start on 2016-01-04 or later'):
        episode_from_source('AAPL', '2015-12-01', '2016-02-29', source)


def test_windows_without_a_trade_are_left_out_and_told(folder):
    table = load_prices('META')
    table.loc['2019-01-02':'2019-12-31', 'volume'] = 0.0
    write_csv(folder, 'META', table)
    histories = folder_histories(folder, folder/'cache')
    assert any('META, 2019-01-02: nothing was traded in 252 sessions' in problem for problem in histories.problems)
    index, whole = (corpus_index(chosen).query('ticker == "META"') for chosen in (histories, packaged_histories()))
    lost = whole[~whole['name'].isin(index['name'])]
    assert len(lost) == 5 and lost['first'].min() >= '2019-01-02' and lost['last'].max() <= '2019-12-31'


def test_a_folder_with_a_jump_leaves_that_file_out_until_it_is_confirmed(folder, tmp_path_factory, monkeypatch):
    table = load_prices('META')
    table.loc['2019-05-01':, ['open', 'high', 'low', 'close', 'adj_close']] /= 100
    write_csv(folder, 'META', table)
    moves = tmp_path_factory.mktemp('moves')/'moves.txt'
    moves.write_text('META 2019-05-01')
    for confirmed in (False, True, False): # the copy that the second reading keeps is no way round
        monkeypatch.setenv('STOCKER_MOVES', str(moves)) if confirmed else monkeypatch.delenv('STOCKER_MOVES', False)
        histories = folder_histories(folder, folder/'cache')
        assert ('META' in histories.tables) is confirmed and bool(histories.problems) is not confirmed
    assert 'META, 2019-05-01: close' in histories.problems[0]


def test_sessions_of_another_exchange_are_told_plainly():
    days = pd.DatetimeIndex(DAYS[DAYS >= np.datetime64('2024-01-02')][:60])
    table = load_prices('AMD').loc[days]
    holiday = table.iloc[[10]].set_axis([pd.Timestamp('2024-01-15')])
    note = missing_sessions(pd.concat([table, holiday]).sort_index(), '7203.T')
    assert '2024-01-15' in note and note.endswith('(shares are on the calendar of the New York Stock Exchange)')


@pytest.mark.parametrize('number', [10**400, -10**400, 0, 2.5, float('nan'), float('inf'), '42', None, 10**6])
def test_a_length_or_stride_that_is_none_is_told(number):
    for options in ({'length': number}, {'stride': number}):
        with pytest.raises(StockerError, match='length and stride of windows: use at least 2 and 1'):
            load_corpus('test', **options)


@pytest.mark.parametrize('thing', [None, 5, 10**400, 0.5, [], b'NVDA:2024-03-01:2024-04-30'])
def test_a_name_of_another_type_is_none(thing):
    with pytest.raises(StockerError, match='is no episode'): read_episode_name(thing)


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from('NVDA:2024-30-1T/.=\u2028\ud800'), max_size=30) | st.text(max_size=20))
def test_any_name_is_read_or_refused(text):
    try: name = read_episode_name(text)
    except StockerError as error: assert str(error)
    else: assert name.start < name.end
