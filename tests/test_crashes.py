"""The power fails, the disk is full, the clock jumps: what lies on the disk is whole, and starting again ends the same.

`STOCKER_KILLS=60 pytest tests/test_crashes.py` kills more often, and also a build of the data set and a training."""
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import numpy as np
import pytest
from crashes import (
    BUILD_PROGRAM, JUMPS, KEEPERS, cached_council, contents, failing_disk, fill_cache, jumping_clock, kill_builds,
    kill_keepers, kill_trainings, kill_work, kill_writers, killed, wrong_times)
from tqdm import tqdm
from waiting import PATIENCE

from stocker.council.cache import VoteCache, verify_cache
from stocker.council.council import ask_all, play, rule_council, write_trace
from stocker.market.core import Vote, canonical_json, write_atomically
from stocker.market.episodes import load_task
from stocker.studies.tuning import seed_grid, sweep, write_choice, write_sweep
from stocker.trading.env import StockerEnv

KILLS = int(os.environ.get('STOCKER_KILLS', 10))
needs_fork = pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs fork and SIGKILL')
on_request = pytest.mark.skipif('STOCKER_KILLS' not in os.environ, reason='takes minutes: set STOCKER_KILLS')


@pytest.fixture(scope='module')
def traces(): return [play(StockerEnv('task_easy'), rule_council(name)) for name in ('vote_mean', 'vote_mean_all_in')]


@pytest.fixture
def rng(): return np.random.default_rng(22)


@needs_fork
def test_a_killed_child_is_told_from_one_that_has_ended():
    def never(): return False
    assert (killed(lambda: time.sleep(PATIENCE), 0.01), killed(lambda: None, 0.0, begun=never)) == (True, False)


class Careless(VoteCache):
    "A cache that writes in place, in parts, as a slow disk does."

    def put(self, *place, model):
        vote, path = super().put(*place, model=model), self.path(*place[:3])
        text = path.read_text()
        with open(path, 'w') as file:
            file.write(text[:60])
            file.flush()
            time.sleep(0.004)
            file.write(text[60:])
        return vote


@needs_fork
def test_a_killed_cache_fill_is_resumed_and_a_careless_cache_found(tmp_path, rng):
    for cache, name in ((VoteCache, 'sound'), (Careless, 'careless')):
        def work(folder, cache=cache): fill_cache(folder, cache)
        kills, damaged = kill_work(work, KILLS, Path(tmp_path, name), rng, resumes=True)
        assert kills and bool(damaged) == (name == 'careless')
    assert [line for line in verify_cache(tmp_path/'sound'/'broken') if '.tmp: ' not in line] == []


@needs_fork
def test_killed_writers_leave_whole_files(traces, rng):
    tables = {id(trace): sweep(trace, seed_grid()[:6]) for trace in traces}
    def choice(trace, path): write_choice(path, trace, tables[id(trace)])
    def in_place(trace, path):
        with open(path, 'w') as file:
            for step in trace.steps: file.write(canonical_json(step) + '\n')
    assert [kill_writers(write, traces, KILLS, rng) for write in (write_trace, choice)] == [0, 0]
    assert kill_writers(in_place, traces, KILLS, rng) > 0


@needs_fork
def test_a_killed_sweep_is_completed(traces, tmp_path, rng):
    def in_place(folder, trace, table):
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder/'sweep.csv', 'w') as file:
            for total in table['total'][:60]:
                print(total, file=file, flush=True)
                time.sleep(0.001)
    table = sweep(traces[0], seed_grid()) # once: what a kill could damage is the writing
    for write in (write_sweep, in_place):
        def work(folder, write=write): write(folder, traces[0], table)
        kills, damaged = kill_work(work, KILLS, tmp_path/write.__name__, rng, resumes=False)
        assert kills and damaged == ({'sweep.csv'} if write is in_place else set())


@needs_fork
def test_killed_runs_reports_and_builds_lose_replace_and_halve_nothing(tmp_path, rng):
    at_work, faults = kill_keepers(KILLS, tmp_path, rng)
    assert faults == [] and sum(at_work.values()) > KILLS // 2


@needs_fork
def test_runs_that_are_written_in_place_under_one_name_are_found_out(tmp_path, rng):
    def in_place(path, fill):
        place, work = path.with_name('task_easy-close'), path.with_name(f'.{os.getpid()}')
        place.mkdir(parents=True, exist_ok=True)
        fill(work)
        for file in sorted(work.iterdir()):
            (place/file.name).write_bytes(file.read_bytes())
            time.sleep(0.05)
        return place
    with patch('stocker.market.core.keep_folder', in_place):
        faults = kill_keepers(12, tmp_path, rng, {'runs': KEEPERS['runs']})[1]
    assert {fault.partition(' is ')[2] for fault in faults} >= {'half', 'lost or replaced'}


