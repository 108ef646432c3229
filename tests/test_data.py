"Prices: what vendors have been seen to hand over, and what must come of it."
import gzip
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stocker.market.core import DataError, StockerError, package_path, sha256_of
from stocker.market.data import (
    ADJUSTMENT, KNOWN_GAPS, PRICE_COLUMNS, FolderSource, RateLimited, YahooSource, as_day, check_prices,
    drop_unfinished, fetch_all, load_prices, load_table, nyse_sessions, nyse_years, price_problems, read_price_file,
    read_table, tidy_prices, write_table, yahoo_download, yahoo_symbol)
from stocker.market.histories import (
    Histories, HistoriesSource, folder_histories, packaged_histories, price_files, save_histories)

HEADER = 'date,open,high,low,close,adj_close,volume\n'
DAYS = ('2024-01-03', '2024-01-04', '2024-01-05')
UNITS = ('s', 'ms', 'us', 'ns')


def price_table(dates, rows):
    return pd.DataFrame(rows, pd.DatetimeIndex(dates, name='date').as_unit('us'), PRICE_COLUMNS, float)


def flat(dates, closes, volume=400):
    return price_table(dates, [[c, c, c, c, c, volume] for c in closes])


def yahoo_frame(dates=DAYS, close=10.0, **columns):
    data = {'Open': close, 'High': close + 1, 'Low': close - 1, 'Close': close, 'Adj Close': close, 'Volume': 100}
    return pd.DataFrame({**data, **columns}, pd.DatetimeIndex(dates, name='Date'))


def new_york(moment):
    return pd.Timestamp(moment, tz='America/New_York')


# layouts of a download

def two_levels(tickers, swapped=False):
    names = ['Close', 'High', 'Low', 'Open', 'Volume']
    columns = pd.MultiIndex.from_product([names, tickers], names=['Price', 'Ticker'])
    level = dict(Close=10, High=11, Low=9, Open=10, Volume=5)
    values = [level[name] + 100 * tickers.index(ticker) for name, ticker in columns]
    frame = pd.DataFrame([values] * 3, pd.DatetimeIndex(DAYS), columns)
    return frame.swaplevel(axis=1) if swapped else frame


def test_a_share_class_is_found_under_either_spelling():
    for symbol in ('BRK.B', 'BRK-B'): assert len(tidy_prices(two_levels([symbol]), 'BRK.B')) == 3


def test_missing_adjusted_close_is_the_close():
    frame = yahoo_frame().drop(columns='Adj Close')
    prices = tidy_prices(frame, 'AAPL')
    assert prices['adj_close'].equals(prices['close'].rename('adj_close'))


def test_columns_in_lower_case_and_text_dates_are_read():
    frame = yahoo_frame().rename(columns=lambda name: name.lower().replace(' ', '_')).set_axis(list(DAYS))
    assert tidy_prices(frame.sample(frac=1, axis=1, random_state=0), 'AAPL').equals(tidy_prices(yahoo_frame(), 'AAPL'))


def test_of_two_rows_for_one_day_the_last_is_kept():
    frame = yahoo_frame(['2019-01-25', '2019-01-24', '2019-01-25'], Volume=[4959679, 1, 4945900])
    prices = tidy_prices(frame, 'AMZN')
    assert prices.index.is_monotonic_increasing and prices.index.is_unique
    assert prices['volume'].tolist() == [1, 4945900]


def test_an_empty_second_row_does_not_displace_the_first():
    frame = yahoo_frame(['2019-01-25', '2019-01-25'], Close=[10, np.nan])
    assert tidy_prices(frame, 'AMZN')['close'].tolist() == [10]


# dates in any unit


def test_a_time_of_day_is_taken_off():
    index = pd.DatetimeIndex([f'{day} 09:30' for day in DAYS], tz='America/New_York')
    assert tidy_prices(yahoo_frame().set_axis(index), 'AAPL').index.equals(flat(DAYS, [1, 1, 1]).index)


# what can be wrong with a row

@pytest.mark.parametrize('ticker, row, message', [
    ('CBOE', [287.54, 310.88, 287.76, 310.23, 310.23, 1], 'low 287.76 is above open 287.54'),
    ('000020.KS', [9936.366819, 10022.853571, 9907.537902, 9878.708984, 9878.708984, 1], 'low 9907.537902 is above'),
    ('AAPL', [10, 10.5, 9, 11, 11, 1], 'high 10.5 is below open 10.0 or close 11.0'),
    ('AAPL', [10, 11, 9, 10, 10, -1], 'volume -1.0 is negative'),
    ('AAPL', [10, 11, 9, np.nan, 10, 1], 'close is missing'),
    ('AAPL', [10, np.inf, 9, 10, 10, 1], 'high is missing or not finite'),
    ('AAPL', [10, 11, 9, 10, np.nan, 1], 'adj_close is missing'),
    ('AAPL', [10, 11, 9, 10, 10, np.nan], 'volume is missing'),
    ('AAPL', [0, 0, 0, 0, 0, 0], 'open 0.0 is not above zero'),
    ('CL=F', [18.27, 18.27, -37.63, -37.63, -37.63, 1], 'low -37.63 is not above zero')])
