"""The vote cache: a wrong vote is never served, a half one never read, and nothing is asked for twice."""
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import PATIENCE

from stocker.council.cache import (
    MOST_CHARACTERS, PACKED_COLUMNS, CachedSpecialist, Place, VoteCache, bar_text, cache_stats,
    is_sealed, observation_digest, pack_cache, packed_votes, path_place, place_path, read_stored, seal, unpack_cache,
    verify_cache, vote_digest)
from stocker.market.core import (
    RESERVED, Abstention, Bar, Headline, MarketObservation, Season, StockerError, Vote, canonical_json, digest,
    escape_name)
from stocker.market.data import write_table

TICKERS = ('AAPL', 'aapl', 'BRK.B', 'BRK-B', 'brk-b', '^GSPC', 'GC=F', 'BTC-USD', 'CON', 'con', 'Con', 'PRN', 'AUX',
           'NUL', 'COM1', 'LPT9', 'CON.B', 'nul.json', '7203.T', '0700.HK')
BAD_TICKERS = ('../../../tmp/x', '/etc/x', 'A/B', 'A\\B', '', '.', '..', '-', 'A B', 'A\n', 'A\0', 'Ä', '%41', 'A:B',
               'A_B', 'A' * (MOST_CHARACTERS + 1), None, 7)
BAD_DATES = ('2024-01-05/../../x', '2024-01-05/../x', '2024-1-5', '20240105', '2024-W01-5', '2024-02-30', '', '.',
             '../', '2024-01-05\n', ' 2024-01-05', '2024-01-05T00:00', None, 20240105)
BAD_LABELS = ('../', '/', '', '.', '..', '/etc', 'a/b', 'a\\b', '.hidden', '-x', 'a b', 'a\n', 'é', 'a%2F', 'a:b',
              'a' * (MOST_CHARACTERS + 1), None, 7)
SEASON = Season(8, 0.01, 0.5, 0.02, 0.1, 120.0, 80.0)
BARS = tuple(Bar(f'2024-01-{day:02}', 100.0 + day, 102.0, 99.0, 101.0, 1e6) for day in range(2, 6))
KEY = '0' * 64


def observe(date='2024-01-05', **changes):
    "A small observation."
    whole = MarketObservation('AAPL', date, 'close', f'{date}T15:55:00-05:00', BARS, {'rsi_14': 55.0}, SEASON, None, (),
                              (), (), ())
    return replace(whole, **changes)


def saying(number=0.5, rationale='so it is'):
    return Vote(signal=number, confidence=0.5, rationale=rationale)


def counting(answer=None):
    "A specialist and the list of the observations that it was asked about."
    asked = []

    def specialist(observation):
        asked.append(observation)
        return answer if answer is not None else saying()
    return specialist, asked


def files_below(root):
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in Path(root).rglob('*') if path.is_file()}


# names


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(), min_size=1, max_size=20), st.sampled_from(['ABCDEFGHIJKLMNOPQRSTUVWXYZ',
                                                                            'abcdefghijklmnopqrstuvwxyz']))
def test_any_text_comes_back_from_its_name(text, letters):
    name = escape_name(text, letters)
    assert unquote(name, errors='surrogatepass') == text
    assert name.isascii() and '/' not in name and '.' not in name and name.lower() not in RESERVED


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from('aAbB.%4261-_'), max_size=8), st.text(st.sampled_from('aAbB.%4261-_'), max_size=8))
def test_different_texts_have_different_names_on_every_disk(one, two):
    if one != two: assert escape_name(one).lower() != escape_name(two).lower()


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from('ABab.%4261-_/'), max_size=10))
def test_a_path_is_either_refused_or_the_one_that_is_written(name):
    try: place = path_place(f'news/base/{name}__2024-01-05.json')
    except StockerError: return
    assert place_path(place) == f'news/base/{name}__2024-01-05.json' and escape_name(place.ticker) == name


def test_a_root_is_a_text_a_path_or_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, root in enumerate(('', '.', 'votes', Path('votes/more'), str(tmp_path/'whole'))):
        cache, vote = VoteCache(root), saying(number / 10)
        cache.put('news', 'AAPL', '2024-01-05', KEY, vote, model='m')
        assert cache.get('news', 'AAPL', '2024-01-05', KEY) == vote
        assert cache.path('news', 'AAPL', '2024-01-05').is_file()


def test_plain_names_are_left_as_they_are(tmp_path):
    cache = VoteCache(tmp_path)
    assert cache.path('chart_pattern', 'AAPL', '2024-01-05') == tmp_path/'chart_pattern/base/AAPL__2024-01-05.json'
    assert VoteCache().path('news', 'GC=F', '2024-01-05').as_posix() == '.cache/council/news/base/GC=F__2024-01-05.json'


