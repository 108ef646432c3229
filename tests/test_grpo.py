"Training: rewards, checks before a model loads, and the whole path with the pocket model."
import json
import math
import os
import signal
import subprocess
import sys
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from stocker.answers import read_trade
from stocker.core import StockerError
from stocker.council import collect_votes, vote_mean
from stocker.data import load_prices
from stocker.env import Run, lay_out
from stocker.episodes import Episode
from stocker.reward import RewardWeights
from stocker.worlds import follow, planted_world

torch = pytest.importorskip('torch')
for package in ('transformers', 'trl', 'peft', 'datasets'): pytest.importorskip(package)

from peft import get_peft_model
from safetensors.torch import load_file

from stocker.grpo import (
    ADAPTER, SCORES, WARM_START, Alarms, CreditReward, Questions, Splits, Start, Trained, brief_answer,
    brief_messages, check_forward, check_groups, check_lengths, check_packages, compile_results, credit_orders,
    curriculum_chances, grpo_settings, imitate, judge, language_targets, last_checkpoint, lesson_rows, load_trained,
    lora_settings, memory_advice, memory_plan, mixed_starts, one_by_one, open_ledger, play_all, precision,
    prompt_rows, random_orders, run_at, train, trained_moderator, visited, voted_difficulty, voted_regimes, watch)
from stocker.pocket import ModelModerator, Student, load_pocket, pocket_messages
from stocker.prompts import LanguageSpecialist
from stocker.specialists import RULE_ANALYSTS
from stocker.statistics import BASELINE_POLICIES, evaluate

torch.set_num_threads(1)
QUIET = {'disable_tqdm': True, 'report_to': []}
QUIET_TEACHER = {'disable_tqdm': True}
TINY = {'prompts': 8, 'per_device_train_batch_size': 16, 'num_generations': 4, **QUIET}


@pytest.fixture(scope='module')
def world():
    return planted_world(1, episodes=6, steps=20).episodes


@pytest.fixture(scope='module')
def starts(world):
    return visited(world, random_orders(np.random.default_rng(0)))


def first_portfolio(voted):
    return Run(lay_out(voted.episode, voted.timing, RewardWeights())).portfolio


def columns(starts):
    return {name: [getattr(start, name) for start in starts] for name in Start._fields}


# Texts that models have really written, none of which may break a reward.
ODD_TEXTS = [
    '', ' ', '{}', '[]', 'null', '42', '"buy"', '{"side":"buy"}', '{"side":"hold"}', '{"side":"buy","quantity":true}',
    '{"side":"buy","quantity":-5}', '{"side":"buy","quantity":10.7}', '{"side":"buy","quantity":1e3}',
    '{"side":"buy","quantity":"1,000"}', '{"side":"buy","quantity":"all"}', '{"side":"buy","quantity":null}',
    '{"side":"buy","quantity":[10]}', '{"side":"buy","quantity":{"shares":10}}', '{"side":"buy","quantity":NaN}',
    '{"side":"buy","quantity":Infinity}', '{"side":"buy","quantity":' + '9' * 5000 + '}', '[' * 100_000,
    '{"side":"buy","side":"sell","quantity":1}', '{"side":"sell","quantity":1', '<think>{"side":"sell","quantity":1}',
    '```json\n{"side":"buy","quantity":5}\n```', '{"side":"buy","quantity":999999999999}', '\ud800', '\x00',
    '{"side":"short","quantity":5}', '{"side":"hold","quantity":7}', '{"side":"sell","quantity":0}']


@pytest.mark.parametrize('credit', ['step', 'horizon', 'episode'])
def test_every_text_gets_one_finite_number(world, starts, credit):
    reward = CreditReward(world, credit, policy=one_by_one(vote_mean))
    some = [starts[(7 * i) % len(starts)] for i in range(len(ODD_TEXTS))]
    values = reward(ODD_TEXTS, **columns(some))
    assert len(values) == len(ODD_TEXTS) and all(type(value) is float and math.isfinite(value) for value in values)


