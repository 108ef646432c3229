"What is found out about a model and its adapter before it is trained."
import re
from types import SimpleNamespace

import pytest
from stocker.market.core import StockerError
from stocker.studies.worlds import planted_world

torch = pytest.importorskip('torch')
for package in ('transformers', 'trl', 'peft', 'datasets'): pytest.importorskip(package)

from peft import get_peft_model

from stocker.training.adapters import (
    brief_answer, brief_messages, check_forward, check_packages, load_weights, lora_settings, precision, save_trained,
    trained_moderator)
from stocker.training.grpo import Questions, TrainingSettings, make_trainer
from stocker.training.pocket import Student, load_pocket, save_pocket
from stocker.training.questions import EpisodeSet
from stocker.training.results import compile_results

torch.set_num_threads(1)


@pytest.mark.parametrize('version', ['0.16.0', '0.18.0+cpu', '1.0.0'])
def test_a_new_torchao_is_welcome(monkeypatch, version):
    monkeypatch.setattr('importlib.metadata.version', lambda name: version)
    check_packages()


@pytest.mark.parametrize('version', ['0.16rc1', '0.16.0.dev20260101+git', '0.15.1.post2', '0.9'])
def test_what_came_before_the_oldest_torchao_is_too_old(monkeypatch, version):
    monkeypatch.setattr('importlib.metadata.version', lambda name: version)
    with pytest.raises(StockerError, match=re.escape(f'torchao {version} is too old for PEFT')): check_packages()


@pytest.mark.parametrize('version', ['', 'unknown', None, '0.16 or so'])
def test_a_version_that_is_none_is_told(monkeypatch, version):
    monkeypatch.setattr('importlib.metadata.version', lambda name: version)
    with pytest.raises(StockerError, match='torchao is damaged, its version is'): check_packages()


@pytest.mark.parametrize('name,content', [
    ('adapter_model.safetensors', None), ('adapter_config.json', '{"r": 16, "target_mod'),
    ('adapter_config.json', '[]'), ('adapter_config.json', '{}'),
    ('question_form.json', '{"mess'), ('question_form.json', '"brief_messages"')])
def test_a_trained_moderator_with_a_damaged_file_names_it(tmp_path, name, content):
    student = load_pocket()
    save_trained(get_peft_model(student.model, lora_settings(student.model, rank=2)), student, tmp_path, '# An example')
    if content is None: (tmp_path/name).write_bytes((tmp_path/name).read_bytes()[:1000])
    else: (tmp_path/name).write_text(content)
    with pytest.raises(StockerError, match=f'{name}: (this file is damaged|the checksum differs)') as told:
        trained_moderator(tmp_path)
    assert '\n' not in str(told.value)
    if content is None:
        with pytest.raises(StockerError, match=f'{name}: (this file is damaged|the checksum differs)'):
            load_weights(get_peft_model(load_pocket().model, lora_settings(load_pocket().model, rank=2)), tmp_path)


def test_a_pocket_model_with_damaged_weights_is_told(tmp_path):
    student = load_pocket()
    save_pocket(student.model, student.tokenizer, tmp_path)
    weights = tmp_path/'model.safetensors'
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(StockerError, match='this file is damaged'): load_pocket(tmp_path)


@pytest.mark.parametrize('name', ['run.json', 'evaluation.json'])
def test_a_damaged_record_of_a_run_names_its_file(tmp_path, name):
    folder = tmp_path/'pocket_1'
    folder.mkdir()
    for file in ('run.json', 'evaluation.json'): (folder/file).write_text('{"seed": 1}' if file != name else '{"se')
    with pytest.raises(StockerError, match=f'{name}: this file is damaged'): compile_results(tmp_path)


@pytest.mark.parametrize('supported,capability,expected', [
    (False, (7, 5), []), (True, (7, 5), []), (True, (8, 0), ['bf16']), (False, (9, 0), [])])
def test_bfloat16_is_never_chosen_where_the_card_lacks_it(monkeypatch, supported, capability, expected):
    monkeypatch.setattr('torch.cuda.is_available', lambda: True)
    monkeypatch.setattr('torch.cuda.is_bf16_supported', lambda *_, **__: supported)
    monkeypatch.setattr('torch.cuda.get_device_capability', lambda *_: capability)
    assert [name for name in ('bf16', 'fp16', 'use_cpu') if precision()[name]] == expected


class Clippable(torch.nn.Module):
    "A linear layer in a wrapping that PEFT does not know."
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)


