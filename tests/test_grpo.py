"Training: checks before a model loads, and the whole path with the pocket model and with a small Gemma 4."
import json
import os
import signal
import subprocess
import sys
import warnings
from functools import partial

import numpy as np
import pytest
from waiting import patiently
from stocker.council.council import collect_votes
from stocker.council.specialists import RULE_ANALYSTS
from stocker.llm.prompts import LanguageSpecialist
from stocker.market.core import DataError, StockerError
from stocker.market.data import load_prices
from stocker.market.episodes import Episode

torch = pytest.importorskip('torch')
for package in ('transformers', 'trl', 'peft', 'datasets'): pytest.importorskip(package)

from safetensors.torch import load_file
from trl import SFTTrainer

from stocker.llm.models import load_adapter
from stocker.training.adapters import ADAPTER, brief_answer, brief_messages, load_weights, trained_moderator
from stocker.training.grpo import (
    SCORES, WARM_START, Alarms, Questions, Trained, TrainingSettings, demonstration_rows,
    last_checkpoint, make_trainer, train)
from stocker.training.pocket import ModelModerator, Student, load_pocket, pocket_messages, tokenized
from stocker.training.questions import EpisodeSet, Splits
from stocker.training.results import compile_results, judge

torch.set_num_threads(1)
QUIET = {'disable_tqdm': True, 'report_to': []}
SMALL = {'per_device_train_batch_size': 16, 'num_generations': 4, **QUIET}


def train_quietly(voted, validation, folder, student=None, tests=None, **changes):
    "A small run without warnings: 8 questions a round, 16 answers a step."
    settings = TrainingSettings(folder, **{'prompts': 8, 'trainer': SMALL, **changes})
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return train(Splits(voted, validation, tests or {}), settings, student)


# What is found before a model is loaded, and while it trains.

def test_an_old_torchao_is_named_before_a_model_is_loaded(tmp_path, world, monkeypatch):
    monkeypatch.setattr('stocker.training.grpo.load_student', lambda *_: pytest.fail('a model was loaded'))
    monkeypatch.setattr('importlib.metadata.version', lambda name: '0.10.0')
    with pytest.raises(StockerError, match='torchao 0.10.0 is too old'):
        train(Splits(world[:4], world[4:], {}), TrainingSettings(tmp_path, 'x/y'))


@pytest.mark.parametrize('log,word', [
    ({'entropy': 0.0}, 'entropy'), ({'completions/clipped_ratio': 0.97}, 'end-of-turn')])
def test_a_collapse_raises_one_alarm(log, word):
    alarms = Alarms()
    seen = [alarms.look(log, step) for step in range(8)]
    assert len(alarms.raised) == 1 and word in alarms.raised[0] and seen == [None, None, *alarms.raised, *[None] * 5]


# The whole path.

@pytest.fixture(scope='module')
def trained(world, tmp_path_factory):
    return train_quietly(world[:4], world[4:], tmp_path_factory.mktemp('runs')/'pocket_1', seed=1, rounds=2)


def test_a_run_leaves_everything_behind(trained):
    record = json.loads((trained.folder/'run.json').read_text())
    assert record['steps'] == 4 and len(record['scores']) == 2 and record['best_step'] in (2, 4)
    assert record['best_step'] == int(max(record['scores'], key=record['scores'].get))
    card = (trained.folder/ADAPTER/'README.md').read_text()
    assert all(word in card for word in ('PLANTED', 'Seed 1', 'Test episodes were not used', 'library_name: peft'))
    assert str(trained.folder) not in card


def test_the_adapter_changes_the_model_and_comes_back_the_same(trained):
    numbers = torch.arange(30)[None]
    with torch.no_grad():
        after = trained.model(numbers).logits
        with trained.model.disable_adapter(): before = trained.model(numbers).logits
        again = load_adapter(load_pocket().model, trained.folder/ADAPTER, 'default')(numbers).logits
    assert torch.equal(after, again) and not torch.equal(before, after)
    assert torch.equal(before, load_pocket().model(numbers).logits)