def test_no_completions_no_rewards(world):
    assert CreditReward(world)([], **{name: [] for name in Start._fields}) == []


@pytest.mark.parametrize('timing', ['close', 'next_open'])
@pytest.mark.parametrize('credit,horizon', [('step', 1), ('horizon', 3), ('horizon', 5), ('horizon', 50)])
def test_what_cannot_be_read_is_below_everything_that_can(timing, credit, horizon):
    voted = planted_world(3, episodes=3, steps=20, timing=timing).episodes
    reward, rng = CreditReward(voted, credit, horizon), np.random.default_rng(1)
    for start in mixed_starts(voted, None, 60, rng):
        orders = [f'{{"side": "{side}", "quantity": {quantity}}}' for side in ('buy', 'sell', 'hold')
                  for quantity in (0, 1, 3, 10, 40, 10**9)]
        values = reward([*orders, 'no idea'], **columns([start] * (len(orders) + 1)))
        assert values[-1] < min(values[:-1])


def test_four_usual_answers_are_not_all_worth_the_same(world):
    rising = next(Start(place, step, 10_000.0, 0.0, 10_000.0, 0.0) for place in range(6) for step in range(10)
                  if np.diff(world[place].episode.market('close').marks)[step] > 0)
    said = ['', '{"side": "hold", "quantity": 0}', '{"side": "buy", "quantity": 50}', '{"side": "buy" "quantity"']
    values = CreditReward(world)(said, **columns([rising] * 4))
    assert len({round(value, 6) for value in values}) == 3 # the two that cannot be read are alike


def test_rewards_equal_the_environment_step_by_step(world, starts):
    reward, rng = CreditReward(world, 'horizon', 4), np.random.default_rng(2)
    for start in starts:
        side, quantity = int(rng.integers(0, 3)), int(rng.choice([0, 1, 7, 1000]))
        run = run_at(lay_out(world[start.place].episode, world[start.place].timing, RewardWeights()), start)
        expected = run.trade(side, quantity)[2].reward
        for _ in range(3):
            if not run.over: expected += run.trade(0, 0)[2].reward
        text = f'{{"side": "{("hold", "buy", "sell")[side]}", "quantity": {quantity}}}'
        assert reward([text], **columns([start]))[0] == pytest.approx(expected, abs=1e-12)


def test_a_group_is_not_mixed_up_with_another(world, starts):
    reward, said = CreditReward(world), ['{"side": "buy", "quantity": 20}', '{"side": "sell", "quantity": 20}']
    one, other = starts[5], starts[60]
    alone = [reward([text], **columns([start]))[0] for start in (one, other) for text in said]
    assert reward(said * 2, **columns([one, one, other, other])) == alone


@pytest.mark.parametrize('credit,horizon', [('step', 1), ('horizon', 2), ('horizon', 5), ('horizon', 50)])
def test_beside_holding_no_answer_gains_on_its_group(world, starts, credit, horizon):
    said = ['{"side": "hold", "quantity": 0}', '{"side": "buy", "quantity": 8}', '{"side": "sell", "quantity": 1024}',
            '{"side": "buy", "quantity": 0}', 'I would rather not say']
    many = columns([start for start in starts for _ in said])
    plain, beside = (np.array(CreditReward(world, credit, horizon, beside_holding=taken_off)(
        said * len(starts), **many)).reshape(-1, len(said)) for taken_off in (False, True))
    gain, same_gain = (values - values.mean(axis=1, keepdims=True) for values in (plain, beside))
    np.testing.assert_allclose(same_gain, gain, rtol=0, atol=1e-12)
    assert (beside[:, 0] == 0.0).all() # to hold is the measure, and worth nothing to the last bit
    assert (beside[:, -1] < beside[:, :-1].min(axis=1)).all()