def test_every_ticker_can_be_kept_and_comes_back(tmp_path):
    cache, votes = VoteCache(tmp_path), {}
    for number, (role, ticker) in enumerate(product(('Macro', 'macro', 'con', 'v1.2'), TICKERS)):
        votes[role, ticker] = saying(number / 100)
        cache.put(role, ticker, '2024-01-05', KEY, votes[role, ticker], model='m')
    for (role, ticker), vote in votes.items():
        assert cache.get(role, ticker, '2024-01-05', KEY) == vote
        path = cache.path(role, ticker, '2024-01-05')
        assert path_place(path.relative_to(tmp_path).as_posix()) == Place(role, 'base', ticker, '2024-01-05')
    written = files_below(tmp_path)
    assert len({name.lower() for name in written}) == len(votes)
    assert all(part.split('.')[0].lower() not in RESERVED for name in written for part in name.split('/'))
    assert verify_cache(tmp_path) == []


@pytest.mark.parametrize('parts', [
    *[('news', ticker, '2024-01-05', 'base') for ticker in BAD_TICKERS],
    *[('news', 'AAPL', date, 'base') for date in BAD_DATES],
    *[(role, 'AAPL', '2024-01-05', 'base') for role in BAD_LABELS],
    *[('news', 'AAPL', '2024-01-05', adapter) for adapter in BAD_LABELS]])
def test_nothing_leaves_the_root(tmp_path, parts):
    role, ticker, date, adapter = parts
    cache = VoteCache(tmp_path/'root')
    for call in (lambda: cache.path(role, ticker, date, adapter), lambda: cache.get(role, ticker, date, KEY, adapter),
                 lambda: cache.put(role, ticker, date, KEY, saying(), adapter, model='m')):
        with pytest.raises(StockerError) as caught: call()
        assert '\n' not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_bad_ticker_is_refused_before_anyone_is_asked(tmp_path):
    specialist, asked = counting()
    for changes in ({'ticker': '../x'}, {'date': '2024-01-05/../x'}):
        remember = CachedSpecialist(specialist, VoteCache(tmp_path), 'news', 'm')
        with pytest.raises(StockerError): remember(observe(**changes))
    assert asked == []


@pytest.mark.parametrize('path', [
    '', 'x', 'news/AAPL__2024-01-05.json', 'news/base/AAPL_2024-01-05.json', 'news/base/__2024-01-05.json',
    'news/base/AAPL__2024-13-05.json', 'news/base/aapl__2024-01-05.json', 'News/base/AAPL__2024-01-05.json',
    'news/Base/AAPL__2024-01-05.json', '../base/AAPL__2024-01-05.json', 'news/base/A%2FB__2024-01-05.json',
    'news/base/CON__2024-01-05.json', 'con/base/AAPL__2024-01-05.json', 'news/base/AAPL__2024-01-05.JSON',
    'news/base/x/AAPL__2024-01-05.json', 'news/base/AAPL__2024-01-05.json\n', 'news/base/%41APL__2024-01-05.json',
    'news/base/%ff__2024-01-05.json', 'news/base/%FF__2024-01-05.json'])
def test_a_path_that_would_not_be_written_is_refused(path):
    with pytest.raises(StockerError): path_place(path)


# what is a miss

BROKEN = {
    'half': b'{"signal": "bu', 'empty': b'', 'null': b'null', 'list': b'[]', 'number': b'7', 'no text': b'\xff\xfe\x00',
    'text': b'"vote"', 'deep': b'[' * 100_000, 'no signal': b'{"confidence":0.5,"rationale":""}', 'zeros': bytes(200),
    'a bare vote': b'{"signal":0.5,"confidence":0.5,"rationale":""}'}


