"Training: checks before a model loads, and the whole path with the pocket model and with a small Gemma 4."
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from stocker.llm.answers import read_trade
from stocker.market.core import StockerError
from stocker.council.council import collect_votes, vote_mean
from stocker.market.data import load_prices
from stocker.trading.env import Run, lay_out
from stocker.market.episodes import Episode
from stocker.trading.reward import RewardWeights

torch = pytest.importorskip('torch')
for package in ('transformers', 'trl', 'peft', 'datasets'): pytest.importorskip(package)

from peft import get_peft_model
from safetensors.torch import load_file

from stocker.training.adapters import (
    ADAPTER, brief_answer, brief_messages, load_trained, lora_settings, trained_moderator)
from stocker.training.credit import CreditReward, Start, one_by_one, play_all, rest_of_episode, start_columns
from stocker.training.grpo import (
    SCORES, WARM_START, Alarms, EpisodeRollout, Questions, Trained, check_groups, check_lengths, curriculum_chances,
    grpo_settings, imitate, last_checkpoint, demonstration_rows, look, make_trainer, prompt_rows, train, voted_difficulty,
    voted_regimes, watch)
from stocker.training.pocket import ModelModerator, Student, load_pocket, pocket_messages, tokenized
from stocker.llm.prompts import LanguageSpecialist
from stocker.training.results import Splits, compile_results, judge
from stocker.council.specialists import RULE_ANALYSTS
from stocker.studies.statistics import BASELINE_POLICIES, evaluate

torch.set_num_threads(1)
QUIET = {'disable_tqdm': True, 'report_to': []}
QUIET_TEACHER = {'disable_tqdm': True}
TINY = {'prompts': 8, 'per_device_train_batch_size': 16, 'num_generations': 4, **QUIET}


def first_portfolio(voted):
    return Run(lay_out(voted.episode, voted.timing, RewardWeights())).portfolio


# Settings that are refused before a model is loaded.

@pytest.mark.parametrize('changes,named', [
    ({'per_device_train_batch_size': 1, 'gradient_accumulation_steps': 2, 'num_generations': 4},
     ['per_device_train_batch_size', 'gradient_accumulation_steps', 'num_generations']),
    ({'num_generations': 1}, ['num_generations']), ({'num_generations': 0}, ['num_generations']),
    ({'per_device_train_batch_size': 6}, ['per_device_train_batch_size', 'num_generations'])])
def test_incomplete_groups_are_refused_before_a_model_is_loaded(tmp_path, world, monkeypatch, changes, named):
    monkeypatch.setattr('stocker.training.grpo.load_student', lambda *_: pytest.fail('a model was loaded'))
    with pytest.raises(StockerError) as error: train('some/model', world[:4], world[4:], tmp_path, **changes)
    assert all(name in str(error.value) for name in named)


def test_groups_over_several_devices():
    assert check_groups(2, 1, 4, processes=2) == 1
    with pytest.raises(StockerError, match='times 3 processes'): check_groups(2, 1, 4, processes=3)


def test_an_old_torchao_is_named_before_a_model_is_loaded(tmp_path, world, monkeypatch):
    monkeypatch.setattr('stocker.training.grpo.load_student', lambda *_: pytest.fail('a model was loaded'))
    monkeypatch.setattr('importlib.metadata.version', lambda name: '0.10.0')
    with pytest.raises(StockerError, match='torchao 0.10.0 is too old'): train('x/y', world[:4], world[4:], tmp_path)


def test_training_and_validation_must_differ(tmp_path, world):
    with pytest.raises(StockerError, match='both for training and for validation'):
        train('pocket', world, world[:1], tmp_path)


def test_number_types_are_always_said(tmp_path):
    settings = grpo_settings(tmp_path)
    on_cpu = not torch.cuda.is_available()
    assert not (settings.bf16 and settings.fp16) and (not on_cpu or not settings.bf16 and not settings.fp16)


def test_a_prompt_over_the_limit_is_refused_and_never_cut(world, starts):
    student = load_pocket()
    rows = prompt_rows(world, starts[:8])
    with pytest.raises(StockerError, match='prompts are never cut'): check_lengths(rows, student.tokenizer, 10)
    short = Student('pocket', student.model, student.tokenizer, pocket_messages, 8, 10)
    with pytest.raises(StockerError, match='the limit is 10'):
        Questions(world, short, 8, seed=0).fill(0, student.moderator())


# Alarms.

@pytest.mark.parametrize('bad', [{'loss': float('nan')}, {'loss': float('inf')}, {'grad_norm': float('nan')},
                                 {'reward': float('nan')}])
def test_a_loss_that_is_no_number_stops_the_run_with_advice(bad):
    with pytest.raises(StockerError, match='lower learning_rate'): look(Alarms(), bad, 6)


