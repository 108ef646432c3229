"""The data set: the same bytes twice, the old one kept when a build fails, and damage found and named."""
import hashlib
import json
import os
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from stocker.trading import dataset
from stocker.market.charts import write_charts
from stocker.market.core import DataError, StockerError, canonical_json, data_path, sha256_of
from stocker.market.data import (
    PRICE_COLUMNS, FolderSource, RateLimited, fetch_all, load_prices, read_table, write_table)
from stocker.market.facts import import_forum
from stocker.trading.dataset import (
    BUILT, FACT_FILES, FIRST_DAYS, SHIPPED, TABLES, build_dataset, check_dataset, dataset_files, dataset_symbols,
    fetch_prices, file_problems, files_like, using_data)
from stocker.market.episodes import TASKS, load_task

DAY = '2023-08-15'
PACKAGE_CHARTS = data_path('charts')


def contents(folder):
    "The checksum of every file below a folder."
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob('*')) if path.is_file()}


class Memory:
    "A source that answers from tables, and with an error where it has one."

    name, adjustment = 'memory', 'splits, not dividends'

    def __init__(self, **answers):
        self.answers, self.asked = answers, []

    def fetch(self, ticker, start, end):
        self.asked.append(ticker)
        answer = self.answers.get(ticker.replace('=', '_'), load_prices(ticker))
        if isinstance(answer, list): answer = answer.pop(0) if len(answer) > 1 else answer[0]
        if isinstance(answer, BaseException): raise answer
        return answer


@pytest.fixture(scope='module')
def market(tmp_path_factory):
    "The prices of the data set as a folder of CSV files."
    folder = tmp_path_factory.mktemp('source')/'market'
    folder.mkdir()
    for symbol in dataset_symbols():
        table = load_prices(symbol).reset_index()
        lines = [f"{row[0]:%Y-%m-%d},{','.join(repr(float(value)) for value in row[1:])}"
                 for row in table.itertuples(index=False)]
        text = '\n'.join([f"date,{','.join(PRICE_COLUMNS)}", *lines, ''])
        (folder/f"{symbol.replace('=', '_')}.csv").write_text(text)
    return FolderSource(folder)


def few_charts(jobs, progress):
    "Draw the charts of five days; the others are those of the package."
    for path, *_ in jobs:
        path.parent.mkdir(exist_ok=True)
        shutil.copyfile(PACKAGE_CHARTS/path.name, path)
    write_charts([job for job in jobs if job[0].name.startswith('META_2022-10-2')][:5], progress=False)


@pytest.fixture(scope='module')
def built(market, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, 'write_charts', few_charts)
        return build_dataset(market, tmp_path_factory.mktemp('built')/'data', progress=False)


@pytest.fixture
def quick(built, monkeypatch):
    "Builds that take their prices and charts from the first one."
    def copied(jobs, progress): shutil.copytree(built/'charts', jobs[0][0].parent)
    monkeypatch.setattr(dataset, 'fetch_prices', lambda *arguments: read_table(built/'prices.parquet'))
    monkeypatch.setattr(dataset, 'write_charts', copied)


@pytest.fixture
def copy(tmp_path):
    "A copy of the committed data set, to be damaged."
    return Path(shutil.copytree(data_path(), tmp_path/'data'))


def reseal(folder):
    "Write a record that agrees with the files as they are now."
    record = json.loads((folder/'manifest.json').read_text())
    record['files'] = {name: sha256_of(folder/name) for name in files_like(folder, BUILT + SHIPPED)}
    (folder/'manifest.json').write_text(canonical_json(record))


# --- building ---

def test_a_build_from_the_prices_of_the_package_gives_its_tables(built):
    for name in TABLES:
        found, expected = read_table(built/f'{name}.parquet'), read_table(data_path(f'{name}.parquet'))
        pd.testing.assert_frame_equal(found, expected, rtol=1e-9)
    assert dataset_files(built) == dataset_files(data_path())
    for name in FACT_FILES: assert (built/'facts'/name).read_bytes() == data_path('facts', name).read_bytes()


