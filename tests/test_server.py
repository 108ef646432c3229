"The served environment: what travels, who is kept apart from whom, and what a stranger can do to it."
import asyncio
import gc
import http.client
import importlib.metadata
import itertools
import json
import os
import pathlib
import re
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import weakref
from configparser import ConfigParser
from statistics import mean

import numpy as np
import pytest

pytest.importorskip('openenv')
import httpx
import jsonschema
import yaml
from waiting import PATIENCE, patiently
from hypothesis import HealthCheck, given, settings
from openenv.cli.__main__ import app as openenv_command
from packaging.requirements import Requirement
from starlette.testclient import TestClient
from typer.testing import CliRunner
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from stocker.serving import limits as limits_module
from stocker.serving import server as server_module
from stocker.serving import trials
from stocker.cli import app as stocker_command
from stocker.serving.client import StockerAction, StockerClient, StockerObservation, market_observation
from stocker.market.core import DataError, StockerError
from stocker.trading.env import StockerEnv
from stocker.market.episodes import TASKS, Episode, load_task
from stocker.llm.prompts import decision_in
from stocker.trading.reward import RewardWeights
from stocker.serving.limits import Limits, message_fault
from stocker.serving.server import (
    SERVED_SPLITS, Session, StockerEnvironment, create_app, http_answer, served, served_rows)
from stocker.serving.trials import (
    examine, oracle_orders, play_load, play_served, random_orders, stocker_talk, unequal_runs, write_report)

ROOT = pathlib.Path(__file__).parent.parent
SPACE = ROOT/'space'
COMMAND = 'from stocker.cli import main; main()'
SECRET = 'sk-do-not-tell-anyone'
SECRETS = {name: f'{SECRET}-{name}' for name in (
    'OPENAI_API_KEY', 'HF_TOKEN', 'AWS_SECRET_ACCESS_KEY', 'SPACE_ID', 'SPACE_HOST', 'MODEL_NAME', 'STOCKER_PLANTED')}


@pytest.fixture(scope='module', autouse=True)
def environment():
    "A secret in the environment, and the proxies of a machine that has none: neither may matter."
    before = dict(os.environ)
    os.environ.update(HTTP_PROXY='http://127.0.0.1:9', HTTPS_PROXY='http://127.0.0.1:9', ALL_PROXY='http://127.0.0.1:9',
                      NO_PROXY='', **SECRETS)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope='module')
def command():
    "A server as the command line runs it, started while the other tests go on."
    process = subprocess.Popen([sys.executable, '-c', COMMAND, 'serve', '--port', '0', '--max-sessions', '70'],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said = []
    yield process, said
    if process.poll() is None: process.kill()
    process.communicate()


def wait_for(command):
    "Where the server of the command line says that it listens."
    process, said = command
    if not said: said.append(process.stdout.readline())
    return re.match(r'Stocker at (http://127\.0\.0\.1:[1-9]\d*): OpenEnv at /ws', said[0])[1]


@pytest.fixture(scope='module')
def url(command):
    with served(Limits(max_sessions=80)) as address: yield address


@pytest.fixture
def client(url):
    with StockerClient(url).sync() as one: yield one


@pytest.fixture
def web(url):
    with httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE) as one: yield one


def local(app): return TestClient(app, base_url='http://localhost')


def open_socket(url, **options):
    return connect(url.replace('http', 'ws') + '/ws', proxy=None, open_timeout=PATIENCE, **options)


def ask(socket, message):
    "One message, one answer, read as strict JSON."
    socket.send(message if isinstance(message, (str, bytes)) else json.dumps(message))
    return strict(socket.recv(timeout=PATIENCE))


def strict(text):
    def refuse(constant): raise AssertionError(f'{constant} in an answer')
    return json.loads(text, parse_constant=refuse)


RESET = {'type': 'reset', 'data': {'task': 'task_easy'}}
HOLD = {'type': 'step', 'data': {'side': 'hold', 'quantity': 0}}
BUY = {'type': 'step', 'data': {'side': 'buy', 'quantity': 5}}


# What travels

@pytest.mark.parametrize('timing', ['close', 'next_open'])
def test_the_wire_changes_nothing(client, timing):
    env, answer = StockerEnv('task_hard', timing), client.reset(task='task_hard', timing=timing, bars=260)
    env.reset()
    for order in random_orders(11, 42):
        assert market_observation(answer.observation) == env.market_observation
        answer = client.step({'side': order[0], 'quantity': order[1]})
        _, reward, done, _, information = env.step({'side': order[0], 'quantity': order[1]})
        seen = answer.observation
        assert (answer.reward, seen.reward, answer.done, seen.done) == (reward, reward, done, done)
        assert (seen.cash, seen.shares, seen.portfolio_value) == (env.run.cash, env.run.shares, env.run.value)
        assert (seen.traded, seen.invalid) == (information['traded'], information['invalid'])
        assert seen.reward_parts['performance'] == information['terms'].performance
        assert seen.reward_parts['bonus'] == information['terms'].bonus
    state, snapshot = client.state(), env.snapshot()
    assert answer.done and state.done and (state.step_count, state.steps) == (42, 42)
    assert (state.cash, state.peak, state.max_drawdown, state.portfolio_value) == (
        snapshot.cash, snapshot.peak, snapshot.max_drawdown, snapshot.value)


def flat_episode(name='flat', value=50.0):
    "A share that never moves, without any facts: hardly anything can be computed of it."
    prices = load_task('task_easy').prices.iloc[:320].copy()
    prices.iloc[:, :4], prices['volume'] = value, 1.0
    days = prices.index.strftime('%Y-%m-%d')
    return Episode.from_prices(prices, 'FLAT', days[260], days[300], name=name)


def test_numbers_that_do_not_exist_are_null():
    environment = StockerEnvironment(episodes=[flat_episode()])
    for observation in [environment.reset(task='flat'), environment.step(StockerAction(side='buy', quantity=1))]:
        text = json.dumps(http_answer(observation), allow_nan=False)
        seen = json.loads(text)['observation']
        assert seen['fundamentals'] is None and None in seen['indicators'].values() and seen['peers'] == []
        assert StockerObservation.model_validate(observation.model_dump()) is not None
        assert type(seen['shares']) is int and type(seen['cash']) is float


