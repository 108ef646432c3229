"""Charts: the same bytes always, no figure left behind, safe in threads and forks, clear answers to bad input."""
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import warnings
from io import BytesIO
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from waiting import PATIENCE

from stocker.market import charts
from stocker.market.charts import (
    CHART_AVERAGES, CHART_SESSIONS, chart_frame, chart_png, empty_chart, write_charts)
from stocker.market.core import Bar, DataError, StockerError


def walk(sessions, seed=0, level=100.0):
    rng = np.random.default_rng(seed)
    close = level * np.exp(np.cumsum(rng.normal(0, 0.02, sessions)))
    open_ = close * (1 + rng.normal(0, 0.005, sessions))
    spread = close * rng.uniform(0.002, 0.02, sessions)
    return pd.DataFrame(dict(open=open_, high=np.maximum(open_, close) + spread, low=np.minimum(open_, close) - spread,
                             close=close, volume=rng.integers(1, 10**8, sessions).astype(float)),
                        index=pd.bdate_range('2022-01-03', periods=sessions, name='date'))


def as_bars(frame):
    return [Bar(str(date)[:10], *row) for date, row in zip(frame.index, frame.itertuples(index=False))]


def open_figures():
    import matplotlib.pyplot as plt
    return plt.get_fignums()


def test_the_same_bars_give_the_same_bytes_whatever_was_drawn_before():
    frame = walk(260)
    first = chart_png(frame, 'one')
    for other in (walk(1), walk(30, seed=1, level=1e5), walk(260, seed=2) * [1, 1, 1, 1, 0]):
        chart_png(other, 'another')
    assert chart_png(frame, 'one') == first
    assert chart_png(as_bars(frame), 'one') == chart_png(tuple(as_bars(frame)), 'one') == first
    empty_chart.cache_clear()
    assert chart_png(frame, 'one') == first


def test_another_process_without_a_screen_or_a_backend_gives_the_same_bytes():
    code = ('import sys, pickle; from stocker.market.charts import chart_png; import matplotlib.pyplot as plt; '
            'png = chart_png(*pickle.load(sys.stdin.buffer)); assert plt.get_fignums() == []; '
            'sys.stdout.buffer.write(png)')
    unset = ('MPLBACKEND', 'DISPLAY', 'WAYLAND_DISPLAY')
    environment = {k: v for k, v in os.environ.items() if k not in unset}
    job = walk(260), 'AAPL'
    done = subprocess.run([sys.executable, '-W', 'error', '-c', code], input=pickle.dumps(job), capture_output=True,
                          env=environment)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == chart_png(*job) and done.stderr == b''


def test_the_reader_s_style_neither_shows_nor_is_changed():
    import matplotlib
    frame = walk(100)
    plain = chart_png(frame)
    style = {'axes.facecolor': 'black', 'font.size': 30, 'lines.antialiased': False, 'text.hinting': 'default',
             'patch.linewidth': 5, 'axes.grid': False}
    with matplotlib.rc_context(style):
        before = dict(matplotlib.rcParams)
        empty_chart.cache_clear()
        assert chart_png(frame) == plain
        assert dict(matplotlib.rcParams) == before


def test_bars_beyond_the_ones_that_count_change_nothing():
    frame = walk(600)
    needed = CHART_SESSIONS + max(CHART_AVERAGES) - 1
    assert len(chart_frame(frame)) == needed
    assert chart_png(frame) == chart_png(frame.tail(needed)) == chart_png(frame.tail(260)) != chart_png(frame.tail(100))


def test_a_thousand_rows_draw_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert chart_png(walk(1000)) == chart_png(walk(1000).tail(260))


def test_the_future_cannot_show():
    frame = walk(300)
    changed = frame.copy()
    changed.iloc[281:] *= 3
    assert chart_png(frame[:281]) == chart_png(changed[:281]) != chart_png(changed[:282])


@pytest.mark.parametrize('sessions', [1, 2, 5, 19, 20, 59, 60, 61, 200])
def test_any_length_draws_without_a_warning(sessions):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        chart_png(walk(sessions), 'short')


