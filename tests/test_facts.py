"Facts: what a file may leave open, and what a user's own export has been seen to hold."
import json
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stocker.market.core import DataError, StockerError
from stocker.market.data import read_table, write_table
from stocker.market.facts import (
    import_forum, read_forum, read_headlines, read_macro, read_quarterly_eps, trailing_earnings)

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


POST = {'created_utc': 1690900000, 'subreddit': 'stocks', 'score': 12, 'title': 'Waiting', 'selftext': 'What now?',
        'id': 'x'}


def export(tmp_path, *posts):
    path = tmp_path/'export.jsonl'
    path.write_text('\n'.join(post if isinstance(post, str) else json.dumps(post) for post in posts), encoding='utf-8')
    return path


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


@pytest.mark.parametrize(('reader', 'old', 'new'), [
    (read_quarterly_eps, '-0.16', '1' * 400), (read_quarterly_eps, '2022Q4', '0000Q1'),
    (read_forum, '-3', '9' * 400),
    (read_headlines, '2023-08-03T16:30-04:00', '0001-01-01T00:00+14:00'),
    (read_headlines, '2023-08-03T16:30-04:00', '9999-12-31T23:59-14:00'),
    (read_headlines, 'AAPL', 'A' * 120_000 + '!')])
def test_an_absurd_field_is_told_at_once_and_in_one_line(reader, old, new, read):
    with pytest.raises(DataError, match='line [23]: .*correct the line') as caught:
        read(reader, ROWS[reader].replace(old, new))
    assert len(str(caught.value)) < 400


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from([10**400, -1]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2), max_leaves=4)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(list(POST)), JUNK))
def test_any_export_is_imported_or_refused(changes):
    with tempfile.TemporaryDirectory() as folder:
        path = export(Path(folder), POST | changes)
        try: posts = import_forum(path, 'AAPL')
        except DataError as error: assert 'line 1: ' in str(error)
        else:
            posts.assign(released_at=posts['released_text']).drop(columns='released_text').to_csv(path, index=False)
            pd.testing.assert_frame_equal(read_forum(path), posts)


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
    (POST | {'selftext': 5}, ''), (POST | {'created_utc': 10**400}, 'too large'), (POST | {'score': 10**400}, 'score'),
    (json.dumps(POST).replace('12', '9' * 5000), 'digits')])
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
