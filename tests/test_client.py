"""Clients: a fault of the request is an error, a fault of one answer is told in the reply, and no reply is lost."""
import asyncio
import copy
import gc
import json
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from waiting import PATIENCE, patiently

from stocker.llm.answers import TRADE_SCHEMA, VOTE_SCHEMA
from stocker.market.core import DataError, StockerError, canonical_json
from stocker.llm.client import (
    Endpoint, OpenAIClient, RecordedClient, Reply, ScriptedClient, append_line, background_loop,
    find_endpoint, read_completion, read_recording, request_digest)

VARIABLES = ('API_BASE_URL', 'MODEL_NAME', 'HF_TOKEN', 'OPENAI_API_KEY')
KEY = 'sk-very-secret-0123456789'
PICTURE = 'data:image/png;base64,' + 'iVBORw0KGgo' * 1000


def say(text): return [{'role': 'user', 'content': text}]


def completion(content, finish='stop', **message):
    return {'choices': [{'message': {'role': 'assistant', 'content': content, **message}, 'finish_reason': finish}],
            'usage': {'prompt_tokens': 12, 'completion_tokens': 3}}


def last_text(request): return request['messages'][-1]['content']


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in VARIABLES: monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    "The library waits half a second before its second try."
    base = pytest.importorskip('openai._base_client')
    monkeypatch.setattr(base, 'INITIAL_RETRY_DELAY', 0.001)


class Handler(BaseHTTPRequestHandler):
    "Speaks the protocol; what it answers is the server's function `behave(handler, request, number)`."

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        with self.server.lock:
            number = len(self.server.requests)
            self.server.requests.append(request)
            self.server.headers.append(dict(self.headers.items()))
            self.server.paths.append(self.path)
        try: self.server.behave(self, request, number)
        except OSError: return # the client has hung up

    def send(self, body, status=200, kind='application/json', **headers):
        body = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        headers = {'Content-Type': kind, 'Content-Length': str(len(body)), **headers}
        for name, value in headers.items(): self.send_header(name.replace('_', '-'), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments): pass


@contextmanager
def served(behave):
    server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    server.behave, server.lock, server.requests, server.headers, server.paths = behave, threading.Lock(), [], [], []
    server.url = f'http://127.0.0.1:{server.server_port}/v1'
    thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.01}, daemon=True)
    thread.start()
    try: yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def serve():
    opened = []

    def start(behave):
        opened.append(served(behave))
        return opened[-1].__enter__()
    yield start
    for server in opened: server.__exit__(None, None, None)


def echoing(handler, request, number): handler.send(completion(last_text(request)))


def failing_first(times, status, **headers):
    def behave(handler, request, number):
        if number < times: handler.send({'error': {'message': 'not now'}}, status, **headers)
        else: echoing(handler, request, number)
    return behave


def client_of(server, **settings):
    pytest.importorskip('openai')
    plain = {'model': 'm', 'base_url': server.url, 'key': KEY, 'timeout': PATIENCE, 'retries': 2}
    return OpenAIClient(**plain | settings)


# --- the digest of a request -----------------------------------------------------------------------------------------

def test_the_digest_sees_everything_an_answer_depends_on():
    base = dict(model='m', settings={'temperature': 0.0}, messages=say('x'), schema=None, adapter='base')
    changes = [{}, {'model': 'n'}, {'settings': {'temperature': 0.5}}, {'settings': {}}, {'messages': say('x ')},
               {'messages': [{'role': 'system', 'content': 'x'}]}, {'messages': say('x') * 2},
               {'schema': VOTE_SCHEMA}, {'schema': TRADE_SCHEMA}, {'adapter': 'moderator'}]
    assert len({request_digest(**base | change) for change in changes}) == len(changes)


def picture_messages(url): return [{'role': 'user', 'content': [
    {'type': 'text', 'text': 'look'}, {'type': 'image_url', 'image_url': {'url': url, 'detail': 'low'}}]}]


def test_one_changed_pixel_is_another_request_and_the_messages_are_left_alone():
    messages = picture_messages(PICTURE)
    before = copy.deepcopy(messages)
    digests = {request_digest('m', {}, picture_messages(url))
               for url in (PICTURE, PICTURE + 'A', PICTURE[:-1], 'https://example.org/a.png')}
    request_digest('m', {}, messages)
    assert len(digests) == 4 and messages == before


# --- scripts ---------------------------------------------------------------------------------------------------------

def test_a_script_counts_under_many_threads():
    client = ScriptedClient([str(number) for number in range(200)])
    answers, threads = [], []
    for _ in range(8):
        threads.append(threading.Thread(target=lambda: answers.extend(client.answer(say('x')).text for _ in range(25))))
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert sorted(answers, key=int) == [str(number) for number in range(200)] and client.calls == 200