def test_a_run_goes_on_from_its_checkpoint_with_the_adapter_still_learning(world, trained, tmp_path):
    "As after a kill: the second round is missing, and later checkpoints were not written to their end."
    import shutil
    out = tmp_path/'pocket_1'
    shutil.copytree(trained.folder/'checkpoints'/'checkpoint-2', out/'checkpoints'/'checkpoint-2')
    for number, written in ((3, None), (5, ''), (6, '{"global_step": 6, "log_history": [')):
        (out/'checkpoints'/f'checkpoint-{number}').mkdir()
        if written is not None: (out/'checkpoints'/f'checkpoint-{number}'/'trainer_state.json').write_text(written)
    shutil.copy(trained.folder/'checkpoints'/SCORES, out/'checkpoints'/SCORES)
    again = train_quietly(world[:4], world[4:], out, seed=1, rounds=2, resume=True)
    assert again.record['steps'] == 4 and list(again.record['scores']) == [2, 4]
    assert again.record['scores'] == {int(step): score for step, score in trained.record['scores'].items()}
    learning = [part for part in again.model.parameters() if part.requires_grad]
    assert learning and all(part.dtype == torch.float32 for part in learning)
    last = [folder/'checkpoints'/'checkpoint-4'/'adapter_model.safetensors' for folder in (trained.folder, out)]
    one, other = map(load_file, last)
    for name in one: torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-6)


@pytest.fixture(scope='module')
def gemma_votes():
    "A council with a real Gemma 4 class in the seat that looks at pictures, small and with random weights."
    from stocker.llm.models import TransformersClient
    from stocker.llm.tiny import tiny_gemma
    client = TransformersClient(*tiny_gemma(), 'tiny-gemma', max_new_tokens=40)
    asked, answer_all = [], client.answer_all
    client.answer_all = lambda conversations, *rest, **named: (
        asked.extend(conversations) or answer_all(conversations, *rest, **named))
    council = {**RULE_ANALYSTS, 'chart_pattern': LanguageSpecialist(client, 'chart_pattern')}
    history = load_prices('AAPL')
    windows = [('2023-08-01', '2023-08-07'), ('2023-08-08', '2023-08-14')]
    voted = [collect_votes(council, Episode.from_prices(history, 'AAPL', *window)) for window in windows]
    return voted, asked


def gemma_student():
    from stocker.llm.tiny import tiny_gemma
    return Student('tiny-gemma-4', *tiny_gemma(), brief_messages, 24, 2048, brief_answer)


def test_a_tiny_gemma_4_goes_the_whole_way_with_a_council_that_sees(gemma_votes, tmp_path):
    voted, asked = gemma_votes
    parts = [part['type'] for messages in asked for part in messages[-1]['content'] if isinstance(part, dict)]
    assert len(asked) == 10 and parts.count('image_url') == 10
    trainer = {'per_device_train_batch_size': 4, 'num_generations': 4, 'gradient_accumulation_steps': 2,
               'learning_rate': 0.01, 'max_steps': 2, **QUIET}
    one = train_quietly(voted[:1], voted[1:], tmp_path, gemma_student(), model='tiny-gemma-4', prompts=2, rounds=2,
                        demonstrations=4, policy_episodes=1, trainer=trainer)
    assert one.record['steps'] == 2 and one.record['demonstrations'] == 4
    assert not any('vision' in name for name, part in one.model.named_parameters() if part.requires_grad)
    numbers = torch.arange(10, 30)[None]
    with torch.no_grad():
        again = load_adapter(gemma_student().model, tmp_path/ADAPTER, 'default').eval()(input_ids=numbers).logits
        assert torch.equal(again, one.model(input_ids=numbers).logits)


REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
LEAVES_OUT = ''


@pytest.mark.parametrize('template', [REFUSES, LEAVES_OUT])
def test_a_model_without_a_system_turn_is_trained_and_asked_with_all_that_was_said(gemma_votes, tmp_path, template):
    from stocker.training.adapters import BRIEF_PROMPT, check_forward
    voted, _ = gemma_votes
    student, episodes = gemma_student(), EpisodeSet(voted)
    student.tokenizer.chat_template = student.tokenizer.tokenizer.chat_template = template + (
        "{% for turn in messages %}{% if turn.role != 'system' %}{{ '<|turn>' + turn.role + '\n' + turn.content }}"
        "{{ '<turn|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}")
    questions = Questions(episodes, student, TrainingSettings(tmp_path, 'x', prompts=2, rank=2, trainer={
        'per_device_train_batch_size': 2, 'num_generations': 2, 'gradient_accumulation_steps': 1, 'report_to': []}))
    rows, shown = questions.ask(episodes.beginnings), demonstration_rows(episodes, 2, student)
    for turns in (rows[0]['prompt'], shown[0]['prompt']):
        assert [turn['role'] for turn in turns] == ['user'] and turns[0]['content'].startswith(BRIEF_PROMPT)
        assert 'can buy' in turns[0]['content']
    trainer = make_trainer(questions, questions.settings.config())
    given, *_ = trainer._tokenize_prompts([row['prompt'] for row in rows]) # what the trainer asks
    question = episodes.questions(episodes.beginnings)[0]
    asked = tokenized(student.tokenizer, [brief_messages(*question)])['input_ids']
    assert given[0] == asked[0] and BRIEF_PROMPT in student.tokenizer.decode(asked[0])
    assert check_forward(trainer.model, student, question) > 0
    assert len(student.moderator().decide_batch([question])) == 1