def test_impossible_rows_are_named(ticker, row, message):
    good = [10, 11, 9, 10, 10, 1]
    prices = price_table(DAYS, [good, row, good])
    problems = price_problems(prices, ticker, file='some.csv')
    assert {problem.date for problem in problems} == {prices.index[1]}
    text = next(str(problem) for problem in problems if message in str(problem))
    assert text.startswith(f'some.csv, {ticker}, 2024-01-04: ')
    assert text.endswith('; fetch it again or correct the source')
    with pytest.raises(DataError): check_prices(prices, ticker)


def test_the_corrected_row_passes():
    check_prices(price_table(['2026-07-31'], [[287.54, 311.06, 287.5400085 - 0.0000085, 310.23, 310.23, 1]]), 'CBOE')


def test_a_future_of_no_volume_passes():
    check_prices(flat(DAYS, [2000, 2001, 2002], volume=0), 'GC=F')


def test_every_broken_rule_is_reported_in_order_of_date():
    prices = price_table([DAYS[2], DAYS[0], DAYS[0]], [[10, 9, 11, 10, 10, -1]] + [[10, 11, 9, 10, 10, 1]] * 2)
    problems = price_problems(prices, 'AAPL', sessions=nyse_sessions(DAYS[0], DAYS[2]))
    assert [(str(p.date.date()), p.problem.split()[0]) for p in problems] == [
        (DAYS[0], 'the'), (DAYS[0], 'the'), (DAYS[1], 'the'), (DAYS[2], 'volume'), (DAYS[2], 'low'), (DAYS[2], 'high')]


@pytest.mark.parametrize('change, message', [
    (lambda p: p[:0], 'no prices came back'),
    (lambda p: p.rename(columns={'close': 'Close'}), 'the columns are'),
    (lambda p: p[list(PRICE_COLUMNS[::-1])], 'the columns are'),
    (lambda p: p.astype({'close': str}), 'are not floats'),
    (lambda p: p.reset_index(drop=True), 'does not hold dates'),
    (lambda p: p.tz_localize('UTC'), 'without a time zone'),
    (lambda p: p.set_axis(p.index + pd.Timedelta(hours=1)), 'midnight'),
    (lambda p: p.set_axis(pd.DatetimeIndex([DAYS[0], None, DAYS[2]])), 'midnight')])
def test_a_table_of_another_shape_is_one_problem(change, message):
    problems = price_problems(change(flat(DAYS, [1, 2, 3])), 'AAPL')
    assert len(problems) == 1 and message in str(problems[0])


def test_sessions_missing_and_too_many():
    sessions = nyse_sessions('2024-01-12', '2024-01-16')
    prices = flat(['2024-01-12', '2024-01-15'], [10, 10])
    found = {str(p.date.date()): p.problem for p in price_problems(prices, 'AAPL', sessions=sessions)}
    assert found == {'2024-01-15': 'the exchange was closed that day', '2024-01-16': 'the session is missing'}
    future = price_problems(prices, 'GC=F', sessions=sessions.index)
    assert [str(p.date.date()) for p in future] == ['2024-01-16']


def test_a_known_gap_of_gold_is_no_problem_and_another_is():
    day = KNOWN_GAPS['GC=F'][0]
    sessions = nyse_sessions('2016-10-07', '2016-10-12')
    prices = flat(['2016-10-07', '2016-10-11', '2016-10-12'], [1250, 1250, 1250])
    assert day in sessions.index and not price_problems(prices, 'GC=F', sessions=sessions)
    assert len(price_problems(prices, 'CL=F', sessions=sessions)) == 1
    assert len(price_problems(prices[:2], 'GC=F', sessions=sessions)) == 1


# what does not go with the row before it

@pytest.mark.parametrize(('closes', 'factor'), [
    ([612.2, 609.6, 6.10, 5.85], '99.93'), ([400, 404, 101, 102], '4'), ([0.021, 0.018, 2.51], '139.4')])
def test_a_close_beyond_three_times_the_one_before_is_one_finding(closes, factor):
    [problem] = price_problems(flat(pd.bdate_range('2024-01-02', periods=len(closes)), closes), 'ODD', file='odd.csv')
    assert str(problem).startswith('odd.csv, ODD, 2024-01-04: close')
    assert f'all prices before by {factor};' in str(problem)
    assert "if it is true, write 'ODD 2024-01-04' into a file that STOCKER_MOVES names" in problem.remedy


@pytest.mark.parametrize('closes', [[10, 20.8, 10], [10, 29.9, 10], [10, 3.34, 9]])
def test_large_moves_that_have_happened_are_none(closes): check_prices(flat(DAYS, closes), 'ODD')


