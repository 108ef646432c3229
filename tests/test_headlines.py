"""Headlines from a file: seen from their release on and not before, whatever form the file has."""
import gzip
import json
from datetime import datetime, timedelta, timezone

import numpy as np
import pandas as pd
import pytest

from stocker.market.core import DataError, Timing
from stocker.market.headlines import file_headlines, release_time
from stocker.market.histories import load_corpus, open_histories


@pytest.mark.parametrize(('value', 'zone', 'told'), [
    ('2024-03-05T21:30:00Z', None, '2024-03-05T21:30:00+00:00'),
    ('2024-03-05 21:30:00.25+00:00', None, '2024-03-05T21:30:01+00:00'),
    ('2024-03-05 16:30:00', 'America/New_York', '2024-03-05T16:30:00-05:00'),
    ('2024-11-03 01:30:00', 'America/New_York', '2024-11-03T01:30:00-05:00'),  # twice that night: the later one
    ('2024-03-10 02:30:00', 'America/New_York', '2024-03-10T03:00:00-04:00'),  # never that night
    ('2024-07-05', 'UTC', '2024-07-05T23:59:59-04:00'), (datetime(2024, 7, 5, 12, tzinfo=timezone.utc), None,
                                                         '2024-07-05T12:00:00+00:00'),
    (1720180800.2, None, '2024-07-05T12:00:01+00:00')])
def test_times_of_release(value, zone, told): assert release_time(value, zone) == told


@pytest.mark.parametrize('value', ['', 'now', '5', '05/03/2024', '2024-13-01', None, True, float('nan'), 0, 1.7e12,
                                   20240305, [], '2024-03-05T25:00:00Z'])
def test_times_that_are_none(value):
    with pytest.raises(ValueError): release_time(value, 'UTC')


RECORDS = [
    {'ticker': 'NVDA', 'released_at': '2025-03-05T09:00:00-05:00', 'headline': 'Chip orders rise', 'tone': 'positive'},
    {'ticker': 'nvda', 'released_at': '2025-03-05T15:00:00+00:00', 'headline': 'chip orders rise!'},
    {'ticker': ['AMD', 'NVDA'], 'released_at': '2025-03-06T16:30:00-05:00', 'headline': 'A new chip', 'tone': 'great'},
    {'ticker': 'NVDA', 'released_at': '2025-03-07', 'headline': 'Only the day is known', 'tone': 'negative'},
    {'ticker': 'NVDA', 'released_at': '2025-03-07 10:00', 'headline': 'No zone'}, {'ticker': 'NVDA'},
    {'ticker': 'no ticker', 'released_at': '2025-03-07T10:00:00Z', 'headline': 'x'}]


def files(folder):
    "The same records in every form."
    lines, table = folder/'lines.jsonl', folder/'table.parquet'
    lines.write_text('\n'.join(map(json.dumps, RECORDS)) + '\n\n')
    packed = folder/'lines.jsonl.gz'
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    joined = [{**record, 'ticker': ','.join(np.atleast_1d(record['ticker']))} for record in RECORDS]
    pd.DataFrame(joined).to_parquet(table)
    return lines, packed, table


def test_every_form_gives_the_same_headlines(tmp_path):
    told = []
    for path in files(tmp_path):
        found, faults = file_headlines(path)
        told.append({ticker: [(line.released_at, line.headline, line.tone) for line in timeline.facts]
                     for ticker, timeline in found.items()})
        assert sum(faults.values()) == 3
    assert all(one == told[0] for one in told)
    texts = [headline for _, headline, _ in told[0]['NVDA']]
    assert texts == ['Chip orders rise', 'A new chip', 'Only the day is known']
    assert [tone for *_, tone in told[0]['NVDA']] == ['positive', '', 'negative']


def test_a_headline_is_seen_from_its_release_on(tmp_path):
    news, _ = file_headlines(files(tmp_path)[0], ['NVDA'])
    histories = open_histories('package', headlines=news)
    episode = load_corpus('test', tickers=['NVDA'], histories=histories)[0]
    for timing in Timing:
        for look in episode.observations(timing):
            decided = datetime.fromisoformat(look.decided_at)
            expected = [line for line in news['NVDA'].facts
                        if decided - timedelta(days=7) < datetime.fromisoformat(line.released_at) <= decided]
            assert list(look.news) == expected
    looks = {look.date: look for look in episode.observations('next_open')}
    assert len(looks['2025-03-07'].news) == 2 and len(looks['2025-03-10'].news) == 3  # the day alone: known after it


def test_only_the_wanted_shares_are_kept(tmp_path):
    for path in files(tmp_path): assert list(file_headlines(path, ['AMD'])[0]) == ['AMD']


def test_damaged_lines_are_counted_and_damaged_files_refused(tmp_path):
    path = tmp_path/'x.jsonl'
    path.write_bytes(b'\xff\xfe nonsense\n[1, 2]\n' + b'[' * 100_000 + b'\n' + json.dumps(RECORDS[0]).encode())
    found, faults = file_headlines(path)
    assert len(found['NVDA'].facts) == 1 and sum(faults.values()) == 3
    torn = gzip.compress(path.read_bytes())[:60]
    for name, data in (('x.parquet', b'PAR1 no'), ('y.jsonl.gz', torn), ('z.jsonl.gz', b'no')):
        (tmp_path/name).write_bytes(data)
        with pytest.raises(DataError, match='cannot be read'): file_headlines(tmp_path/name)
    with pytest.raises(DataError, match='cannot be read'): file_headlines(tmp_path/'none.jsonl')