def put_file(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@pytest.mark.parametrize('content', BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_a_miss_and_is_written_anew(tmp_path, content):
    cache, (specialist, asked) = VoteCache(tmp_path), counting()
    remember = CachedSpecialist(specialist, cache, 'news', 'm')
    put_file(cache.path('news', 'AAPL', '2024-01-05'), content)
    assert [remember(observe()), remember(observe())] == [saying(), saying()]
    assert len(asked) == 1 and verify_cache(tmp_path) == []


def whole_file(tmp_path):
    cache = VoteCache(tmp_path)
    cache.put('news', 'AAPL', '2024-01-05', KEY, saying(), model='m')
    return cache, cache.path('news', 'AAPL', '2024-01-05')


def test_every_beginning_of_a_file_is_a_miss(tmp_path):
    cache, path = whole_file(tmp_path)
    whole = path.read_bytes().rstrip()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert cache.get('news', 'AAPL', '2024-01-05', KEY) is None
    path.write_bytes(whole)
    assert cache.get('news', 'AAPL', '2024-01-05', KEY) == saying()


@pytest.mark.parametrize('change', [
    {'vote': {'confidence': 0.5, 'rationale': ''}}, {'vote': {'reason': 'no headlines'}}, {'vote': None}, {'vote': []},
    *[{'vote': {'signal': number, 'confidence': 0.5, 'rationale': ''}} for number in (True, 2, '0.5', None)],
    {'role': 'indicator'}, {'adapter': 'moderator'},
    {'ticker': 'aapl'}, {'date': '2024-01-08'}, {'digest': '1' * 64}, {'digest': None}, {'more': 1}])
def test_a_file_of_another_shape_or_of_something_else_is_a_miss(tmp_path, change):
    cache, path = whole_file(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert cache.get('news', 'AAPL', '2024-01-05', KEY) is None


def test_a_number_that_is_none_is_a_miss(tmp_path):
    cache, path = whole_file(tmp_path)
    for number in ('NaN', 'Infinity', '-Infinity', '1e999'):
        path.write_text(path.read_text().replace('"signal":0.5', f'"signal":{number}'))
        assert cache.get('news', 'AAPL', '2024-01-05', KEY) is None


def test_a_folder_in_the_place_of_a_vote_is_a_miss(tmp_path):
    cache, (specialist, asked) = VoteCache(tmp_path), counting()
    path = cache.path('news', 'AAPL', '2024-01-05')
    path.mkdir(parents=True)
    remember = CachedSpecialist(specialist, cache, 'news', 'm')
    assert [remember(observe()), remember(observe())] == [saying(), saying()] and len(asked) == 1 and path.is_file()


def test_a_full_folder_in_the_place_of_a_vote_is_named_and_kept(tmp_path):
    cache = VoteCache(tmp_path)
    path = cache.path('news', 'AAPL', '2024-01-05')
    put_file(path/'notes.txt', b'mine')
    assert cache.get('news', 'AAPL', '2024-01-05', KEY) is None
    with pytest.raises(StockerError, match='look into it'):
        cache.put('news', 'AAPL', '2024-01-05', KEY, saying(), model='m')
    assert (path/'notes.txt').read_bytes() == b'mine' and len(files_below(tmp_path)) == 1


@pytest.mark.skipif(os.name == 'nt' or not hasattr(os, 'geteuid') or os.geteuid() == 0, reason='needs file permissions')
def test_a_file_without_permission_is_a_miss(tmp_path):
    cache, path = whole_file(tmp_path)
    path.chmod(0)
    assert cache.get('news', 'AAPL', '2024-01-05', KEY) is None


def test_a_link_that_leads_in_a_circle_is_a_miss_and_replaced(tmp_path):
    cache = VoteCache(tmp_path)
    path = cache.path('news', 'AAPL', '2024-01-05')
    path.parent.mkdir(parents=True)
    try: path.symlink_to(path)
    except OSError: pytest.skip('no links on this disk')
    assert cache.get('news', 'AAPL', '2024-01-05', KEY) is None
    cache.put('news', 'AAPL', '2024-01-05', KEY, saying(), model='m')
    assert cache.get('news', 'AAPL', '2024-01-05', KEY) == saying()


# what is kept

@pytest.mark.parametrize('answer', [
    Abstention(reason='no headlines'), None, 'buy', 0.5, {'signal': 0.5, 'confidence': 0.5, 'rationale': ''},
    Vote.model_construct(signal=float('nan'), confidence=0.5, rationale=''), Vote.model_construct(signal=0.5),
    Vote.model_construct(signal=2.0, confidence=0.5, rationale=''),
    Vote.model_construct(signal=0.5, confidence=0.5, rationale=None)])
def test_only_a_valid_vote_is_kept(tmp_path, answer):
    with pytest.raises(StockerError) as caught:
        VoteCache(tmp_path).put('news', 'AAPL', '2024-01-05', KEY, answer, model='m')
    assert '\n' not in str(caught.value) and files_below(tmp_path) == {}


def test_an_abstention_leaves_an_older_vote_where_it_is(tmp_path):
    cache = VoteCache(tmp_path)
    CachedSpecialist(counting()[0], cache, 'news', 'm')(observe())
    before = files_below(tmp_path)
    CachedSpecialist(counting(Abstention(reason='server down'))[0], cache, 'news', 'other')(observe())
    assert files_below(tmp_path) == before


def test_an_error_passes_and_leaves_nothing(tmp_path):
    def failing(observation): raise ConnectionError('server down')
    with pytest.raises(ConnectionError): CachedSpecialist(failing, VoteCache(tmp_path), 'news', 'm')(observe())
    assert files_below(tmp_path) == {}


@settings(max_examples=100, deadline=None)
@given(st.floats(-1, 1), st.floats(0, 1), st.text())
def test_a_vote_comes_back_to_the_last_bit(tmp_path_factory, number, confidence, rationale):
    cache = VoteCache(tmp_path_factory.getbasetemp()/'exact')
    vote = Vote(signal=number, confidence=confidence, rationale=rationale)
    cache.put('news', 'AAPL', '2024-01-05', KEY, vote, model='m')
    assert canonical_json(cache.get('news', 'AAPL', '2024-01-05', KEY)) == canonical_json(vote)


def test_a_disk_that_takes_nothing_costs_the_memory_and_not_the_vote(tmp_path):
    root = tmp_path/'file'
    root.write_text('a file where the folder should be')
    specialist, asked = counting()
    remember = CachedSpecialist(specialist, VoteCache(root), 'news', 'm')
    with pytest.warns(UserWarning, match='the vote counts but is not kept'): assert remember(observe()) == saying()
    assert len(asked) == 1


# what a vote depends on

QUESTION = {'role': 'news', 'model': 'gemma', 'adapter': 'base', 'prompt': 'What do you think?',
            'settings': {'temperature': 0.0, 'seed': 1}}
NEWS = Headline('2024-01-04T09:00:00-05:00', 'product', 'A new one.', 'positive', 'company')
ANOTHER = {
    'model': {'model': 'gemma, revision 2'}, 'adapter': {'adapter': 'moderator'},
    'prompt': {'prompt': 'What do you think'}, 'temperature': {'settings': {'temperature': 0.1, 'seed': 1}},
    'one setting more': {'settings': {**QUESTION['settings'], 'top': 5}},
    'no settings': {'settings': None}, 'messages': {'prompt': [{'role': 'user', 'content': 'What do you think?'}]}}
SEEN = {
    'a price in history': {'bars': (BARS[0]._replace(close=101.01), *BARS[1:])}, 'one bar less': {'bars': BARS[1:]},
    'an indicator': {'indicators': {'rsi_14': 55.1}}, 'a missing indicator': {'indicators': {'rsi_14': None}},
    'no indicator': {'indicators': {}}, 'a headline': {'news': (NEWS,)},
    'a tone': {'news': (NEWS._replace(headline='An old one.', tone='negative'),)},
    'the timing': {'timing': 'next_open'}, 'the hour': {'decided_at': '2024-01-05T12:00:00-05:00'},
    'the season': {'season': SEASON._replace(years=7)}}


def settled(tmp_path, **changes):
    "A cache that holds the vote of the question, and a specialist that counts."
    specialist, asked = counting()
    cache = VoteCache(tmp_path)
    remember = CachedSpecialist(specialist, cache, **QUESTION)
    remember(observe(**changes))
    assert len(asked) == 1
    return cache, specialist, asked


@pytest.mark.parametrize('change', ANOTHER.values(), ids=ANOTHER)
def test_another_question_is_one_new_call(tmp_path, change):
    cache, specialist, asked = settled(tmp_path)
    remember = CachedSpecialist(specialist, cache, **{**QUESTION, **change})
    for _ in range(3): remember(observe())
    assert len(asked) == 2


@pytest.mark.parametrize('change', SEEN.values(), ids=SEEN)
def test_another_observation_is_one_new_call(tmp_path, change):
    cache, specialist, asked = settled(tmp_path, news=(NEWS._replace(headline='An old one.'),))
    remember = CachedSpecialist(specialist, cache, **QUESTION)
    for _ in range(3): remember(observe(**{'news': (NEWS._replace(headline='An old one.'),), **change}))
    assert len(asked) == 2


def test_the_same_question_is_no_call_however_it_is_put(tmp_path):
    cache, specialist, asked = settled(tmp_path)
    turned = dict(reversed(QUESTION['settings'].items()))
    for _ in range(3):
        CachedSpecialist(specialist, VoteCache(str(tmp_path)), **{**QUESTION, 'settings': turned})(observe())
    assert len(asked) == 1


def test_roles_and_adapters_do_not_share_votes(tmp_path):
    cache, (specialist, asked) = VoteCache(tmp_path), counting()
    seats = list(product(('news', 'indicator'), ('base', 'moderator')))
    for _ in range(2):
        for role, adapter in seats: CachedSpecialist(specialist, cache, role, 'm', adapter=adapter)(observe())
    assert len(asked) == len(seats) == len(files_below(tmp_path))


def test_every_field_of_an_observation_counts():
    changes = {'ticker': 'MSFT', 'date': '2024-01-04', 'timing': 'next_open', 'decided_at': 'later', 'bars': BARS[1:],
               'indicators': {}, 'season': None, 'fundamentals': SEASON, 'news': (NEWS,), 'forum': (NEWS,),
               'macro': (NEWS,), 'peers': (NEWS,), 'split_adjusted': True}
    assert set(changes) == {field.name for field in fields(MarketObservation)}
    digests = {vote_digest(replace(observe(), **{name: value}), 'news', 'm') for name, value in changes.items()}
    assert len(digests | {vote_digest(observe(), 'news', 'm')}) == len(changes) + 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[st.one_of(st.floats(allow_infinity=False), st.integers(0, 3), st.none())] * 5), max_size=4))