@needs_fork
def test_the_lock_of_a_killed_childs_bar_blocks_nobody():
    "Bars share a lock with their children; one who dies with it would stop everyone else for ever."
    def bars():
        while True:
            with tqdm.get_lock(): time.sleep(0.001)
    assert all(killed(bars, 0.002) for _ in range(10))
    assert tqdm.get_lock().acquire(timeout=PATIENCE) is not False
    tqdm.get_lock().release()


def half_written(trace, path): path.write_text(canonical_json(trace), encoding='utf-8')


def silent(trace, path):
    with contextlib.suppress(OSError): write_trace(trace, path)


@pytest.mark.parametrize('kind', ['full', 'read-only'])
@pytest.mark.parametrize('write, faults', [
    (write_trace, set()), (silent, {'nobody was told'}), (half_written, {'the old file is damaged'})])
def test_a_disk_that_refuses_costs_the_new_file_and_nothing_else(kind, write, faults, traces, tmp_path):
    path, council, told = tmp_path/'trace.jsonl', cached_council(tmp_path/'votes'), False
    write(traces[0], path)
    before = path.read_bytes()
    with failing_disk(kind), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        try: write(replace(traces[0], council='another'), path)
        except OSError: told = True
        decided = play(StockerEnv('task_easy'), council).steps
    found = {'nobody was told': not told, 'the old file is damaged': path.read_bytes() != before}
    assert {fault for fault, there in found.items() if there} >= faults
    if write is write_trace: assert not any(found.values())
    assert len(list(tmp_path.rglob('*.*'))) == 1 and decided == traces[0].steps


class Signed(VoteCache):
    "A cache that writes down who wrote."

    def put(self, *place, model): return super().put(*place, model=f'{model} of process {os.getpid()}')


@needs_fork
@pytest.mark.parametrize('cache, same', [(VoteCache, True), (Signed, False)])
def test_processes_that_share_a_cache_leave_what_one_leaves(cache, same, tmp_path):
    fill_cache(tmp_path/'alone')
    work = {'target': fill_cache, 'args': (tmp_path/'shared', cache), 'daemon': True}
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', DeprecationWarning)
        started = [multiprocessing.get_context('fork').Process(**work) for _ in range(2)]
        for process in started: process.start()
    for process in started: process.join(PATIENCE)
    assert [process.exitcode for process in started] == [0, 0]
    assert (contents(tmp_path/'alone') == contents(tmp_path/'shared')) == same


# The clock jumps. Time limits run on the monotonic clock, which nobody can set, and no file is newer for its time.

def test_a_clock_that_jumps_goes_back_and_forward_and_is_put_right_again():
    true = time.time, time.time_ns
    with pytest.raises(KeyError), jumping_clock():
        seen = [time.time() for _ in JUMPS]
        raise KeyError
    assert (time.time, time.time_ns) == true and np.diff(seen).min() < -1e9 and np.diff(seen).max() > 1e9