def test_the_first_day_of_an_empty_record_over_the_wire():
    with local(create_app(episodes=[flat_episode()])).websocket_connect('ws://localhost/ws') as socket:
        socket.send_json({'type': 'reset', 'data': {'task': 'flat', 'bars': 260}})
        told = strict(socket.receive_text())['data']
    seen = told['observation']
    assert (told['reward'], told['done'], seen['fundamentals'], seen['traded']) == (None, False, None, None)
    assert None in seen['indicators'].values() and all(type(seen[name]) is int for name in ('step', 'steps', 'shares'))



def test_the_reward_tree_has_names_and_adds_up():
    environment, weights = StockerEnvironment(), RewardWeights()
    environment.reset(task='task_medium')
    names = [name for name, _ in environment.rubric.named_rubrics()]
    assert names == ['performance', 'inflation', 'invalid_penalty', 'bonus']
    for side, quantity in [*random_orders(3, 40), ('sell', 10_000)]:
        reward = environment.step(StockerAction(side=side, quantity=quantity)).reward
        part = {name: rubric.last_score for name, rubric in environment.rubric.named_rubrics()}
        total = weights.w_performance * part['performance'] + weights.w_inflation * part['inflation']
        total = total - part['invalid_penalty'] + part['bonus']
        assert environment.rubric.last_score == reward == max(-1, min(1, total))
    environment.reset()
    assert environment.rubric.last_score is None


@pytest.mark.parametrize('options, cause', [
    ({'task': 'task_impossible'}, 'no episode'), ({'split': 'everything'}, 'unknown split'),
    ({'index': 3}, 'needs a split'),
    ({'task': 'task_easy', 'split': 'train'}, 'not both'), ({'split': 'tasks', 'index': 3}, 'last index is 2'),
    ({'timing': 'noon'}, 'timing: '), ({'seed': -1}, 'seed: '), ({'seed': 1.5}, 'seed: '), ({'seed': True}, 'seed: '),
    ({'bars': 261}, 'bars: '), ({'episode_id': ''}, 'episode_id: '), ({'episode_id': 'two words'}, 'episode_id: '),
    ({'episode_id': 'x' * 256}, 'episode_id: '), ({'episode_id': 'line\n'}, 'episode_id: '),
    ({'misspelt': 1}, 'misspelt: ')])
def test_a_reset_that_is_refused_changes_nothing(options, cause):
    environment = StockerEnvironment()
    environment.reset(task='task_easy', episode_id='stays')
    environment.step(StockerAction(side='buy', quantity=3))
    before = environment.state
    with pytest.raises(StockerError, match=cause): environment.reset(**options)
    assert environment.state == before


# Tasks

def test_splits_and_tasks_over_http(web):
    splits = web.get('/stocker/splits').json()
    assert [split['name'] for split in splits] == list(SERVED_SPLITS)
    for split in SERVED_SPLITS:
        count = web.post('/stocker/num_tasks', json={'split': split}).json()['num_tasks']
        tasks = web.post('/stocker/tasks', json={'split': split}).json()['tasks']
        last = web.post('/stocker/task', json={'split': split, 'index': count - 1}).json()['task']
        assert (len(tasks), tasks[-1]) == (count, last) and count >= 3
    some = web.post('/stocker/task_range', json={'split': 'tasks', 'start': 1}).json()['tasks']
    assert [task['id'] for task in some] == ['task_medium', 'task_hard']
    assert web.post('/stocker/task', json={'split': 'tasks', 'index': 3}).status_code == 400
    assert web.post('/stocker/tasks', json={'split': 'everything'}).status_code == 422
    assert web.get('/other/splits').status_code == 404




def test_a_listed_task_can_be_played_by_place_and_by_name(client):
    listed = client.reset(split='validation', index=5).observation
    named = client.reset(task=served_rows('validation')[5]['name']).observation
    assert (listed.task, listed.bars) == (named.task, named.bars)



# Who is kept apart from whom

def test_neighbours_and_a_client_that_disappears():
    with served(Limits(max_sessions=2)) as url, open_socket(url) as mine:
        ask(mine, RESET), ask(mine, BUY)
        yours = open_socket(url).__enter__()
        assert ask(yours, RESET)['data']['observation']['shares'] == 0
        with open_socket(url) as third: assert strict(third.recv())['data']['code'] == 'CAPACITY_REACHED'
        yours.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b'\x01\0\0\0\0\0\0\0')
        yours.socket.close()  # a reset of the connection, without a goodbye

        def begins():
            with open_socket(url) as third: return (ask(third, RESET)['data'].get('observation') or {}).get('step') == 0
        patiently(begins, what='the place of a client that disappeared is free')
        assert ask(mine, HOLD)['data']['observation']['shares'] == 5


def test_seeds_are_not_shared(url):
    def draws(one, seed):
        return [one.reset(split='train', **seeded).observation.task for seeded in ({'seed': seed}, {})]
    with StockerClient(url).sync() as a, StockerClient(url).sync() as b, StockerClient(url).sync() as c:
        alone = draws(a, 7)
        first = [one.reset(split='train', seed=seed).observation.task for one, seed in ((a, 7), (b, 8), (c, 7))]
        second = [one.reset(split='train').observation.task for one in (a, b, c)]
    assert [first[0], second[0]] == [first[2], second[2]] == alone
    assert first[1] != first[0]


def short_talk(number): return stocker_talk(number)[:5]


def test_nothing_is_left_of_clients_that_are_gone(monkeypatch):
    with served() as url:
        before, made = threading.active_count(), weakref.WeakSet()
        monkeypatch.setattr(StockerEnvironment, 'close', lambda environment: made.add(environment))
        for _ in range(3): play_load(url, short_talk, clients=8)

        def nothing_left():
            gc.collect()
            return not made and threading.active_count() <= before + 8
        patiently(nothing_left, what='environments and threads of clients that are gone', pause=0.05)


# Faulty messages