def test_a_build_is_sound_and_leaves_nothing_beside_it(built):
    assert check_dataset(built) == []
    assert [path.name for path in built.parent.iterdir()] == ['data']
    assert not [name for name in contents(built) if name.endswith('.tmp') or name.startswith('.')]


def test_building_again_gives_the_same_bytes(market, built, tmp_path, monkeypatch):
    "Every table, the README, the record, and the charts that both builds drew."
    monkeypatch.setattr(dataset, 'write_charts', few_charts)
    assert contents(build_dataset(market, tmp_path/'again', progress=False)) == contents(built)


def test_the_files_of_a_build_can_be_read_by_everyone(built):
    assert all((built/name).stat().st_mode & 0o044 == 0o044
               for name in [*dataset_files(built), 'README.md', 'manifest.json'])


def test_a_build_over_an_older_data_set_replaces_it(market, built, quick, copy):
    write_table(read_table(copy/'news.parquet').iloc[1:], copy/'news.parquet')
    before = contents(copy)
    with pytest.raises(StockerError, match='lies there already'): build_dataset(market, copy, progress=False)
    assert contents(copy) == before
    build_dataset(market, copy, progress=False, replace=True)
    found, expected = contents(copy), {name: sha for name, sha in contents(built).items() if name != 'manifest.json'}
    assert {name: found[name] for name in expected} == expected and check_dataset(copy) == []


def test_the_readme_names_every_column_and_checksum(built):
    text = (built/'README.md').read_text()
    for name, (_, columns) in TABLES.items():
        assert f'## {name}.parquet' in text and all(f'| `{column}` |' in text for column in columns)
    assert all(f'{sha256_of(built/name)}  {name}' in text for name in dataset_files(built))


def test_imported_posts_become_part_of_a_sound_data_set(market, quick, tmp_path):
    line = {'created_utc': 1690900000, 'subreddit': 'stocks', 'score': 5, 'title': 'A title', 'selftext': ''}
    (tmp_path/'posts.jsonl').write_text(json.dumps(line))
    folder = build_dataset(market, tmp_path/'data', posts=[import_forum(tmp_path/'posts.jsonl', 'AAPL')],
                           progress=False)
    assert (read_table(folder/'forum.parquet')['origin'] == 'imported').sum() == 1
    assert check_dataset(folder) == []


def test_imported_posts_among_the_facts_are_not_counted_twice(market, quick, tmp_path):
    shutil.copytree(data_path('facts'), tmp_path/'facts')
    text = (tmp_path/'facts'/'forum.csv').read_text()
    (tmp_path/'facts'/'forum.csv').write_text(text.replace(',composed\n', ',imported\n', 1))
    folder = build_dataset(market, tmp_path/'data', facts=tmp_path/'facts', progress=False)
    assert (read_table(folder/'forum.parquet')['origin'] == 'imported').sum() == 1
    assert check_dataset(folder) == []


# --- builds that fail ---

@pytest.fixture
def old(tmp_path):
    "A folder that already holds something, and what it holds."
    folder = tmp_path/'data'
    (folder/'charts').mkdir(parents=True)
    (folder/'prices.parquet').write_bytes(b'old prices')
    (folder/'charts'/'AAPL_2023-08-01.png').write_bytes(b'old chart')
    return folder


def fails_without_a_trace(folder, error_type, build):
    before, surroundings = contents(folder), sorted(path.name for path in folder.parent.iterdir())
    with pytest.raises(error_type) as error: build()
    assert contents(folder) == before
    assert sorted(path.name for path in folder.parent.iterdir()) == surroundings
    assert 'STOCKER_DATA' not in os.environ and load_task('task_easy').steps == 43
    return str(error.value)