# --- recordings ------------------------------------------------------------------------------------------------------

def scripted(model='m@1', **more):
    return ScriptedClient(lambda messages: f"answer to {messages[-1]['content']} \u2028 \"äß\"\r\n", model=model,
                          settings={'temperature': 0.0}, **more)


def recorded(path, count=3):
    client = scripted()
    RecordedClient(path, client, record=True).answer_all([say(str(number)) for number in range(count)])
    return client


def test_a_recording_gives_the_same_replies_without_a_client(tmp_path):
    client = scripted(sees_images=True)
    conversations = [say(str(number)) for number in range(5)]
    first = RecordedClient(tmp_path/'a'/'r.jsonl', client, record=True).answer_all(conversations, VOTE_SCHEMA, 'lora')
    replay = RecordedClient(tmp_path/'a'/'r.jsonl')
    assert replay.answer_all(conversations, VOTE_SCHEMA, 'lora') == first
    assert [replay.answer(messages, VOTE_SCHEMA, 'lora') for messages in conversations] == first
    assert (replay.model, replay.settings, replay.sees_images) == (client.model, client.settings, True)
    assert client.calls == 5


def test_only_what_is_missing_is_asked_in_one_batch(tmp_path):
    recorded(tmp_path/'r.jsonl', 3)
    batches = []

    class Watched(ScriptedClient):
        def answer_all(self, conversations, schema=None, adapter='base'):
            batches.append([messages[-1]['content'] for messages in conversations])
            return super().answer_all(conversations, schema, adapter)

    client = Watched(scripted().script, model='m@1', settings={'temperature': 0.0})
    recorder = RecordedClient(tmp_path/'r.jsonl', client, record=True)
    replies = recorder.answer_all([say(name) for name in ('9', '1', '8', '9', '0')])
    assert batches == [['9', '8']]
    assert [reply.text[:11] for reply in replies] == [f'answer to {name}' for name in '91890']
    recorder.answer_all([say('9')])
    assert len(batches) == 1


def test_what_was_never_recorded_is_an_error_with_file_and_remedy(tmp_path):
    client = recorded(tmp_path/'r.jsonl')
    for player in (RecordedClient(tmp_path/'r.jsonl'), RecordedClient(tmp_path/'r.jsonl', client)):
        for ask in (lambda p: p.answer(say('new')), lambda p: p.answer(say('1'), VOTE_SCHEMA),
                    lambda p: p.answer(say('1'), adapter='lora'), lambda p: p.answer_all([say('1'), say('new')])):
            with pytest.raises(StockerError, match=r'r\.jsonl: 1 of the requests.*record=True'): ask(player)
    assert client.calls == 3


