"""Indicators against published numbers, and against the faults that other libraries have had."""
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stocker.market.core import DataError, StockerError
from stocker.market.indicators import (
    INDICATORS, average_true_range, bollinger_bands, gapless, indicator_table, macd, rsi, shown,
    simple_moving_average, window_mean_and_deviation)

RSI_PRICES = [29.685, 29.685, 29.685, 29.695, 29.715, 29.715, 29.735, 29.735, 29.725, 29.715, 29.705, 29.715, 29.675,
              29.615]
NO_LOSS = [294435.0] * 3 + [294500] * 3 + [294520] + [294539] * 2 + [294600] * 5 + [294700]
TURN = [*range(10, 41), 38, 36, 37, 35, 34]


def series(values, name='close'):
    return pd.Series(np.asarray(values, float), name=name)


def table_of(close):
    close = np.asarray(close, float)
    index = pd.bdate_range('2020-01-01', periods=len(close), name='date')
    return pd.DataFrame(dict(high=close * 1.01, low=close * 0.99, close=close), index=index)


def walk(sessions, seed=0):
    return table_of(100 * np.exp(np.cumsum(np.random.default_rng(seed).normal(0, 0.02, sessions))))


def test_rsi_needs_fifteen_prices():
    assert rsi(series(RSI_PRICES)).isna().all()
    assert rsi(series([*RSI_PRICES, 29.625])).iloc[-1] == pytest.approx(35.0)


@pytest.mark.parametrize('level', [20.0, 0.1, 100.1, 1e-9, 1e9])
def test_rsi_of_flat_prices_is_50(level):
    result = rsi(series([level] * 100))
    assert result[:14].isna().all() and (result[14:] == 50).all()


def test_rsi_without_a_loss_is_100_and_with_one_is_not():
    assert rsi(series(NO_LOSS)).iloc[-1] == 100
    one_loss = [*NO_LOSS[:5], 294400, *NO_LOSS[6:]]
    assert rsi(series(one_loss)).iloc[-1] == pytest.approx(78.49462366)
    assert rsi(series(np.arange(50, 20, -1))).iloc[-1] == 0


@pytest.mark.parametrize('before', [np.arange(10, 60), np.arange(100, 50, -1)])
def test_rsi_of_a_move_that_has_ended_is_50_after_a_full_flat_window(before):
    result = rsi(series([*before, *[before[-1]] * 600]))
    assert (result[len(before) + 13:] == 50).all()
    assert result[len(before) + 12] in (0, 100)


def test_macd_is_the_one_of_ta_lib():
    line, signal, histogram = macd(series(TURN))
    assert line.first_valid_index() == signal.first_valid_index() == histogram.first_valid_index() == 33
    np.testing.assert_allclose(line[33:], [6.01189419, 5.52944218, 5.00866705], rtol=1e-8)
    np.testing.assert_allclose(signal[33:], [6.78990825, 6.53781504, 6.23198544], rtol=1e-8)
    np.testing.assert_array_equal(histogram[33:], line[33:] - signal[33:])


def test_bollinger_uses_the_population_deviation():
    upper, middle, lower, position = (band.iloc[-1] for band in bollinger_bands(series(np.arange(1, 21))))
    assert (upper, middle, lower) == (pytest.approx(22.0325626), 10.5, pytest.approx(-1.0325626))
    assert position == pytest.approx((20 - lower) / (upper - lower))


@pytest.mark.parametrize('level', [100, 0.1, 100.1, 1 / 3, 1e9 + 0.1])
def test_bands_of_flat_prices_have_no_width_and_no_position(level):
    bands = bollinger_bands(series([level] * 60))
    assert (bands.upper[19:] == bands.lower[19:]).all() and (bands.middle[19:] == level).all()
    assert bands.position.isna().all()


@pytest.mark.parametrize('spike', [1e5, 1e9, 1e12, -1e9])
def test_an_earlier_spike_leaves_no_trace(spike):
    _, deviation = window_mean_and_deviation(np.array([spike, 0.1, 0.2, 0.3, 0.4]), 3)
    assert deviation[-1] * np.sqrt(3 / 2) == pytest.approx(0.1, rel=1e-14)
    after = [100.1] * 60
    for window in (20, 50):
        assert simple_moving_average(series([spike, *after]), window).iloc[-1] == 100.1
    bands = bollinger_bands(series([spike, *after]))
    assert bands.upper.iloc[-1] == bands.lower.iloc[-1]


def test_true_range_counts_the_close_before_and_starts_with_the_first_ranges_only():
    high, low = series([9, 7, 8, 7, 8, 8, 7, 7, 8, 7]), series([1, 2, 3, 3, 2, 1, 2, 2, 2, 3])
    close = series([4, 5, 6, 6, 6, 5, 5, 20, 6, 4])
    five = average_true_range(high, low, close, 5)
    assert five[:5].isna().all()
    np.testing.assert_allclose(five[5:], [5.4, 5.32, 5.256, 7.8048, 7.04384])
    np.testing.assert_allclose(average_true_range(high, low, close, 1)[1:], [5, 5, 4, 6, 7, 5, 5, 18, 4])
    assert average_true_range(high, low, close, 10).isna().all()


@pytest.mark.parametrize('sessions', [0, 1, 2, 10, 13, 14])
def test_a_short_history_is_missing_throughout(sessions):
    table = indicator_table(walk(sessions))
    assert table.shape == (sessions, len(INDICATORS)) and table.isna().all(axis=None)
    assert (table.dtypes == np.float64).all()