@pytest.mark.parametrize('log,word', [
    ({'frac_reward_zero_std': 1.0}, 'num_generations'), ({'entropy': 0.0}, 'entropy'),
    ({'completions/clipped_ratio': 0.97}, 'end-of-turn')])
def test_a_collapse_warns_once_and_can_stop(log, word):
    for stop in (False, True):
        alarms, control = Alarms(stop=stop), SimpleNamespace(should_training_stop=False, should_save=False)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter('always')
            for step in range(8): watch(alarms).on_log(None, SimpleNamespace(global_step=step), control, logs=log)
        assert len(alarms.raised) == 1 and word in alarms.raised[0] and word in str(seen[0].message)
        assert control.should_training_stop is stop


# The whole path.

@pytest.fixture(scope='module')
def trained(world, tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return train('pocket', world[:4], world[4:], tmp_path_factory.mktemp('runs')/'pocket_1', seed=1,
                     num_train_epochs=2, **TINY)


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
        again = load_trained(trained.folder/ADAPTER, load_pocket())(numbers).logits
    assert torch.equal(after, again) and not torch.equal(before, after)
    assert torch.equal(before, load_pocket().model(numbers).logits)


def test_an_adapter_whose_names_do_not_fit_is_refused(trained, tmp_path):
    import shutil

    from safetensors.torch import save_file
    shutil.copytree(trained.folder/ADAPTER, tmp_path/'a')
    file = tmp_path/'a'/'adapter_model.safetensors'
    weights = load_file(file)
    first = sorted(weights)[0]
    weights[first.replace('base_model', 'basemodel')] = weights.pop(first)
    save_file(weights, file)
    with pytest.raises(StockerError, match='made for another model'): load_trained(tmp_path/'a', load_pocket())
    with pytest.raises(StockerError, match='no adapter here'): load_trained(tmp_path/'b', load_pocket())


def test_a_run_goes_on_from_its_checkpoint_with_the_adapter_still_learning(world, trained, tmp_path):
    "As after a kill: the second round is missing, and later checkpoints were not written to their end."
    import shutil
    out = tmp_path/'pocket_1'
    shutil.copytree(trained.folder/'checkpoints'/'checkpoint-2', out/'checkpoints'/'checkpoint-2')
    for number, written in ((3, None), (5, ''), (6, '{"global_step": 6, "log_history": [')):
        (out/'checkpoints'/f'checkpoint-{number}').mkdir()
        if written is not None: (out/'checkpoints'/f'checkpoint-{number}'/'trainer_state.json').write_text(written)
    shutil.copy(trained.folder/'checkpoints'/SCORES, out/'checkpoints'/SCORES)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        again = train('pocket', world[:4], world[4:], out, seed=1, num_train_epochs=2, resume=True, **TINY)
    assert again.record['steps'] == 4 and list(again.record['scores']) == [2, 4]
    assert again.record['scores'] == {int(step): score for step, score in trained.record['scores'].items()}
    learning = [part for part in again.model.parameters() if part.requires_grad]
    assert learning and all(part.dtype == torch.float32 for part in learning)
    last = [folder/'checkpoints'/'checkpoint-4'/'adapter_model.safetensors' for folder in (trained.folder, out)]
    one, other = map(load_file, last)
    for name in one: torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-6)


def test_a_rollout_plays_each_run_on_with_the_model_that_is_trained(world, starts, monkeypatch):
    "The model here repeats what it is told, and it is told what the vote mean would do."
    def told(votes, portfolio):
        return [{'role': 'user', 'content': brief_answer(vote_mean(votes, portfolio))}]
    def repeat(trainer, prompts):
        return {'texts': [one[-1]['content'] for one in prompts]}
    monkeypatch.setattr('stocker.training.grpo.trainer_answers', repeat)
    first, reward = [start for start in starts if start.step == 0], CreditReward(world, 'episode')
    prompts = [row['prompt'] for row in prompt_rows(world, first, told, carried=True)]
    rolled = EpisodeRollout(reward, told)(prompts, None)
    values = reward(rolled['texts'], **start_columns(first), rest=rolled['rest'])
    assert values == pytest.approx([run.total_reward for run in play_all(world, one_by_one(vote_mean))], abs=1e-12)