FAULTY = {
    'not JSON': ('{"type": ', 'this is not JSON'), 'empty': ('', 'this is not JSON'),
    'NaN': ('{"seed": NaN}', 'NaN is not'),
    'a key twice': ('{"type": "step", "data": {"quantity": 5, "quantity": 9}}', "'quantity' stands twice"),
    'a type twice': ('{"type": "state", "type": "step"}', "'type' stands twice"),
    'a list': ('[1]', 'a message is a JSON object'), 'a text': ('"reset"', 'a message is a JSON object'),
    'null': ('null', 'a message is a JSON object'), 'deep': ('[' * 30_000, 'this is not JSON'),
    'long number': ('{"type": ' + '1' * 6_000 + '}', 'this is not JSON'), 'binary': (b'\x00\x01', 'send JSON'),
    'oversized': ('{"type": "step", "data": "' + 'x' * 70_000 + '"}', 'more than 65536 bytes'),
    'wide characters': ('{"type": "' + 'ä' * 40_000 + '"}', 'more than 65536 bytes'),
    'no type': ('{}', 'Unknown message type'), 'unknown type': ('{"type": "jump"}', 'Unknown message type'),
    'odd type': ('{"type": ["step"]}', 'Unknown message type'),
    'data no object': ('{"type": "step", "data": 3}', 'data: '), 'no data': ('{"type": "step"}', 'data: '),
    'surplus': ('{"type": "state", "extra": 1}', 'extra: '),
    'half a sign': ('{"type": "step", "data": {"side": "\\ud800"}}', 'half a sign'),
    'quantity a text': ('{"type": "step", "data": {"side": "buy", "quantity": "5"}}', 'quantity: '),
    'quantity a fraction': ('{"type": "step", "data": {"side": "buy", "quantity": 1.5}}', 'quantity: '),
    'quantity true': ('{"type": "step", "data": {"side": "buy", "quantity": true}}', 'quantity: '),
    'quantity huge': ('{"type": "step", "data": {"side": "buy", "quantity": 1e400}}', 'quantity: '),
    'unknown side': ('{"type": "step", "data": {"side": "short"}}', 'side: '),
    'no side': ('{"type": "step", "data": {}}', 'side: '),
    'tool as action': ('{"type": "step", "data": {"type": "list_tools"}}', 'side: '),
    'reset with a list': ('{"type": "reset", "data": []}', 'data: '),
    'bad reset': ('{"type": "reset", "data": {"seed": "x"}}', 'seed: ')}


@pytest.fixture(scope='module')
def two(url):
    "A session that is sent faulty messages, and its neighbour."
    with open_socket(url, max_size=None) as one, open_socket(url) as other:
        for each in (one, other): ask(each, {'type': 'reset', 'data': {'split': 'train', 'index': 0}})
        yield one, other


@pytest.mark.parametrize('name', FAULTY)
def test_a_faulty_message_is_told_its_cause_and_costs_nothing(two, name):
    one, other = two
    message, cause = FAULTY[name]
    before, neighbour = ask(one, {'type': 'state'}), ask(other, {'type': 'state'})
    answer = ask(one, message)
    assert answer['type'] == 'error' and cause in answer['data']['message'] and answer['data']['code']
    assert (ask(one, {'type': 'state'}), ask(other, {'type': 'state'})) == (before, neighbour)
    assert ask(one, {'type': 'reset', 'data': {}})['type'] == 'observation'


def test_too_early_and_too_late(url):
    with open_socket(url) as one:
        assert 'call reset() first' in ask(one, HOLD)['data']['message']
        assert ask(one, {'type': 'state'})['data']['step_count'] == 0
        answer = ask(one, RESET)
        while not answer['data']['done']: answer = ask(one, HOLD)
        state = ask(one, {'type': 'state'})
        assert 'the episode is over' in ask(one, HOLD)['data']['message']
        assert ask(one, {'type': 'state'}) == state and state['data']['done']
        assert ask(one, RESET)['data']['observation']['step'] == 0


def test_a_frame_beyond_all_measure_ends_its_connection_only(url):
    with open_socket(url) as other, open_socket(url) as one:
        ask(other, RESET), ask(other, BUY)
        with pytest.raises(ConnectionClosed):
            one.send('x' * 3_000_000)
            one.recv(timeout=PATIENCE)
        assert ask(other, HOLD)['data']['observation']['shares'] == 5


def test_silence_ends_a_session_and_frees_its_place():
    with served(Limits(max_sessions=1, idle_seconds=0.2)) as url:
        def was_let_in():
            "Whether a session begins and is closed only because nothing is said in it."
            with open_socket(url) as one:
                try: return one.recv(timeout=PATIENCE) is None  # a word of the server: there was no place
                except ConnectionClosed as ended: return 'silent' in ended.rcvd.reason
        assert was_let_in()
        patiently(was_let_in, what='the place is free again')


def test_a_message_ends_the_silence(monkeypatch):
    now, watches, sent = [0.0], [], []

    class Kept(limits_module.SilenceWatch):
        def __init__(self, *options):
            super().__init__(*options)
            watches.append(self)

    async def receive():
        now[0] += 60.0
        return {'type': 'websocket.receive', 'text': '{"type": "state"}'}

    async def send(message): sent.append(message)

    async def app(scope, receive, send):
        for seconds, closed in ((60.0, 0), (99.0, 0), (101.0, 1)):
            await receive()
            now[0] += seconds
            watches[0].timer.cancel()
            watches[0]._look()
            if closed: await watches[0].closing
            assert len(sent) == closed
    monkeypatch.setattr(limits_module, 'SilenceWatch', Kept)
    monkeypatch.setattr(limits_module, 'time', types.SimpleNamespace(monotonic=lambda: now[0]))
    asyncio.run(limits_module.Guard(app, Limits(idle_seconds=100.0))({'type': 'websocket'}, receive, send))
    assert 'silent' in sent[0]['reason'] and now[0] == 440.0


def test_a_long_thought_is_not_a_lost_client(monkeypatch):
    monkeypatch.setattr(server_module, 'PING_SECONDS', 0.1)
    monkeypatch.setattr(server_module, 'PONG_SECONDS', PATIENCE)

    async def think(url):
        async with StockerClient(url) as one:
            await one.reset(task='task_easy')
            time.sleep(0.8)  # the loop of the client stands still, as during a call of a language model
            return (await one.step({'side': 'hold'})).observation.step
    with served() as url: assert asyncio.run(think(url)) == 1