def test_beside_holding_the_states_no_longer_differ_by_what_they_held(world, starts):
    said, many = ['{"side": "hold", "quantity": 0}'] * len(starts), columns(starts)
    assert np.ptp(CreditReward(world)(said, **many)) > 0.1
    assert np.ptp(CreditReward(world, beside_holding=True)(said, **many)) == 0.0


def test_to_the_end_of_an_episode_nothing_is_taken_off(world, starts):
    some, policy = columns(starts[:4]), one_by_one(vote_mean)
    plain, beside = (CreditReward(world, 'episode', policy=policy, beside_holding=taken_off)(
        ['{"side": "buy", "quantity": 8}'] * 4, **some) for taken_off in (False, True))
    assert plain == beside


def test_episodes_of_different_lengths_share_a_ledger():
    voted = [planted_world(seed, episodes=1, steps=steps).episodes[0] for seed, steps in ((1, 12), (2, 30))]
    courses = [lay_out(one.episode, one.timing, RewardWeights()) for one in voted]
    together, alone = open_ledger(courses), open_ledger(courses[:1])
    starts = Start(*map(np.array, zip(*[Start(0, step, 1e4, 0.0, 1e4, 0.0) for step in range(12)])))
    earned = [credit_orders(ledger, starts, np.full(12, 10.0), np.full(12, True), 5, RewardWeights())
              for ledger in (together, alone)]
    assert np.array_equal(*earned)
    assert (earned[0][:, -1] != 0).sum() == 1 # the last decision has no other after it


def test_playing_side_by_side_is_playing_one_by_one(world):
    from stocker.council import moderate_episode
    for one, run in zip(world, play_all(world, one_by_one(follow('news')))):
        alone = moderate_episode(one, follow('news'))
        assert run.rewards.tolist() == alone.rewards.tolist() and run.rulings == alone.rulings


def test_start_states_hold_shares_and_come_late_too(world):
    mixture = mixed_starts(world, one_by_one(vote_mean), 200, np.random.default_rng(3))
    assert len(mixture) == 200
    assert any(start.shares for start in mixture) and any(not start.shares for start in mixture)
    assert {start.step for start in mixture} >= {0, 19}


# Settings that are refused before a model is loaded.

@pytest.mark.parametrize('changes,named', [
    ({'per_device_train_batch_size': 1, 'gradient_accumulation_steps': 2, 'num_generations': 4},
     ['per_device_train_batch_size', 'gradient_accumulation_steps', 'num_generations']),
    ({'num_generations': 1}, ['num_generations']), ({'num_generations': 0}, ['num_generations']),
    ({'per_device_train_batch_size': 6}, ['per_device_train_batch_size', 'num_generations'])])
def test_incomplete_groups_are_refused_before_a_model_is_loaded(tmp_path, world, monkeypatch, changes, named):
    monkeypatch.setattr('stocker.grpo.load_student', lambda *_: pytest.fail('a model was loaded'))
    with pytest.raises(StockerError) as error: train('some/model', world[:4], world[4:], tmp_path, **changes)
    assert all(name in str(error.value) for name in named)


def test_groups_over_several_devices():
    assert check_groups(2, 1, 4, processes=2) == 1
    with pytest.raises(StockerError, match='times 3 processes'): check_groups(2, 1, 4, processes=3)


def test_an_old_torchao_is_named_before_a_model_is_loaded(tmp_path, world, monkeypatch):
    monkeypatch.setattr('stocker.grpo.load_student', lambda *_: pytest.fail('a model was loaded'))
    monkeypatch.setattr('importlib.metadata.version', lambda name: '0.10.0')
    with pytest.raises(StockerError, match='torchao 0.10.0 is too old'): train('x/y', world[:4], world[4:], tmp_path)


@pytest.mark.parametrize('version', ['0.16.0', '0.18.0+cpu', '1.0.0'])
def test_a_new_torchao_is_welcome(monkeypatch, version):
    monkeypatch.setattr('importlib.metadata.version', lambda name: version)
    check_packages()


