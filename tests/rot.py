"Rot: single bits that turn in the files of a data set and of a vote cache, and what is served of them afterwards."
from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import numpy as np

from stocker.council.cache import VoteCache, verify_cache
from stocker.council.cache import read_stored as stored_vote
from stocker.council.moderators import read_logistic
from stocker.llm.client import RecordedClient
from stocker.market import core
from stocker.market.core import StockerError, canonical_json, check_files, plain
from stocker.market.data import load_prices, load_table
from stocker.market.episodes import load_task
from stocker.trading.dataset import using_data

CHART_TASKS = {load_task(name).ticker: name for name in ('task_easy', 'task_medium', 'task_hard')}


def chart(path):
    "A chart as its episode serves it; drawing it anew would not be serving the file."
    ticker, _, date = path.stem.partition('_')
    episode = load_task(CHART_TASKS[ticker])
    return replace(episode, chart_folder=path.parent).chart(episode.dates.index(date))


def table(path):
    "A table as the library serves it."
    if path.stem == 'prices': load_prices('AAPL')
    return load_table(path.stem).to_csv()


def reader(name):
    "What serves a file of a data set, by its name; None for files that nothing is read from."
    folder, _, rest = name.rpartition('/')
    if name.endswith('.parquet'): return table
    if folder == 'charts': return chart
    if folder == 'moderators': return lambda path: canonical_json(plain(vars(read_logistic())))
    if folder == 'recordings': return lambda path: canonical_json(
        {key: reply._asdict() for key, reply in RecordedClient(path).replies.items()})
    if folder in ('pocket', 'facts'): # loaded by transformers, and by a build, once this has passed
        return lambda path: (check_files(path.parent, path.parents[1]), path.read_bytes())[1]
    return None


def turned(content, place):
    "The same bytes with one bit turned."
    changed = bytearray(content)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def served_data(root, flips, rng):
    """Turn bits in a data set, one at a time: how each ended, and the faults.

    Every other bit is drawn from all bits there are, the rest from one file after the other: charts are small."""
    files = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob('*')) if path.is_file()}
    names, ends, faults, sound = list(files), Counter(), [], {}
    sizes = np.array([path.stat().st_size for path in files.values()])
    drawn = rng.choice(len(names), flips, p=sizes / sizes.sum())
    with using_data(root), patch.object(core, 'package_path', root.joinpath), patch(
            'stocker.council.moderators.package_path', root.joinpath), patch(
            'stocker.llm.client.package_path', root.joinpath):
        for name, path in files.items():
            if read := reader(name): sound[name] = read(path)
        for number in range(flips):
            name = names[drawn[number] if number % 2 else number // 2 % len(names)]
            path, content = files[name], files[name].read_bytes()
            path.write_bytes(turned(content, int(rng.integers(8 * len(content)))))
            try: ends[serve(name, path, sound, faults)] += 1
            finally: path.write_bytes(content)
    return ends, faults


def serve(name, path, sound, faults):
    "Read a file of which one bit has turned: how that ended."
    if name == 'manifest.json': # the record itself: no table may be another one, whatever it says now
        for other in ('news.parquet', 'earnings.parquet'):
            try:
                if reader(other)(path.with_name(other)) != sound[other]: faults.append(f'{name}: {other} is another')
            except StockerError: pass
        return 'the record'
    if not (read := reader(name)): return 'not read from'
    try: found = read(path)
    except StockerError as error:
        if str(path) not in str(error): faults.append(f'{name}: {error}')
        return 'an error that names the file'
    if found != sound[name]: faults.append(f'{name}: served')
    return 'served as it was'


def served_votes(root, flips, rng):
    "Turn bits in a vote cache, one at a time: how each lookup ended, and the faults, missed by `verify` ones too."
    cache, ends, faults = VoteCache(root), Counter(), []
    files = sorted(root.rglob('*.json'))
    votes = [stored_vote(path) for path in files]
    for number in range(flips):
        path, vote = files[number % len(files)], votes[number % len(files)]
        content = path.read_bytes()
        path.write_bytes(turned(content, int(rng.integers(8 * len(content)))))
        found = cache.get(*vote.place[:1], vote.ticker, vote.date, vote.digest, vote.adapter)
        ends['a miss' if found is None else 'a vote'] += 1
        if found is not None: faults.append(f'{path.name}: served')
        if stored_vote(path) is not None: faults.append(f'{path.name}: not seen by verify')
        path.write_bytes(content)
    return ends, faults


def found_by_verify(root, count, rng):
    "Turn a bit in each of some files of a cache: how many files `verify_cache` names, and how many were turned."
    files = sorted(root.rglob('*.json'))
    chosen = [files[i] for i in rng.choice(len(files), min(count, len(files)), replace=False)]
    before = [path.read_bytes() for path in chosen]
    for path, content in zip(chosen, before): path.write_bytes(turned(content, int(rng.integers(8 * len(content)))))
    named = {line.partition(': ')[0] for line in verify_cache(root)}
    for path, content in zip(chosen, before): path.write_bytes(content)
    return len(named & {path.relative_to(root).as_posix() for path in chosen}), len(chosen), len(named)