# Plain HTTP



def test_the_plain_walk_gives_the_same_rewards(web, client):
    orders = oracle_orders('task_easy')
    web.post('/reset', json={'task': 'task_easy', 'episode_id': 'oracle'})
    walked = [web.post('/step', json={'episode_id': 'oracle', 'side': side, 'quantity': quantity}).json()
              for side, quantity in orders]
    played = play_served(client, orders, task='task_easy')
    assert [answer['reward'] for answer in walked] == [answer['reward'] for answer in played[1:]]
    assert walked[-1]['done']
    late = web.post('/step', json={'episode_id': 'oracle', 'side': 'hold'})
    assert (late.status_code, 'is over' in late.json()['detail']) == (409, True)


def test_two_plain_walks_do_not_mix(web):
    walks = {'plain-a': random_orders(21, 12), 'plain-b': random_orders(22, 12)}

    def step(name, order):
        return web.post('/step', json={'episode_id': name, 'side': order[0], 'quantity': order[1]}).json()

    def begin(name): assert web.post('/reset', json={'task': 'task_hard', 'episode_id': name}).status_code == 200
    alone = {}
    for name, orders in walks.items():
        begin(name)
        alone[name] = [step(name, order) for order in orders]
    for name in walks: begin(name)
    together = {name: [] for name in walks}
    for orders in zip(*walks.values(), strict=True):
        for name, order in zip(walks, orders, strict=True): together[name].append(step(name, order))
    assert together == alone and together['plain-a'] != together['plain-b']
    states = [web.get('/state', params={'episode_id': name}).json() for name in walks]
    assert [state['cash'] for state in states] == [run[-1]['observation']['cash'] for run in alone.values()]
    begin('plain-b')
    assert web.get('/state', params={'episode_id': 'plain-a'}).json() == states[0]


def test_a_plain_walk_that_is_left_makes_room():
    with local(create_app(limits=Limits(max_sessions=1, idle_seconds=0.01))) as web:
        assert web.post('/reset', json={'episode_id': 'left'}).status_code == 200
        patiently(lambda: web.get('/state', params={'episode_id': 'left'}).status_code == 410, pause=0.02)
        assert 'idle for more than 0.01 seconds' in web.get('/state', params={'episode_id': 'left'}).json()['detail']
        assert web.post('/reset', json={'episode_id': 'next'}).status_code == 200


def test_resets_without_an_end_shut_nobody_out():
    with local(create_app()) as web:
        for number in range(64): assert web.post('/reset', json={'episode_id': f'run-{number}'}).is_success
        assert web.get('/state', params={'episode_id': 'run-0'}).is_success # so that run-1 is idle for longest
        later = web.post('/reset', json={'episode_id': 'later'})
        lost = web.post('/step', json={'episode_id': 'run-1', 'side': 'hold'})
        assert (later.status_code, lost.status_code) == (200, 410)
        for words in ('all 64 places were taken', 'idle for longest', 'POST /close', '--max-sessions', 'POST /reset'):
            assert words in lost.json()['detail']
        assert web.post('/step', json={'episode_id': 'run-0', 'side': 'hold'}).is_success
        assert web.post('/reset', json={'episode_id': 'run-1'}).json()['observation']['step'] == 0


def test_what_is_over_gives_way_before_what_goes_on():
    with local(create_app(limits=Limits(max_sessions=2))) as web:
        for name in ('going-on', 'over'): web.post('/reset', json={'episode_id': name})
        while not web.post('/step', json={'episode_id': 'over', 'side': 'hold'}).json()['done']: pass
        assert web.post('/reset', json={'episode_id': 'new'}).is_success
        codes = [web.get('/state', params={'episode_id': name}).status_code for name in ('going-on', 'over', 'new')]
    assert codes == [200, 410, 200]


def test_a_run_that_is_closed_tells_where_it_stood(web):
    web.post('/reset', json={'task': 'task_easy', 'episode_id': 'short'})
    web.post('/step', json={'episode_id': 'short', 'side': 'buy', 'quantity': 3})
    stood = web.get('/state', params={'episode_id': 'short'}).json()
    closed = web.post('/close', json={'episode_id': 'short'})
    assert (closed.status_code, closed.json(), stood['shares']) == (200, stood, 3)
    for again in (web.post('/close', json={'episode_id': 'short'}), web.get('/state?episode_id=short')):
        assert again.status_code == 410 and 'it was closed' in again.json()['detail']
    assert web.post('/close', json={'episode_id': 'nobody'}).status_code == 404


PAGE = {'origin': 'https://evil.example'}
HANDSHAKE = {'connection': 'Upgrade', 'upgrade': 'websocket', 'sec-websocket-version': '13',
             'sec-websocket-key': 'dGhlIHNhbXBsZSBub25jZQ=='}
REBOUND = {'host': 'evil.example:8000', 'origin': 'http://evil.example:8000'}


@pytest.mark.parametrize('headers', [
    PAGE, REBOUND, {'host': 'evil.example:8000'}, {'origin': 'null'}, {'origin': 'http://localhost:1'},
    {'host': '127.0.0.1.evil.example'}])
def test_a_web_page_of_a_stranger_is_not_let_in(url, headers):
    with httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE, headers=headers) as page:
        answers = [page.get('/health'), page.get('/'), page.post('/reset', json={}), page.options('/reset'),
                   page.post('/reset', content='{}', headers={'content-type': 'text/plain'}), page.post('/mcp')]
    assert {answer.status_code for answer in answers} == {403}
    assert all('--allow-host' in answer.json()['detail'] for answer in answers)
    assert not any('access-control-allow-origin' in answer.headers for answer in answers)
    refused = httpx.get(f'{url}/ws', trust_env=False, timeout=PATIENCE, headers={**HANDSHAKE, **headers})
    assert refused.status_code == 403 and '--allow-host' in refused.json()['detail']