@pytest.mark.parametrize('cut', range(1, 120))
def test_a_line_cut_anywhere_is_dropped_and_asked_again(tmp_path, cut):
    path = tmp_path/'r.jsonl'
    recorded(path, 2)
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    path.write_bytes(whole[:-max(1, cut * last // 120)])
    client = scripted()
    replies = RecordedClient(path, client, record=True).answer_all([say('0'), say('1')])
    assert path.read_bytes() == whole
    assert client.calls == (0 if cut * last // 120 <= 1 else 1)
    assert replies == RecordedClient(path).answer_all([say('0'), say('1')])


def test_a_damaged_last_line_is_not_touched_by_a_replay(tmp_path):
    path = tmp_path/'r.jsonl'
    recorded(path, 2)
    damaged = path.read_bytes()[:-20]
    path.write_bytes(damaged)
    assert RecordedClient(path).answer(say('0')).text.startswith('answer to 0')
    with pytest.raises(StockerError, match='never recorded'): RecordedClient(path).answer(say('1'))
    assert path.read_bytes() == damaged


@pytest.mark.parametrize('damage', [b'{"digest": "a', b'{}', b'[]', b'null', b'\xff\xfe\x00', b'', b'<<<<<<< HEAD',
                                    b'{"digest": 1, "text": "x"}'])
@pytest.mark.parametrize('line', [1, 2, 3])
def test_damage_elsewhere_names_the_line(tmp_path, damage, line):
    path = tmp_path/'r.jsonl'
    recorded(path, 3)
    lines = path.read_bytes().split(b'\n')
    lines[line - 1] = damage
    path.write_bytes(b'\n'.join(lines))
    before = path.read_bytes()
    for ask in (lambda: RecordedClient(path), lambda: RecordedClient(path, scripted(), record=True)):
        with pytest.raises(DataError, match=rf'r\.jsonl: line {line} is damaged'): ask()
    assert path.read_bytes() == before


def test_a_file_of_something_else_is_never_cut(tmp_path):
    path = tmp_path/'notes.txt'
    path.write_text('my notes')
    with pytest.raises(DataError, match='line 1 is damaged'): RecordedClient(path, scripted(), record=True)
    assert path.read_text() == 'my notes'


def test_an_editor_that_drops_the_last_line_end_or_adds_lines_does_no_harm(tmp_path):
    path = tmp_path/'r.jsonl'
    recorded(path, 2)
    for end in (b'', b'\n\n\n', b'\r\n'):
        path.write_bytes(path.read_bytes().rstrip() + end)
        RecordedClient(path, scripted(), record=True).answer(say(f'after {end!r}'))
    assert len(read_recording(path)[1]) == 5
    path.write_bytes(path.read_bytes().replace(b'\r\n', b'\n').replace(b'\n', b'\r\n'))
    assert len(read_recording(path)[1]) == 5


def test_a_missing_or_empty_recording(tmp_path):
    with pytest.raises(StockerError, match=r'none\.jsonl: there is no recording'): RecordedClient(tmp_path/'none.jsonl')
    with pytest.raises(StockerError, match='hand in a client too'): RecordedClient(tmp_path/'x.jsonl', record=True)
    (tmp_path/'empty.jsonl').touch()
    with pytest.raises(DataError, match='empty'): RecordedClient(tmp_path/'empty.jsonl')
    assert RecordedClient(tmp_path/'empty.jsonl', scripted(), record=True).answer(say('1')).text
    assert not (tmp_path/'none.jsonl').exists() and not (tmp_path/'x.jsonl').exists()


@pytest.mark.parametrize('other', [dict(model='m@2'), dict(settings={'temperature': 0.5}), dict(sees_images=True)])
def test_a_recording_of_another_client_is_refused(tmp_path, other):
    recorded(tmp_path/'r.jsonl')
    wrong = ScriptedClient(['x'], **{'model': 'm@1', 'settings': {'temperature': 0.0}} | other)
    for record in (True, False):
        with pytest.raises(StockerError, match='name another file'): RecordedClient(tmp_path/'r.jsonl', wrong, record)


def test_the_prompt_is_not_in_the_file(tmp_path):
    RecordedClient(tmp_path/'r.jsonl', ScriptedClient(['yes']), record=True).answer(picture_messages(PICTURE))
    text = (tmp_path/'r.jsonl').read_text()
    assert 'look' not in text and 'iVBOR' not in text and len(text) < 300


def test_half_a_character_is_the_same_live_and_replayed(tmp_path):
    live = RecordedClient(tmp_path/'r.jsonl', ScriptedClient(['half \ud83d']), record=True).answer(say('1'))
    assert live.text == 'half ?' and RecordedClient(tmp_path/'r.jsonl').answer(say('1')) == live


def test_many_threads_record_each_request_once(tmp_path):
    def slowly(messages):
        time.sleep(0.002)
        return messages[-1]['content']
    recorder = RecordedClient(tmp_path/'r.jsonl', ScriptedClient(slowly), record=True)
    threads = [threading.Thread(target=lambda: [recorder.answer(say(str(number))) for number in range(20)])
               for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert len((tmp_path/'r.jsonl').read_bytes().splitlines()) == 21
    assert len(read_recording(tmp_path/'r.jsonl')[1]) == 20


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    path = tmp_path/'r.jsonl'
    path.write_bytes(b'{}\n')

    class Full:
        def __init__(self, file): self.file = file
        def __enter__(self): return self
        def __exit__(self, *error): self.file.close()
        def __getattr__(self, name): return getattr(self.file, name)
        def write(self, line): return self.file.write(line[:5])

    monkeypatch.setattr('builtins.open', lambda *args, opened=open, **more: Full(opened(*args, **more)))
    with pytest.raises(StockerError, match='make room'): append_line(path, {'a': 'long enough'})
    monkeypatch.undo()
    assert path.read_bytes() == b'{}\n'


RECORD_FOR_EVER = '''
import sys, time
from stocker.llm.client import RecordedClient, Reply, ScriptedClient

class Slow(ScriptedClient):
    def answer_each(self, conversations, schema=None, adapter='base'):
        for position, messages in enumerate(conversations):
            yield position, self.answer(messages)

client = Slow(lambda messages: messages[-1]['content'] * 2000, model='slow')
recorder = RecordedClient(sys.argv[1], client, record=True)
recorder.answer_all([[{'role': 'user', 'content': str(number)}] for number in range(3_000)])
'''


def test_a_kill_in_the_middle_of_a_batch_loses_nothing_that_was_answered(tmp_path):
    path, moments = tmp_path/'r.jsonl', random.Random(1)
    for _ in range(3):
        before = path.stat().st_size if path.exists() else 0
        process = subprocess.Popen([sys.executable, '-c', RECORD_FOR_EVER, str(path)])
        while (path.stat().st_size if path.exists() else 0) < before + 20_000:
            assert process.poll() is None
            time.sleep(0.005)
        time.sleep(moments.random() / 50)
        process.send_signal(signal.SIGKILL)
        process.wait()
    kept = read_recording(path)[1]
    client = ScriptedClient(lambda messages: messages[-1]['content'] * 2000, model='slow')
    conversations = [say(str(number)) for number in range(len(kept) + 2)]
    replies = RecordedClient(path, client, record=True).answer_all(conversations)
    assert client.calls == 2 and len(kept) > 3
    assert [reply.text for reply in replies] == [str(number) * 2000 for number in range(len(kept) + 2)]


# --- reading what an endpoint says -----------------------------------------------------------------------------------

@pytest.mark.parametrize('body, text, problem', [
    (completion('Hello'), 'Hello', ''),
    (completion('Hello', None), 'Hello', ''),
    (completion('Hello', 'stop', reasoning_content='{"signal": 1}', reasoning='no'), 'Hello', ''),
    (completion([{'type': 'text', 'text': 'Hel'}, {'type': 'text', 'text': 'lo'}]), 'Hello', ''),
    (completion('Hello', 'tool_calls', tool_calls=[{'id': '1'}]), 'Hello', ''),
    (completion('{"sig', 'length'), '{"sig', 'cut off at the limit of tokens'),
    (completion(None, 'length', reasoning_content='...'), '', 'cut off at the limit of tokens'),
    (completion('I', 'content_filter'), 'I', 'stopped by the filter of the endpoint'),
    (completion(None, refusal='I cannot'), '', 'the model refused to answer'),
    (completion(None), '', 'an empty answer'),
    (completion(' \n'), ' \n', 'an empty answer'),
    (completion(None, reasoning_content='{"signal": 1}'), '', 'an empty answer'),
    (completion(None, 'tool_calls', tool_calls=[{'id': '1'}]), '', 'a call of a tool in place of words'),
    (completion('half \ud83d'), 'half ?', '')])
def test_a_completion_is_read(body, text, problem):
    assert read_completion(json.dumps(body)) == Reply(text, problem, 12, 3)


@pytest.mark.parametrize('body', [
    '', ' ', 'null', '42', '"text"', '[]', '{}', '{"choices": null}', '{"choices": []}', '{"choices": [null]}',
    '{"choices": {}}', '{"choices": [{"message": null}]}', '{"choices": [{"text": "old style"}]}', '{"choices": [{"me',
    '[' * 100_000, '1' * 5000, '{"error": {"message": "overloaded", "code": 503}}', '{"error": null}',
    '<!DOCTYPE html><html><body>Please log in</body></html>', '\x00\ufeff'])
def test_what_is_no_completion_is_no_answer(body):
    reply = read_completion(body)
    assert reply.text == '' and not reply.answered and len(reply.problem) < 300 and '\n' not in reply.problem


@pytest.mark.parametrize('usage', [None, [], {}, {'prompt_tokens': None}, {'prompt_tokens': 'many'},
                                   {'prompt_tokens': -1}, {'prompt_tokens': True}, {'prompt_tokens': 1.5}])
def test_tokens_that_were_not_counted_are_zero(usage):
    assert read_completion(json.dumps(completion('x') | {'usage': usage})) == Reply('x')


# --- naming an endpoint ----------------------------------------------------------------------------------------------

def test_names_come_from_the_environment(monkeypatch):
    monkeypatch.setenv('API_BASE_URL', 'http://127.0.0.1:9000/v1/')
    monkeypatch.setenv('MODEL_NAME', 'org/model')
    monkeypatch.setenv('HF_TOKEN', 'hf_1')
    client = OpenAIClient()
    assert (client.model, client.endpoint) == ('org/model', Endpoint('http://127.0.0.1:9000/v1', 'hf_1'))
    named = OpenAIClient('other', 'http://127.0.0.1:9001/v1', 'k')
    assert (named.model, named.endpoint) == ('other', Endpoint('http://127.0.0.1:9001/v1', 'k'))


@pytest.mark.parametrize('address, named, key', [
    ('https://router.huggingface.co/v1', None, 'hf_1'), ('https://x.endpoints.huggingface.cloud/v1', None, 'hf_1'),
    ('https://api.openai.com/v1', None, 'sk_1'), ('https://api.openai.com/v1', 'https://api.openai.com/v1', 'sk_1'),
    ('https://example.org/v1', None, 'sk_1'), ('https://example.org/v1', 'https://example.org/v1', 'hf_1'),
    ('https://huggingface.co.example.org/v1', None, 'sk_1')])
def test_a_key_goes_where_it_belongs(monkeypatch, address, named, key):
    monkeypatch.setenv('HF_TOKEN', 'hf_1')
    monkeypatch.setenv('OPENAI_API_KEY', 'sk_1')
    if named: monkeypatch.setenv('API_BASE_URL', named)
    assert find_endpoint(address).key == key
    assert find_endpoint(address, '').key == ''


def test_what_is_not_named_is_asked_for():
    with pytest.raises(StockerError, match='hand in base_url or set API_BASE_URL'): OpenAIClient('m')
    with pytest.raises(StockerError, match='hand in model or set MODEL_NAME'): OpenAIClient(base_url='http://x/v1')
    for address in ('localhost:8000/v1', 'ftp://x/v1', 'http://', '/v1', 'not an address'):
        with pytest.raises(StockerError, match='is no address'): OpenAIClient('m', address)
    for wrong in (dict(timeout=0), dict(retries=-1), dict(concurrency=0)):
        with pytest.raises(StockerError, match='has to be above 0'): OpenAIClient('m', 'http://x/v1', **wrong)


@pytest.mark.parametrize('key', [f'{KEY}\nX-Evil: 1', f'{KEY}–', f'{KEY} {KEY}', f'{KEY}\x00'])
def test_a_key_that_cannot_be_one_is_refused_and_not_shown(key):
    with pytest.raises(StockerError) as error: OpenAIClient('m', 'http://x/v1', key)
    assert KEY not in str(error.value)


def test_a_password_in_the_address_is_refused_and_not_shown():
    for address in (f'http://me:{KEY}@x/v1', f'http://x/v1?key={KEY}'):
        with pytest.raises(StockerError, match='holds a password') as error: Endpoint(address)
        assert KEY not in str(error.value)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'openai', None)
    with pytest.raises(StockerError, match=r"pip install 'stocker\[llm\]'"):
        OpenAIClient('m', 'http://127.0.0.1:1/v1').answer(say('x'))


def test_importing_the_module_loads_nothing_heavy():
    code = 'import sys, stocker.llm.client; print([n for n in ("torch", "openai", "pandas") if n in sys.modules])'
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout.strip() == '[]'


# --- over HTTP -------------------------------------------------------------------------------------------------------

def test_a_request_arrives_as_it_was_sent(serve):
    server = serve(echoing)
    server.behave = lambda handler, request, number: handler.send(completion('seen'))
    extra = {'seed': 3, 'chat_template_kwargs': {'think': False}}
    client = client_of(server, temperature=0.7, max_new_tokens=99, extra=extra)
    messages = [{'role': 'system', 'content': 'Be brief – 日本 \ud83d'}, *picture_messages(PICTURE)]
    assert client.answer(messages, VOTE_SCHEMA) == Reply('seen', '', 12, 3)
    request = server.requests[0]
    assert request['messages'][1] == messages[1] and request['messages'][0]['content'] == 'Be brief – 日本 ?'
    assert (request['temperature'], request['max_tokens'], request['seed']) == (0.7, 99, 3)
    assert request['chat_template_kwargs'] == {'think': False}
    assert request['response_format']['json_schema']['schema'] == VOTE_SCHEMA
    assert server.paths == ['/v1/chat/completions']
    assert {name.lower(): value for name, value in server.headers[0].items()}['authorization'] == f'Bearer {KEY}'


def test_a_schema_is_sent_only_if_wanted(serve):
    server = serve(echoing)
    client_of(server, constrained=False).answer(say('x'), VOTE_SCHEMA)
    client_of(server).answer(say('x'))
    assert all('response_format' not in request for request in server.requests)


@pytest.mark.parametrize('status', [408, 409, 429, 500, 502, 503])
def test_what_passes_is_asked_again(serve, status):
    server = serve(failing_first(2, status))
    assert client_of(server).answer(say('x')) == Reply('x', '', 12, 3)
    assert len(server.requests) == 3


def test_what_does_not_pass_is_told(serve):
    server = serve(failing_first(99, 500))
    client = client_of(server)
    reply = client.answer(say('x'))
    assert reply == Reply('', 'no answer: HTTP 500: not now') and len(server.requests) == 3


@pytest.mark.parametrize('header', ['0.4', 'date'])
def test_retry_after_is_honoured(serve, header):
    moments = []

    def behave(handler, request, number):
        moments.append(time.monotonic())
        value = formatdate(time.time() + 2, usegmt=True) if header == 'date' else header # whole seconds
        failing_first(1, 429, Retry_After=value)(handler, request, number)
    assert client_of(serve(behave)).answer(say('x')).text == 'x'
    assert 0.39 < moments[1] - moments[0]


def test_a_wait_of_an_hour_is_not_waited_for(serve):
    server = serve(failing_first(1, 429, Retry_After='3600'))
    started = time.monotonic()
    reply = client_of(server).answer(say('x'))
    assert 'Retry-After: 3600' in reply.problem or reply.text == 'x' # before openai 3, the library asked again at once
    assert time.monotonic() - started < PATIENCE


def answering_late(handler, request, number):
    time.sleep(0.6)
    echoing(handler, request, number)


def trickling_body(handler, request, number):
    handler.send_response(200)
    handler.end_headers()
    while True: # until the client hangs up
        handler.wfile.write(b' ')
        time.sleep(0.02)


def trickling_headers(handler, request, number):
    handler.wfile.write(b'HTTP/1.1 200 OK\r\nX-Slow: ')
    while True:
        handler.wfile.write(b'H')
        time.sleep(0.02)


def trickling_error(handler, request, number):
    handler.send_response(500)
    handler.end_headers()
    while True: # until the client hangs up
        handler.wfile.write(b' ')
        time.sleep(0.02)


@pytest.mark.parametrize('slow', [answering_late, trickling_body, trickling_headers, trickling_error])
def test_slowness_of_every_kind_ends_at_the_time_limit(serve, slow):
    server = serve(slow)
    client = client_of(server, timeout=0.25, retries=1)
    started = time.monotonic()
    reply = client.answer(say('x'))
    assert reply == Reply('', 'no answer: not complete after 0.25 seconds')
    assert 0.5 <= time.monotonic() - started < PATIENCE
    assert len(server.requests) <= 2


def test_a_slow_answer_does_not_hold_up_the_others(serve):
    others = threading.Barrier(3)

    def behave(handler, request, number):
        if last_text(request) != 'slow': echoing(handler, request, number)
        others.wait(PATIENCE) # the slow one ends when both of the others are answered
        if last_text(request) == 'slow': hanging_up(handler, request, number)
    client = client_of(serve(behave), timeout=PATIENCE, retries=0)
    replies = client.answer_all([say('slow'), say('a'), say('b')])
    assert [reply.text for reply in replies] == ['', 'a', 'b'] and not replies[0].answered


def cut_short(handler, request, number): handler.send(json.dumps(completion('x'))[:40], Content_Length='4000')


def hanging_up(handler, request, number): handler.connection.close()


@pytest.mark.parametrize('broken, words', [
    (lambda handler, request, number: handler.send('{"choices": [{"mess'), 'no completion came'),
    (lambda handler, request, number: handler.send('<html><body>Log in</body></html>', kind='text/html'), 'HTML page'),
    (lambda handler, request, number: handler.send(''), 'nothing'),
    (lambda handler, request, number: handler.send({'error': {'message': 'upstream is down'}}), 'upstream is down'),
    (lambda handler, request, number: handler.send('<html>Bad gateway</html>', 502, 'text/html'), '502: an HTML page'),
    (lambda handler, request, number: handler.send(b'\x1f\x8bno gzip', Content_Encoding='gzip'), 'no answer'),
    (cut_short, 'no answer'), (hanging_up, 'no answer')])
def test_a_broken_answer_is_asked_again_and_then_told(serve, broken, words):
    server = serve(broken)
    client = client_of(server)
    reply = client.answer(say('x'))
    assert words in reply.problem and not reply.answered and reply.text == ''
    assert len(server.requests) == 3
    server.behave = echoing
    assert client.answer(say('x')).text == 'x'


def test_plain_text_headers_around_json_are_no_obstacle(serve):
    server = serve(lambda handler, request, number: handler.send(completion('x'), kind='text/plain'))
    assert client_of(server).answer(say('x')).text == 'x'


@pytest.mark.parametrize('status, words', [
    (401, 'HF_TOKEN'), (402, 'credit'), (403, 'may not use this model'), (404, 'base_url usually ends in /v1'),
    (405, 'usually ends in /v1')])
def test_a_fault_of_the_request_is_an_error_at_once(serve, status, words):
    server = serve(failing_first(99, status))
    client = client_of(server)
    with pytest.raises(StockerError, match=words) as error: client.answer(say('x'))
    assert len(server.requests) == 1 and server.url in str(error.value) and '\n' not in str(error.value)
    with pytest.raises(StockerError, match='lora-modules' if status == 404 else words):
        client.answer(say('x'), adapter='a')


def nobody_asks(): return not asyncio.all_tasks(background_loop())


def test_a_fault_of_the_request_stops_the_batch(serve):
    server = serve(failing_first(999, 401))
    complaints = []
    background_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    with pytest.raises(StockerError): client_of(server, concurrency=2).answer_all([say(str(i)) for i in range(200)])
    patiently(nobody_asks, what='requests that were on their way')
    gc.collect()
    assert len(server.requests) < 200 and complaints == []
    background_loop().set_exception_handler(None)


def test_an_account_without_credit_is_not_asked_again(serve):
    body = {'error': {'message': 'You exceeded your quota', 'code': 'insufficient_quota'}}
    server = serve(lambda handler, request, number: handler.send(body, 429))
    with pytest.raises(StockerError, match='credit'): client_of(server).answer(say('x'))
    assert len(server.requests) == 1


def test_a_prompt_that_is_too_long_concerns_one_answer(serve):
    def behave(handler, request, number):
        if last_text(request) == 'long': handler.send({'message': 'maximum context length is 8192 tokens'}, 400)
        else: echoing(handler, request, number)
    server = serve(behave)
    replies = client_of(server).answer_all([say('long'), say('x')])
    assert replies[0] == Reply('', 'refused with HTTP 400: maximum context length is 8192 tokens')
    assert replies[0].answered and replies[1].text == 'x' and len(server.requests) == 2


def test_a_redirect_to_elsewhere_is_an_error(serve):
    server = serve(lambda handler, request, number: handler.send('', 301))
    with pytest.raises(StockerError, match='usually ends in /v1'): client_of(server).answer(say('x'))


def refusing_schema(handler, request, number):
    if 'response_format' in request: handler.send({'error': {'message': 'unknown field response_format'}}, 400)
    else: echoing(handler, request, number)


def test_a_refused_schema_is_left_out_and_remembered(serve):
    server = serve(refusing_schema)
    client = client_of(server)
    settings = dict(client.settings)
    with pytest.warns(UserWarning, match='refuses response_format'): reply = client.answer(say('a'), VOTE_SCHEMA)
    assert reply.text == 'a'
    assert client.answer(say('b'), VOTE_SCHEMA).text == 'b'
    assert ['response_format' in request for request in server.requests] == [True, False, False]
    assert client.settings == settings


@pytest.mark.filterwarnings('ignore:.*refuses response_format')
def test_a_batch_with_a_refused_schema_is_whole(serve):
    client = client_of(serve(refusing_schema), concurrency=4)
    replies = client.answer_all([say(str(i)) for i in range(12)], VOTE_SCHEMA)
    assert [reply.text for reply in replies] == [*map(str, range(12))]


def test_a_long_prompt_with_a_schema_does_not_switch_schemas_off(serve):
    server = serve(lambda handler, request, number: handler.send({'message': 'context too long'}, 400))
    client = client_of(server)
    assert 'context too long' in client.answer(say('x'), VOTE_SCHEMA).problem
    assert not client.refuses_schema and len(server.requests) == 2


def test_order_is_kept_and_the_limit_obeyed(serve):
    now, most, lock = [0], [0], threading.Lock()

    def behave(handler, request, number):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(random.Random(last_text(request)).random() / 50)
        with lock: now[0] -= 1
        echoing(handler, request, number)
    client = client_of(serve(behave), concurrency=3)
    texts = [str(number) for number in range(40)]
    assert [reply.text for reply in client.answer_all([say(text) for text in texts])] == texts
    assert most[0] == 3


def test_the_limit_holds_across_threads(serve):
    now, most, lock = [0], [0], threading.Lock()

    def behave(handler, request, number):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.02)
        with lock: now[0] -= 1
        echoing(handler, request, number)
    client, answers = client_of(serve(behave), concurrency=2), {}
    threads = [threading.Thread(target=lambda i=i: answers.update({i: client.answer(say(str(i))).text}))
               for i in range(7)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert answers == {i: str(i) for i in range(7)} and most[0] <= 2


def test_a_reader_who_stops_stops_the_batch(serve):
    server = serve(echoing)
    client = client_of(server, concurrency=2)
    arriving = client.answer_each([say(str(number)) for number in range(200)])
    position, reply = next(arriving)
    arriving.close()
    patiently(nobody_asks, what='requests that were on their way')
    assert reply.text == str(position) and len(server.requests) < 200


def test_it_works_inside_a_running_loop(serve):
    client = client_of(serve(echoing))

    async def cell(): return client.answer(say('x')), client.answer_all([say('y')])
    one, many = asyncio.run(cell())
    again, _ = asyncio.run(cell()) # another loop; the same client
    assert type(one) is Reply and one.text == 'x' and many[0].text == 'y' and again == one


def test_a_name_that_leads_nowhere_is_an_error():
    pytest.importorskip('openai')
    client = OpenAIClient('m', 'http://no-such-host.invalid/v1', '', retries=0)
    with pytest.raises(StockerError, match='correct base_url'): client.answer(say('x'))


# --- keys and proxies ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('status', [200, 400, 401, 404, 429, 500])
def test_a_key_that_a_server_repeats_is_not_shown(serve, status):
    server = serve(lambda handler, request, number: handler.send(
        {'error': {'message': 'x' * 190 + f' you sent {handler.headers["Authorization"]}'}}, status))
    client = client_of(server, retries=0)
    try: shown = repr(client.answer(say('x')))
    except StockerError as error: shown = f'{error!r} {error.__cause__!r} {error.__context__!r}'
    assert 'very-secret' not in shown
    assert KEY not in f'{client!r} {client.endpoint!r} {client.settings!r}'


def test_a_key_is_in_no_recording(serve, tmp_path):
    RecordedClient(tmp_path/'r.jsonl', client_of(serve(echoing)), record=True).answer(say('x'))
    assert KEY not in (tmp_path/'r.jsonl').read_text()


def dead_proxies(monkeypatch):
    for name in ('HTTP_PROXY', 'HTTPS_PROXY', 'ALL_PROXY'):
        monkeypatch.setenv(name, 'http://127.0.0.1:9')
        monkeypatch.setenv(name.lower(), 'http://127.0.0.1:9')
    monkeypatch.setenv('NO_PROXY', '')
    monkeypatch.setenv('no_proxy', '')


def test_a_server_on_this_machine_needs_no_proxy(serve, monkeypatch):
    dead_proxies(monkeypatch)
    server = serve(echoing)
    assert client_of(server).answer(say('x')).text == 'x'
    by_name = client_of(server, base_url=server.url.replace('127.0.0.1', 'localhost'))
    assert by_name.answer(say('x')).text == 'x'


def test_a_server_elsewhere_is_reached_through_the_proxy(serve, monkeypatch):
    dead_proxies(monkeypatch)
    proxy = serve(echoing)
    monkeypatch.setenv('HTTP_PROXY', proxy.url.removesuffix('/v1'))
    monkeypatch.setenv('http_proxy', proxy.url.removesuffix('/v1'))
    assert client_of(proxy, base_url='http://model.invalid/v1').answer(say('x')).text == 'x'
    assert proxy.paths == ['http://model.invalid/v1/chat/completions']


# --- processes -------------------------------------------------------------------------------------------------------

def test_a_client_can_be_sent_to_another_process(serve):
    server = serve(echoing)
    client = client_of(server)
    client.answer(say('x'))
    assert pickle.loads(pickle.dumps(client)).answer(say('y')).text == 'y'


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='no fork on this system')
@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_a_forked_process_opens_its_own_connections(serve):
    client = client_of(serve(echoing))
    client.answer(say('x'))
    context = multiprocessing.get_context('fork')
    results = context.SimpleQueue()
    process = context.Process(target=lambda: results.put(client.answer(say('child')).text), daemon=True)
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == 0 and results.get() == 'child'
    assert client.answer(say('parent')).text == 'parent'


def test_a_process_ends_although_a_request_hangs(serve):
    pytest.importorskip('openai')
    server = serve(trickling_body)
    code = ('import threading, sys\nfrom stocker.llm.client import OpenAIClient\n'
            'client = OpenAIClient("m", sys.argv[1], "", timeout=100_000)\n'
            'ask = lambda: client.answer([{"role": "user", "content": "x"}])\n'
            'threading.Thread(target=ask, daemon=True).start()\n'
            'sys.stdin.readline()')
    process = subprocess.Popen([sys.executable, '-c', code, server.url], stdin=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)
    patiently(lambda: server.requests or process.poll() is not None, what='the request has come')
    assert process.communicate('end\n', timeout=PATIENCE) == (None, '') and process.returncode == 0


def test_a_recording_over_http_keeps_each_reply_as_it_comes(serve, tmp_path):
    path, gate = tmp_path/'r.jsonl', threading.Event()

    def behave(handler, request, number):
        if last_text(request) == 'last': gate.wait(PATIENCE)
        echoing(handler, request, number)
    recorder = RecordedClient(path, client_of(serve(behave)), record=True)
    replies = []
    conversations = [say('last'), *(say(str(number)) for number in range(5))]
    thread = threading.Thread(target=lambda: replies.extend(recorder.answer_all(conversations)))
    thread.start()
    def kept(): return len(path.read_bytes().splitlines())
    patiently(lambda: kept() >= 6, what='the replies are kept')
    before = kept()
    gate.set()
    thread.join()
    assert before == 6 and [reply.text for reply in replies] == ['last', *map(str, range(5))]
    assert canonical_json(replies) == canonical_json(RecordedClient(path).answer_all(conversations))