class ByTime(VoteCache):
    "A cache that reads a file again only if its time and its size have changed."

    known = {}

    def get(self, *place):
        path = self.path(*place[:3])
        key = path, (path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else None
        if key not in self.known: self.known[key] = super().get(*place)
        return self.known[key]


class Expiring(VoteCache):
    "A cache whose votes count for a year."

    def get(self, *place):
        path = self.path(*place[:3])
        if path.exists() and time.time() - path.stat().st_mtime > 3e7: return None
        return super().get(*place)


@pytest.mark.parametrize('cache', [VoteCache, ByTime, Expiring])
def test_a_cache_does_not_trust_the_clock(cache, tmp_path):
    place, votes, wrong = ('news', 'AAPL', '2023-08-07'), cache(tmp_path/'one'), 0
    with jumping_clock():
        for signal in (0.25, 0.75): # of the same length, with the same time on the file
            vote = votes.put(*place, '0' * 64, Vote(signal=signal, confidence=0.5, rationale=''), model='a model')
            os.utime(votes.path(*place), (0, 1e9))
            wrong += sum(votes.get(*place, '0' * 64) != vote for _ in JUMPS)
        fill_cache(tmp_path/'two')
        before = contents(tmp_path/'two')
        wrong_times(tmp_path/'two', np.random.default_rng(27))
        again = fill_cache(tmp_path/'two', cache)
    assert bool(wrong) == (cache is not VoteCache)
    if cache is VoteCache: assert again.asked == again.abstained and contents(tmp_path/'two') == before


def slow_seat(seconds):
    def answer(look):
        time.sleep(seconds)
        return Vote(signal=0.0, confidence=0.0, rationale='')
    return answer


def patience(ask):
    "Whether a seat that answers is always in time, and one that is late never waited for."
    look, prompt, slow = load_task('task_easy').observations()[0], slow_seat(0.02), slow_seat(1.0)
    with jumping_clock():
        return (all(isinstance(ask({'news': prompt}, look, PATIENCE)['news'], Vote) for _ in JUMPS),
                not any(isinstance(ask({'news': slow}, look, 0.01)['news'], Vote) for _ in range(5)))


def test_the_patience_of_a_council_does_not_depend_on_the_clock():
    assert patience(ask_all) == (True, True)
    assert patience(lambda seats, look, seconds: ask_all(seats, look, min(seconds, 0.001))) == (False, True)
    assert patience(lambda seats, look, seconds: ask_all(seats, look)) == (True, False)
    with patch('stocker.council.council.time', SimpleNamespace(monotonic=lambda: time.time())):
        assert patience(ask_all) == (False, False)


def test_a_server_keeps_a_run_while_the_clock_jumps():
    from stocker.serving import limits
    def is_lost(**clock):
        "Whether a run that is asked for all the time is taken for an idle one."
        sessions = limits.HttpSessions(limits.Limits(), **clock)
        sessions.keep(Mock(session=Mock(episode_id='a run')))
        try: return not all(sessions.find('a run') for _ in JUMPS)
        except limits.NoRun: return True
    with jumping_clock(): assert (is_lost(), is_lost(clock=lambda: time.time())) == (False, True)


# A build and a training

def test_a_build_that_writes_in_place_is_found(tmp_path):
    slow = "import sys, time\nfrom pathlib import Path\nfolder = Path(sys.argv[1]); folder.mkdir(exist_ok=True)\n"
    parts = "with open(folder/'a', 'w') as f: f.write('half'); f.flush(); time.sleep(2); f.write('rest')\n"
    whole = "(folder/'a.tmp').write_text('whole'); time.sleep(2); (folder/'a.tmp').replace(folder/'a')\n"
    (tmp_path/'1').mkdir(), (tmp_path/'2').mkdir()
    assert kill_builds(slow + parts, 1, tmp_path/'1') == (1, True)
    assert kill_builds(slow + whole, 1, tmp_path/'2') == (1, False)


@on_request
def test_a_killed_build_leaves_the_data_set_whole(tmp_path):
    kills, damaged = kill_builds(BUILD_PROGRAM, max(1, KILLS // 6), tmp_path)
    assert kills and not damaged


def steps_of(folder, begin, more):
    "Steps that add up, each kept with all that `more` adds; goes on where it stopped."
    file = Path(folder, 'checkpoint', 'adapter_model.safetensors')
    state = json.loads(file.read_text()) if file.is_file() else begin
    while state['step'] < 20:
        state = more({**state, 'step': state['step'] + 1})
        with write_atomically(file) as temporary: temporary.write_text(json.dumps(state))
        time.sleep(0.005)


def counted(folder): steps_of(folder, {'step': 0, 'sum': 0}, lambda state: {**state, 'sum': state['sum'] + 1})


def drawn_again(folder):
    "Begins its random numbers anew where it goes on."
    rng = np.random.default_rng(0)
    steps_of(folder, {'step': 0, 'sum': 0.0}, lambda state: {**state, 'sum': state['sum'] + rng.random()})


def fails(folder): raise SystemExit('no such luck')


def once(folder):
    Path(folder).mkdir(parents=True)
    steps_of(folder, {'step': 0}, dict)


@needs_fork
@pytest.mark.parametrize('train, kills, fault', [
    (counted, 6, None), (drawn_again, 6, 'A run that went on has learned something else.'),
    (fails, 1, 'The training fails.'), (once, 1, 'A killed run cannot go on.')])
def test_a_training_that_cannot_go_on_is_found(train, kills, fault, tmp_path):
    assert fault in (kill_trainings(train, tmp_path, kills)[1] or [None])


@needs_fork
@on_request
def test_a_killed_training_goes_on_as_if_nothing_had_happened(tmp_path):
    pytest.importorskip('trl')
    command = [sys.executable, Path(__file__).with_name('crashes.py'), str(tmp_path), str(max(2, KILLS // 5))]
    ended = subprocess.run(command, env={**os.environ, 'HF_HUB_OFFLINE': '1'}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    kills, faults = json.loads(ended.stdout.splitlines()[-1])
    assert kills and faults == []