def test_training_and_validation_must_differ(tmp_path, world):
    with pytest.raises(StockerError, match='both for training and for validation'):
        train('pocket', world, world[:1], tmp_path)


def test_number_types_are_always_said(tmp_path):
    settings = grpo_settings(tmp_path)
    on_cpu = not torch.cuda.is_available()
    assert not (settings.bf16 and settings.fp16) and (not on_cpu or not settings.bf16 and not settings.fp16)


@pytest.mark.parametrize('supported,capability,expected', [
    (False, (7, 5), 'fp16'), (True, (7, 5), 'fp16'), (True, (8, 0), 'bf16'), (False, (9, 0), 'fp16')])
def test_bfloat16_is_never_chosen_where_the_card_lacks_it(monkeypatch, supported, capability, expected):
    monkeypatch.setattr('torch.cuda.is_available', lambda: True)
    monkeypatch.setattr('torch.cuda.is_bf16_supported', lambda *_, **__: supported)
    monkeypatch.setattr('torch.cuda.get_device_capability', lambda *_: capability)
    assert [name for name in ('bf16', 'fp16') if precision()[name]] == [expected]


def test_a_prompt_over_the_limit_is_refused_and_never_cut(world, starts):
    student = load_pocket()
    rows = prompt_rows(world, starts[:8])
    with pytest.raises(StockerError, match='prompts are never cut'): check_lengths(rows, student.tokenizer, 10)
    short = Student('pocket', student.model, student.tokenizer, pocket_messages, 8, 10)
    with pytest.raises(StockerError, match='the limit is 10'):
        Questions(world, short, 8, seed=0).fill(0, student.moderator())


# Where an adapter goes.

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
    assert language_targets(model) == ['model.language_model.layers.0.self_attn.q_proj']
    with pytest.raises(StockerError, match='no linear layers'): language_targets(tower(Clippable()).layers[0])


def test_the_plan_for_a_card_says_what_to_change():
    pytest.importorskip('transformers.models.gemma4')
    from stocker.grpo import gemma4_e4b_config
    plan = memory_plan(gemma4_e4b_config())
    assert 12 < sum(plan.values()) < 14.7 and 'it fits' in memory_advice(plan)
    assert plan['embeddings and the rest, 16 bit'] > plan['linear layers, 4 bit']


# Alarms.

@pytest.mark.parametrize('bad', [{'loss': float('nan')}, {'loss': float('inf')}, {'grad_norm': float('nan')},
                                 {'reward': float('nan')}])
def test_a_loss_that_is_no_number_stops_the_run_with_advice(bad):
    with pytest.raises(StockerError, match='lower learning_rate'): Alarms().look(bad, 6)


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
    with pytest.raises(StockerError, match='does not fit the model'): load_trained(tmp_path/'a', load_pocket())
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