def test_no_share_on_record_has_moved_so_far():
    for ticker, table in load_table('prices').groupby('ticker'):
        moves = table['close'].to_numpy()[1:] / table['close'].to_numpy()[:-1]
        assert 1 / 2.5 < moves.min() and moves.max() < 2.5, ticker


def test_a_true_move_is_confirmed_by_a_line_of_a_file(tmp_path, monkeypatch):
    prices, path = flat(DAYS, [10, 50, 51]), tmp_path/'moves.txt'
    monkeypatch.setenv('STOCKER_MOVES', str(path))
    with pytest.raises(DataError, match='moves.txt: the file that STOCKER_MOVES names cannot be read'):
        check_prices(prices, 'ODD')
    for text, sound in (('# none\n', False), ('odd 2024-01-04 # saved\n', True), ('ODD 2024-01-05', False),
                        ('EVEN 2024-01-04', False)):
        path.write_text(text)
        assert (price_problems(prices, 'ODD') == []) is sound
    for text in ('ODD', 'ODD soon', 'ODD 2024-02-30'):
        path.write_text(text)
        with pytest.raises(DataError, match='line 1: .* is not a day; write a ticker and a day'):
            check_prices(prices, 'ODD')


def test_two_units_in_one_row_are_a_finding():
    prices = price_table(DAYS, [[10, 11, 9, 10, 10, 1], [10, 1011, 9, 10, 10, 1], [10, 11, 9, 10, 10, 1]])
    [problem] = price_problems(prices, 'ODD')
    assert str(problem.date.date()) == DAYS[1] and 'high 1011.0 is 112 times low 9.0' in str(problem)


@pytest.mark.parametrize(('closes', 'ratio', 'found'), [
    ([400, 404, 202, 205], 2.0, 1), ([400, 404, 270, 271], 1.5, 1), ([10, 10.1, 101, 99], 0.1, 1),
    ([200, 202, 202, 205], 2.0, 0), ([200, 202, 141, 150], 2.0, 0), ([400, 404, 101, 102], 4.0, 1)])
def test_a_split_that_was_not_applied_is_found_by_its_table(closes, ratio, found):
    prices = flat(pd.bdate_range('2024-01-02', periods=4), closes)
    problems = price_problems(prices, 'ODD', splits=(('2024-01-04', ratio), ('2030-01-02', 4.0)))
    assert len(problems) == found
    if found: assert f'the split of {ratio:g} for 1 was not applied' in str(problems[0])


@pytest.mark.parametrize(('ticker', 'volumes', 'found'), [
    ('ODD', [0, 0, 0], 1), ('ODD', [0, 0, 5], 0), ('GC=F', [0, 0, 0], 0), ('^VIX', [0, 0, 0], 0),
    ('EURUSD=X', [0, 0, 0], 0)])
def test_a_share_that_was_never_traded_is_a_finding(ticker, volumes, found):
    problems = price_problems(flat(DAYS, [10, 10, 10]).assign(volume=np.array(volumes, float)), ticker)
    assert len(problems) == found
    if found: assert 'nothing was traded in 3 sessions' in str(problems[0]) and 'choose other days' in str(problems[0])


@pytest.mark.parametrize('thing', [None, 5, 10**400, 'prices', [], {}, np.zeros((3, 6))])
def test_what_is_no_table_is_a_problem_and_no_error(thing):
    [problem] = price_problems(thing, 'ODD')
    assert 'came back, not a table' in str(problem)


# days and time zones

LATE = new_york('2024-01-05 23:30')


@pytest.mark.parametrize('moment', [
    LATE, LATE.to_pydatetime(), '2024-01-05T23:30-05:00', '2024-01-05', LATE.date(), np.datetime64('2024-01-05T23')])
def test_the_day_of_a_moment_is_the_one_in_its_own_zone(moment, tmp_path):
    (tmp_path/'AAPL.csv').write_text(HEADER + GOOD_LINE + GOOD_LINE.replace('01-04', '01-05'))
    sources = (FolderSource(tmp_path), YahooSource(lambda *_: yahoo_frame()), HistoriesSource(packaged_histories()))
    for source in sources:
        assert source.fetch('AAPL', moment, moment).index.tolist() == [pd.Timestamp('2024-01-05')]
    assert nyse_sessions(moment, moment).index.tolist() == [pd.Timestamp('2024-01-05')]
    assert as_day(LATE.tz_convert('UTC')) == pd.Timestamp('2024-01-06')


NO_DAYS = (None, 20240105, 1.5, float('nan'), 10**400, 10**5000, '', 'soon', '2024-02-30', '9999-12-31', '0001-01-01',
           b'2024-01-05', [], pd.NaT)