def test_the_quick_digest_is_the_plain_one(rows):
    observation = observe(bars=tuple(Bar('2024-01-05', *row) for row in rows))
    assert observation_digest(observation) == digest(observation) == observation_digest(observation)


def test_a_whole_number_and_a_fraction_are_kept_apart():
    texts = [bar_text('2024-01-05', 1, 1, 1, 1, volume) for volume in (1, 1.0, 1, True, np.float64(1))]
    assert [json.loads(text)['volume'] for text in texts] == [1, 1.0, 1, True, 1.0]
    assert texts[0] == texts[2] != texts[1] and texts[3] not in (texts[0], texts[1])


def test_an_observation_in_the_memory_of_a_dead_one_has_its_own_digest():
    for number in range(3000):
        observation = observe(indicators={'rsi_14': float(number)})
        if number % 500 == 0: assert observation_digest(observation) == digest(observation)
        else: observation_digest(observation)


# many at once

def test_sixteen_writers_of_one_vote_and_its_readers(tmp_path):
    cache, barrier, faults, seen, done = VoteCache(tmp_path), threading.Barrier(20), [], Counter(), threading.Event()
    path = cache.path('news', 'AAPL', '2024-01-05')
    votes = {saying(number / 16, 'long ' * 2000 + str(number)) for number in range(16)}

    def write(vote):
        barrier.wait()
        for _ in range(10): cache.put('news', 'AAPL', '2024-01-05', KEY, vote, model='m')

    def read():
        barrier.wait()
        while not done.is_set():
            written = path.exists()
            if written: seen['valid'] += json.loads(path.read_bytes())['ticker'] == 'AAPL'
            found = cache.get('news', 'AAPL', '2024-01-05', KEY)
            if found not in votes and (found is not None or written): faults.append(f'read {found}')
            done.wait(0.002)

    def guarded(work, *given):
        try: work(*given)
        except BaseException as error: faults.append(repr(error))

    writers = [threading.Thread(target=guarded, args=(write, vote)) for vote in votes]
    readers = [threading.Thread(target=guarded, args=(read,)) for _ in range(4)]
    for thread in writers + readers: thread.start()
    for thread in writers: thread.join()
    done.set()
    for thread in readers: thread.join()
    assert faults == [] and seen['valid'] > 0
    assert list(files_below(tmp_path)) == ['news/base/AAPL__2024-01-05.json'] and verify_cache(tmp_path) == []


