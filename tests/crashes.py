"Crashes: children that are killed at work, a disk that refuses, a clock that jumps, and what they leave behind."
import errno
import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from itertools import cycle
from pathlib import Path
from unittest.mock import patch

import numpy as np
from tqdm import tqdm
from waiting import kill_once

from stocker.cli import label_of, trade
from stocker.council.cache import CachedSpecialist, VoteCache
from stocker.council.council import rule_council
from stocker.market.core import package_path
from stocker.market.data import load_prices
from stocker.market.episodes import load_task
from stocker.pages.report import write_report
from stocker.studies.worlds import planted_world
from stocker.trading import dataset

JUMPS = (0.0, 3.2e9, 0.5, -1.5e9, 3600.0, -3600.0, -0.5, 1e8, -1e8) # seconds that the clock is wrong by, in turn
LEARNED = ('.safetensors', '.pt', '.pth') # what training writes about the model and goes on with


def killed(work, seconds, begun=lambda: True):
    "Let a child process work, and kill it some seconds after it has begun: whether it was still at work."
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', DeprecationWarning) # newer Pythons warn of a fork where threads are running
        child = os.fork()
    if child == 0:
        try:
            tqdm.set_lock(threading.RLock()) # its own: a dead child never lets go of the lock that it shares
            os.write(writer, b'.')
            work()
        finally: os._exit(0)
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    return kill_once(child, begun, seconds)


def finished(work, seconds=900.0):
    "Let a child process work to its end: whether it came there without an error."
    child = multiprocessing.get_context('fork').Process(target=work)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', DeprecationWarning)
        child.start()
    child.join(seconds)
    if child.is_alive(): child.kill()
    child.join()
    return child.exitcode == 0


def cached_council(folder, cache=VoteCache):
    "The council of rules, with a cache for each seat."
    council, votes = rule_council(), cache(Path(folder))
    seats = {role: CachedSpecialist(seat, votes, role, 'rules') for role, seat in council.specialists.items()}
    return replace(council, specialists=seats)


def fill_cache(folder, cache=VoteCache):
    "Fill a cache with the votes of the rules on one task; what is there already is not asked for again."
    return cached_council(folder, cache).fill([load_task('task_easy')], batch_size=4, progress=False)


def contents(folder):
    "What lies in a folder: digest by path, temporary files left out."
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(Path(folder).rglob('*'))
            if path.is_file() and not any(part.endswith('.tmp') for part in path.relative_to(folder).parts)}


def wrong_times(folder, rng):
    "Give everything in a folder a random time, from 1970 to 2096: a machine without power often loses its clock."
    for path in sorted(Path(folder).rglob('*')): os.utime(path, (0, rng.uniform(0, 4e9)))


def kill_work(work, kills, folder, rng, resumes):
    "Kill work that fills a folder again and again, then let it end: kills at work, and files that were ever damaged."
    whole, broken = Path(folder, 'whole'), Path(folder, 'broken')
    if not resumes: work(whole) # the first time also loads what the work needs
    begin = time.monotonic()
    work(whole)
    took, expected, at_work, damaged = time.monotonic() - begin, contents(whole), 0, set()
    longest = 4 * took / kills if resumes else took # so that the kills are spread over the whole work
    broken.mkdir()
    for _ in range(kills):
        at_work += killed(partial(work, broken), rng.uniform(0, longest))
        wrong_times(broken, rng)
        damaged |= {name for name, sha in contents(broken).items() if sha != expected.get(name)}
    work(broken)
    return at_work, damaged | {name for name, sha in expected.items() if contents(broken).get(name) != sha}


def kill_writers(write, values, kills, rng):
    "How often a file was none of the values when its writer was killed."
    def write_forever(path, begun):
        for value in cycle(values):
            write(value, path)
            begun.touch()
    with tempfile.TemporaryDirectory() as folder:
        path, begun, whole, damaged = Path(folder, 'file'), Path(folder, 'begun'), set(), 0
        for value in values:
            write(value, path)
            whole.add(path.read_bytes())
        for _ in range(kills):
            begun.unlink(missing_ok=True)
            killed(partial(write_forever, path, begun), rng.uniform(0, 0.01), begun.exists)
            damaged += path.read_bytes() not in whole
        return damaged