@pytest.mark.parametrize('price', [20.0, 0.0, -37.63, 1e-6, 1e6])
@pytest.mark.parametrize('sessions', [1, 80])
def test_a_flat_price_without_volume_draws_without_a_warning(price, sessions):
    flat = walk(sessions).assign(open=price, high=price, low=price, close=price, volume=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        chart_png(flat, 'flat')


def test_titles_are_taken_literally():
    frame = walk(30)
    assert chart_png(frame, 'costs $5 and $6') != chart_png(frame, 'costs 5 and 6')
    assert chart_png(frame, r'$\frac{$') != chart_png(frame, '')


BROKEN = [
    (lambda f: f[:0], StockerError, 'at least one bar'),
    (lambda f: [], StockerError, 'at least one bar'),
    (lambda f: f.drop(columns=['open', 'volume']), StockerError, 'needs the column open, volume'),
    (lambda f: f.assign(close='high'), DataError, 'close is missing or not a finite number'),
    (lambda f: f.assign(close=['x' if i == 5 else x for i, x in enumerate(f.close)]), DataError,
     '2022-01-10: close is missing or not a finite number'),
    (lambda f: pd.concat([f[:40], f[40:41] * np.nan, f[41:]]), DataError,
     '2022-02-28: open is missing or not a finite number'),
    (lambda f: f.assign(volume=f.volume.where(f.index != f.index[50])), DataError, '2022-03-14: volume is missing'),
    (lambda f: f.assign(high=np.inf), DataError, 'high is missing or not a finite number'),
    (lambda f: f.set_axis([f'day {i}' for i in range(len(f))]), DataError, "'day 0' is not a date"),
    (lambda f: f.reset_index(drop=True), DataError, "'0' is not a date"),
    (lambda f: f.set_axis([pd.NaT, *f.index[1:]]), DataError, 'without a date'),
    (lambda f: f[::-1], DataError, 'have to increase'),
    (lambda f: pd.concat([f, f]), DataError, 'have to increase'),
    (lambda f: [Bar('2023-08-01', 1, 2, 0.5, None, 7)], DataError, '2023-08-01: close is missing'),
    (lambda f: [Bar('yesterday', 1, 2, 0.5, 1, 7)], DataError, "'yesterday' is not a date"),
]


@pytest.mark.parametrize('spoil, error, message', BROKEN)
def test_what_cannot_be_drawn_is_refused_in_one_line(spoil, error, message):
    with pytest.raises(error, match=message) as caught: chart_png(spoil(walk(80)))
    assert '\n' not in str(caught.value) and open_figures() == []


def test_text_dates_and_whole_numbers_are_welcome():
    frame = walk(80)
    assert chart_png(frame.set_axis(frame.index.strftime('%Y-%m-%d'))) == chart_png(frame)
    whole = frame.round().astype(int)
    assert chart_png(whole) == chart_png(whole.astype(float)) == chart_png(whole.astype(object))


@pytest.mark.parametrize('unit', ['s', 'ms', 'us', 'ns'])
def test_the_unit_of_the_dates_does_not_show(unit):
    frame = walk(80)
    assert chart_png(frame.set_axis(frame.index.as_unit(unit))) == chart_png(frame)


def test_thirty_charts_of_which_one_fails_leave_no_figure_and_no_warning(monkeypatch):
    frame = walk(100)
    clean, real = chart_png(frame), charts.draw_volume
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for number in range(30):
            if number == 17:
                def fails(*_): raise RuntimeError('in the middle of a chart')
                monkeypatch.setattr(charts, 'draw_volume', fails)
                with pytest.raises(RuntimeError): chart_png(walk(100, seed=9), 'half')
                monkeypatch.setattr(charts, 'draw_volume', real)
            else: chart_png(walk(20 + number, seed=number))
            assert open_figures() == []
    assert chart_png(frame) == clean


def draw_into(pipe, frame):
    pipe.send(chart_png(frame))


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs fork')
@pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
def test_a_fork_while_another_thread_draws_does_not_hang():
    frame, stop, drawing = walk(80), threading.Event(), threading.Event()
    expected = chart_png(frame)
    def busy():
        while not stop.is_set():
            chart_png(walk(80, seed=1))
            drawing.set()
    thread = threading.Thread(target=busy)
    thread.start()
    try:
        assert drawing.wait(PATIENCE)
        here, there = multiprocessing.Pipe()
        child = multiprocessing.get_context('fork').Process(target=draw_into, args=(there, frame))
        child.start()
        assert here.poll(PATIENCE), 'the forked process hangs'
        assert here.recv() == expected
        child.join(PATIENCE)
    finally:
        stop.set()
        thread.join()


def jobs_in(folder, count):
    frame = walk(280)
    return [(folder/f'{number}.png', as_bars(frame[:240 + number]), f'chart {number}') for number in range(count)]


def test_many_charts_are_the_same_charts(tmp_path):
    jobs = jobs_in(tmp_path/'charts', 10)
    write_charts(jobs, progress=False)
    assert sorted(p.name for p in (tmp_path/'charts').iterdir()) == sorted(p.name for p, _, _ in jobs)
    for path, bars, title in jobs[::4]: assert path.read_bytes() == chart_png(bars, title)


def test_no_chart_is_drawn_if_one_cannot_be(tmp_path):
    bad = tmp_path/'bad.png', [Bar('2023-08-01', 1, 2, 0.5, float('nan'), 7)], ''
    jobs = [*jobs_in(tmp_path/'charts', 40), bad]
    with pytest.raises(StockerError, match=r'bad\.png: 2023-08-01: close is missing'): write_charts(jobs)
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_draw_is_no_error(capsys):
    write_charts([])
    assert capsys.readouterr() == ('', '')


def test_no_progress_bar_for_what_is_quick(tmp_path, capsys):
    write_charts(jobs_in(tmp_path, 2))
    assert capsys.readouterr() == ('', '')


def test_works_without_ipywidgets(tmp_path):
    code = ("import sys; sys.modules['ipywidgets'] = None\n"
            'from pathlib import Path; from test_charts import jobs_in, write_charts\n'
            f"write_charts(jobs_in(Path({str(tmp_path)!r}), 2))")
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr


def test_importing_charts_loads_no_plotting_library():
    code = ('import sys, stocker.market.charts; heavy = {"matplotlib", "mplfinance", "PIL", "tqdm", "talib"}; '
            'print(sorted(heavy & set(sys.modules)))')
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout == '[]\n'


def test_the_picture_shows_up_blue_and_down_orange():
    from PIL import Image
    rising = walk(60).assign(open=lambda f: f.low, close=lambda f: f.high)
    falling = walk(60).assign(open=lambda f: f.high, close=lambda f: f.low)
    def share(frame, test):
        picture = Image.open(BytesIO(chart_png(frame))).convert('RGB')
        return test(np.asarray(picture).astype(int)).mean()
    def blue(rgb): return (rgb[..., 2] - rgb[..., 0] > 100) & (rgb[..., 2] - rgb[..., 1] > 40)
    def orange(rgb): return rgb[..., 0] - rgb[..., 2] > 100
    assert share(rising, blue) > 0.01 > 10 * share(rising, orange)
    assert share(falling, orange) > 0.01 > 10 * share(falling, blue)