def test_the_own_page_and_programs_are_let_in(url):
    port, plain = url.rsplit(':', 1)[1], {'trust_env': False, 'timeout': PATIENCE}
    for host in (f'127.0.0.1:{port}', f'localhost:{port}', f'[::1]:{port}', '10.0.0.7'):
        for headers in ({'host': host}, {'host': host, 'origin': f'http://{host}'}):
            assert httpx.get(f'{url}/health', headers=headers, **plain).is_success
            assert httpx.get(f'{url}/ws', headers={**HANDSHAKE, **headers}, **plain).status_code == 101
    with open_socket(url, origin=url) as one: assert ask(one, RESET)['type'] == 'observation'


def test_a_page_that_is_allowed_may_read_and_play():
    with (served(allowed_hosts=['*.hf.space']) as url,
          httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE) as web):
        page = {'origin': 'https://somebody-else.hf.space'}
        assert web.post('/reset', json={}, headers=page).headers['access-control-allow-origin'] == '*'
        asked = web.options('/reset', headers={**page, 'access-control-request-method': 'POST',
                                               'access-control-request-headers': 'content-type'})
        assert asked.is_success
        assert web.get('/health', headers={'host': 'somebody-stocker.hf.space'}).is_success
        with open_socket(url, origin=page['origin']) as one: assert ask(one, RESET)['type'] == 'observation'
        for headers in (PAGE, REBOUND, {'host': 'evilhf.space'}, {'host': 'a.hf.space.evil.example'}):
            assert web.get('/health', headers=headers).status_code == 403


def test_the_front_page_says_what_this_is_and_leads_on(web):
    front = web.get('/')
    assert front.headers['content-type'].startswith('text/html') and '<h1>Stocker</h1>' in front.text
    links = re.findall(r'href="(.*?)"', front.text)
    assert '/docs' in links and '/web/' not in links
    assert {web.get(link).status_code for link in links} == {200}


def test_a_key_that_stands_twice_is_found_in_no_time():
    text = '{' + ','.join(f'"{number:05}":1' for number in range(6_000)) + ',"05999":1}'
    before = time.process_time()
    for _ in range(10): assert 'stands twice' in message_fault(text, 70_000)[1]
    assert time.process_time() - before < 1.0


@pytest.mark.skipif(shutil.which('curl') is None, reason='curl is not installed')
@pytest.mark.parametrize('document', ['space/README.md', 'nbs/serving/74_server.ipynb'])
def test_what_is_written_for_curl_works(url, document):
    text = (ROOT/document).read_text()
    if document.endswith('.ipynb'):
        text = '\n'.join(''.join(cell['source']) for cell in json.loads(text)['cells'])
    lines = [line for line in text.replace('http://127.0.0.1:8000', url).splitlines() if line.startswith('curl')]
    answers = [strict(subprocess.run(['curl', '--silent', '--noproxy', '*', *shlex.split(line)[1:]], text=True,
                                     capture_output=True, check=True, timeout=PATIENCE).stdout) for line in lines]
    assert [answer['observation']['shares'] for answer in answers[:2]] == [0, 10]
    assert all(answer['step_count'] == 1 for answer in answers[2:]) and len(answers) >= 2


@pytest.mark.parametrize('path, body, status, cause', [
    ('/step', {'side': 'buy', 'quantity': 1}, 422, 'POST /reset begins an episode and answers its episode_id'),
    ('/step', {'episode_id': 'nobody', 'side': 'buy'}, 404, 'POST /reset'),
    ('/step', {'episode_id': 'x', 'side': 'buy', 'quantity': '1'}, 422, 'quantity'),
    ('/step', '{"episode_id": "x", "side": "buy", "quantity": 5, "quantity": 500}', 400, "'quantity' stands twice"),
    ('/reset', '{"task": "task_easy", "task": "task_hard"}', 400, "'task' stands twice"),
    ('/close', '{"episode_id": "x", "episode_id": "y"}', 400, "'episode_id' stands twice"),
    ('/stocker/tasks', '{"split": "train", "split": "test"}', 400, "'split' stands twice"),
    ('/step', '{"side": ', 400, 'not JSON'), ('/step', '[]', 400, 'JSON object'),
    ('/step', '{"episode_id": "x", "side": "buy", "quantity": NaN}', 400, 'NaN'),
    ('/reset', {'taks': 1}, 422, 'taks'), ('/reset', {'task': 'no'}, 422, 'choose one of'),
    ('/reset', 'x' * 70_000, 413, 'bytes'), ('/reset', '[' * 30_000, 400, 'not JSON'),
    ('/reset', {'seed': '9' * 5_000}, 422, 'seed'), ('/mcp', {}, 200, 'no tools')])
def test_faulty_requests_are_told_their_cause(web, path, body, status, cause):
    content = body if isinstance(body, str) else json.dumps(body)
    for kind in ('application/json', 'Application/JSON; charset=utf-8'):
        answer = web.post(path, content=content, headers={'content-type': kind})
        assert (answer.status_code, cause in answer.text) == (status, True)


def test_a_body_without_an_end_is_not_waited_for(url):
    def chunks():
        for _ in range(100): yield b' ' * 1_000
    with httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE) as web:
        assert web.post('/reset', content=chunks()).status_code == 413
    with served(Limits(body_seconds=1.0)) as slow:
        connection = http.client.HTTPConnection(slow.removeprefix('http://'), timeout=PATIENCE)
        connection.putrequest('POST', '/reset')
        connection.putheader('content-length', '10')
        connection.endheaders(b'{')
        assert connection.getresponse().status == 408


def test_a_connection_that_asks_nothing_is_closed():
    with served(Limits(body_seconds=1.0)) as url:
        place = ('127.0.0.1', int(url.rsplit(':', 1)[1]))
        with open_socket(url) as session:
            ask(session, RESET)
            silent, slow, again = (socket.create_connection(place, timeout=PATIENCE) for _ in range(3))
            slow.sendall(b'POST /reset HTTP/1.1\r\nhost: localhost\r\n')
            again.sendall(b'GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n')
            assert again.recv(1_000).startswith(b'HTTP/1.1 200')
            again.sendall(b'GET /health HTT')
            busy = http.client.HTTPConnection(*place, timeout=PATIENCE)
            while not select.select([silent], [], [], 0.01)[0]:  # who goes on asking is not closed meanwhile
                busy.request('GET', '/health')
                assert busy.getresponse().read() == b'{"status":"healthy"}'
            for one in (silent, slow, again):
                while one.recv(1_000): pass
                one.close()
            assert ask(session, BUY)['data']['observation']['shares'] == 5
            busy.close()