@pytest.mark.parametrize('fault, error_type', [
    (RuntimeError('the line is dead'), StockerError), (DataError('delisted', ticker='INTC'), StockerError),
    (KeyboardInterrupt(), KeyboardInterrupt)])
def test_a_source_that_fails_in_the_middle_leaves_the_old_data_set(old, fault, error_type):
    def work(): build_dataset(Memory(INTC=fault), old, progress=False, replace=True)
    text = fails_without_a_trace(old, error_type, work)
    assert '\n' not in text and (error_type is KeyboardInterrupt or 'INTC' in text)


def test_a_build_that_fails_at_its_charts_leaves_the_old_data_set(old, quick, market, monkeypatch):
    def broken(jobs, progress): raise DataError('no ink', file='chart.png')
    monkeypatch.setattr(dataset, 'write_charts', broken)
    fails_without_a_trace(old, DataError, lambda: build_dataset(market, old, progress=False, replace=True))


def test_a_build_that_fails_at_its_facts_leaves_the_old_data_set(old, quick, market, tmp_path):
    facts = shutil.copytree(data_path('facts'), tmp_path/'facts')
    (facts/'macro.csv').write_text('country,when\n')
    def work(): build_dataset(market, old, facts, progress=False, replace=True)
    text = fails_without_a_trace(old, StockerError, work)
    assert 'macro.csv' in text and '\n' not in text


def test_a_folder_without_facts_is_named(old, quick, market, tmp_path):
    (tmp_path/'facts').mkdir()
    text = fails_without_a_trace(old, StockerError,
                                 lambda: build_dataset(market, old, tmp_path/'facts', progress=False, replace=True))
    assert 'headlines.csv' in text and '\n' not in text


def test_a_window_that_ends_before_the_tasks_is_refused(old):
    text = fails_without_a_trace(
        old, StockerError, lambda: build_dataset(Memory(**{symbol.replace('=', '_'): load_prices(symbol)[:'2022-12-30']
                                                           for symbol in dataset_symbols()}), old,
                                                    replace=True, progress=False))
    assert 'AAPL' in text and '\n' not in text


@pytest.mark.parametrize('answer, words', [
    (lambda: load_prices('SNAP').iloc[:0], ['SNAP', 'no prices']),
    (lambda: load_prices('SNAP').drop(pd.Timestamp(DAY)), ['SNAP', DAY, 'session is missing']),
    (lambda: pd.concat([load_prices('SNAP'), load_prices('SNAP').iloc[-1:]]), ['SNAP', 'more than once']),
    (lambda: load_prices('SNAP').drop(pd.Timestamp(DAY)).reindex(load_prices('SNAP').index), ['SNAP', DAY, 'missing']),
    (lambda: load_prices('SNAP') * -1.0, ['SNAP', '2017-03-02', 'not above zero']),
    (lambda: TimeoutError('too slow'), ['SNAP', 'too slow'])])
def test_a_ticker_that_a_source_cannot_give_is_named(answer, words):
    with pytest.raises(StockerError) as error: fetch_prices(Memory(SNAP=answer()), progress=False)
    assert all(word in str(error.value) for word in words) and '\n' not in str(error.value)


def test_a_share_that_stops_before_the_last_day_is_not_taken(monkeypatch):
    with pytest.raises(StockerError, match='SPY') as error:
        fetch_prices(Memory(SPY=load_prices('SPY').iloc[:-1]), progress=False)
    assert '2026-04-30' in str(error.value)


def test_a_source_that_refuses_once_is_asked_again(monkeypatch):
    waits = []
    monkeypatch.setattr(dataset, 'fetch_all', partial(fetch_all, wait=waits.append))
    source = Memory(MSFT=[RateLimited('MSFT: wait'), load_prices('MSFT')])
    found = fetch_prices(source, progress=False)
    assert len(waits) == 1 and source.asked.count('MSFT') == 2
    assert found['ticker'].nunique() == len(dataset_symbols()) and list(found) == ['ticker', 'date', *PRICE_COLUMNS]


