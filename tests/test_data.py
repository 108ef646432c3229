"Prices and facts: what vendors and exports have been seen to hand over, and what must come of it."
import gzip
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stocker.market.core import DataError, StockerError
from stocker.market.data import (
    ADJUSTMENT, FIRST_WAIT, HEADLINE_FORMS, KNOWN_GAPS, PRICE_COLUMNS, FolderSource, RateLimited, YahooSource,
    adjust_for_dividends, check_prices, drop_unfinished, fetch_all, import_forum, load_prices, load_table,
    merge_history, nyse_sessions, nyse_years, price_problems, read_forum, read_headlines, read_macro,
    read_quarterly_eps, read_table, sha256_of, tidy_prices, trailing_earnings, write_table, yahoo_download,
    yahoo_symbol)

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


@pytest.mark.parametrize('swapped', [False, True])
@pytest.mark.parametrize('tickers', [['AAPL'], ['MSFT', 'AAPL'], ['AAPL', 'MSFT']])
def test_columns_on_two_levels_in_either_order(tickers, swapped):
    prices = tidy_prices(two_levels(tickers, swapped), 'AAPL')
    assert tuple(prices.columns) == PRICE_COLUMNS and {str(kind) for kind in prices.dtypes} == {'float64'}
    assert set(prices['close']) == {10.0 + 100 * tickers.index('AAPL')}
    check_prices(prices, 'AAPL')


@pytest.mark.parametrize('swapped', [False, True])
def test_another_ticker_is_never_taken_for_the_one_asked_for(swapped):
    with pytest.raises(DataError, match='META: the answer holds'): tidy_prices(two_levels(['MSFT'], swapped), 'META')


def test_a_share_class_is_found_under_either_spelling():
    for symbol in ('BRK.B', 'BRK-B'): assert len(tidy_prices(two_levels([symbol]), 'BRK.B')) == 3


def test_missing_adjusted_close_is_the_close():
    frame = yahoo_frame().drop(columns='Adj Close')
    prices = tidy_prices(frame, 'AAPL')
    assert prices['adj_close'].equals(prices['close'].rename('adj_close'))


def test_columns_in_lower_case_and_text_dates_are_read():
    frame = yahoo_frame().rename(columns=lambda name: name.lower().replace(' ', '_')).set_axis(list(DAYS))
    assert tidy_prices(frame.sample(frac=1, axis=1, random_state=0), 'AAPL').equals(tidy_prices(yahoo_frame(), 'AAPL'))


@pytest.mark.parametrize('frame, message', [
    (yahoo_frame().drop(columns=['Open', 'Volume']), r"no column \['open', 'volume'\]"),
    (yahoo_frame(Close='n/a'), 'not a number'),
    (yahoo_frame().reset_index(drop=True), 'does not hold dates'),
    (yahoo_frame().set_axis([20240103, 20240104, 20240105]), 'does not hold dates')])
def test_a_table_that_is_no_download_is_refused(frame, message):
    with pytest.raises(DataError, match=message): tidy_prices(frame, 'AAPL')


def test_all_four_prices_are_scaled_for_dividends():
    scaled = adjust_for_dividends(price_table(['2024-01-05'], [[101, 102, 99, 100, 98, 7]]))
    np.testing.assert_allclose(scaled.iloc[0], [98.98, 99.96, 97.02, 98, 98, 7])
    check_prices(scaled, 'AAPL')


def test_scaling_for_dividends_keeps_real_prices_in_order():
    for ticker in ('AAPL', 'SPY'):
        scaled = adjust_for_dividends(load_prices(ticker))
        check_prices(scaled, ticker)
        assert scaled.equals(adjust_for_dividends(scaled))


@pytest.mark.parametrize('missing', ['Open', 'High', 'Low', 'Close'])
def test_a_row_without_prices_is_dropped(missing):
    frame = yahoo_frame(['2026-07-08', '2026-07-09'], 60.599998)
    frame.loc['2026-07-09', missing] = np.nan
    prices = tidy_prices(frame, 'ATR.WA')
    assert prices['close'].tolist() == [60.599998]


def test_of_two_rows_for_one_day_the_last_is_kept():
    frame = yahoo_frame(['2019-01-25', '2019-01-24', '2019-01-25'], Volume=[4959679, 1, 4945900])
    prices = tidy_prices(frame, 'AMZN')
    assert prices.index.is_monotonic_increasing and prices.index.is_unique
    assert prices['volume'].tolist() == [1, 4945900]