@pytest.mark.parametrize('wrong', NO_DAYS, ids=range(len(NO_DAYS)))
def test_what_is_no_day_is_told(wrong, tmp_path):
    (tmp_path/'AAPL.csv').write_text(HEADER + GOOD_LINE)
    asks = [FolderSource(tmp_path).fetch, YahooSource(lambda *_: yahoo_frame()).fetch,
            HistoriesSource(packaged_histories()).fetch, lambda _, *window: nyse_sessions(*window)]
    for ask in asks:
        for window in ((wrong, '2024-01-05'), ('2024-01-02', wrong)):
            with pytest.raises(StockerError, match='is not a day; write it as 2023-08-01') as caught:
                ask('AAPL', *window)
            assert len(str(caught.value)) < 200


# sessions

def test_sessions_know_holidays_closings_and_early_closes():
    sessions = nyse_sessions('2024-12-23', '2025-01-10')
    assert '2024-12-25' not in sessions.index and '2025-01-09' not in sessions.index
    assert str(sessions.loc['2024-12-24', 'closes_at']) == '2024-12-24 18:00:00+00:00'
    assert sessions.index.tz is None and str(sessions.index.dtype) == 'datetime64[us]'
    assert str(sessions['opens_at'].dtype) == 'datetime64[us, UTC]'


def test_a_window_without_sessions_is_empty_and_a_reversed_one_refused():
    assert nyse_sessions('2024-01-06', '2024-01-07').empty
    assert len(nyse_sessions('2024-01-05', '2024-01-05')) == 1
    with pytest.raises(StockerError, match='swap the two days'): nyse_sessions('2024-01-05', '2024-01-04')


def test_the_three_windows_have_the_sessions_they_should():
    counts = [len(nyse_sessions(*days)) for days in (
        ('2023-08-01', '2023-09-29'), ('2024-01-02', '2024-02-29'), ('2022-09-01', '2022-10-31'))]
    assert counts == [43, 41, 42]


@pytest.mark.parametrize('package, call', [
    ('exchange_calendars', lambda: nyse_sessions('2024-01-02', '2024-01-05')),
    ('yfinance', lambda: YahooSource().fetch('AAPL', '2024-01-02', '2024-01-05'))])
def test_a_missing_package_is_told_with_the_extra_it_is_in(package, call, monkeypatch):
    nyse_years.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(StockerError, match=rf"{package} cannot be imported .*pip install 'stocker\[data\]'"): call()


# tables on disk

def test_equal_tables_give_equal_bytes_and_come_back_equal(tmp_path):
    frame = pd.DataFrame({'ticker': ['AAPL', 'META'], 'date': pd.DatetimeIndex(DAYS[:2]).as_unit('us'),
                          'volume': [1, 2], 'close': [0.1 + 0.2, np.nan],
                          'at': pd.DatetimeIndex(DAYS[:2], tz='UTC').as_unit('us')})
    write_table(frame, tmp_path/'a.parquet')
    write_table(read_table(tmp_path/'a.parquet'), tmp_path/'b.parquet')
    pd.testing.assert_frame_equal(read_table(tmp_path/'b.parquet'), frame)
    assert sha256_of(tmp_path/'a.parquet') == sha256_of(tmp_path/'b.parquet')
    assert sorted(path.name for path in tmp_path.iterdir()) == ['a.parquet', 'b.parquet']


def test_bytes_depend_neither_on_the_unit_of_dates_nor_on_the_version_of_pandas(tmp_path):
    import pyarrow.parquet
    hashes = set()
    for unit in UNITS:
        date = pd.DatetimeIndex(DAYS).as_unit(unit)
        frame = pd.DataFrame({'date': date, 'at': date.tz_localize('UTC')})
        write_table(frame, tmp_path/'dates.parquet')
        hashes.add(sha256_of(tmp_path/'dates.parquet'))
        back = read_table(tmp_path/'dates.parquet')
        assert [str(kind) for kind in back.dtypes] == ['datetime64[us]', 'datetime64[us, UTC]']
        assert back['date'].tolist() == [pd.Timestamp(day) for day in DAYS]
    assert len(hashes) == 1
    assert not pyarrow.parquet.read_schema(tmp_path/'dates.parquet').metadata