def test_a_source_that_keeps_refusing_is_given_up(old, monkeypatch):
    waits = []
    monkeypatch.setattr(dataset, 'fetch_all', partial(fetch_all, wait=waits.append))
    source = Memory(AAPL=RateLimited('AAPL: Yahoo refuses; wait, then try again'))
    text = fails_without_a_trace(old, StockerError, lambda: build_dataset(source, old, progress=False, replace=True))
    assert 'AAPL' in text and 'try again' in text and len(waits) == 2 and source.asked == ['AAPL'] * 3


def test_every_symbol_is_asked_for_once_from_its_first_day():
    class Asking(Memory):
        def fetch(self, ticker, start, end):
            self.asked.append((ticker, str(start), str(end)))
            return load_prices(ticker)
    source = Asking()
    fetch_prices(source, progress=False)
    assert source.asked == [(symbol, FIRST_DAYS.get(symbol, '2015-01-02'), '2026-04-30')
                            for symbol in dataset_symbols()]


def test_another_data_set_is_used_only_inside_the_block(copy):
    inside = load_prices('AAPL')
    with using_data(copy):
        assert data_path() == copy
        assert load_task('task_easy').chart_folder == copy/'charts'
        pd.testing.assert_frame_equal(load_prices('AAPL'), inside)
    assert load_task('task_easy').chart_folder == data_path('charts') != copy/'charts'


# --- damage ---

def of_day(table, ticker='AAPL', day=DAY):
    return (table['ticker'] == ticker) & (table['date'] == day)


def with_cell(column, value):
    def change(table):
        table.loc[of_day(table), column] = value
        return table
    return change


def swapped(table):
    rows = of_day(table)
    table.loc[rows, ['high', 'low']] = table.loc[rows, ['low', 'high']].to_numpy()
    return table


def with_another(table, date):
    more = table[of_day(table)].assign(date=pd.Timestamp(date))
    return pd.concat([table, more]).sort_values(['ticker', 'date'], ignore_index=True)


PRICE_DAMAGE = {
    'missing open': (with_cell('open', np.nan), 'open'), 'zero close': (with_cell('close', 0.0), 'close'),
    'negative volume': (with_cell('volume', -1), 'volume'), 'high and low swapped': (swapped, 'low'),
    'infinite low': (with_cell('low', np.inf), 'low'),
    'session missing': (lambda table: table[~of_day(table)].reset_index(drop=True), 'session is missing'),
    'date twice': (lambda table: with_another(table, DAY), 'more than once'),
    'a day of rest': (lambda table: with_another(table, '2023-08-19'), 'closed that day')}


@pytest.mark.parametrize('name', PRICE_DAMAGE)
def test_a_damaged_price_is_found_by_file_ticker_and_date(name, copy):
    change, word = PRICE_DAMAGE[name]
    write_table(change(read_table(copy/'prices.parquet')), copy/'prices.parquet')
    checksum, *problems = check_dataset(copy)
    assert checksum.file == copy/'prices.parquet' and 'checksum' in str(checksum)
    assert problems[0].file == copy/'prices.parquet' and problems[0].ticker == 'AAPL' and word in str(problems[0])
    assert str(problems[0].date).startswith('2023-08-19' if name == 'a day of rest' else DAY)
    assert all('\n' not in str(problem) and problem.remedy for problem in [checksum, *problems])


@pytest.mark.parametrize('row', [0, -1])
def test_the_first_and_the_last_session_of_a_share_may_not_be_missing(row, copy):
    table = read_table(copy/'prices.parquet')
    lost = table[table['ticker'] == 'SPY'].iloc[[row]]
    write_table(table.drop(lost.index).reset_index(drop=True), copy/'prices.parquet')
    reseal(copy)
    problems = [str(problem) for problem in check_dataset(copy)]
    assert any('prices.parquet' in text and 'SPY' in text and str(lost['date'].iloc[0])[:10] in text
               for text in problems)