def test_an_empty_second_row_does_not_displace_the_first():
    frame = yahoo_frame(['2019-01-25', '2019-01-25'], Close=[10, np.nan])
    assert tidy_prices(frame, 'AMZN')['close'].tolist() == [10]


# dates in any unit

@pytest.mark.parametrize('zone', [None, 'America/New_York', 'Asia/Tokyo', 'UTC'])
def test_dates_are_the_same_in_every_unit(zone, tmp_path):
    made = []
    for unit in UNITS:
        index = pd.DatetimeIndex(DAYS, tz=zone).as_unit(unit)
        prices = tidy_prices(yahoo_frame().set_axis(index), 'AAPL')
        write_table(prices.reset_index(), tmp_path/f'{unit}.parquet')
        keys = prices.index.strftime('%Y-%m-%d').tolist()
        made.append((keys, prices.index.asi8.tolist(), str(prices.index.dtype), sha256_of(tmp_path/f'{unit}.parquet')))
    assert made[0][0] == list(DAYS)
    assert all(one == made[0] for one in made)


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


def test_an_index_is_not_lost_silently(tmp_path):
    with pytest.raises(StockerError, match='date.*would be lost'):
        write_table(flat(DAYS, [1, 2, 3]), tmp_path/'x.parquet')
    assert not list(tmp_path.iterdir())


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
    text = (HEADER + '2024-01-03,20,21,0.3,0.30000000000000004,1e-1,7\n' + GOOD_LINE
            + '2024-01-05,20,21,19,20.5,20.5,7\n').encode()
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
    '', '\n', 'date,open\n', HEADER.replace('adj_close,', ''), HEADER.replace('volume', 'open')])
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


def test_parallel_downloads_do_not_mix():
    shared = {}

    def careless(symbol, start, end):
        shared['price'] = {'AAA': 10, 'BBB': 20}[symbol]
        time.sleep(0.0005)
        return yahoo_frame(close=shared['price'])

    def closes(ticker):
        return [set(YahooSource(careless).fetch(ticker, DAYS[0], DAYS[2])['close']) for _ in range(100)]

    with ThreadPoolExecutor(2) as pool: first, second = pool.map(closes, ['AAA', 'BBB'])
    assert first == [{10.0}] * 100 and second == [{20.0}] * 100


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
    assert waits == [FIRST_WAIT]
    assert 'DEAD: no prices from' in failures['DEAD'] and 'delisted' in failures['DEAD']
    assert 'ZeroDivisionError: inside yfinance' in failures['ODD']
    assert 'LOW, 2024-01-03: low 11.0 is above open 10.0' in failures['LOW']


@pytest.mark.parametrize('attempts', [1, 2, 4])
def test_a_refusal_that_stays_ends_with_growing_waits(attempts):
    waits = []

    class Refusing:
        name, adjustment, asked = 'refusing', ADJUSTMENT, 0

        def fetch(self, ticker, start, end):
            self.asked += 1
            raise RateLimited('MSFT: too many questions')

    source = Refusing()
    prices, failures = fetch_all(source, ['MSFT'], *DAYS[:2], attempts=attempts, wait=waits.append, progress=False)
    assert (prices, failures, source.asked) == ({}, {'MSFT': 'MSFT: too many questions'}, attempts)
    assert waits == [FIRST_WAIT * 2 ** i for i in range(attempts - 1)]


def test_an_empty_answer_of_any_source_is_a_failure():
    class Empty:
        name, adjustment = 'empty', ADJUSTMENT

        def fetch(self, ticker, start, end): return flat([], [])

    prices, failures = fetch_all(Empty(), ['DEAD'], *DAYS[:2], progress=False)
    assert not prices and 'no prices came back' in failures['DEAD']
    assert 'ask at least once' in fetch_all(Empty(), ['DEAD'], *DAYS[:2], attempts=0)[1]['DEAD']


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
    assert [len(drop_unfinished(prices, new_york(f'2025-01-09 {clock}'))) for clock in ('17:59', '18:00')] == [1, 2]


def test_a_fetch_leaves_todays_bar_out():
    today = pd.Timestamp.now('America/New_York').tz_localize(None).normalize()
    days = [today - pd.Timedelta(days=3), today + pd.Timedelta(days=1)]
    prices = YahooSource(lambda *_: yahoo_frame(days)).fetch('AAPL', days[0], days[1])
    assert prices.index.tolist() == [days[0]]