def test_the_adapter_of_a_packed_model_stays_in_32_bits(gemma_votes, tmp_path, monkeypatch):
    "Before demonstrations, between them and GRPO, after both, in the files, and when the run is taken up."
    pytest.importorskip('bitsandbytes')
    import transformers
    from stocker.llm.models import load_client
    from stocker.llm.tiny import tiny_gemma
    voted, _ = gemma_votes
    network, processor = tiny_gemma(wide=True)
    network.save_pretrained(tmp_path/'model')
    monkeypatch.setattr(transformers.AutoProcessor, 'from_pretrained', lambda *_, **__: processor)
    seen, steps = [], SFTTrainer.train

    def look(moment, model):
        kinds = [part.dtype for part in model.parameters() if part.requires_grad]
        seen.append((moment, len(kinds), set(kinds)))

    def watched(trainer):
        look('before', trainer.model)
        steps(trainer)
        look('after the demonstrations', trainer.model)
    monkeypatch.setattr(SFTTrainer, 'train', watched)
    for rounds in (1, 2):
        packed = load_client(tmp_path/'model', four_bit=True).network
        assert any(type(part).__name__ == 'Linear4bit' for part in packed.modules())
        student = Student('tiny', packed, processor, brief_messages, 24, 2048, brief_answer)
        one = train_quietly(
            voted[:1], voted[1:], tmp_path/'run', student, model='tiny', prompts=2, rounds=rounds, rank=2,
            demonstrations=4, policy_episodes=1, resume=rounds == 2,
            trainer={'per_device_train_batch_size': 4, 'num_generations': 4, 'gradient_accumulation_steps': 2, **QUIET})
        look('after the run', one.model)
        assert one.record['steps'] == rounds
    assert [moment for moment, *_ in seen] == ['before', 'after the demonstrations', 'after the run', 'after the run']
    assert {count for _, count, _ in seen} == {48} and all(kinds == {torch.float32} for *_, kinds in seen)
    for folder in (WARM_START, ADAPTER, 'checkpoints/checkpoint-1', 'checkpoints/checkpoint-2'):
        kept = load_file(tmp_path/'run'/folder/'adapter_model.safetensors').values()
        assert {part.dtype for part in kept} == {torch.float32}


def test_a_warm_start_is_kept_apart_from_what_came_after(world, tmp_path):
    tmp_path = tmp_path/'run_1'
    one = train_quietly(world[:4], world[4:], tmp_path, rounds=1, demonstrations=8)
    tables = judge(one, Splits(world[:4], world[4:5], {'seen': world[5:]}))
    warm, after = (load_file(tmp_path/name/'adapter_model.safetensors') for name in (WARM_START, ADAPTER))
    assert set(warm) == set(after) and any(not torch.equal(warm[name], after[name]) for name in warm)
    assert any(part.abs().sum() > 0 for name, part in warm.items() if 'lora_B' in name)
    assert {'before', 'warm start', 'after'} < set(tables['seen']['policy'])
    with torch.no_grad(): # judging left the trained weights in place
        numbers = torch.arange(20)[None]
        again = load_adapter(load_pocket().model, tmp_path/ADAPTER, 'default')(numbers).logits
        assert torch.equal(again, one.model(numbers).logits)
    page = compile_results(tmp_path.parent).read_text()
    assert 'Warm start: 8 answers of the vote mean.' in page and 'after and warm start' in page