def test_writers_meet_an_empty_folder_in_the_place_of_the_vote(tmp_path):
    cache, barrier, faults = VoteCache(tmp_path), threading.Barrier(16), []
    cache.path('news', 'AAPL', '2024-01-05').mkdir(parents=True)

    def write():
        barrier.wait()
        try: cache.put('news', 'AAPL', '2024-01-05', KEY, saying(), model='m')
        except BaseException as error: faults.append(repr(error))
    threads = [threading.Thread(target=write) for _ in range(16)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert faults == [] and cache.get('news', 'AAPL', '2024-01-05', KEY) == saying()


def test_a_stop_before_the_renaming_leaves_the_old_vote(tmp_path, monkeypatch):
    cache, _ = whole_file(tmp_path)

    def stop(*paths): raise KeyboardInterrupt
    monkeypatch.setattr(os, 'replace', stop)
    with pytest.raises(KeyboardInterrupt): cache.put('news', 'AAPL', '2024-01-05', KEY, saying(-1.0), model='m')
    assert cache.get('news', 'AAPL', '2024-01-05', KEY) == saying() and len(files_below(tmp_path)) == 1


KILLS, DAYS = 20, 16
FILLER = '''
import os, random, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from stocker.council.cache import CachedSpecialist, VoteCache
from stocker.market.core import ROLES, Vote
from test_cache import DAYS, observe, long_answer
from waiting import kill_once

root, log, rng = sys.argv[1], sys.argv[2], random.Random(int(sys.argv[4]))
observations = [observe(f'2024-02-{day:02}') for day in range(1, DAYS + 1)]

def slow_disk(path, text, encoding):
    with open(path, 'w', encoding=encoding) as file:
        for start in range(0, len(text), 200):
            file.write(text[start:start + 200])
            file.flush()
            time.sleep(0.0001)

Path.write_text = slow_disk # so that most of the kills fall into a writing

def fill():
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    def slow(role):
        def specialist(observation):
            os.write(handle, f'{role} {observation.date}\\n'.encode())
            return long_answer(role, observation)
        return specialist
    for observation in observations:
        for role in ROLES: CachedSpecialist(slow(role), VoteCache(root), role, 'slow', 'prompt')(observation)

def called(): return Path(log).read_text().count('\\n') if os.path.exists(log) else 0

stopped = 0
for _ in range(int(sys.argv[5])):
    until, child = called() + rng.randrange(1, 5), os.fork()
    if not child:
        try: fill()
        finally: os._exit(0)
    stopped += kill_once(child, lambda: called() >= until, rng.uniform(0, 0.003))
print(stopped)
'''


def long_answer(role, observation):
    "A vote that takes a slow disk a while."
    return saying(0.25, f'{role} {observation.date} ' + 'long ' * 400)


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs fork and SIGKILL')
def test_a_filling_that_is_killed_goes_on_where_it_stopped(tmp_path):
    from stocker.market.core import ROLES
    root, log = tmp_path/'root', tmp_path/'calls.txt'
    script = [sys.executable, '-c', FILLER, str(root), str(log), str(Path(__file__).parent), '7', str(KILLS)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    stopped = int(done.stdout)
    assert stopped >= KILLS // 2, 'too few of the processes were still at work when they were killed'
    kept = {path for path in root.rglob('*.json') if not path.name.startswith('.')}
    assert kept and all(read_stored(path) for path in kept)
    leftovers = verify_cache(root)
    assert len(leftovers) <= len(ROLES) and all('.tmp: ' in line for line in leftovers), 'the next process sweeps'
    calls = Counter(log.read_text().splitlines())
    assert calls.total() - len(calls) <= stopped, 'a vote that was kept was asked for again'

    asked, observations = [], [observe(f'2024-02-{day:02}') for day in range(1, DAYS + 1)]

    def specialist(role):
        def answer(observation):
            asked.append((role, observation.date))
            return long_answer(role, observation)
        return answer
    cache = VoteCache(root)
    for observation in observations:
        for role in ROLES:
            answer = CachedSpecialist(specialist(role), cache, role, 'slow', 'prompt')(observation)
            assert answer == long_answer(role, observation)
    missing = {(role, observation.date) for role in ROLES for observation in observations
               if cache.path(role, 'AAPL', observation.date) not in kept}
    assert len(asked) == len(missing) and set(asked) == missing
    assert len(list(root.glob('*/*/[!.]*.json'))) == DAYS * len(ROLES) and verify_cache(root) == []


# the cache as a whole

def filled(root, count=30):
    cache = VoteCache(root)
    for number in range(count):
        vote = saying(number / count, f'Nr. {number}, "quoted"\nüber 東京')
        cache.put(('news', 'indicator', 'Macro')[number % 3], TICKERS[number % len(TICKERS)],
                  f'2024-01-{number % 28 + 1:02}', digest(number), vote, ('base', 'LoRA-1')[number % 2],
                  model=('gemma', 'rules')[number % 2])
    return cache


def test_stats_count_by_role_adapter_and_model(tmp_path):
    filled(tmp_path)
    stats = cache_stats(tmp_path)
    assert list(stats) == ['role', 'adapter', 'model', 'votes', 'bytes']
    assert stats['votes'].sum() == 30 and stats['bytes'].sum() == sum(map(len, files_below(tmp_path).values()))
    voters = (('LoRA-1', 'rules'), ('base', 'gemma'))
    assert list(zip(stats['role'], stats['adapter'], stats['model'])) == [
        (role, *voter) for role in ('Macro', 'indicator', 'news') for voter in voters]
    assert (stats['votes'] == 5).all()


def test_stats_of_an_empty_folder_are_an_empty_table(tmp_path):
    assert list(cache_stats(tmp_path)) == ['role', 'adapter', 'model', 'votes', 'bytes'] and cache_stats(tmp_path).empty


def test_a_folder_that_is_not_there_is_named(tmp_path):
    for call in (cache_stats, verify_cache, lambda root: pack_cache(root, tmp_path/'votes.parquet')):
        with pytest.raises(StockerError, match='there is no vote cache here'): call(tmp_path/'missing')
    with pytest.raises(StockerError, match='no readable vote to pack'): pack_cache(tmp_path, tmp_path/'votes.parquet')
    assert list(tmp_path.iterdir()) == []


def test_verify_names_each_file_that_is_of_no_use(tmp_path):
    cache = filled(tmp_path)
    good = next(path for path in tmp_path.rglob('*.json'))
    put_file(tmp_path/'news/base/AAPL__2024-03-01.json', b'{"signal": "bu')
    put_file(tmp_path/'news/base/.AAPL__2024-03-01.json.abc.tmp', b'{')
    put_file(tmp_path/'news/base/MSFT__2024-03-01.json', good.read_bytes())
    put_file(tmp_path/'news/base/msft__2024-03-01.json', good.read_bytes())
    put_file(tmp_path/'notes\n.txt', b'hello')
    (tmp_path/'news/base/MSFT__2024-03-04.json').mkdir()
    problems = verify_cache(tmp_path)
    assert len(problems) == 6 and not any('\n' in line for line in problems)
    found = dict(line.rsplit(': ', 1) for line in problems)
    assert 'cannot be read' in found['news/base/AAPL__2024-03-01.json']
    assert 'left it behind' in found['news/base/.AAPL__2024-03-01.json.abc.tmp']
    assert 'it holds the vote of' in found['news/base/MSFT__2024-03-01.json']
    assert 'not one that this cache writes' in found['news/base/msft__2024-03-01.json']
    assert 'cannot be read' in found['news/base/MSFT__2024-03-04.json']
    assert cache_stats(cache.root)['votes'].sum() == 30


def test_a_cache_comes_back_from_one_file(tmp_path):
    filled(tmp_path/'one')
    assert pack_cache(tmp_path/'one', tmp_path/'votes.parquet') == 30
    assert unpack_cache(tmp_path/'votes.parquet', tmp_path/'two') == 30
    assert files_below(tmp_path/'one') == files_below(tmp_path/'two')
    assert pack_cache(tmp_path/'two', tmp_path/'again.parquet') == 30
    assert (tmp_path/'votes.parquet').read_bytes() == (tmp_path/'again.parquet').read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ['again.parquet', 'one', 'two', 'votes.parquet']


def test_a_packed_cache_is_a_table_that_any_tool_reads(tmp_path):
    filled(tmp_path/'one')
    pack_cache(tmp_path/'one', tmp_path/'votes.parquet')
    table = pd.read_parquet(tmp_path/'votes.parquet')
    assert tuple(table) == PACKED_COLUMNS == (
        'role', 'adapter', 'ticker', 'date', 'digest', 'model', 'signal', 'confidence', 'rationale')
    places = list(zip(*(table[name] for name in ('role', 'adapter', 'ticker', 'date'))))
    assert places == sorted(places) and len(set(places)) == 30 and set(table['ticker']) == set(TICKERS)


def test_the_order_of_writing_does_not_show_and_rubbish_is_left_out(tmp_path):
    for root, numbers in (('one', range(9)), ('two', reversed(range(9)))):
        cache = VoteCache(tmp_path/root)
        for number in numbers: cache.put('news', 'AAPL', f'2024-01-0{number + 1}', KEY, saying(number / 9), model='m')
    put_file(tmp_path/'two/news/base/.AAPL__2024-01-01.json.abc.tmp', b'{')
    put_file(tmp_path/'two/news/base/AAPL__2024-01-31.json', b'{"signal": "bu')
    put_file(tmp_path/'two/news/base/MSFT__2024-01-01.json', cache.path('news', 'AAPL', '2024-01-01').read_bytes())
    for root in ('one', 'two'): assert pack_cache(tmp_path/root, tmp_path/f'{root}.parquet') == 9
    assert (tmp_path/'one.parquet').read_bytes() == (tmp_path/'two.parquet').read_bytes()


def test_every_changed_byte_is_refused(tmp_path):
    filled(tmp_path/'one', 3)
    pack_cache(tmp_path/'one', tmp_path/'votes.parquet')
    whole = (tmp_path/'votes.parquet').read_bytes()
    assert is_sealed(whole)
    for i, change in product(range(len(whole)), (1, 128)):
        assert not is_sealed(whole[:i] + bytes([whole[i] ^ change]) + whole[i + 1:])
    for i in range(0, len(whole), 97): assert not is_sealed(whole[:i]) and not is_sealed(whole[i + 1:])
    for i in range(0, len(whole), 97):
        (tmp_path/'votes.parquet').write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1:])
        with pytest.raises(StockerError, match='votes.parquet: not a packed cache, or changed since'):
            unpack_cache(tmp_path/'votes.parquet', tmp_path/'two')
    assert not (tmp_path/'two').exists()