# a split between two fetches

def test_a_split_between_two_fetches_leaves_no_jump():
    days = pd.date_range('2020-08-26', periods=4)
    stored, later = flat(days[:3], [100, 102, 102]), flat(days[1:], [25.5, 25.5, 26])
    merged = merge_history(stored, later)
    assert merged['close'].tolist() == [25, 25.5, 25.5, 26]
    assert merged['volume'].tolist() == [1600, 400, 400, 400]
    assert merged['close'].pct_change().abs().max() < 0.03
    check_prices(merged, 'AAPL')


def test_many_shares_becoming_one_leaves_no_jump():
    days = pd.DatetimeIndex(['2024-03-20', '2024-03-21', '2024-03-22'])
    merged = merge_history(flat(days[:2], [0.021, 0.018]), flat(days[1:], [3.42, 2.51]))
    np.testing.assert_allclose(merged['close'], [3.99, 3.42, 2.51])


def test_a_dividend_between_two_fetches_changes_adjusted_closes_only():
    stored, later = flat(DAYS[:2], [100, 100]), flat(DAYS[1:], [100, 101])
    later['adj_close'] = [98.0, 101.0]
    merged = merge_history(stored, later)
    assert merged['close'].tolist() == [100, 100, 101]
    np.testing.assert_allclose(merged['adj_close'], [98, 98, 101])


@pytest.mark.parametrize('stored, later, message', [
    (flat(DAYS[:1], [100]), flat(DAYS[2:], [25]), 'does not overlap'),
    (flat(DAYS[:2], [100, 102]), flat(['2024-01-08', '2024-01-09'], [25.5, 26]), 'does not overlap'),
    (flat(DAYS, [100, 102, 104]), flat(DAYS[1:], [25.5, 27]), 'does not agree'),
    (flat(DAYS, [100, 102, 104]), flat([DAYS[1]], [102]), 'does not agree'), # ends before the stored one
    (flat(DAYS, [100, 102, 104]), flat([DAYS[0], DAYS[2]], [100, 104]), 'does not agree'), # a day has gone
    (price_table(DAYS[:1], [[10, 11, 9, 10.5, 10.5, 1]]), price_table(DAYS[:1], [[10, 12, 9, 11.5, 11.5, 2]]),
     'does not agree')]) # the stored bar was not final
def test_what_cannot_be_joined_is_fetched_whole(stored, later, message):
    with pytest.raises(DataError, match=f'AAPL, .*{message}.*; fetch the whole history again'):
        merge_history(stored, later, 'AAPL')


def test_an_empty_fetch_is_not_joined():
    with pytest.raises(DataError, match='has no rows'): merge_history(flat(DAYS, [1, 2, 3]), flat([], []))


@settings(max_examples=40, deadline=None)
@given(factor=st.sampled_from([1, 2, 3, 4, 10, 20, 1.5, 1.05, 1 / 8, 1 / 190]), cut=st.integers(1, 200),
       overlap=st.integers(1, 20), dividend=st.floats(0, 0.1))
def test_joining_never_changes_a_return(factor, cut, overlap, dividend):
    whole = load_prices('AAPL').iloc[:240]
    stored = whole.iloc[:cut + overlap].copy()
    stored[['open', 'high', 'low', 'close']] *= factor
    stored['adj_close'] *= factor / (1 - dividend)
    stored['volume'] /= factor
    pd.testing.assert_frame_equal(merge_history(stored, whole.iloc[cut:]), whole, rtol=1e-12)


# dated facts

ROWS = {
    read_headlines: 'AAPL,2023-08-03T16:30-04:00,earnings,"Apple earned 1.26 USD, a bit more",positive,company release',
    read_macro: 'US,2022-09-13T08:30:00-04:00,inflation,August prices rose 8.3 % on the year,hawkish,BLS',
    read_forum: 'AAPL,2023-08-01T10:26:40-04:00,market_talk,-3,Waiting,"Two lines,\nof text",composed',
    read_quarterly_eps: 'INTC,2022Q4,2023-01-26T16:00-05:00,-0.16'}
HEADERS = {
    read_headlines: 'ticker,released_at,kind,headline,tone,origin',
    read_macro: 'country,released_at,kind,headline,stance,origin',
    read_forum: 'ticker,released_at,community,score,title,text,origin',
    read_quarterly_eps: 'ticker,fiscal_quarter,released_at,diluted_eps_gaap'}