@pytest.mark.parametrize('damage', [lambda data: b'', lambda data: b'\xff\xfe\x00', lambda data: data[:len(data) // 2],
                                    lambda data: data[:40] + bytes(len(data) - 80) + data[-40:]])
def test_a_damaged_table_is_told_in_one_line(damage, tmp_path, monkeypatch):
    monkeypatch.setenv('STOCKER_DATA', str(tmp_path))
    path = tmp_path/'prices.parquet'
    write_table(flat(DAYS, [1, 2, 3]).reset_index().assign(ticker='AAPL'), path)
    path.write_bytes(damage(path.read_bytes()))
    for read in (lambda: load_table('prices'), lambda: load_prices('AAPL')):
        with pytest.raises(DataError, match='prices.parquet: the file cannot be read') as caught: read()
        assert '\n' not in str(caught.value) and 'stocker data build' in str(caught.value)


def test_a_missing_table_and_a_folder_in_its_place(tmp_path, monkeypatch):
    monkeypatch.setenv('STOCKER_DATA', str(tmp_path))
    with pytest.raises(DataError, match='prices.parquet: the file is missing; reinstall the package or run'):
        load_prices('A')
    (tmp_path/'prices.parquet').mkdir()
    with pytest.raises(DataError, match='cannot be read as parquet'): load_table('prices')


def test_prices_are_read_anew_after_a_change_and_copies_are_ones_own(tmp_path, monkeypatch):
    monkeypatch.setenv('STOCKER_DATA', str(tmp_path))
    for close in (10, 20):
        write_table(flat(DAYS, [close] * 3).reset_index().assign(ticker='AAPL'), tmp_path/'prices.parquet')
        prices = load_prices('AAPL')
        assert prices['close'].tolist() == [close] * 3
        prices['close'] = 0.0
        assert load_prices('AAPL')['close'].tolist() == [close] * 3
    with pytest.raises(DataError, match='META: there are no prices of it; choose one of AAPL'): load_prices('META')
    write_table(pd.DataFrame({'ticker': ['AAPL']}), tmp_path/'prices.parquet')
    with pytest.raises(DataError, match='no column'): load_prices('AAPL')


# a folder of CSV files

GOOD_LINE = '2024-01-04,20,21,19,20.5,20.5,7\n'


@pytest.mark.parametrize('packed', [True, False])
def test_a_folder_is_read(packed, tmp_path):
    text = (HEADER + '2024-01-03,0.3,0.5,0.3,0.30000000000000004,1e-1,7\n'
            '2024-01-04,0.3,0.5,0.3,0.4,0.4,7\n2024-01-05,0.4,0.5,0.3,0.5,0.5,7\n').encode()
    (tmp_path/f"GC_F.csv{'.gz' if packed else ''}").write_bytes(gzip.compress(text) if packed else text)
    prices = FolderSource(tmp_path).fetch('GC=F', '2024-01-03', '2024-01-04')
    assert [str(day.date()) for day in prices.index] == ['2024-01-03', '2024-01-04']
    assert prices['close'].iloc[0] == 0.1 + 0.2
    assert FolderSource(tmp_path).adjustment == ADJUSTMENT and str(tmp_path.parent) not in FolderSource(tmp_path).name


@pytest.mark.parametrize('line, message', [
    ('2024-01-04,20,21,19,,20.5,7', "close is '', not a number"),
    ('2024-01-04,20,21,19,abc,20.5,7', "close is 'abc', not a number"),
    ('2024-01-04,20,21,19,nan,20.5,7', "close is 'nan', not a number"),
    ('2024-01-04,20,inf,19,20,20,7', "high is 'inf', not a number"),
    ('2024-01-04,2_0,21,19,20,20,7', "open is '2_0', not a number"),
    ('2024-01-04,２０,21,19,20,20,7', 'not a number'),
    ('2024-02-30,20,21,19,20.5,20.5,7', 'is not in the calendar'),
    ('04.01.2024,20,21,19,20.5,20.5,7', 'is not a day'),
    ('2024-01-04,20,21,19,20.5,20.5', 'line 2 has 6 fields instead of 7'),
    ('2024-01-04,20,21,19,20.5,20.5,7,8', 'line 2 has 8 fields instead of 7'),
    ('2024-01-04,20,21,20.1,20.5,20.5,7', 'AAPL, 2024-01-04: low 20.1 is above open 20.0'),
    ('2024-01-04,20,21,19,-1,20.5,7', 'AAPL, 2024-01-04: close -1.0 is not above zero'),
    (GOOD_LINE + GOOD_LINE, 'AAPL, 2024-01-04: the date comes more than once'),
    ('2024-01-05,20,21,19,20,20,7\n' + GOOD_LINE, 'AAPL, 2024-01-04: the date comes after 2024-01-05')])
def test_a_wrong_line_is_named(line, message, tmp_path):
    (tmp_path/'AAPL.csv').write_text(HEADER + line, encoding='utf-8')
    with pytest.raises(DataError) as caught: FolderSource(tmp_path).fetch('AAPL', '2024-01-01', '2024-01-31')
    assert message in str(caught.value) and 'AAPL.csv, AAPL' in str(caught.value) and '; ' in str(caught.value)


@pytest.mark.parametrize('damage', [
    lambda data: data[:-12], lambda data: b'not gzip', lambda data: data[:20] + b'\0\0\0\0' + data[24:],
    lambda data: gzip.compress(b'\xff\xfe\x00')])
def test_a_damaged_file_is_named(damage, tmp_path):
    whole = gzip.compress((HEADER + GOOD_LINE * 50).encode())
    (tmp_path/'AAPL.csv.gz').write_bytes(damage(whole))
    with pytest.raises(DataError, match='AAPL.csv.gz, AAPL: the file is damaged .*; restore the file or download'):
        FolderSource(tmp_path).fetch('AAPL', '2024-01-01', '2024-01-31')


@pytest.mark.parametrize('text', [
    '', '\n', 'date,open\n', HEADER.replace('close,adj_', 'adj_'), HEADER.replace('volume', 'open'),
    HEADER.replace('volume', 'volume,bid')])
def test_other_columns_are_refused(text, tmp_path):
    (tmp_path/'AAPL.csv').write_text(text)
    with pytest.raises(DataError, match='AAPL.csv, AAPL: the columns are'):
        FolderSource(tmp_path).fetch('AAPL', '2024-01-01', '2024-01-31')


def test_a_window_outside_the_file_says_what_there_is(tmp_path):
    (tmp_path/'AAPL.csv').write_text(HEADER + GOOD_LINE)
    with pytest.raises(DataError, match='no prices from 2023-01-01 to 2023-12-31; choose days from 2024-01-04 to'):
        FolderSource(tmp_path).fetch('AAPL', '2023-01-01', '2023-12-31')


@pytest.mark.parametrize('ticker', ['../../../tmp/x', '/etc/x', 'A/B', '', '.', '..', 'AAPL\n', 'A\\B'])
def test_a_ticker_cannot_leave_the_folder(ticker, tmp_path):
    for ask in (FolderSource(tmp_path).path, yahoo_symbol):
        with pytest.raises(StockerError, match='is not a ticker'): ask(ticker)


@pytest.mark.parametrize('ticker', ['^GSPC', 'GC=F', 'BTC-USD', 'BRK.B'])
def test_real_tickers_have_a_file_in_the_folder(ticker, tmp_path):
    assert FolderSource(tmp_path).path(ticker).parent == tmp_path


@pytest.mark.parametrize(('ticker', 'stem'), [
    ('PRN', '%50RN'), ('CON', '%43ON'), ('CON.DE', '%43ON.DE'), ('NUL', '%4EUL'), ('COM1', '%43OM1'), ('aux', '%61ux')])
def test_a_reserved_name_is_escaped_and_read_again(ticker, stem, tmp_path):
    source = FolderSource(tmp_path)
    assert source.path(ticker).name == f'{stem}.csv.gz'
    save_histories(Histories({ticker: flat(DAYS, [10, 11, 12])}), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f'{stem}.csv.gz']
    assert len(source.fetch(ticker, DAYS[0], DAYS[2])) == 3
    assert list(price_files(tmp_path)[0]) == [ticker.upper()]
    (tmp_path/f'{stem}.csv.gz').rename(tmp_path/f'{ticker}.csv.gz') # as it was written before
    assert len(source.fetch(ticker, DAYS[0], DAYS[2])) == 3 and list(price_files(tmp_path)[0]) == [ticker.upper()]


YAHOO_LINES = ('Date,Open,High,Low,Close,Adj Close,Volume\n2024-01-03,184.22,185.88,183.43,184.25,182.36,58414500\n',
               'Date,Open,High,Low,Close,Adj Close,Volume,Dividends,Stock Splits\n'
               '2024-01-03 00:00:00-05:00,184.22,185.88,183.43,184.25,182.36,58414500,0.0,0.0\n')


@pytest.mark.parametrize('text', YAHOO_LINES)
def test_files_as_yahoo_writes_them_are_read(text, tmp_path, recwarn):
    (tmp_path/'AAPL.csv').write_text(text)
    source = FolderSource(tmp_path)
    prices = source.fetch('AAPL', '2024-01-03', '2024-01-03')
    assert prices.to_numpy().tolist() == [[184.22, 185.88, 183.43, 184.25, 182.36, 58414500]]
    assert source.adjustment == ADJUSTMENT and not recwarn.list


def test_a_folder_without_adjusted_closes_is_read_and_said_to_be_unadjusted(tmp_path):
    (tmp_path/'AAPL.csv').write_text('Date,Open,High,Low,Close,Volume\n2024-01-03,10,11,9,10.5,7\n')
    source = FolderSource(tmp_path)
    with pytest.warns(UserWarning, match='AAPL: AAPL.csv has no adjusted closes: its prices are unadjusted'):
        prices = source.fetch('AAPL', '2024-01-03', '2024-01-03')
    assert prices['adj_close'].tolist() == [10.5] and 'unadjusted: no adjusted closes in AAPL.csv' in source.adjustment
    for _ in range(2): # a second time from the copy
        histories = folder_histories(tmp_path, tmp_path/'cache')
        assert histories.problems == ('AAPL.csv: no adjusted closes; the prices are read, unadjusted',)


def test_the_example_file_is_read_as_it_lies():
    example = read_price_file(package_path('example', 'AAPL.csv'), 'AAPL')
    assert len(example) == 5 and not price_problems(example, 'AAPL', sessions=nyse_sessions('2024-01-02', '2024-01-08'))


@pytest.mark.parametrize('header', [
    'Day,Price', 'date;open;high;low;close;volume', 'Date,Open,High,Low,Close,Volume,Close'])
def test_another_header_is_told_how_to_read(header, tmp_path):
    (tmp_path/'AAPL.csv').write_text(f'{header}\n')
    with pytest.raises(DataError, match='name them so in the first line: date,open,high,low,close,volume'):
        FolderSource(tmp_path).fetch('AAPL', '2024-01-03', '2024-01-03')


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([
    '2024-01-03', '2024-01-04', '9999-12-31', '0001-01-01', '10', '11', '9', '1e999', '1' * 400, '-1', '0', '', 'nan',
    '"', '\0', 'null', '1_0', ' ', 'é'])).map(','.join) | st.text(max_size=60), st.booleans())
