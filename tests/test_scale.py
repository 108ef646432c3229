"""Work in parts: the same table whichever way it is made, nothing done twice, and a driver that is killed goes on."""
import os
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
from waiting import PATIENCE, patiently
from stocker.market.core import StockerError
from stocker.market.histories import load_corpus
from stocker.council.council import rule_council
from stocker.scale import Judging, cut, finish_part, in_processes, run_parts

HERE = os.path.dirname(__file__)


@pytest.fixture(scope='module')
def index(): return load_corpus('validation').index.iloc[:4]


def names(rows): return pd.DataFrame({'name': [row['name'] for row in rows]})


def naming(): return names


class Noting:
    "Makes a worker that notes each part in a file and takes its time."

    def __init__(self, log, pause=0.0, hang_at=None): self.log, self.pause, self.hang_at = str(log), pause, hang_at

    def __call__(self):
        def worker(rows):
            with open(self.log, 'a') as file: file.write(''.join(f"{row['name']}\n" for row in rows))
            with open(self.log) as file: worked_on = len(file.read().split())
            time.sleep(PATIENCE if worked_on == self.hang_at else self.pause)
            return names(rows)
        return worker


def failing():
    def worker(rows): raise ValueError('no such vote')
    return worker


class Dying:
    "Makes a worker that ends its process when it meets one episode."

    def __init__(self, name): self.name = name

    def __call__(self):
        def worker(rows):
            if rows[0]['name'] == self.name: os._exit(1)
            return names(rows)
        return worker


@pytest.mark.parametrize('size, lengths', [(1, [1, 1, 1, 1]), (3, [3, 1]), (9, [4])])
def test_parts_hold_every_episode_once(size, lengths, index):
    parts = cut(index, size, 'question')
    assert [len(part.rows) for part in parts] == lengths
    assert [row['name'] for part in parts for row in part.rows] == index['name'].tolist()


def test_only_missing_parts_are_worked_on_in_processes_too(index, tmp_path):
    parts, log = cut(index, 1, 'q'), tmp_path/'log.txt'
    first = run_parts(Noting(log), parts, tmp_path/'out', workers=2, progress=False)
    assert first['name'].tolist() == index['name'].tolist()
    assert sorted(log.read_text().split()) == sorted(index['name'])
    (tmp_path/'out'/f'{parts[2].name}.parquet').unlink()
    log.unlink()
    assert run_parts(Noting(log), parts, tmp_path/'out', workers=2, progress=False).equals(first)
    assert log.read_text().split() == [index['name'].iloc[2]]


def test_a_failing_worker_leaves_no_part_and_tells_why(index, tmp_path):
    with pytest.raises(ValueError, match='no such vote'):
        run_parts(failing, cut(index, 2, 'q'), tmp_path, workers=2, progress=False)
    assert not list(tmp_path.iterdir())


def test_what_a_process_cannot_import_is_refused_in_words(index, tmp_path):
    code = f'''
import sys
sys.path.insert(0, {HERE!r})
from stocker.market.histories import load_corpus
from stocker.scale import cut, run_parts
def mine(): return lambda rows: None
mine.__module__ = '__main__'
if __name__ == '__main__':
    import stocker.market.core
    parts = cut(load_corpus('validation').index.iloc[:1], 1, 'q')
    try: run_parts(mine, parts, {str(tmp_path)!r}, 2, progress=False)
    except stocker.market.core.StockerError as error: print(error)
'''
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=PATIENCE)
    assert 'put it into a module' in done.stdout, done.stderr


def test_a_process_that_dies_is_told_and_what_is_finished_stays(index, tmp_path):
    parts = cut(index.iloc[:2], 1, 'q')
    with pytest.raises(StockerError, match='a worker process died'):
        list(in_processes(Dying(index['name'].iloc[1]), parts, tmp_path, workers=1)) # one process: the first part first
    assert [part for part in parts if (tmp_path/f'{part.name}.parquet').is_file()] == parts[:1]
    again = run_parts(naming, parts, tmp_path, progress=False)
    assert again['name'].tolist() == index['name'].tolist()[:2]


def test_nothing_to_do_is_an_empty_table(tmp_path): assert run_parts(naming, [], tmp_path, progress=False).empty


def test_judgements_are_the_same_in_processes(index, tmp_path):
    parts = cut(index.iloc[:2], 1, 'rules')
    alone = run_parts(Judging(rule_council), parts, tmp_path/'loop', progress=False)
    assert run_parts(Judging(rule_council), parts, tmp_path/'processes', 2, progress=False).equals(alone)
    assert len(alone) == 2 * 4


def test_a_driver_that_is_killed_goes_on(index, tmp_path):
    "Killed in the middle, started again: every part is there, none is broken, and finished ones are not made again."
    parts, log = cut(load_corpus('validation').index.iloc[:12], 1, 'q'), tmp_path/'log.txt'
    code = f'''
import sys
sys.path.insert(0, {HERE!r})
from test_scale import Noting
from stocker.market.histories import load_corpus
from stocker.scale import cut, run_parts
parts = cut(load_corpus('validation').index.iloc[:12], 1, 'q')
run_parts(Noting({str(log)!r}, hang_at=4), parts, {str(tmp_path/'out')!r}, progress=False)'''
    driver = subprocess.Popen([sys.executable, '-c', code])
    def at_work():
        assert driver.poll() is None, 'it ended before it could be killed'
        return log.exists() and len(log.read_text().split()) >= 4
    patiently(at_work, what='the fourth part is being worked on')
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    finished = [part for part in parts if (tmp_path/'out'/f'{part.name}.parquet').is_file()]
    assert finished == parts[:3]
    log.unlink()
    table = run_parts(Noting(log), parts, tmp_path/'out', progress=False)
    assert len(table) == 12 and len(log.read_text().split()) == 12 - len(finished)


def test_a_worker_that_does_not_write_leaves_the_old_part(index, tmp_path):
    part = cut(index, 4, 'q')[0]
    finish_part(part, names, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError): finish_part(part, failing(), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.skipif(os.environ.get('STOCKER_NO_RAY') == '1', reason='STOCKER_NO_RAY is set')
def test_a_local_ray_with_two_actors_gives_the_same_table(index, tmp_path):
    "In a process of its own, because Ray does not let go of the one it was started in."
    pytest.importorskip('ray')
    code = f'''
import sys
sys.path.insert(0, {HERE!r})
from test_scale import Noting
from stocker.market.histories import load_corpus
from stocker.scale import cut, run_parts
parts = cut(load_corpus('validation').index.iloc[:4], 1, 'q')
make = Noting({str(tmp_path/'log.txt')!r}, pause=0.5)
print(run_parts(make, parts[:2], {str(tmp_path/'out')!r}, workers=2, ray=True, progress=False)['name'].tolist())
print(run_parts(make, parts, {str(tmp_path/'out')!r}, workers=2, ray=True, progress=False)['name'].tolist())'''
    def ran():
        "What came of it; nothing where Ray gave up its start after the half minute that it waits for itself."
        paths = os.pathsep.join([HERE, *sys.path])
        done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=PATIENCE,
                              cwd=tmp_path, env={**os.environ, 'PYTHONPATH': paths})
        return None if 'timed out during startup' in done.stderr else done
    done = patiently(ran, what='Ray starts')
    lines = [line for line in done.stdout.splitlines() if line.startswith('[')]
    assert lines == [str(index['name'].tolist()[:2]), str(index['name'].tolist())], done.stderr
    asked = (tmp_path/'log.txt').read_text().split()
    assert sorted(asked) == sorted(index['name'].tolist())