READERS = list(ROWS)


@pytest.fixture
def read(tmp_path):
    def reading(reader, *lines, header=None):
        path = tmp_path/'facts.csv'
        path.write_text('\n'.join([header or HEADERS[reader], *lines]) + '\n', encoding='utf-8')
        return reader(path)
    return reading


@pytest.mark.parametrize('reader', READERS)
def test_a_fact_is_read_with_its_moment_and_the_text_it_had(reader, read):
    facts = read(reader, ROWS[reader])
    assert list(facts) == [*HEADERS[reader].split(','), 'released_text']
    assert facts['released_text'][0] in ROWS[reader]
    assert facts['released_at'][0] == pd.Timestamp(facts['released_text'][0])
    assert str(facts['released_at'].dtype) == 'datetime64[us, UTC]'


@pytest.mark.parametrize('reader', READERS)
def test_a_file_without_lines_is_an_empty_table_of_the_same_types(reader, read):
    empty, facts = read(reader), read(reader, ROWS[reader])
    assert empty.empty and list(empty) == list(facts)
    numbers = [c for c in facts if facts[c].dtype.kind in 'ifM']
    assert [empty[c].dtype.kind for c in numbers] == [facts[c].dtype.kind for c in numbers]


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path):
    path = tmp_path/'headlines.csv'
    path.write_bytes(b'\xef\xbb\xbf' + f'{HEADERS[read_headlines]}\r\n{ROWS[read_headlines]}\r\n'.encode())
    assert read_headlines(path)['headline'].tolist() == ['Apple earned 1.26 USD, a bit more']


def test_facts_come_oldest_first_across_offsets(read):
    line = 'AAPL,{},earnings,Something,neutral,company'
    facts = read(read_headlines, line.format('2023-08-03T16:30-04:00'), line.format('2023-08-03T21:00+02:00'))
    assert facts['released_text'].tolist() == ['2023-08-03T21:00+02:00', '2023-08-03T16:30-04:00']


def test_facts_of_one_moment_keep_the_order_of_the_file(read):
    kinds = [f'kind {i}' for i in range(60)]
    lines = [f'US,2023-08-0{1 + i % 2}T08:30-04:00,{kind},Something,neutral,BLS' for i, kind in enumerate(kinds)]
    assert read(read_macro, *lines)['kind'].tolist() == kinds[::2] + kinds[1::2]


@pytest.mark.parametrize('reader, old, new, message', [
    (read_headlines, 'positive', 'Positive', "tone is 'Positive', not positive, neutral or negative"),
    (read_headlines, 'positive', '', "tone is ''"),
    (read_headlines, '-04:00', '', 'not a time with its offset'),
    (read_headlines, '-04:00', 'Z', 'not a time with its offset'),
    (read_headlines, '2023-08-03T16:30-04:00', '2023-08-03', 'not a time with its offset'),
    (read_headlines, 'T16:30', 'T24:30', 'not in the calendar'),
    (read_headlines, '2023-08', '2023-13', 'not in the calendar'),
    (read_headlines, '"Apple earned 1.26 USD, a bit more"', '', "headline is '', not text that says something"),
    (read_headlines, 'company release', '  ', "origin is '  '"),
    (read_headlines, 'AAPL', '../AAPL', "ticker is '../AAPL', not a ticker"),
    (read_headlines, ',company release', '', 'line 2 has 5 fields instead of 6'),
    (read_macro, 'hawkish', 'bearish', "stance is 'bearish', not hawkish"),
    (read_macro, 'US,', 'usa,', "country is 'usa'"),
    (read_forum, 'composed', 'reddit', "origin is 'reddit', not composed or imported"),
    (read_forum, '-3', '3.5', "score is '3.5', not a whole number"),
    (read_forum, 'Waiting', '', "title is ''"),
    (read_quarterly_eps, '2022Q4', '2022Q5', "fiscal_quarter is '2022Q5', not a quarter such as 2023Q3"),
    (read_quarterly_eps, '-0.16', 'n/a', "diluted_eps_gaap is 'n/a', not a number")])
def test_a_wrong_fact_is_named_with_its_line(reader, old, new, message, read):
    assert old in ROWS[reader]
    with pytest.raises(DataError) as caught: read(reader, ROWS[reader].replace(old, new, 1))
    assert 'facts.csv' in str(caught.value) and 'line ' in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize('reader', READERS)