# Nothing is given away

TOO_MUCH = (*SECRETS.values(), '/srv/secret', str(ROOT), 'site-packages', 'Traceback', sys.prefix,
            str(pathlib.Path.home()) + '/', 'planted-line')
PATHS = ('/metadata', '/schema', '/health', '/openapi.json', '/list_environments', '/nowhere', '/state', '/docs', '/',
         '/stocker/splits', '/../../etc/passwd', '/web/', '/web/config', '/web/metadata', '/web/gradio_api/info')


def test_no_path_variable_or_key_in_any_answer(url, web, monkeypatch):
    def broken(*_): raise DataError('the file cannot be read', file='/srv/secret/prices.parquet')

    def worse(*_): raise OSError(f'cannot open /srv/secret/{SECRET}')
    answers, bodies = [web.get(path).text for path in PATHS], ({}, {'episode_id': 'x'}, [1])
    answers += [web.post(path, json=body).text for path in ('/reset', '/step', '/mcp') for body in bodies]
    with open_socket(url) as one:
        for fault in (broken, worse):
            monkeypatch.setattr(server_module, 'choose_served', fault)
            answers += [json.dumps(ask(one, RESET)), web.post('/reset').text]
            assert 'its log says why' in answers[-1] and 'its log says why' in answers[-2]
        monkeypatch.undo()
        messages = (RESET, HOLD, {'type': 'state'}, {'type': 'mcp', 'data': {}})
        answers += [json.dumps(ask(one, message)) for message in messages]
    assert [secret for secret in TOO_MUCH if secret in ' '.join(answers)] == []



# The client

def test_the_client_in_a_running_loop(url):
    async def cell():
        with StockerClient(url).sync() as one: return one.reset(task='task_easy').observation.task
    assert asyncio.run(cell()) == 'task_easy'


def test_without_openenv_the_modules_say_what_to_install():
    code = ('import sys; sys.modules["openenv"] = None\n'
            'import stocker.serving.trials\nfrom stocker.serving.client import StockerClient\n'
            'from stocker.serving.server import StockerEnvironment, create_app\n'
            'for make in (StockerClient, StockerEnvironment, create_app):\n'
            '    try: make()\n    except ValueError as error: print(error)')
    told = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout
    assert told.splitlines() == ["OpenEnv is missing: pip install 'stocker[serve]'"] * 3


# What others ask of it

def test_openenv_validates_the_space():
    answer = CliRunner().invoke(openenv_command, ['validate', str(SPACE), '--level', 'static'])
    assert answer.exit_code == 0 and 'PASS  static.manifest' in answer.output and 'Verdict: PASS' in answer.output


def test_openenv_validates_the_server(url, monkeypatch):
    for name in ('NO_PROXY', 'no_proxy'): monkeypatch.setenv(name, '127.0.0.1')
    answer = CliRunner().invoke(openenv_command, ['validate', '--url', url, '--timeout', str(PATIENCE)])
    assert answer.exit_code == 0 and 'mode: simulation' in answer.output and 'Verdict: PASS' in answer.output


def test_openenv_grades_a_run(url):
    from openenv.validation.graders import Subject
    from openenv.validation.graders.runtime import RewardWellFormedGrader, StateContractGrader
    from openenv.validation.parsers.openenv_yaml import OpenEnvYamlParser
    from openenv.validation.runtime.collector import collect_runtime_evidence
    from openenv.validation.runtime.contracts import load_runtime_plan
    manifest = OpenEnvYamlParser().parse(SPACE)
    evidence = collect_runtime_evidence(url, load_runtime_plan(SPACE, manifest.execution), episode_timeout_s=PATIENCE)
    subject = Subject(root=SPACE, manifest=manifest, image_ref=None, running=None, outputs_dir=SPACE,
                      runtime_evidence=evidence)
    assert evidence.failure_reason is None
    for grader in (RewardWellFormedGrader, StateContractGrader):
        result = grader().run(subject)
        assert result.status.value == 'pass', result.evidence
    schema = jsonschema.Draft202012Validator(json.loads(evidence.observation_schema_json))
    answers = [strict(exchange.response_json)['data'] for exchange in evidence.exchanges
               if exchange.operation != 'state']
    for answer in answers:
        schema.validate({**answer['observation'], 'reward': answer['reward'], 'done': answer['done']})
    assert len(answers) == 5


def faulty(change):
    "A view of a run with a fault in it."
    def view(session, *rest):
        seen = plain_view(session, *rest)
        change(session, seen)
        return seen
    return Session, 'view', view


def random_cash(session, seen): seen.cash += float(np.random.default_rng().random())


def half_reward(session, seen): seen.reward = seen.reward and seen.reward / 2


def paid_for_coming(session, seen): seen.reward = None if seen.reward is None else 0.5


def paid_for_trading(session, seen): seen.reward = seen.reward and seen.reward + (0.5 if seen.traded else 0.0)


def cash_of_another(session, seen): LAST['cash'], seen.cash = seen.cash, LAST.get('cash', seen.cash)


def tomorrow(session, seen): seen.price = session.run.known[min(session.run.step + 1, seen.steps - 1)]


plain_view, plain_state, server_choice = Session.view, Session.state.fget, server_module.choose_served
LAST = {}
PLANTED = {
    'seed_control': (server_module, 'choose_served',
                     lambda asked, random, own: server_choice(asked, np.random.default_rng(0), own)),
    'episode_determinism': faulty(random_cash), 'oracle_max': faulty(half_reward), 'floor_gap': faulty(paid_for_coming),
    'canary_floor': faulty(paid_for_trading), 'no_solution_leakage': faulty(tomorrow),
    'episode_isolation': faulty(cash_of_another),
    'replayability': (Session, 'state', property(lambda run: plain_state(run).model_copy(update={'cash': 0.0})))}