@pytest.mark.parametrize('content', [b'', b'PAR1', b'no parquet at all, but longer than the seal of one would be' * 3])
def test_what_is_no_packed_cache_is_refused(tmp_path, content):
    (tmp_path/'votes.parquet').write_bytes(content)
    with pytest.raises(StockerError, match='not a packed cache'): packed_votes(tmp_path/'votes.parquet')
    with pytest.raises(StockerError, match='cannot be read'): packed_votes(tmp_path/'missing.parquet')
    with pytest.raises(StockerError, match='cannot be read'): packed_votes(tmp_path)


GOOD_ROW = {'role': 'news', 'adapter': 'base', 'ticker': 'AAPL', 'date': '2024-01-05', 'digest': KEY, 'model': 'm',
            'signal': 0.5, 'confidence': 0.5, 'rationale': 'so'}


@pytest.mark.parametrize('change', [
    {'signal': 2.0}, {'signal': float('nan')}, {'signal': 'buy'}, {'ticker': '../x'}, {'role': '..'},
    {'adapter': 'a/b'}, {'date': '2024-01-05/../x'}, {'date': pd.Timestamp('2024-01-05')},
    {'rationale': None}, {'model': 7}])
def test_a_sealed_file_with_a_bad_row_writes_nothing(tmp_path, change):
    path = tmp_path/'votes.parquet'
    write_table(pd.DataFrame([{**GOOD_ROW, **change}]), path)
    path.write_bytes(seal(path.read_bytes()))
    with pytest.raises(StockerError, match='row 1: not a vote'): unpack_cache(path, tmp_path/'two')
    assert not (tmp_path/'two').exists()