def test_questions_of_any_length_are_answered_as_they_are_alone(world, starts):
    "Shorter questions are filled up on the left, whatever the tokenizer would do by itself."
    student, lengths = load_pocket(), (7, 3, 5, 1)
    student.tokenizer.padding_side = 'right'
    def last_lines(votes, portfolio):
        lines = pocket_messages(votes, portfolio)[0]['content'].splitlines(keepends=True)
        return [{'role': 'user', 'content': ''.join(lines[-len(votes):])}]
    moderator = ModelModerator(student.model, student.tokenizer, last_lines)
    portfolio = EpisodeSet(world).run(starts[0]).portfolio
    questions = [(dict(list(world[0].votes[0].items())[:count]), portfolio) for count in lengths]
    assert moderator.decide_batch(questions) == [moderator(*question) for question in questions]


def test_demonstrations_follow_their_seed(world):
    episodes, student = EpisodeSet(world), load_pocket()
    one, same, other = (demonstration_rows(episodes, 40, student, seed) for seed in (3, 3, 4))
    assert one == same != other


def test_a_curriculum_asks_about_its_episodes_only(world):
    seen = []
    def chances(progress):
        seen.append(progress)
        return np.array([0, 0, 2.0, 0, 1.0, 0])
    student = load_pocket()
    questions = Questions(EpisodeSet(world), student, TrainingSettings('here', prompts=32, policy_episodes=1))
    questions.chances = chances
    questions.fill(1, student.moderator()) # the second of three rounds
    assert {row['place'] for row in questions.rows} == {2, 4} and seen == [0.5]


def test_a_run_taken_up_within_a_round_asks_the_rest_of_that_round(world, tmp_path, monkeypatch):
    "Four steps a round, a checkpoint after step 6, and the whole of it lost from there on."
    import shutil
    filled, fill = [], Questions.fill
    monkeypatch.setattr(Questions, 'fill', lambda self, number, moderator: filled.append(number) or fill(
        self, number, moderator))
    asked = {'rounds': 3, 'prompts': 16, 'seed': 1, 'policy_episodes': 1,
             'trainer': {**SMALL, 'save_strategy': 'steps', 'save_steps': 3}}
    whole = train_quietly(world[:4], world[4:], tmp_path/'whole', **asked)
    assert filled == [0, 1, 2] and list(whole.record['scores']) == [4, 8, 12]
    seen = []
    monkeypatch.setattr('stocker.training.grpo.curriculum', lambda *_: lambda progress: seen.append(progress))
    for step in (6, 4): # in the middle of the second round, and at its beginning
        out = tmp_path/f'from_{step}'
        for name in (f'checkpoint-{step}', 'checkpoint-4'): shutil.copytree(
            tmp_path/'whole'/'checkpoints'/name, out/'checkpoints'/name, dirs_exist_ok=True)
        shutil.copy(tmp_path/'whole'/'checkpoints'/SCORES, out/'checkpoints'/SCORES)
        filled.clear(), seen.clear()
        again = train_quietly(world[:4], world[4:], out, resume=True, **asked)
        assert list(zip(filled, seen, strict=True)) == [(1, 0.5), (2, 1.0)]
        assert again.record['scores'] == whole.record['scores']


def test_a_run_is_not_taken_up_with_rounds_of_another_length(world, trained, tmp_path):
    import shutil
    shutil.copytree(trained.folder/'checkpoints', tmp_path/'checkpoints')
    for changed in ({'prompts': 16}, {'trainer': {**SMALL, 'per_device_train_batch_size': 8}}):
        with pytest.raises(StockerError, match='step 4 was 2 rounds into its run, and rounds of 4 steps make that 1'):
            train_quietly(world[:4], world[4:], tmp_path, seed=1, rounds=3, resume=True, **changed)


def test_a_curriculum_ends_with_the_last_step(world, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr('stocker.training.grpo.curriculum', lambda *_: lambda progress: seen.append(progress))
    one = train_quietly(world[:4], world[4:], tmp_path, policy_episodes=1, trainer={**SMALL, 'max_steps': 12})
    assert one.record['steps'] == 12 and seen == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])


KILLED = '''
import json, sys, warnings; warnings.simplefilter('ignore')
import torch; torch.set_num_threads(1)
from stocker.studies.worlds import planted_world
from stocker.training.grpo import TrainingSettings, train
from stocker.training.questions import Splits
world = planted_world(1, episodes=6, steps=20).episodes
settings = TrainingSettings(sys.argv[1], seed=1, rounds=500, prompts=4, trainer=json.loads(sys.argv[2]))
train(Splits(world[:4], world[4:], {}), settings)
'''