@pytest.mark.parametrize('name', PLANTED)
def test_each_check_finds_the_fault_it_is_for(url, monkeypatch, name):
    monkeypatch.setattr(trials, 'TASKS', {'task_easy': TASKS['task_easy']})
    LAST.clear()
    monkeypatch.setattr(*PLANTED[name])
    check = getattr(trials, name)(url)
    assert not check.passed and check.check_id.endswith(name)


def test_the_checks_hold_and_the_report_is_current(url, tmp_path):
    checks = examine(url)
    assert [check.check_id for check in checks if not check.passed] == []
    write_report(checks, tmp_path/'report.json')
    fresh, kept = (json.loads((folder/'report.json').read_text()) for folder in (tmp_path, SPACE/'validation'))
    assert fresh == kept


def click(page, name, *data):
    "A button of the page: what it changes."
    event = page.post(f'/web/gradio_api/call/{name}', json={'data': list(data)}).json()['event_id']
    return json.loads(page.get(f'/web/gradio_api/call/{name}/{event}').text.split('data: ', 1)[1])


@pytest.mark.filterwarnings('ignore::DeprecationWarning')  # of the page's own library
def test_the_page_of_openenv(monkeypatch, tmp_path):
    monkeypatch.setenv('ENABLE_WEB_INTERFACE', 'true')
    planted = tmp_path/'secret.txt'
    planted.write_text('planted-line')
    with local(create_app()) as page:
        first = click(page, 'reset_env', [])
        assert '<svg' in first[0]['value'] and 'AAPL: task_easy' in first[0]['value']
        assert [label for label, _ in first[1]['choices']] == ['Hold', 'Buy 51']
        second = click(page, 'step_fn', first[-2], 'buy', 4)
        assert '<b>4</b>' in second[0]['value'] and 'last reward' in second[0]['value']
        assert 'greater' in str(click(page, 'step_fn', second[-1], 'buy', -10 ** 16))
        about = page.get('/web/metadata').json()
        assert about == page.get('/metadata').json() and about['description'].startswith('Trade one share')
        answers = [page.get(path).text for path in (*PATHS, f'/web/gradio_api/file={planted.name}')]
        answers.append(page.get(f'/web/gradio_api/file={planted}').text.replace(str(planted), ''))
        assert [secret for secret in TOO_MUCH if secret in ' '.join(answers)] == []
        assert {page.post(f'/web/{name}', json={}).status_code for name in ('reset', 'step', 'state')} <= {404, 405}



def test_the_command_listens_on_this_machine_only(command, monkeypatch):
    given = []
    monkeypatch.setattr(server_module, 'serve', lambda *arguments: given.append(arguments[:4]))
    for arguments in (['serve'], ['serve', '--host', '0.0.0.0', '--port', '9', '--max-sessions', '3',
                                  '--allow-host', 'a.example', '--allow-host', '*.hf.space']):
        assert CliRunner().invoke(stocker_command, arguments).exit_code == 0
    assert given == [('127.0.0.1', 8000, Limits(), ()),
                     ('0.0.0.0', 9, Limits(max_sessions=3), ['a.example', '*.hf.space'])]
    with pytest.raises(OSError): socket.create_connection(('127.0.0.2', int(wait_for(command).rsplit(':', 1)[1])), 5)


def test_a_port_in_use_is_told_in_one_line_and_no_address_before_it():
    with socket.create_server(('127.0.0.1', 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run([sys.executable, '-c', COMMAND, 'serve', '--port', port], capture_output=True, text=True)
    cause = f'port {port} of 127.0.0.1 cannot be opened (Address already in use)'
    assert (done.returncode, done.stdout) == (2, '')
    assert done.stderr == f'stocker: {cause}: --port 0 takes any that is free\n'


def test_sixty_four_clients_at_once(command):
    load = play_load(wait_for(command), clients=64, keep=True)
    assert len(load.answers) == 64 and unequal_runs(load) == []
    assert 0 < load.percentile(50) <= load.percentile(99)


def test_terminated_servers_end_cleanly(command):
    process, url = command[0], wait_for(command)
    with open_socket(url) as one:
        ask(one, RESET)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(ConnectionClosed): one.recv(timeout=PATIENCE)
    output, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, output, errors) == (0, '', '')


# The container and what is beside it

def needed(extra):
    "Every distribution that an installation with an extra brings, by name, as this environment has them."
    options = ConfigParser(delimiters=['='])
    options.read(ROOT/'settings.ini')
    wanted = [Requirement(text) for name in ('requirements', f'{extra}_requirements')
              for text in options['DEFAULT'][name].split()]
    found = set()
    while wanted:
        one = wanted.pop()
        name = re.sub('[-_.]+', '-', one.name).lower()
        extras = sorted({'', *one.extras})
        if (name, *extras) in found or (one.marker and not one.marker.evaluate({'extra': ''})): continue
        found.add((name, *extras))
        try: below_it = importlib.metadata.requires(one.name) or ()
        except importlib.metadata.PackageNotFoundError: continue
        for text in below_it:
            below = Requirement(text)
            if below.marker is None or any(below.marker.evaluate({'extra': each}) for each in extras):
                below.marker = None
                wanted.append(below)
    return {name for name, *_ in found}


def test_the_container_brings_no_model_and_no_root():
    lines = (SPACE/'Dockerfile').read_text().replace('\\\n', ' ').splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith('#')]
    said = {name: [rest for step, rest in steps if step == name] for name, _ in steps}
    assert re.fullmatch(r'PYTHON=python:3\.11\.\d+-slim-[a-z]+', said['ARG'][0])
    assert [line.split()[0] for line in said['FROM']] == ['${PYTHON}'] * 2
    assert said['USER'] == ['1000'] and steps.index(['USER', '1000']) > max(
        place for place, (step, _) in enumerate(steps) if step in ('COPY', 'RUN'))
    assert all(line.startswith('--from=build /opt/stocker ') for line in said['COPY']) and 'ADD' not in said
    assert re.findall(r'stocker\[(\w+)]', ' '.join(said['RUN'])) == ['serve']
    assert '/health' in said['HEALTHCHECK'][0] and 'GRADIO_ANALYTICS_ENABLED=False' in said['ENV'][0]
    inside = needed('serve')
    assert {'numpy', 'gradio', 'uvicorn'} <= inside
    assert not [name for name in inside if re.match('torch|nvidia|cuda|triton|transformers|tensorflow|jax', name)]
    assert 'torch' in needed('train')