def tower(kind):
    attention = torch.nn.Module()
    attention.q_proj = kind
    layer = torch.nn.Module()
    layer.self_attn = attention
    part = torch.nn.Module()
    part.layers = torch.nn.ModuleList([layer])
    return part


def test_an_adapter_goes_to_the_language_layers_only():
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.language_model, model.model.vision_tower = tower(torch.nn.Linear(2, 2)), tower(Clippable())
    pattern = lora_settings(model).target_modules
    assert [name for name, _ in model.named_modules() if re.fullmatch(pattern, name)] == [
        'model.language_model.layers.0.self_attn.q_proj']
    with pytest.raises(StockerError, match='no linear language layers'): lora_settings(tower(Clippable()).layers[0])


def test_gemma_4_gives_the_same_with_and_without_its_cache():
    from stocker.llm.tiny import tiny_gemma
    model, numbers = tiny_gemma()[0], torch.arange(10, 40)[None]
    with torch.no_grad():
        one, other = (model(input_ids=numbers, labels=numbers, use_cache=cache) for cache in (True, False))
    torch.testing.assert_close(one.loss, other.loss)


@pytest.mark.parametrize('losses', [(1.0, 3.0), (2.0, 1.9)])
def test_a_model_that_reads_otherwise_without_its_cache_is_not_trained(monkeypatch, losses):
    student, episodes = load_pocket(), EpisodeSet(planted_world(1, episodes=1, steps=20).episodes)
    question = episodes.questions(episodes.beginnings)[0]
    assert check_forward(student.model, student, question) > 0
    monkeypatch.setattr(type(student.model), 'forward', lambda self, use_cache, **rest: SimpleNamespace(
        loss=torch.tensor(losses[0] if use_cache else losses[1])))
    with pytest.raises(StockerError, match='upgrade transformers'): check_forward(student.model, student, question)


def test_a_loss_that_is_no_number_is_told_as_such(monkeypatch):
    student, episodes = load_pocket(), EpisodeSet(planted_world(1, episodes=1, steps=20).episodes)
    monkeypatch.setattr(type(student.model), 'forward', lambda self, **rest: SimpleNamespace(
        loss=torch.tensor(float('nan'))))
    with pytest.raises(StockerError, match='pocket: its loss is not a number'):
        check_forward(student.model, student, episodes.questions(episodes.beginnings)[0])


def test_what_overflows_in_mixed_precision_is_found_before_training(world):
    from stocker.llm.tiny import tiny_gemma
    network, processor = tiny_gemma(loudness=10_000.0)
    student = Student('loud', network, processor, brief_messages, 24, 2048, brief_answer)
    question = EpisodeSet(world).questions(EpisodeSet(world).beginnings)[0]
    for half in (None, torch.bfloat16): assert check_forward(network, student, question, half) > 0
    with pytest.raises(StockerError, match=r'overflow in float16, first in .*language_model.layers.0.mlp.*leave fp16'):
        check_forward(network, student, question, torch.float16)
    network.model.language_model.layers[1].mlp.up_proj.weight.data[:] = float('inf')
    with pytest.raises(StockerError, match=r'overflow in float32, first in .*layers.1.mlp.*weights are damaged'):
        check_forward(network, student, question)


def test_answers_are_never_drawn_from_what_is_no_number(world):
    from stocker.llm.tiny import tiny_gemma
    network, processor = tiny_gemma(loudness=10_000.0)
    student = Student('loud', network.half(), processor, brief_messages, 24, 2048, brief_answer)
    question = EpisodeSet(world).questions(EpisodeSet(world).beginnings)[0]
    for temperature in (0.0, 1.0):
        with pytest.raises(StockerError, match='scores of the model are not numbers.*bfloat16 or float32'):
            student.moderator().decide_batch([question], temperature)


def test_a_trainer_draws_no_answer_from_what_is_no_number(world, tmp_path):
    from stocker.llm.tiny import tiny_gemma
    network, processor = tiny_gemma(loudness=10_000.0)
    student = Student('loud', network.half(), processor, brief_messages, 24, 2048, brief_answer)
    questions = Questions(EpisodeSet(world), student, TrainingSettings(tmp_path, 'loud', prompts=1, rank=2, trainer={
        'per_device_train_batch_size': 2, 'num_generations': 2, 'gradient_accumulation_steps': 1, 'report_to': []}))
    trainer = make_trainer(questions, questions.settings.config())
    rows = questions.ask(questions.episodes.beginnings[:1])
    asked, *rest = trainer._tokenize_prompts([row['prompt'] for row in rows])
    with pytest.raises(StockerError, match='scores of the model are not numbers'):
        trainer._generate_single_turn(asked, *rest, num_generations=1)