def test_episode_credit_goes_the_same_way(world, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        one = train('pocket', world[:4], world[4:], tmp_path, credit='episode', num_train_epochs=1,
                    **{**TINY, 'prompts': 2, 'per_device_train_batch_size': 8})
    assert one.record['steps'] == 1 and one.record['credit'] == 'episode'


@pytest.fixture(scope='module')
def gemma_votes():
    "A council with a real Gemma 4 class in the seat that looks at pictures, small and with random weights."
    from stocker.models import TransformersClient, tiny_gemma
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
    from stocker.models import tiny_gemma
    return Student('tiny-gemma-4', *tiny_gemma(), brief_messages, 24, 2048, brief_answer)


def test_a_tiny_gemma_4_goes_the_whole_way_with_a_council_that_sees(gemma_votes, tmp_path):
    voted, asked = gemma_votes
    parts = [part['type'] for messages in asked for part in messages[-1]['content'] if isinstance(part, dict)]
    assert len(asked) == 10 and parts.count('image_url') == 10
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        one = train('tiny-gemma-4', voted[:1], voted[1:], tmp_path, prompts=2, num_train_epochs=2, lessons=4,
                    per_device_train_batch_size=4, num_generations=4, learning_rate=0.01, max_steps=2,
                    student=gemma_student(), policy_episodes=1, **QUIET)
    assert one.record['steps'] == 2 and one.record['lessons'] == 4
    assert not any('vision' in name for name, part in one.model.named_parameters() if part.requires_grad)
    numbers = torch.arange(10, 30)[None]
    with torch.no_grad():
        again = load_trained(tmp_path/ADAPTER, gemma_student())(input_ids=numbers).logits
        assert torch.equal(again, one.model(input_ids=numbers).logits)


def test_gemma_4_gives_the_same_with_and_without_its_cache():
    model, numbers = gemma_student().model, torch.arange(10, 40)[None]
    with torch.no_grad():
        one, other = (model(input_ids=numbers, labels=numbers, use_cache=cache) for cache in (True, False))
    torch.testing.assert_close(one.loss, other.loss)


@pytest.mark.parametrize('losses', [(2.0, 9.0), (float('nan'), float('nan')), (float('inf'), 2.0)])
def test_a_model_that_reads_otherwise_without_its_cache_is_not_trained(world, monkeypatch, losses):
    student = load_pocket()
    assert check_forward(student.model, student, (world[0].votes[0], first_portfolio(world[0]))) > 0
    monkeypatch.setattr(type(student.model), 'forward', lambda self, use_cache, **rest: SimpleNamespace(
        loss=torch.tensor(losses[0] if use_cache else losses[1])))
    with pytest.raises(StockerError, match='upgrade transformers'):
        check_forward(student.model, student, (world[0].votes[0], first_portfolio(world[0])))


def test_a_warm_start_is_kept_apart_from_what_came_after(world, tmp_path):
    tmp_path = tmp_path/'run_1'
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        one = train('pocket', world[:4], world[4:], tmp_path, num_train_epochs=1, lessons=8, **TINY)
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
    rows = lesson_rows(world, 40, student, seed=3)
    assert rows == lesson_rows(world, 40, student, seed=3) != lesson_rows(world, 40, student, seed=4)
    for row in rows:
        said = read_trade(row['completion'][0]['content'])
        assert said.side.value in ('buy', 'sell', 'hold')
    learned = imitate(get_peft_model(student.model, lora_settings(student.model)), student, rows * 4, **QUIET_TEACHER)
    assert np.mean(learned[-3:]) < np.mean(learned[:3])


def test_a_trained_moderator_comes_from_its_files(trained, world):
    again = trained_moderator(trained.folder/ADAPTER)
    questions = [(one.votes[0], first_portfolio(one)) for one in world]
    assert again.rule_all(questions) == trained.moderator.rule_all(questions)


def test_questions_of_any_length_are_answered_as_they_are_alone(world):
    "Shorter questions are filled up on the left, whatever the tokenizer would do by itself."
    student, lengths = load_pocket(), (7, 3, 5, 1)
    student.tokenizer.padding_side = 'right'
    def last_lines(votes, portfolio):
        lines = pocket_messages(votes, portfolio)[0]['content'].splitlines(keepends=True)
        return [{'role': 'user', 'content': ''.join(lines[-len(votes):])}]
    moderator, portfolio = ModelModerator(student.model, student.tokenizer, last_lines), first_portfolio(world[0])
    questions = [(dict(list(world[0].votes[0].items())[:count]), portfolio) for count in lengths]
    assert moderator.rule_all(questions) == [moderator(*question) for question in questions]


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


def test_without_a_curriculum_the_states_are_what_they_were(world):
    one, other = (mixed_starts(world, None, 50, np.random.default_rng(5), **options)
                  for options in ({}, {'chances': None}))
    assert one == other and {start.place for start in one} == set(range(6))


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
from stocker.grpo import train
from stocker.worlds import planted_world
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
