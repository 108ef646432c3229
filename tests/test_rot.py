"""A bit turns in a file of the data set or of a vote cache: nothing of it is served, and the check names it.

`STOCKER_FLIPS=10000 pytest tests/test_rot.py` turns more of them."""
import os
from pathlib import Path
from shutil import copytree
from unittest.mock import patch

import numpy as np
import pytest
from crashes import fill_cache
from rot import found_by_verify, served_data, served_votes, turned

from stocker.council.cache import VoteCache, read_stored
from stocker.llm.client import RecordedClient
from stocker.market.core import DataError, canonical_json, data_path, package_path
from stocker.market.data import load_prices, read_table, write_table
from stocker.trading.dataset import using_data

FLIPS = int(os.environ.get('STOCKER_FLIPS', 300))


@pytest.fixture
def rng(): return np.random.default_rng(31)


@pytest.fixture
def data(tmp_path): return Path(copytree(data_path(), tmp_path/'data'))


@pytest.fixture(scope='module')
def votes(tmp_path_factory):
    root = tmp_path_factory.mktemp('votes')
    fill_cache(root)
    return root


def test_no_turned_bit_of_the_data_set_is_served(data, rng):
    ends, faults = served_data(data, FLIPS // 2, rng)
    assert faults == [] and ends['an error that names the file'] > 0.9 * (FLIPS // 2)


def test_a_data_set_that_is_not_compared_with_its_record_is_found_out(data, rng):
    with patch('stocker.market.episodes.sound_bytes', lambda path, root: Path(path).read_bytes()):
        _, faults = served_data(data, 300, rng)
    assert faults and all(fault.startswith('charts/') and fault.endswith('served') for fault in faults)


def test_no_turned_bit_of_a_vote_is_served_and_verify_sees_each(votes, rng):
    ends, faults = served_votes(votes, FLIPS - FLIPS // 2, rng)
    assert (dict(ends), faults) == ({'a miss': FLIPS - FLIPS // 2}, [])
    found, turned_ones, named = found_by_verify(votes, 300, rng)
    assert found == turned_ones == named > 250


def test_votes_without_a_seal_are_read_and_their_rot_is_served(votes, tmp_path, rng):
    "Votes of older versions: what the trial finds where nothing is sealed."
    for path in votes.rglob('*.json'):
        older = {name: value for name, value in read_stored(path) if name != 'seal'}
        copy = tmp_path/'old'/path.relative_to(votes)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(canonical_json(older) + '\n', encoding='utf-8')
    vote = read_stored(copy)
    assert VoteCache(tmp_path/'old').get(vote.role, vote.ticker, vote.date, vote.digest) == vote.vote
    assert any(fault.endswith('served') for fault in served_votes(tmp_path/'old', 300, rng)[1])


def test_prices_with_a_turned_bit_are_refused_and_without_a_record_read(data):
    path = data/'prices.parquet'
    sound = path.read_bytes()
    with using_data(data):
        before = load_prices('AAPL')
        path.write_bytes(turned(sound, 4 * len(sound)))
        with pytest.raises(DataError, match='prices.parquet: the checksum differs'): load_prices('AAPL')
        path.write_bytes(sound)
        assert load_prices('AAPL').equals(before)
        table = read_table(path)
        table['close'] *= 2
        write_table(table, path)
        with pytest.raises(DataError, match='remove manifest.json'): load_prices('AAPL')
        (data/'manifest.json').unlink()
        assert load_prices('AAPL')['close'].equals(2 * before['close'])


def test_pages_of_a_table_carry_checksums(tmp_path):
    table = read_table(data_path('news.parquet'))
    write_table(table, tmp_path/'news.parquet')
    content, refused = (tmp_path/'news.parquet').read_bytes(), 0
    for place in range(8 * 400, 8 * 2000, 80):
        (tmp_path/'news.parquet').write_bytes(turned(content, place))
        try: assert read_table(tmp_path/'news.parquet').equals(table)
        except DataError: refused += 1
    assert refused > 100


@pytest.mark.parametrize('name', ['smollm2_task_easy.jsonl', 'smollm2_trust.jsonl'])
def test_the_recordings_that_come_along_can_be_read(name):
    assert len(RecordedClient(package_path('recordings', name)).replies) > 50