def test_any_file_is_read_or_refused_in_one_line(line, yahoo):
    with tempfile.TemporaryDirectory() as folder:
        header = YAHOO_LINES[0].split('\n')[0] + '\n' if yahoo else HEADER
        Path(folder, 'AAPL.csv').write_text(header + line + '\n', encoding='utf-8', errors='replace')
        try: FolderSource(folder).fetch('AAPL', '1900-01-01', '2100-01-01')
        except DataError as error: assert '\n' not in str(error).replace(line, '')


# Yahoo

SAME_AT_YAHOO = ('7203.T', '130A.T', '000020.KS', 'SAP.DE', 'SAP.F', 'ATR.WA', 'VOD.L', 'ABC.V', 'BTC-USD', '^GSPC',
                 'GC=F', 'F', 'T', 'BRK-B')


@pytest.mark.parametrize('ticker, symbol', [
    ('BRK.B', 'BRK-B'), ('BF.B', 'BF-B'), ('brk.b', 'BRK-B'), *zip(SAME_AT_YAHOO, SAME_AT_YAHOO)])
def test_symbols(ticker, symbol):
    assert yahoo_symbol(ticker) == symbol
    assert yahoo_symbol(symbol) == symbol


def test_the_last_day_is_included_and_nothing_after_it():
    asked = []

    def download(symbol, start, end):
        asked.append((symbol, start, end))
        bars = yahoo_frame(pd.bdate_range('2023-12-20', '2024-01-19'))
        return bars[bars.index < pd.Timestamp(end) + pd.Timedelta(days=3)] # hands over more than was asked for

    prices = YahooSource(download).fetch('BRK.B', '2024-01-02', '2024-01-05')
    assert asked == [('BRK-B', '2024-01-02', '2024-01-06')]
    assert (prices.index[0], prices.index[-1]) == (pd.Timestamp('2024-01-02'), pd.Timestamp('2024-01-05'))