@pytest.mark.parametrize('ticker', ['AAPL', 'SPY', 'GC=F'])
def test_a_share_that_is_gone_is_reported(ticker, copy):
    table = read_table(copy/'prices.parquet')
    write_table(table[table['ticker'] != ticker].reset_index(drop=True), copy/'prices.parquet')
    reseal(copy)
    assert any('prices.parquet' in str(problem) and ticker in str(problem) for problem in check_dataset(copy))


@pytest.mark.parametrize('name', ['prices', 'news', 'ideal', 'calendar'])
@pytest.mark.parametrize('length', [0, 3, 200, -100])
def test_a_truncated_table_is_named(name, length, copy):
    path = copy/f'{name}.parquet'
    path.write_bytes(path.read_bytes()[:length])
    problems = check_dataset(copy)
    assert {problem.file for problem in problems} == {path}
    assert any('parquet' in problem.problem for problem in problems)
    assert all('\n' not in str(problem) for problem in problems)


def test_a_changed_byte_anywhere_in_a_table_is_found(copy):
    path, rng = copy/'news.parquet', np.random.default_rng(0)
    sound = path.read_bytes()
    for place in [0, len(sound) - 1, len(sound) - 6, *rng.integers(0, len(sound), 20).tolist()]:
        damaged = bytearray(sound)
        damaged[place] ^= 0x55
        path.write_bytes(damaged)
        assert [problem.file for problem in file_problems(copy)] == [path], place


def test_a_table_with_damaged_text_is_named(tmp_path):
    "The names of the columns stand as text in the file: a changed byte may leave something that is no text."
    sound = data_path('news.parquet').read_bytes()
    for place in [i for i in range(len(sound) - 8) if sound[i:i + 8] == b'headline']:
        (tmp_path/'news.parquet').write_bytes(sound[:place] + b'\xff' + sound[place + 1:])
        try: read_table(tmp_path/'news.parquet')
        except DataError as error: assert 'news.parquet' in str(error) and '\n' not in str(error)


@pytest.mark.parametrize('path', ['charts/AAPL_2023-08-15.png', 'facts/forum.csv', 'facts/README.md', 'prices.parquet',
                                  'peers.parquet'])
def test_a_missing_file_is_named(path, copy):
    (copy/path).unlink()
    problems = check_dataset(copy)
    assert [problem.file for problem in problems] == [copy/path] and 'is missing' in str(problems[0])


def test_a_missing_chart_is_named_even_if_the_record_does_not_know_it(copy):
    (copy/'charts'/'META_2022-10-26.png').unlink()
    reseal(copy)
    problem, = check_dataset(copy)
    assert (problem.file, problem.ticker, problem.date) == (copy/'charts'/'META_2022-10-26.png', 'META', '2022-10-26')


def test_a_byte_at_the_end_of_any_file_is_found(copy):
    names = ('charts/AAPL_2023-08-15.png', 'prices.parquet', 'facts/macro.csv', 'earnings.parquet')
    paths = {copy/name for name in names}
    for path in paths:
        with open(path, 'ab') as handle: handle.write(b'\n')
    assert paths <= {problem.file for problem in check_dataset(copy)}


def test_extra_files_are_named(copy):
    paths = {copy/name for name in ('charts/AAPL_2023-08-05.png', 'more.parquet', 'facts/more.csv')}
    for path in paths: path.write_bytes(b'x')
    assert {problem.file for problem in file_problems(copy)} == paths


def test_an_edited_fact_is_found_with_its_ticker_and_date(copy):
    path = copy/'facts'/'headlines.csv'
    path.write_text(path.read_text().replace('positive', 'negative', 1))
    problems = check_dataset(copy)
    assert [problem.file for problem in problems] == [path, copy/'news.parquet']
    assert problems[-1].ticker == 'AAPL' and str(problems[-1].date).startswith('2023-08-03')


