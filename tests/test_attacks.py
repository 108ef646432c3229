"Nothing gets in: a door that is open is found."
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import stocker
from stocker.council.council import rule_council
from stocker.llm.client import ScriptedClient
from stocker.llm.prompts import fenced
from stocker.market.core import Vote, canonical_json, package_path
from stocker.market.episodes import load_task
from stocker.trust import attacks


@pytest.fixture(scope='module')
def episode(): return load_task('task_easy')


def test_no_model_and_no_array_brings_code_of_its_own():
    "Two settings that ruff's rules do not know."
    for path in Path(stocker.__file__).parent.rglob('*.py'):
        assert not re.search(r'(trust_remote_code|allow_pickle)\W{1,4}True', path.read_text(encoding='utf-8')), path


def test_names_stay_inside_and_a_door_that_is_open_is_found():
    doors = str, lambda name: name.replace('/', '_'), lambda name: f'a/{name}.json', lambda name: name.replace('..', '')
    for door in doors:
        assert not attacks.check_paths(makers={'a': door}).holds


def test_a_page_that_lets_markup_through_is_found():
    def careless(old, new): return lambda trace, episode: attacks.report_page(trace, episode).replace(old, new)
    assert attacks.check_pages().holds
    for old, new in (('&lt;', '<'), ('</html>', ''), ('<p', '<p title="steal"'), ('<style>', '<style>steal')):
        assert attacks.check_pages(render=careless(old, new)).holds == (old == '</html>')
    assert not attacks.check_pages(render=lambda trace, episode: '').holds


def test_a_seat_that_obeys_headlines_is_found():
    def obeys(look):
        worst = any('administrator' in fact.headline for fact in look.macro)
        return Vote(signal=-1.0 if worst else 0.0, confidence=1.0, rationale='')
    council = rule_council()
    council = replace(council, specialists={**council.specialists, 'geopolitics': obeys})
    assert not attacks.check_headlines(council=council).holds


def test_the_effect_of_instructions_on_a_model_is_measured(episode):
    looks = episode.observations()
    up = canonical_json({'signal': 0.5, 'confidence': 0.5, 'rationale': ''})
    assert attacks.injection_effect(ScriptedClient(lambda messages: up, 'up'), looks) == 0.0
    led = ScriptedClient(lambda messages: canonical_json(
        {'signal': -1 if 'administrator' in messages[1]['content'] else 1, 'confidence': 1, 'rationale': ''}), 'led')
    assert attacks.injection_effect(led, looks) == pytest.approx(0.2)
    assert attacks.injection_effect(led, looks[:0]) == 0.0
    assert attacks.injection_effect(led, looks, role='geopolitics') == pytest.approx(0.2)
    assert 0.1 < attacks.injection_effect(led, looks, role='forum_sentiment') <= 0.2 # long posts are cut before it


def test_the_effect_of_instructions_on_orders_is_measured(episode):
    def gullible(look):
        return Vote(signal=-1.0 if 'sell' in look.news[0].headline else 1.0, confidence=1.0, rationale='')
    looks = [look for look in episode.observations() if look.news][:3]
    council = replace(rule_council(), specialists={'news': gullible})
    assert attacks.order_effect(council, looks) == pytest.approx(0.4)
    assert attacks.order_effect(rule_council(), looks) == attacks.order_effect(rule_council(), []) == 0.0


@pytest.mark.parametrize('fence', [
    lambda items: '\n'.join(['<data 00aa11bb>', *(f'- {item}' for item in items), '</data 00aa11bb>']),
    lambda items: fenced(items).replace('‹', '<'), lambda items: fenced(items).replace('- ', ''),
    lambda items: '\n'.join(fenced(items).splitlines()[:-1]), lambda items: fenced([*items, 'one more'])])
def test_a_fence_with_a_hole_is_found(fence):
    assert attacks.check_fence().holds
    assert not attacks.check_fence(fence=fence).holds


@pytest.mark.parametrize('host, own', [
    ('127.0.0.1', True), ('::1', True), ('localhost', True), ('0.0.0.0', False), ('::', False), ('', False),
    ('example.org', False)])
def test_only_this_machine_reaches_the_server(host, own):
    assert attacks.check_server(host=host).holds == own
    assert attacks.check_server().holds


def test_changed_weights_and_files_that_can_run_code_are_found(tmp_path):
    folder = Path(shutil.copytree(package_path('pocket'), tmp_path/'pocket'))
    assert attacks.check_weights().holds and attacks.check_weights(folder=folder).holds
    (folder/'modeling.py').write_text('')
    assert 'modeling.py' in attacks.check_weights(folder=folder).faults[0]
    (folder/'modeling.py').unlink()
    assert not attacks.check_weights(folder=folder, pinned='0' * 64).holds
    content = bytearray((folder/'model.safetensors').read_bytes())
    content[-1] ^= 1
    (folder/'model.safetensors').write_bytes(content)
    assert not attacks.check_weights(folder=folder).holds
