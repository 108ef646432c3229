"What is asked of the trainer is checked before anything is loaded, and rounds that do not come out even are refused."
import json
import math
import subprocess
import sys

import pytest
from stocker.market.core import StockerError
from stocker.training.adapters import OURS, RANGES, trainer_fields
from stocker.training.grpo import TrainingSettings
from stocker.training.questions import Splits

SMALL = {'per_device_train_batch_size': 16, 'num_generations': 4}


def settings(**changes): return TrainingSettings('here', **changes)


@pytest.mark.parametrize('name', ['rounds', 'prompts', 'horizon', 'rank', 'seed', 'policy_episodes', 'demonstrations'])
@pytest.mark.parametrize('value', [-1, 1.5, math.nan, math.inf, '3', True, 10**400, pytest.param(10**5000, id='long')])
def test_a_number_without_sense_is_refused_with_its_name_and_range(name, value):
    least, most = RANGES[name]
    with pytest.raises(StockerError, match=f'^{name} = .*from {least:,} to {most:,}'): settings(**{name: value})


@pytest.mark.parametrize('name', ['rounds', 'prompts', 'horizon', 'rank'])
def test_nothing_at_all_is_refused(name):
    with pytest.raises(StockerError, match=f'^{name} = 0: use a whole number from 1'): settings(**{name: 0})


@pytest.mark.parametrize('name,value', [
    ('learning_rate', 'fast'), ('learning_rate', 0), ('learning_rate', -1e-5), ('learning_rate', math.nan),
    ('learning_rate', 3), ('temperature', 0.0), ('temperature', math.inf), ('top_p', 0), ('num_generations', 1),
    ('num_generations', '8'), ('num_generations', None), ('per_device_train_batch_size', 0), ('max_steps', 0),
    ('gradient_accumulation_steps', 2.0), ('max_completion_length', -5), ('adam_epsilon', math.nan),
    ('vllm_gpu_memory_utilization', 'all'), ('fp16', 'yes'), ('bf16', 1), ('report_to', 7)])
def test_a_field_of_the_trainer_takes_what_its_type_and_range_say(name, value):
    with pytest.raises(StockerError, match=f'^{name} = '): settings(trainer={name: value})


def test_the_fields_read_from_the_source_are_those_of_the_class():
    trl = pytest.importorskip('trl')
    assert set(trainer_fields()) == {one.name for one in trl.GRPOConfig.__dataclass_fields__.values() if one.init}
    assert set(OURS) < set(trainer_fields()) | {'gone'}
    assert {name for name in RANGES if name not in TrainingSettings.__dataclass_fields__} < set(trainer_fields())


@pytest.mark.parametrize('name', sorted(OURS))
def test_no_field_that_works_against_a_run_is_taken(name):
    wrong = {'save_strategy': 'no', 'eval_strategy': 'steps', 'logging_strategy': 'no', 'save_total_limit': 2,
             'dataloader_num_workers': 2, 'dataloader_multiprocessing_context': 'spawn', 'seed': 3,
             'num_train_epochs': 2.0, 'output_dir': 'there', 'resume_from_checkpoint': 'there',
             'train_sampling_strategy': 'group_by_length', 'model_init_kwargs': {'dtype': 'float16'},
             'chat_template_kwargs': {'enable_thinking': True}}.get(name, True)
    with pytest.raises(StockerError, match=f'^{name} = .* is not open here'): settings(trainer={name: wrong})


def test_workers_that_would_go_on_with_old_questions_are_refused():
    for given in ({'dataloader_num_workers': 1, 'dataloader_persistent_workers': True},
                  {'dataloader_persistent_workers': True}):
        with pytest.raises(StockerError, match='the questions of each round lie in this process'):
            settings(trainer=given)


@pytest.mark.parametrize('prompts,trainer,words', [
    (8, {}, 'prompts = 8: 128 answers in groups of 8 are 16 questions at a time, so 8 of 8 would never be asked'),
    (20, {'per_device_train_batch_size': 32, 'num_generations': 4},
     'prompts = 20: 32 answers in groups of 4 are 8 questions at a time, so 4 of 20 would never be asked'),
    (12, {**SMALL, 'steps_per_generation': 2}, '8 questions at a time, so 4 of 12'),
    (12, {**SMALL, 'generation_batch_size': 32}, '8 questions at a time, so 4 of 12'),
    (12, {**SMALL, 'steps_per_generation': 1, 'gradient_accumulation_steps': 2}, 'a round has 3 batches')])