def test_a_lost_fact_is_found(copy):
    path = copy/'facts'/'macro.csv'
    path.write_text(''.join(path.read_text().splitlines(keepends=True)[:-1]))
    reseal(copy)
    assert [problem.file for problem in check_dataset(copy)] == [copy/'macro.parquet']


@pytest.mark.parametrize('old, new', [('positive', 'posi'), ('T16:30', 'T25:30'), ('headline', 'title'), ('AAPL', '')])
def test_a_fact_that_cannot_be_read_is_reported_like_other_damage(old, new, copy):
    path = copy/'facts'/'headlines.csv'
    path.write_text(path.read_text().replace(old, new, 1))
    reseal(copy)
    assert any(problem.file == path for problem in check_dataset(copy))


@pytest.mark.parametrize('name, column', [('ideal', 'ideal_pnl_pct'), ('indicators', 'rsi_14'), ('peers', 'return_5')])
def test_a_consequence_that_no_longer_follows_is_found_with_ticker_and_date(name, column, copy):
    table = read_table(copy/f'{name}.parquet')
    row = table[column].last_valid_index()
    table.loc[row, column] += 1e-6
    write_table(table, copy/f'{name}.parquet')
    reseal(copy)
    problem, = check_dataset(copy)
    assert problem.file == copy/f'{name}.parquet' and column in str(problem)
    assert problem.ticker == table.loc[row].get('ticker', table.loc[row].get('task'))
    assert str(problem.date)[:10] == str(table.loc[row, 'date'])[:10]


def test_an_edited_calendar_is_found(copy):
    table = read_table(copy/'calendar.parquet')
    write_table(table.drop(index=6000).reset_index(drop=True), copy/'calendar.parquet')
    reseal(copy)
    assert [problem.file for problem in check_dataset(copy)] == [copy/'calendar.parquet']


@pytest.mark.parametrize('name, change', [
    ('prices', lambda table: table.assign(close='much')), ('prices', lambda table: table.assign(date='today')),
    ('prices', lambda table: table.iloc[:0]), ('indicators', lambda table: table.assign(rsi_14='high')),
    ('ideal', lambda table: table.assign(fill='dear')), ('news', lambda table: table.assign(released_at='today')),
    ('calendar', lambda table: table.assign(closes_at='late')),
    ('macro', lambda table: table.rename(columns={'stance': 'tone'})),
    ('peers', lambda table: table.drop(columns='symbol')),
    ('news', lambda table: table.assign(headline=None))],
    ids=['text for prices', 'text for dates', 'no prices', 'text for an indicator', 'text for a fill', 'text for times',
         'text for closes', 'renamed column', 'lost column', 'no headlines'])
def test_a_table_of_another_kind_is_reported_and_stops_nothing(name, change, copy):
    write_table(change(read_table(copy/f'{name}.parquet')), copy/f'{name}.parquet')
    reseal(copy)
    problems = check_dataset(copy)
    assert any(problem.file == copy/f'{name}.parquet' for problem in problems)
    assert all('\n' not in str(problem) for problem in problems)


@pytest.mark.parametrize('content', [b'', b'{"files": {', b'[]', b'{}', b'\xff\xfe', b'{"files": []}'])
def test_a_damaged_record_is_reported(content, copy):
    (copy/'manifest.json').write_bytes(content)
    problems = list(file_problems(copy))
    assert problems and all('\n' not in str(problem) for problem in problems)


def test_a_missing_record_or_folder_is_reported(copy):
    (copy/'manifest.json').unlink()
    assert [problem.file for problem in check_dataset(copy)] == [copy/'manifest.json']
    assert [problem.file for problem in check_dataset(copy/'nowhere')] == [copy/'nowhere'/'manifest.json']


def test_the_committed_data_set_is_sound_and_checking_it_changes_nothing():
    before = contents(data_path())
    assert check_dataset() == [] and contents(data_path()) == before
    assert sorted(TASKS) == ['task_easy', 'task_hard', 'task_medium']