@pytest.mark.parametrize('answer', [None, pd.DataFrame(), yahoo_frame()[:0], yahoo_frame(Close=np.nan),
                                    pd.DataFrame({name: [] for name in ('Open', 'High', 'Low', 'Close', 'Volume')})])
def test_no_prices_is_an_error_and_never_an_empty_table(answer):
    with pytest.raises(DataError, match='^DEAD: no '): YahooSource(lambda *_: answer).fetch('DEAD', DAYS[0], DAYS[2])


def test_errors_of_yfinance_and_of_the_network_become_ours():
    from yfinance.exceptions import YFPricesMissingError, YFRateLimitError

    def failing(error):
        def download(*_): raise error
        return YahooSource(download)

    with pytest.raises(RateLimited, match='MSFT: Yahoo refuses .Too Many'):
        failing(YFRateLimitError()).fetch('MSFT', *DAYS[:2])
    for error in (YFPricesMissingError('MSFT', ''), ConnectionError('no route'), TimeoutError('slow')):
        with pytest.raises(DataError, match='MSFT: Yahoo gave no prices'): failing(error).fetch('MSFT', *DAYS[:2])


def test_yfinance_is_asked_without_adjustment_and_its_setting_restored(monkeypatch):
    import yfinance
    asked = []

    class Ticker:
        def __init__(self, symbol): self.symbol = symbol

        def history(self, **arguments):
            asked.append((self.symbol, arguments, yfinance.config.debug.hide_exceptions))
            if self.symbol == 'MSFT': raise yfinance.exceptions.YFRateLimitError
            return yahoo_frame().tz_localize('America/New_York')

    monkeypatch.setattr(yfinance, 'Ticker', Ticker)
    before = yfinance.config.debug.hide_exceptions
    assert len(yahoo_download('AAPL', '2024-01-03', '2024-01-06')) == 3
    arguments = dict(start='2024-01-03', end='2024-01-06', auto_adjust=False, actions=False)
    assert asked == [('AAPL', arguments, False)]
    with pytest.raises(RateLimited): YahooSource().fetch('MSFT', *DAYS[:2])
    assert yfinance.config.debug.hide_exceptions == before
    assert len(YahooSource().fetch('AAPL', DAYS[0], DAYS[2])) == 3