def test_unknown_and_missing_columns_are_refused(reader, read):
    for header in (HEADERS[reader] + ',mood', HEADERS[reader].replace('released_at', 'date'), 'x'):
        with pytest.raises(DataError, match='facts.csv: the columns are'): read(reader, ROWS[reader], header=header)


def test_an_empty_forum_body_is_allowed(read):
    assert read(read_forum, 'AAPL,2023-08-01T10:26:40-04:00,market_talk,1,Title,,composed')['text'].tolist() == ['']


def test_a_missing_file_and_undecodable_bytes_are_told(tmp_path):
    with pytest.raises(DataError, match='no.csv: the file is missing'): read_macro(tmp_path/'no.csv')
    (tmp_path/'bad.csv').write_bytes(b'\xff\xfe\x00')
    with pytest.raises(DataError, match='bad.csv: the file is damaged'): read_macro(tmp_path/'bad.csv')
    (tmp_path/'quote.csv').write_text(f'{HEADERS[read_headlines]}\nAAPL,"half')
    with pytest.raises(DataError, match='quote.csv: the file is damaged'): read_headlines(tmp_path/'quote.csv')


def test_facts_survive_parquet(read, tmp_path):
    facts = read(read_headlines, ROWS[read_headlines])
    write_table(facts, tmp_path/'headlines.parquet')
    pd.testing.assert_frame_equal(read_table(tmp_path/'headlines.parquet'), facts)


# earnings

def quarters_of(read, *rows):
    return read(read_quarterly_eps, *[f'INTC,{quarter},{moment},{eps}' for quarter, moment, eps in rows])


INTEL = (('2022Q4', '2023-01-26T16:00-05:00', '-0.16'), ('2023Q1', '2023-04-27T16:00-04:00', '-0.66'),
         ('2023Q2', '2023-07-27T16:00-04:00', '0.35'), ('2023Q3', '2023-10-26T16:00-04:00', '0.07'),
         ('2023Q4', '2024-01-25T16:00-05:00', '0.63'))


def test_trailing_earnings_count_what_was_released(read):
    trailing = trailing_earnings(quarters_of(read, *INTEL[::-1]), 'INTC')
    assert trailing['fiscal_quarter'].tolist() == [quarter for quarter, _, _ in INTEL]
    np.testing.assert_equal(trailing['trailing_eps'].tolist(), [np.nan] * 3 + [-0.4, 0.39])
    at_new_year = trailing[trailing['released_at'] <= pd.Timestamp('2024-01-02', tz='UTC')].iloc[-1]
    assert at_new_year['trailing_eps'] == -0.4


@pytest.mark.parametrize('gone', range(5))
def test_a_gap_makes_the_sum_missing(gone, read):
    kept = [row for i, row in enumerate(INTEL) if i != gone]
    known = trailing_earnings(quarters_of(read, *kept), 'INTC')['trailing_eps'].dropna().tolist()
    assert known == {0: [0.39], 4: [-0.4]}.get(gone, [])


def test_a_late_quarter_counts_from_its_release(read):
    late = [*INTEL[:1], (INTEL[1][0], '2023-12-01T16:00-05:00', INTEL[1][2]), *INTEL[2:4]]
    trailing = trailing_earnings(quarters_of(read, *late), 'INTC')
    assert trailing['fiscal_quarter'].tolist() == ['2022Q4', '2023Q2', '2023Q3', '2023Q3']
    np.testing.assert_equal(trailing['trailing_eps'].tolist(), [np.nan] * 3 + [-0.4])


def test_nothing_later_changes_what_was_known(read):
    whole, part = (trailing_earnings(quarters_of(read, *INTEL[:n]), 'INTC') for n in (5, 4))
    pd.testing.assert_frame_equal(whole[:4], part)


def test_a_ticker_without_earnings_has_an_empty_table(read):
    none = trailing_earnings(quarters_of(read, *INTEL), 'SPY')
    assert none.empty and list(none) == ['released_at', 'fiscal_quarter', 'trailing_eps']
    assert (none['released_at'] <= pd.Timestamp.now('UTC')).sum() == 0


def test_a_quarter_given_twice_is_refused(read):
    with pytest.raises(DataError, match='INTC, 2023-04-27: 2023Q1 comes twice; keep one of the lines'):
        quarters_of(read, *INTEL[:2], INTEL[1])


# a user's own export

POST = {'created_utc': 1690900000, 'subreddit': 'stocks', 'score': 12, 'title': 'Waiting', 'selftext': 'What now?',
        'id': 'x'}