def test_warm_up_is_missing_never_zero_and_a_value_does_not_vanish_again():
    table = indicator_table(walk(300))
    warm_up = dict(rsi_14=14, macd=33, macd_signal=33, macd_histogram=33, sma_20=19, sma_50=49, sma_200=199,
                   bollinger_upper=19, bollinger_middle=19, bollinger_lower=19, bollinger_position=19, atr_14=14)
    for name, sessions in warm_up.items():
        assert table[name][:sessions].isna().all() and table[name][sessions:].notna().all(), name


def test_an_episode_cut_out_afterwards_keeps_its_values():
    prices = walk(400)
    whole, alone = indicator_table(prices)[300:], indicator_table(prices[300:])
    assert whole.notna().all(axis=None)
    assert alone.sma_200.isna().all() and abs(alone.macd.iloc[40] - whole.macd.iloc[40]) > 1e-6


@pytest.mark.parametrize('wrong', [np.nan, np.inf, -np.inf, None, 'n/a', pd.NA])
@pytest.mark.parametrize('column', ['high', 'low', 'close'])
def test_a_gap_is_refused_with_its_date(column, wrong):
    prices = walk(40)
    prices[column] = prices[column].astype(object)
    prices.iloc[30, prices.columns.get_loc(column)] = wrong
    date = str(prices.index[30])[:10]
    with pytest.raises(DataError, match=f'{date}: {column} is missing or not a finite number; .*before computing'):
        indicator_table(prices)


def test_sessions_have_to_increase():
    prices = walk(40)
    for wrong in (prices[::-1], pd.concat([prices, prices[-1:]]), pd.concat([prices[20:], prices[:20]])):
        with pytest.raises(DataError, match=r'^\d{4}-\d\d-\d\d: close: sessions do not increase'):
            indicator_table(wrong)


def test_absent_columns_are_named():
    with pytest.raises(DataError, match='no column high, low'): indicator_table(walk(40)[['close']])


def test_whole_numbers_and_other_columns_are_welcome():
    whole = table_of(np.arange(100, 200)).round().astype(int)
    pd.testing.assert_frame_equal(indicator_table(whole), indicator_table(whole.astype(float)))
    extra = whole.assign(volume=0, note='text')
    pd.testing.assert_frame_equal(indicator_table(extra), indicator_table(whole))


@pytest.mark.parametrize('unit', ['s', 'ms', 'us', 'ns'])
def test_the_unit_of_the_dates_does_not_matter(unit):
    prices = walk(60)
    prices.index = prices.index.as_unit(unit)
    table = indicator_table(prices)
    assert table.index.equals(prices.index) and table.index.dtype == prices.index.dtype
    np.testing.assert_array_equal(table, indicator_table(walk(60)))


def test_the_input_is_not_changed():
    prices = walk(60)
    before = prices.copy(deep=True)
    indicator_table(prices)
    pd.testing.assert_frame_equal(prices, before)


@pytest.mark.parametrize('value, text', [
    (35.0, '35.00'), (np.float64(1.005), '1.00'), (7, '7.00'), (-0.001, '0.00'), (-0.006, '-0.01'), (None, 'n/a'),
    (float('nan'), 'n/a'), (np.nan, 'n/a'), (pd.NA, 'n/a'), (pd.NaT, 'n/a')])
def test_shown(value, text):
    assert shown(value) == text


def test_shown_takes_decimals():
    assert [shown(12.3456, decimals) for decimals in (0, 1, 4)] == ['12', '12.3', '12.3456']
    with pytest.raises(StockerError, match='infinite'): shown(float('inf'))


prices_from_nowhere = st.lists(st.floats(0.01, 1e5), min_size=1, max_size=230).map(table_of)
flat_stretches = st.lists(st.tuples(st.floats(0.01, 1e5), st.integers(1, 40)), min_size=1, max_size=8).map(
    lambda runs: table_of([price for price, sessions in runs for _ in range(sessions)]))
histories = prices_from_nowhere | flat_stretches
thorough = settings(max_examples=60, deadline=None, database=None, derandomize=True)


@thorough
@given(histories, st.data())
def test_cutting_off_the_future_changes_nothing(prices, data):
    known = data.draw(st.integers(0, len(prices)))
    pd.testing.assert_frame_equal(indicator_table(prices[:known]), indicator_table(prices)[:known], check_exact=True)


@thorough
@given(histories, st.integers(-8, 12))
def test_a_power_of_two_scales_exactly(prices, power):
    table, scaled = indicator_table(prices), indicator_table(prices * 2.0**power)
    for name in INDICATORS:
        factor = 1.0 if name in ('rsi_14', 'bollinger_position') else 2.0**power
        np.testing.assert_array_equal(scaled[name], table[name] * factor, err_msg=name)


@thorough
@given(histories)
def test_everything_stays_in_its_bounds(prices):
    table = indicator_table(prices)
    assert not np.isinf(table.to_numpy()).any()
    assert table.rsi_14.dropna().between(0, 100).all() and (table.atr_14.dropna() >= 0).all()
    formed = table[19:]
    assert (formed.bollinger_lower <= formed.bollinger_middle).all()
    assert (formed.bollinger_middle <= formed.bollinger_upper).all()
    assert (formed.sma_20 == formed.bollinger_middle).all()


def test_a_dated_gap_message_is_one_line():
    prices = series([1, np.nan, 3])
    with pytest.raises(DataError) as caught: gapless(prices)
    assert '\n' not in str(caught.value)