def test_questions_that_do_not_fill_a_step_are_counted(prompts, trainer, words):
    with pytest.raises(StockerError, match=words): settings(prompts=prompts, trainer=trainer)


def test_processes_are_counted(monkeypatch):
    each = {'per_device_train_batch_size': 4, 'num_generations': 8}
    with pytest.raises(StockerError, match='on 1 process makes 4 answers, which num_generations = 8 does not divide'):
        settings(prompts=16, trainer=each)
    monkeypatch.setenv('WORLD_SIZE', '2')
    assert settings(prompts=16, trainer=each).steps_a_round == 16
    with pytest.raises(StockerError, match='so 16 of 16 would never be asked'): settings(prompts=16)
    for odd in ('', 'two', '-1', '0'):
        monkeypatch.setenv('WORLD_SIZE', odd)
        assert settings(prompts=16).steps_a_round == 1


def test_rounds_under_a_limit_of_steps_are_those_that_are_begun():
    two_steps = {'prompts': 8, 'trainer': {**SMALL, 'max_steps': 12}}
    assert settings(**two_steps).all_rounds == 6
    assert settings(prompts=8, trainer={**SMALL, 'max_steps': 11}).all_rounds == 6
    assert settings(prompts=8, rounds=4, trainer={**SMALL, 'max_steps': -1}).all_rounds == 4


def test_what_the_trainer_itself_refuses_is_one_line():
    pytest.importorskip('trl')
    for given in ({'optim': 'nosuch'}, {'bf16': True, 'fp16': True}, {'lr_scheduler_type': 'nosuch'}):
        with pytest.raises(StockerError, match='trl.GRPOConfig refuses these settings') as told:
            settings(trainer=given).config()
        assert '\n' not in str(told.value)


COMMANDS = { # options, and what the message has to say
    '--set learning_rte=1e-5': 'do you mean learning_rate?', '--set learning_rate=fast': "learning_rate = 'fast'",
    '--set learning_rate=NaN': 'learning_rate = nan', '--set max_steps=' + '1' * 5000: 'max_steps = ',
    '--prompts 0': 'prompts = 0: use a whole number from 1 to', '--prompts 8': 'so 8 of 8 would never be asked',
    '--rounds -1': 'rounds = -1: use a whole number from 1 to', '--few 0': '--few', '--few -1': '--few',
    '--horizon 0': 'horizon = 0', '--seed -1': 'seed = -1', '--transaction-cost nan': '--transaction-cost',
    '--curriculum reverse': "unknown curriculum 'reverse'", '--rounds 9999999999999999999999': 'rounds = about 10^22'}
ASK_ALL = '''
import contextlib, io, json, sys
from stocker import cli
for options in json.loads(sys.argv[1]):
    sys.argv = ['stocker', 'train', *options.split()]
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        try: cli.main()
        except SystemExit as end: code = end.code
    print(json.dumps([code, told.getvalue(), 'torch' in sys.modules or 'trl' in sys.modules]))
'''


def test_the_command_tells_before_anything_is_loaded(tmp_path):
    done = subprocess.run([sys.executable, '-c', ASK_ALL, json.dumps(list(COMMANDS))], capture_output=True, text=True,
                          check=False, cwd=tmp_path)
    assert done.returncode == 0 and not list(tmp_path.iterdir())
    for word, line in zip(COMMANDS.values(), done.stdout.splitlines(), strict=True):
        code, told, loaded = json.loads(line)
        assert (code, loaded, told.count('\n')) == (2, False, 1) and word in told


def test_several_processes_share_a_folder_that_was_named(monkeypatch):
    from stocker.cli import train
    monkeypatch.setenv('WORLD_SIZE', '2')
    with pytest.raises(StockerError, match='--out: name the folder of the run'): train()


def test_no_episodes_to_choose_on_are_refused(world):
    splits = Splits(world[:4], world[4:], {})
    for count in (0, -1, 1.5, math.nan, '2'):
        with pytest.raises(StockerError, match='few = '): splits.fewer(count)
    assert len(splits.fewer(1).validation) == 1 and len(splits.fewer(10**6).validation) == 2