def export(tmp_path, *posts):
    path = tmp_path/'export.jsonl'
    path.write_text('\n'.join(post if isinstance(post, str) else json.dumps(post) for post in posts), encoding='utf-8')
    return path


def test_an_export_becomes_a_forum_table(tmp_path, read):
    posts = import_forum(export(tmp_path, POST, '', POST | {'created_utc': 1690800000.5}), 'AAPL')
    assert list(posts) == list(read(read_forum, ROWS[read_forum]))
    # never before the post: fractions of a second are rounded up
    assert posts['released_text'].tolist() == ['2023-07-31T10:40:01+00:00', '2023-08-01T14:26:40+00:00']
    assert set(posts['origin']) == {'imported'} and set(posts['ticker']) == {'AAPL'} and posts['score'].dtype == 'int64'


def test_an_imported_table_can_be_written_and_read_like_any_other(tmp_path):
    posts = import_forum(export(tmp_path, POST, POST | {'title': 'Half a \ud83d', 'selftext': None}), 'AAPL')
    written = posts.assign(released_at=posts['released_text']).drop(columns='released_text')
    written.to_csv(tmp_path/'forum.csv', index=False)
    pd.testing.assert_frame_equal(read_forum(tmp_path/'forum.csv'), posts)


@pytest.mark.parametrize('body, text', [
    (None, ''), ('', ''), ('[deleted]', ''), ('[removed]', ''), ('[ Removed by Reddit ]', ''), (' [deleted] ', ''),
    ('They [deleted] it', 'They [deleted] it'), ('two\nlines', 'two\nlines')])
def test_bodies_taken_back_are_empty(body, text, tmp_path):
    assert import_forum(export(tmp_path, POST | {'selftext': body}), 'AAPL')['text'].tolist() == [text]


def test_missing_body_and_score_are_allowed(tmp_path):
    bare = {key: POST[key] for key in ('created_utc', 'subreddit', 'title')}
    assert import_forum(export(tmp_path, bare), 'AAPL')[['score', 'text']].values.tolist() == [[0, '']]


@pytest.mark.parametrize('line, message', [
    ('{"created_utc": 16', 'Expecting'), ('[]', 'it is not a JSON object'), ('null', 'it is not a JSON object'),
    ('[' * 100_000, ''), (POST | {'created_utc': 1690900000000}, 'not seconds since 1970'),
    (POST | {'created_utc': None}, 'not seconds since 1970'), (POST | {'created_utc': True}, 'not seconds since 1970'),
    (POST | {'created_utc': float('nan')}, 'not seconds'), (POST | {'created_utc': 'yesterday'}, 'yesterday'),
    (POST | {'created_utc': [1]}, ''), (POST | {'score': 'many'}, "score is 'many', not a whole number"),
    (POST | {'score': True}, 'not a whole number'), (POST | {'score': 10**30}, 'not a whole number'),
    (POST | {'title': ' '}, 'title is missing'), (POST | {'subreddit': None}, 'subreddit is missing'),
    (POST | {'selftext': 5}, '')])
def test_a_line_that_is_no_post_is_named(line, message, tmp_path):
    with pytest.raises(DataError) as caught: import_forum(export(tmp_path, POST, '', line), 'AAPL')
    assert 'export.jsonl, AAPL: line 3: ' in str(caught.value) and message in str(caught.value)
    assert str(caught.value).endswith('; correct or delete the line')


def test_an_export_that_cannot_be_read_is_told(tmp_path):
    with pytest.raises(DataError, match='no.jsonl, AAPL: the file cannot be read'):
        import_forum(tmp_path/'no.jsonl', 'AAPL')
    (tmp_path/'bad.jsonl').write_bytes(b'\xff\xfe\x00')
    with pytest.raises(DataError, match='export it again as UTF-8'): import_forum(tmp_path/'bad.jsonl', 'AAPL')
    with pytest.raises(StockerError, match='is not a ticker'): import_forum(export(tmp_path, POST), '../x')


def test_threads_read_prices_at_once():
    barrier, closes = threading.Barrier(8), []

    def read_one():
        barrier.wait()
        closes.append(load_prices('META')['close'].sum())

    threads = [threading.Thread(target=read_one) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert len(set(closes)) == 1 and len(closes) == 8


def test_the_forms_are_the_columns_of_the_file():
    assert list(HEADLINE_FORMS) == HEADERS[read_headlines].split(',')