@pytest.mark.skipif(not hasattr(signal, 'SIGKILL'), reason='no such signal here')
def test_a_killed_run_leaves_a_whole_checkpoint(tmp_path, world):
    process = subprocess.Popen([sys.executable, '-c', KILLED, str(tmp_path), json.dumps(SMALL)],
                               env={**os.environ, 'HF_HUB_OFFLINE': '1'}, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    try:
        def kept():
            assert process.poll() is None
            return last_checkpoint(tmp_path/'checkpoints')
        patiently(kept, what='a checkpoint is written', pause=0.1)
    finally:
        process.kill()
        process.wait()
    begun = int(last_checkpoint(tmp_path/'checkpoints').name.split('-')[1])
    again = train_quietly(world[:4], world[4:], tmp_path, seed=1, rounds=begun + 1, prompts=4, resume=True)
    assert again.record['steps'] == begun + 1 and isinstance(again, Trained)


TWO = '''
import json, os, sys, warnings; warnings.simplefilter('ignore')
import torch; torch.set_num_threads(1)
from stocker.studies.worlds import planted_world
from stocker.training.grpo import Questions, TrainingSettings, train
from stocker.training.questions import Splits
rows, fill = [], Questions.fill
Questions.fill = lambda self, *given: (fill(self, *given), rows.append(self.rows))
world = planted_world(1, episodes=6, steps=20).episodes
trainer = {'per_device_train_batch_size': 4, 'num_generations': 8, 'ddp_backend': 'gloo', **json.loads(sys.argv[2])}
one = train(Splits(world[:4], world[4:], {}), TrainingSettings(
    sys.argv[1] + '/run', seed=1, rounds=1, prompts=2, policy_episodes=1, demonstrations=8, trainer=trainer))
with open(f"{sys.argv[1]}/{os.environ['RANK']}.json", 'w') as file:
    json.dump([one.record['steps'], one.record['answers_a_step'], one.record['scores'], rows], file)
'''


def test_two_processes_share_the_groups_of_a_run(tmp_path):
    "Eight answers to a question, four by each of two processes, after demonstrations: as on two cards."
    done = subprocess.run(
        [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '2', '--no_python',
         sys.executable, '-c', TWO, str(tmp_path), json.dumps(QUIET)],
        env={**os.environ, 'HF_HUB_OFFLINE': '1'}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    one, other = (json.loads((tmp_path/f'{rank}.json').read_text()) for rank in (0, 1))
    assert one == other and one[:2] == [2, 8]
    assert {path.name for path in (tmp_path/'run').iterdir()} == {'checkpoints', ADAPTER, WARM_START, 'run.json'}


def test_the_file_for_two_cards_can_be_read():
    from pathlib import Path

    from accelerate.commands.config.config_args import load_config_from_file
    config = load_config_from_file(str(Path(__file__).parents[1]/'training'/'accelerate_two_cards.yaml'))
    assert (config.num_processes, config.distributed_type.value, config.mixed_precision) == (2, 'MULTI_GPU', 'no')


# What a run leaves is not replaced, and not loaded with a turned bit.

def test_a_second_run_in_the_same_folder_is_refused_and_a_turned_bit_in_an_adapter_named(world, tmp_path, monkeypatch):
    trained = train_quietly(world[:4], world[4:], tmp_path/'run', rounds=1)
    before = {path: path.read_bytes() for path in (tmp_path/'run').rglob('*') if path.is_file()}
    with monkeypatch.context() as patch, pytest.raises(StockerError, match='a run lies there already'):
        patch.setattr('stocker.training.grpo.load_student', lambda *_: pytest.fail('a model was loaded'))
        train_quietly(world[:4], world[4:], tmp_path/'run', rounds=1)
    assert {path: path.read_bytes() for path in (tmp_path/'run').rglob('*') if path.is_file()} == before
    weights = trained.folder/ADAPTER/'adapter_model.safetensors'
    content = bytearray(weights.read_bytes())
    content[-5] ^= 4
    weights.write_bytes(content)
    for use in (trained_moderator, partial(load_weights, trained.model)):
        with pytest.raises(DataError, match='adapter_model.safetensors: the checksum'): use(trained.folder/ADAPTER)
    (trained.folder/ADAPTER/'manifest.json').unlink() # as adapters of older versions
    assert trained_moderator(trained.folder/ADAPTER)