def test_the_files_of_the_space_agree():
    manifest = yaml.safe_load((SPACE/'openenv.yaml').read_text())
    front = yaml.safe_load((SPACE/'README.md').read_text().split('---')[1])
    docker, declared = (SPACE/'Dockerfile').read_text(), manifest['validation']
    assert (front['sdk'], front['base_path'], 'openenv' in front['tags']) == ('docker', '/web', True)
    assert manifest['port'] == front['app_port'] == int(re.search(r'EXPOSE (\d+)', docker)[1])
    assert f'"--port", "{manifest["port"]}"' in docker and '"--allow-host", "*.hf.space"' in docker
    module, _, name = manifest['app'].partition(':')
    assert module == 'stocker.serving.server' and callable(getattr(server_module, name))
    reward, capabilities = declared['reward'], declared['capabilities']
    assert (reward['oracle_tolerance'], reward['floor_margin']) == (trials.ORACLE_TOLERANCE, trials.FLOOR_MARGIN)
    assert capabilities['declared_task_count'] == {split: len(served_rows(split)) for split in SERVED_SPLITS}
    files = [capabilities['oracle']['location'], capabilities['canaries'], *declared['execution'].values()]
    assert all((SPACE/file).is_file() for file in files if '/' in file or file == 'Dockerfile')
    canaries = json.loads((SPACE/'validation'/'canaries.json').read_text())['trajectories']
    assert canaries == {name: [{'side': side, 'quantity': quantity} for side, quantity in orders]
                        for name, orders in trials.CANARIES.items()}


def test_what_the_space_says_can_be_done(url, monkeypatch, capsys):
    code = re.search(r'```python\n(.*?)```', (SPACE/'README.md').read_text(), re.S)[1]
    exec(code.replace('http://127.0.0.1:8000', url), {})
    assert capsys.readouterr().out.startswith('0.38')
    monkeypatch.setattr(sys, 'argv', ['oracle.py', url])
    with pytest.raises(SystemExit) as ended: runpy.run_path(SPACE/'validation'/'oracle.py')
    assert ended.value.code == 0 and "'highest': 0.7" in capsys.readouterr().out


def test_the_turns_for_verifiers_play_an_episode(url):
    notebook = json.loads((ROOT/'nbs'/'serving'/'75_trials.ipynb').read_text())
    text = next(text for cell in notebook['cells'] if 'class StockerTurns' in (text := ''.join(cell['source'])))
    code = re.search(r'```python\n(.*?)```', text, re.S)[1].replace('http://127.0.0.1:8000', url)
    stand_in = types.SimpleNamespace(MultiTurnEnv=object, UserMessage=types.SimpleNamespace, cleanup=lambda made: made)
    names = {'verifiers': stand_in, 'StockerClient': StockerClient, 'decision_in': decision_in, 'mean': mean}
    exec(code, names)

    async def roll_out():
        turns, state = names['StockerTurns'](), {'info': {'task': 'task_hard'}, 'client': 'the model'}
        messages = (await turns.setup_state(state))['prompt']
        for text in itertools.cycle(['{"side": "buy", "quantity": 5}', 'no idea', '{"side": "sell", "quantity": 5}']):
            messages.append(types.SimpleNamespace(content=text))
            messages += await turns.env_response(messages, state)
            if 'final_env_response' in state: break
        await turns.leave(state)
        return state, await names['mean_reward'](state)
    state, reward = asyncio.run(roll_out())
    assert state['client'] == 'the model' and len(state['rewards']) == 42 and -1 <= reward <= 1
    assert StockerObservation.model_validate_json(state['prompt'][0].content).ticker == 'META'
    assert StockerObservation.model_validate_json(state['final_env_response'][0].content).done


# The OpenAPI document

def aimed(case):
    "The same request about things that are there, so that it may get an answer."
    if case.path_parameters: case.path_parameters['env_name'] = 'stocker'
    for values in (case.body, case.query):
        if not isinstance(values, dict): continue
        if 'episode_id' in values: values['episode_id'] = 'there'
        if 'split' in values and case.path != '/reset': values['split'] = 'tasks'
        if 'index' in values and case.path != '/reset': values['index'] %= 3
    return case


def statuses(operation, mode, checks):
    "Some requests as the document allows them, or forbids them; every answer has to pass the checks."
    few, seen = settings(max_examples=5, deadline=None, derandomize=True, database=None,
                         suppress_health_check=list(HealthCheck)), set()

    @few
    @given(case=operation.as_strategy(generation_mode=mode))
    def hold(case):
        answer = (aimed(case) if mode.is_positive else case).call()
        seen.add(answer.status_code)
        case.validate_response(answer, checks=checks)
    hold()
    return seen


@pytest.mark.filterwarnings('ignore')
def test_the_document_is_true():
    schemathesis = pytest.importorskip('schemathesis')
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance, negative_data_rejection, response_schema_conformance)
    checks = [not_a_server_error, content_type_conformance, response_schema_conformance]
    modes = schemathesis.GenerationMode
    app = create_app(allowed_hosts=['testserver'])
    TestClient(app).post('/reset', json={'episode_id': 'there'})
    document = schemathesis.openapi.from_asgi('/openapi.json', app)
    operations = {operation.path: operation for result in document.get_all_operations() if (operation := result.ok())}
    assert {'/reset', '/step', '/state', '/close', '/schema', '/mcp', '/{env_name}/task'} <= set(operations)
    for path, operation in sorted(operations.items(), key=lambda one: one[0] == '/close'): # which ends what is there
        assert 200 in statuses(operation, modes.POSITIVE, checks), path
    for path in ('/reset', '/step', '/close'):
        assert statuses(operations[path], modes.NEGATIVE, [*checks, negative_data_rejection]) <= {200, 400, 422}