def test_episode_credit_trains_through_a_rollout(world, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr('stocker.training.grpo.rest_of_episode', lambda *given: seen.append(rest_of_episode(*given)) or seen[-1])
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        one = train('pocket', world[:4], world[4:], tmp_path, credit='episode', num_train_epochs=1,
                    **{**TINY, 'prompts': 2, 'per_device_train_batch_size': 8})
    assert one.record['steps'] == 1 and one.record['credit'] == 'episode'
    assert [len(rest) for rest in seen] == [8] and any(seen[0])


def test_a_rollout_of_gemma_4(gemma_votes, tmp_path):
    voted, _ = gemma_votes
    student, reward = gemma_student(), CreditReward(voted, 'episode')
    questions = Questions(voted, student, 2, seed=0, carried=True)
    settings = grpo_settings(tmp_path, 24, per_device_train_batch_size=2, num_generations=2, report_to=[])
    trainer = make_trainer(student, settings, reward, questions, {'r': 2})
    first = [Start(place, 0, 10_000.0, 0.0, 10_000.0, 0.0) for place in range(2)]
    prompts = [row['prompt'] for row in prompt_rows(voted, first, student.messages, carried=True)]
    rolled = trainer.rollout_func(prompts, trainer)
    assert [len(rolled[name]) for name in ('prompt_ids', 'completion_ids', 'texts', 'rest')] == [2] * 4
    assert rolled['prompt_ids'] == tokenized(student.tokenizer, prompts)['input_ids']


@pytest.fixture(scope='module')
def gemma_votes():
    "A council with a real Gemma 4 class in the seat that looks at pictures, small and with random weights."
    from stocker.llm.models import TransformersClient, tiny_gemma
    client = TransformersClient(*tiny_gemma(), 'tiny-gemma', most_tokens=40)
    asked, answer_all = [], client.answer_all
    client.answer_all = lambda conversations, *rest, **named: (
        asked.extend(conversations) or answer_all(conversations, *rest, **named))
    council = {**RULE_ANALYSTS, 'chart_pattern': LanguageSpecialist(client, 'chart_pattern')}
    history = load_prices('AAPL')
    windows = [('2023-08-01', '2023-08-07'), ('2023-08-08', '2023-08-14')]
    voted = [collect_votes(council, Episode.from_prices(history, 'AAPL', *window)) for window in windows]
    return voted, asked


def gemma_student():
    from stocker.llm.models import tiny_gemma
    return Student('tiny-gemma-4', *tiny_gemma(), brief_messages, 24, 2048, brief_answer)


def test_a_tiny_gemma_4_goes_the_whole_way_with_a_council_that_sees(gemma_votes, tmp_path):
    voted, asked = gemma_votes
    parts = [part['type'] for messages in asked for part in messages[-1]['content'] if isinstance(part, dict)]
    assert len(asked) == 10 and parts.count('image_url') == 10
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        one = train('tiny-gemma-4', voted[:1], voted[1:], tmp_path, prompts=2, num_train_epochs=2, demonstrations=4,
                    per_device_train_batch_size=4, num_generations=4, learning_rate=0.01, max_steps=2,
                    student=gemma_student(), policy_episodes=1, **QUIET)
    assert one.record['steps'] == 2 and one.record['demonstrations'] == 4
    assert not any('vision' in name for name, part in one.model.named_parameters() if part.requires_grad)
    numbers = torch.arange(10, 30)[None]
    with torch.no_grad():
        again = load_trained(tmp_path/ADAPTER, gemma_student())(input_ids=numbers).logits
        assert torch.equal(again, one.model(input_ids=numbers).logits)


def test_a_warm_start_is_kept_apart_from_what_came_after(world, tmp_path):
    tmp_path = tmp_path/'run_1'
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        one = train('pocket', world[:4], world[4:], tmp_path, num_train_epochs=1, demonstrations=8, **TINY)
        tables = judge(one, Splits(world[:4], world[4:5], {'seen': world[5:]}))
    warm, after = (load_file(tmp_path/name/'adapter_model.safetensors') for name in (WARM_START, ADAPTER))
    assert set(warm) == set(after) and any(not torch.equal(warm[name], after[name]) for name in warm)
    assert any(part.abs().sum() > 0 for name, part in warm.items() if 'lora_B' in name)
    assert {'before', 'warm start', 'after'} < set(tables['seen']['policy'])
    with torch.no_grad(): # judging left the trained weights in place
        numbers = torch.arange(20)[None]
        assert torch.equal(load_trained(tmp_path/ADAPTER, load_pocket())(numbers).logits, one.model(numbers).logits)
    page = compile_results(tmp_path.parent).read_text()
    assert 'Warm start: 8 answers of the vote mean.' in page and 'after and warm start' in page


def test_lessons_know_nothing_of_what_came_next(world):
    "The same states under other prices afterwards get the same answers."
    student = load_pocket()
    rows = demonstration_rows(world, 40, student, seed=3)
    assert rows == demonstration_rows(world, 40, student, seed=3) != demonstration_rows(world, 40, student, seed=4)
    for row in rows:
        said = read_trade(row['completion'][0]['content'])
        assert said.side.value in ('buy', 'sell', 'hold')
    learned = imitate(get_peft_model(student.model, lora_settings(student.model)), student, rows * 4, **QUIET_TEACHER)
    assert np.mean(learned[-3:]) < np.mean(learned[:3])


def test_a_trained_moderator_comes_from_its_files(trained, world):
    again = trained_moderator(trained.folder/ADAPTER)
    questions = [(one.votes[0], first_portfolio(one)) for one in world]
    assert again.decide_batch(questions) == trained.moderator.decide_batch(questions)


def test_questions_of_any_length_are_answered_as_they_are_alone(world):
    "Shorter questions are filled up on the left, whatever the tokenizer would do by itself."
    student, lengths = load_pocket(), (7, 3, 5, 1)
    student.tokenizer.padding_side = 'right'
    def last_lines(votes, portfolio):
        lines = pocket_messages(votes, portfolio)[0]['content'].splitlines(keepends=True)
        return [{'role': 'user', 'content': ''.join(lines[-len(votes):])}]
    moderator, portfolio = ModelModerator(student.model, student.tokenizer, last_lines), first_portfolio(world[0])
    questions = [(dict(list(world[0].votes[0].items())[:count]), portfolio) for count in lengths]
    assert moderator.decide_batch(questions) == [moderator(*question) for question in questions]


# A curriculum.

def test_a_curriculum_asks_about_its_episodes_only(world):
    seen = []
    def chances(progress):
        seen.append(progress)
        return np.array([0, 0, 2.0, 0, 1.0, 0])
    student = load_pocket()
    questions = Questions(world, student, 24, seed=0, policy_episodes=1, chances=chances)
    questions.fill(1, student.moderator(), 0.5)
    assert {row['place'] for row in questions.rows} == {2, 4} and seen == [0.5]


def test_harder_episodes_come_in_as_training_goes_on(world):
    chances, hard = curriculum_chances('easy first', world), voted_difficulty(world)
    let_in = [set(np.flatnonzero(chances(progress))) for progress in (0.0, 0.5, 1.0)]
    assert let_in[0] < let_in[1] < let_in[2] == set(range(6))
    assert max(hard[list(let_in[0])]) <= min(hard[list(let_in[2] - let_in[0])])


def test_every_kind_of_market_comes_equally_often(world):
    kinds, chances = voted_regimes(world)['regime'], curriculum_chances('regimes', world)(0.3)
    assert np.allclose([chances[kinds == kind].sum() for kind in kinds.unique()], 1)


def test_difficulty_is_the_distance_of_the_best_simple_policy(world):
    table = evaluate(BASELINE_POLICIES, world, progress=False).set_index(['episode', 'policy'])['return'].unstack()
    for one, hard in zip(world, voted_difficulty(world)):
        row = table.loc[one.episode.name]
        assert hard == pytest.approx(1 - max(row[['hold', 'buy and hold', 'vote mean']]) / row['optimum'], abs=1e-12)


KILLED = '''
import json, sys, warnings; warnings.simplefilter('ignore')
import torch; torch.set_num_threads(1)
from stocker.training.grpo import train
from stocker.studies.worlds import planted_world
world = planted_world(1, episodes=6, steps=20).episodes
train('pocket', world[:4], world[4:], sys.argv[1], seed=1, num_train_epochs=500, **json.loads(sys.argv[2]))
'''


@pytest.mark.skipif(not hasattr(signal, 'SIGKILL'), reason='no such signal here')
def test_a_killed_run_leaves_a_whole_checkpoint(tmp_path, world):
    one_step = {**TINY, 'prompts': 4}
    process = subprocess.Popen([sys.executable, '-c', KILLED, str(tmp_path), json.dumps(one_step)],
                               env={**os.environ, 'HF_HUB_OFFLINE': '1'}, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        while last_checkpoint(tmp_path/'checkpoints') is None:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
    begun = int(last_checkpoint(tmp_path/'checkpoints').name.split('-')[1])
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        again = train('pocket', world[:4], world[4:], tmp_path, seed=1, num_train_epochs=begun + 1, resume=True,
                      **one_step)
    assert again.record['steps'] == begun + 1 and isinstance(again, Trained)


def test_the_file_for_two_cards_can_be_read():
    from pathlib import Path

    from accelerate.commands.config.config_args import load_config_from_file
    config = load_config_from_file(str(Path(__file__).parents[1]/'training'/'accelerate_two_cards.yaml'))
    assert (config.num_processes, config.distributed_type.value, config.mixed_precision) == (2, 'MULTI_GPU', 'no')


@pytest.mark.parametrize('mode', ['colocate', 'server'])
def test_settings_for_vllm_are_taken(tmp_path, mode):
    settings = grpo_settings(tmp_path, use_vllm=True, vllm_mode=mode)
    assert settings.use_vllm and settings.vllm_mode == mode