@contextmanager
def failing_disk(kind):
    "A disk that is 'full', which takes half of a text and then refuses, or 'read-only', which refuses at once."
    def half(path, content, *options, **others):
        content = content if isinstance(content, bytes) else content.encode(errors='replace')
        with open(path, 'wb') as file: file.write(content[:len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refused(*options, **others): raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if kind == 'full':
        with patch.multiple(Path, write_text=half, write_bytes=half): yield
    else:
        with patch.object(tempfile, 'mkstemp', refused): yield


@contextmanager
def jumping_clock():
    "A system clock that jumps whenever someone looks at it, until the block ends."
    jumps, seconds, nanoseconds = cycle(JUMPS), time.time, time.time_ns
    wrong = {'time': lambda: seconds() + next(jumps), 'time_ns': lambda: nanoseconds() + int(next(jumps) * 1e9)}
    with patch.multiple(time, **wrong): yield


BUILD_PROGRAM = """
import shutil, sys
from stocker.trading import dataset
from stocker.market.core import data_path
from stocker.market.data import load_prices

class Packaged:
    name, adjustment = 'packaged', 'splits, not dividends'
    def fetch(self, ticker, start, end): return load_prices(ticker)

def copied(jobs, progress): # charts take longest, and are tried elsewhere
    for path, *_ in jobs:
        path.parent.mkdir(exist_ok=True)
        shutil.copyfile(charts/path.name, path)

charts, dataset.write_charts = data_path('charts'), copied
dataset.build_dataset(Packaged(), sys.argv[1], progress=False, replace=True)
"""


def built(program, folder, seconds=None):
    "Run a program that builds a folder, and kill it after some seconds: whether it came to its end."
    process = subprocess.Popen([sys.executable, '-c', program, str(folder)], stderr=subprocess.DEVNULL)
    try: return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False


def kill_builds(program, kills, folder):
    "Kill builds over a finished folder: kills at work, and whether it ever differed afterwards."
    rng, folder, begin = np.random.default_rng(24), Path(folder, 'data'), time.monotonic()
    assert built(program, folder)
    took, whole, at_work, damaged = time.monotonic() - begin, contents(folder), 0, False
    for _ in range(kills):
        at_work += not built(program, folder, rng.uniform(0.3, 0.95) * took)
        wrong_times(folder, rng)
        damaged |= contents(folder) != whole
    return at_work, damaged or not built(program, folder) or contents(folder) != whole


class Packaged:
    "The prices of the package as a source."

    name, adjustment = 'packaged', 'splits, not dividends'

    def fetch(self, ticker, start, end): return load_prices(ticker)


def copied_charts(jobs, progress):
    "Charts take longest to draw, and are tried elsewhere."
    for path, *_ in jobs:
        path.parent.mkdir(exist_ok=True)
        shutil.copyfile(package_path('charts', path.name), path)


def keep_run(folder, number):
    "Trade a task, under one moderator or the other."
    name = ('vote_mean', 'vote_mean_all_in')[number % 2]
    with redirect_stdout(StringIO()):
        trade([load_task('task_easy')], 'close', rule_council(name), folder/'runs', label_of('rules', name))


def keep_report(folder, number):
    "Write the report of a run that lies there."
    write_report(folder/'reports'/str(number))


def keep_build(folder, number):
    "Build a data set, every other time over one that lies there."
    with patch.object(dataset, 'write_charts', copied_charts):
        dataset.build_dataset(Packaged(), folder/'builds'/str(number % 2 and number), progress=False, replace=True)


KEEPERS = {'runs': keep_run, 'reports': keep_report, 'builds': keep_build}


def units(folder):
    "What is complete in the folders of KEEPERS: digests by name, for each run, reported run and data set."
    return {f'{kind}/{one.name}': contents(one) for kind in KEEPERS for one in sorted(Path(folder, kind).glob('[!.]*'))}


def kill_keepers(kills, folder, rng, keepers=KEEPERS):
    "Kill runs, reports and builds at work: kills at work by kind, and what was lost, replaced or left half."
    whole, broken, took, at_work, faults = Path(folder, 'whole'), Path(folder, 'broken'), {}, Counter(), []
    for kind, work in keepers.items():
        for number in (0, 1):
            if kind == 'reports': shutil.copytree(whole/'runs'/'task_easy-close', whole/kind/str(number))
            begin = time.monotonic()
            work(whole, number)
            took[kind] = time.monotonic() - begin # the second time nothing has to be loaded
    allowed = {kind: [one for name, one in units(whole).items() if name.startswith(kind)] for kind in keepers}
    if 'reports' in keepers: allowed['reports'].append(contents(whole/'runs'/'task_easy-close')) # not reported yet
    for number in range(kills):
        kind = list(keepers)[number % len(keepers)]
        if kind == 'reports': shutil.copytree(whole/'runs'/'task_easy-close', broken/kind/str(number))
        before = units(broken)
        at_work[kind] += killed(partial(keepers[kind], broken, number), rng.uniform(0, 1.1 * took[kind]))
        after = units(broken)
        faults += [f'{name} is half' for name, one in after.items() if one not in allowed[name.partition('/')[0]]]
        faults += [f'{name} is lost or replaced' for name, one in before.items()
                   if not one.items() <= after.get(name, {}).items()]
    for kind, work in keepers.items(): # the next one of each kind sweeps
        if kind == 'reports': continue
        if not finished(partial(work, broken, kills)): faults.append(f'{kind} cannot be made any more')
        faults += [f'{path} is left' for path in Path(broken, kind).rglob('*.tmp')]
    return at_work, faults


def learned(folder):
    "All in a run's folder that depends on what was learned, and not on how long it took."
    return {name: sha for name, sha in contents(folder).items()
            if Path(name).suffix in LEARNED or Path(name).name == 'scores.json'}


def kill_trainings(train, folder, kills):
    "Kill a training again and again, let it end, and compare it with one that nobody disturbed: kills, and faults."
    rng, whole, run, begin = np.random.default_rng(25), Path(folder, 'whole'), Path(folder, '0'), time.monotonic()
    if not finished(partial(train, whole)): return 0, ['The training fails.']
    took, expected, at_work, faults = time.monotonic() - begin, learned(whole), 0, []
    for number in range(kills):
        if killed(partial(train, run), rng.uniform(0.05, 0.6) * took):
            at_work += 1
            wrong_times(run, rng)
            faults += [f'{name} is damaged by a kill.' for name, sha in learned(run).items()
                       if sha != expected.get(name) and (run/name).with_name('trainer_state.json').is_file()]
            continue
        if learned(run) != expected: faults.append('A run that went on has learned something else.')
        run = Path(folder, str(number + 1))
    if not finished(partial(train, run)): faults.append('A killed run cannot go on.')
    elif learned(run) != expected: faults.append('A run that went on has learned something else.')
    return at_work, list(dict.fromkeys(faults))


def train_on(folder):
    "Train the pocket model for four rounds, or go on from the last whole checkpoint."
    from stocker.training.grpo import TrainingSettings, train
    from stocker.training.questions import Splits
    splits = Splits(planted_world(0, 4, 12).episodes, planted_world(1, 2, 12).episodes, {})
    small = {'per_device_train_batch_size': 16, 'num_generations': 4, 'disable_tqdm': True, 'report_to': []}
    with redirect_stdout(StringIO()):
        train(splits, TrainingSettings(folder, prompts=8, rounds=4, resume=True, trainer=small))


if __name__ == '__main__': # Python needs longer to load the packages of training than the run takes: they load once
    warnings.simplefilter('ignore')
    import torch
    torch.set_num_threads(1) # a child that is forked off must not wait for threads that it does not have
    import trl.trainer.grpo_trainer # noqa: F401
    print(json.dumps(kill_trainings(train_on, sys.argv[1], int(sys.argv[2]))))