def test_arguments_given_to_yfinance_exist():
    import inspect

    import yfinance
    names = inspect.signature(yfinance.scrapers.history.PriceHistory.history).parameters
    assert {'start', 'end', 'auto_adjust', 'actions'} <= set(names)


# many tickers

def test_one_failure_leaves_the_others_alone():
    from yfinance.exceptions import YFRateLimitError
    asked, waits = [], []

    def download(symbol, start, end):
        asked.append(symbol)
        if symbol == 'DEAD': return yahoo_frame()[:0]
        if symbol == 'MSFT' and asked.count('MSFT') == 1: raise YFRateLimitError
        if symbol == 'ODD': raise ZeroDivisionError('inside yfinance')
        if symbol == 'LOW': return yahoo_frame(Low=11)
        return yahoo_frame()

    tickers = ['AAPL', 'DEAD', 'ODD', 'LOW', 'A/B', 'MSFT', 'AAPL']
    for run in (1, 2):
        prices, failures = fetch_all(YahooSource(download), tickers, DAYS[0], DAYS[2], wait=waits.append)
        assert list(prices) == ['AAPL', 'MSFT'] and list(failures) == ['DEAD', 'ODD', 'LOW', 'A/B']
        assert asked.count('DEAD') == run # nothing of it was kept
    assert waits == [10.0]
    assert 'DEAD: no prices from' in failures['DEAD'] and 'delisted' in failures['DEAD']
    assert 'ZeroDivisionError: inside yfinance' in failures['ODD']
    assert 'LOW, 2024-01-03: low 11.0 is above open 10.0' in failures['LOW']


def test_a_refusal_that_stays_ends_with_growing_waits():
    waits = []

    class Refusing:
        name, adjustment, asked = 'refusing', ADJUSTMENT, 0

        def fetch(self, ticker, start, end):
            self.asked += 1
            raise RateLimited('MSFT: too many questions')

    source = Refusing()
    prices, failures = fetch_all(source, ['MSFT'], *DAYS[:2], wait=waits.append, progress=False)
    assert (prices, failures, source.asked) == ({}, {'MSFT': 'MSFT: too many questions'}, 3)
    assert waits == [10.0, 20.0]


def test_an_empty_answer_of_any_source_is_a_failure():
    class Empty:
        name, adjustment = 'empty', ADJUSTMENT

        def fetch(self, ticker, start, end): return flat([], [])

    prices, failures = fetch_all(Empty(), ['DEAD'], *DAYS[:2], progress=False)
    assert not prices and 'no prices came back' in failures['DEAD']


def test_a_bar_of_progress_needs_no_notebook_widgets(monkeypatch):
    monkeypatch.setitem(sys.modules, 'ipywidgets', None)
    prices, _ = fetch_all(YahooSource(lambda *_: yahoo_frame()), ['AAPL'], *DAYS[:2])
    assert list(prices) == ['AAPL']


# today's bar

@pytest.mark.parametrize('now, last', [
    ('2023-11-22 12:00', '2023-11-21'), ('2023-11-22 17:59', '2023-11-21'), ('2023-11-22 18:00', '2023-11-22'),
    ('2023-11-23 09:00', '2023-11-22'), ('2023-11-24 14:59', '2023-11-22'), ('2023-11-24 15:00', '2023-11-24'),
    ('2023-11-25 00:00', '2023-11-24'), ('2023-11-20 12:00', '2023-11-17')])
def test_todays_bar_is_not_kept_before_it_is_final(now, last):
    prices = flat(['2023-11-17', '2023-11-21', '2023-11-22', '2023-11-24'], [1, 2, 3, 4])
    for moment in (new_york(now), new_york(now).tz_convert('UTC'), new_york(now).tz_convert('Asia/Tokyo')):
        assert str(drop_unfinished(prices, moment).index[-1].date()) == last


def test_a_futures_bar_on_a_day_without_session_is_final_in_the_evening():
    prices = flat(['2025-01-08', '2025-01-09'], [1, 2])
    assert [len(drop_unfinished(prices, new_york(f'2025-01-09 {time}'))) for time in ('17:59', '18:00')] == [1, 2]


def test_a_fetch_leaves_todays_bar_out():
    today = pd.Timestamp.now('America/New_York').tz_localize(None).normalize()
    days = [today - pd.Timedelta(days=3), today + pd.Timedelta(days=1)]
    prices = YahooSource(lambda *_: yahoo_frame(days)).fetch('AAPL', days[0], days[1])
    assert prices.index.tolist() == [days[0]]


def test_threads_read_prices_at_once():
    barrier, closes = threading.Barrier(8), []

    def read_one():
        barrier.wait()
        closes.append(load_prices('META')['close'].sum())

    threads = [threading.Thread(target=read_one) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert len(set(closes)) == 1 and len(closes) == 8