def test_a_sealed_file_with_other_columns_is_refused(tmp_path):
    path = tmp_path/'votes.parquet'
    for table in (pd.DataFrame([GOOD_ROW])[sorted(GOOD_ROW)], pd.DataFrame({'close': [1.0]})):
        write_table(table, path)
        path.write_bytes(seal(path.read_bytes()))
        with pytest.raises(StockerError, match='its columns are'): packed_votes(path)


def test_unpacking_replaces_what_lies_there_and_leaves_the_rest(tmp_path):
    cache = VoteCache(tmp_path/'one')
    cache.put('news', 'AAPL', '2024-01-05', KEY, saying(), model='m')
    pack_cache(cache.root, tmp_path/'votes.parquet')
    for date in ('2024-01-05', '2024-01-08'): cache.put('news', 'AAPL', date, '1' * 64, saying(-1.0), model='m')
    unpack_cache(tmp_path/'votes.parquet', cache.root)
    assert cache.get('news', 'AAPL', '2024-01-05', KEY) == saying()
    assert cache.get('news', 'AAPL', '2024-01-08', '1' * 64) == saying(-1.0)


def test_a_cache_goes_to_the_hub_and_comes_back(tmp_path, monkeypatch):
    "The hub is a file system: here one in a folder, under the hub's own name."
    import fsspec.core
    import huggingface_hub
    from fsspec.implementations.dirfs import DirFileSystem
    from stocker.council.cache import pull_cache, push_cache
    hub, made = tmp_path/'hub', []
    files = DirFileSystem(str(hub), fsspec.filesystem('file'))

    def url_to_fs(url, token=None):
        assert url == 'hf://datasets/somebody/votes' and token == 'a key'
        return files, 'datasets/somebody/votes'

    def create_repo(place, repo_type, exist_ok, token):
        made.append((place, repo_type))
        (hub/'datasets'/place).mkdir(parents=True, exist_ok=exist_ok)

    monkeypatch.setenv('HF_TOKEN', 'a key')
    monkeypatch.setattr(fsspec.core, 'url_to_fs', url_to_fs)
    monkeypatch.setattr(huggingface_hub, 'create_repo', create_repo)
    cache, observation = VoteCache(tmp_path/'here'), observe()
    kept = CachedSpecialist(counting()[0], cache, 'news', 'm')(observation)
    assert push_cache(cache.root, 'somebody/votes') == 1 and made == [('somebody/votes', 'dataset')]
    assert pull_cache('somebody/votes', tmp_path/'there') == 1
    again = CachedSpecialist(counting()[0], VoteCache(tmp_path/'there'), 'news', 'm')
    assert again.find(observation, again.key(observation)) == kept
    shared = hub/'datasets/somebody/votes/votes.parquet'
    shared.write_bytes(shared.read_bytes()[:-1] + b'x')
    with pytest.raises(StockerError, match='changed since'): pull_cache('somebody/votes', tmp_path/'else')
    assert not (tmp_path/'else').exists()
