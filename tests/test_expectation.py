"Answers that are listed: what each is worth, and a trainer that learns from all of them."
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from stocker.market.core import StockerError
from stocker.studies.ladder import fit_ladder
from stocker.studies.worlds import GRADES, best_rule, graded_world, roles_apart
from stocker.trading.engine import Run
from stocker.trading.exposure import exposure_action
from stocker.trading.objectives import Objective
from stocker.training.adapters import ADAPTER, trained_moderator
from stocker.training.expectation import MenuWorths, scaled
from stocker.training.grpo import TROUBLES, Alarms, Questions, TrainingSettings, make_trainer, train
from stocker.training.pocket import MENUS, load_pocket, pocket_exposures
from stocker.training.questions import EpisodeSet, Splits, load_splits, one_by_one, walk_forward
from stocker.training.results import reopen


@pytest.fixture(scope='module')
def graded():
    return graded_world('two-70', 5, 6).episodes


@pytest.mark.parametrize('menu', [*MENUS])
@pytest.mark.parametrize('horizon', [1, 2, 5])
def test_what_an_answer_is_worth_is_what_it_earns_beside_keeping(graded, menu, horizon):
    episodes, menu = EpisodeSet(graded), MENUS[menu]
    starts = episodes.even_starts([0.0, 0.5, 1.0], 25, np.random.default_rng(1))
    grade = MenuWorths(episodes, menu, horizon, Objective(risk_aversion=0.0))
    for start, row in zip(starts, grade([start._asdict() for start in starts])):
        ends = []
        for target in (float('nan'), *menu.targets): # by hand, one portfolio at a time
            run = Run(episodes.paths[start.place], start=start)
            action, worth = exposure_action(target, run.portfolio), 0.0
            for step in range(min(horizon, len(run.path.fills) - start.step)):
                before = run.value if step else run.cash + run.shares * run.path.known[start.step]
                run.trade(*((action.side.code, action.quantity) if step == 0 else (0, 0.0)))
                worth += run.value / before - 1.0
            ends.append(worth)
        usual = grade.usual_move(start.place, start.step) # in this unit
        assert row * usual == pytest.approx(np.array(ends[1:]) - ends[0], abs=1e-9)


def trainer_of(graded, tmp_path, **changes):
    settings = TrainingSettings(tmp_path/'run', answers='exposures', objective='wealth', horizon=2, prompts=256,
                                **{'rounds': 1, **changes})
    student = pocket_exposures()
    questions = Questions(EpisodeSet(graded), student, settings)
    questions.fill(0, student.moderator())
    return make_trainer(questions, settings.config())


@pytest.mark.parametrize('fit', ['worths', 'expectation'])
def test_the_loss_is_the_one_that_is_written_down(graded, tmp_path, fit):
    trainer = trainer_of(graded, tmp_path, fit=fit, trainer={'beta': 0.3, 'entropy_coef': 0.2})
    rows = [{'prompt': row['prompt'], **row} for row in trainer.train_dataset]
    given = trainer._generate_and_score_completions([row for row in rows[:8] for _ in range(6)])
    assert given['worths'].shape == (8, 6)
    scores = trainer._likely(trainer.model, given).detach().double().numpy()
    worths, odds = given['worths'].double().numpy(), np.exp(scores)
    aim = ((scores - scores.mean(axis=1, keepdims=True) - worths) ** 2).mean()
    if fit == 'expectation': aim = -(odds * worths).sum(axis=1).mean() + 0.2 * (odds * scores).sum(axis=1).mean()
    trainer.model.eval() # a fresh adapter is the model without one: no divergence yet
    assert trainer._compute_loss(trainer.model, given).item() == pytest.approx(aim, rel=1e-4)


@pytest.mark.parametrize('scale', ['batch', 'group', 'none'])
def test_scaling_changes_no_order_and_no_sign(scale):
    worths = np.random.default_rng(0).normal(size=(50, 6)) * np.random.default_rng(1).exponential(size=(50, 1))
    found = scaled(worths, scale)
    assert (found.argsort(axis=1) == worths.argsort(axis=1)).all() and found.sum(axis=1) == pytest.approx(0, abs=1e-9)
    assert (scaled(np.zeros((3, 6)), scale) == 0).all()


@pytest.fixture(scope='module')
def learned(tmp_path_factory):
    world = partial(graded_world, 'one-97')
    splits = Splits(world(2, 64).episodes, world(1002, 8, roles=roles_apart(GRADES['one-97'], 2)).episodes,
                    {'unseen': world(2002, 8, roles=roles_apart(GRADES['one-97'], 2)).episodes})
    folder = tmp_path_factory.mktemp('learned')
    settings = TrainingSettings(folder/'run', answers='exposures', objective='wealth', horizon=2, rounds=1, seed=2,
                                prompts=80 * 128, trainer={'disable_tqdm': True, 'report_to': []})
    return splits, train(splits, settings)


def test_eighty_steps_follow_one_informant(learned):
    splits, trained = learned
    episodes = EpisodeSet(splits.tests['unseen'])
    rule = episodes.mean_reward(one_by_one(best_rule('one-97', roles_apart(GRADES['one-97'], 2))))
    after = episodes.mean_reward(trained.moderator.decide_batch)
    with trained.model.disable_adapter(): before = episodes.mean_reward(trained.moderator.decide_batch)
    assert after > 0.9 * rule > before + 5
    assert not trained.record['constant'] and trained.record['usual_share'] < 0.8
    assert (trained.record['fit'], trained.record['objective'], trained.record['threads']) == ('worths', 'wealth', 1)


def test_a_model_that_chooses_comes_back_with_its_menu(learned):
    splits, trained = learned
    episodes = EpisodeSet(splits.tests['unseen'][:2])
    said = [[one.said for one in run.decisions] for run in episodes.play(trained.moderator.decide_batch)]
    for again in (trained_moderator(trained.folder/ADAPTER), reopen(trained.folder).moderator):
        assert again.menu == MENUS['exposures']
        assert said == [[one.said for one in run.decisions] for run in episodes.play(again.decide_batch)]
    assert all(not run.invalid.any() for run in episodes.play(trained.moderator.decide_batch))


def test_the_packaged_model_says_the_same_with_and_without_the_wider_vocabulary(graded):
    episodes, narrow = EpisodeSet(graded[:1]), load_pocket()
    questions = episodes.questions(episodes.even_starts([0.0, 1.0], 20, np.random.default_rng(0)))
    wide = pocket_exposures()
    ids = narrow.tokenizer(''.join(m['content'] for m in narrow.messages(*questions[0])))['input_ids']
    assert ids == wide.tokenizer(''.join(m['content'] for m in narrow.messages(*questions[0])))['input_ids']
    rows = torch.tensor([ids])
    with torch.no_grad(): one, other = (model(input_ids=rows).logits for model in (narrow.model, wide.model))
    assert torch.allclose(one, other[..., :one.shape[-1]], atol=1e-5)


def test_a_constant_policy_raises_an_alarm():
    alarms = Alarms()
    for step in range(5): alarms.look({'most_common_answer': 0.97}, step)
    assert len(alarms.raised) == 1 and 'one answer is given nearly always' in alarms.raised[0]
    assert len(TROUBLES) == 4


def test_credit_of_one_step_under_close_says_that_it_sees_the_fee_only(world, tmp_path):
    settings = TrainingSettings(tmp_path/'run', credit='step', rounds=1, prompts=16, trainer={'report_to': []})
    with pytest.warns(UserWarning, match='sees the fee'):
        trained = train(Splits(world[:2], world[2:3], {}), settings)
    assert any('take horizon' in alarm for alarm in trained.record['alarms'])


@pytest.mark.parametrize('changes,word', [
    ({'answers': 'words'}, 'drawn, sides, exposures'), ({'objective': 'profit'}, 'environment, wealth, budget'),
    ({'fit': 'odds'}, 'worths, expectation'), ({'answers': 'sides', 'credit': 'step'}, 'use horizon')])
def test_settings_outside_their_meaning_are_told_before_anything_loads(tmp_path, changes, word):
    with pytest.raises(StockerError, match=word): TrainingSettings(tmp_path, **changes)


def test_learners_of_the_ladder_find_what_there_is():
    for world, best in (('two-70', 'logistic'), ('xor', 'boosted trees'), ('coins', None)):
        splits = load_splits(world, 3)
        fitted = fit_ladder(splits.training[:256], 3)
        episodes = EpisodeSet(splits.tests[f'{world}, unseen'][:32])
        gains = {name: episodes.mean_reward(model.decide_batch) for name, model in fitted.items()}
        if best is None: assert all(gain < 1.5 for gain in gains.values()) # fees for nothing, at most
        else: assert gains[best] > 3
        if world == 'xor': assert gains['logistic'] < 0.3 * gains['boosted trees']


def test_a_world_comes_with_roles_that_stand_apart():
    assert {len(set(roles_apart(grade, seed))) - grade.seats for grade in GRADES.values() for seed in range(14)} == {0}


def test_a_checkpoint_is_chosen_on_folds_that_walk_forward(tmp_path):
    episodes = graded_world('one-97', 2, 12).episodes
    settings = TrainingSettings(tmp_path/'run', answers='sides', objective='wealth', horizon=2, rounds=2, prompts=128,
                                folds=2, trainer={'report_to': [], 'disable_tqdm': True})
    trained = train(Splits(episodes[:10], episodes[10:], {}), settings)
    scores = trained.record['folds']
    assert [list(fold) for fold in scores] == [[1, 2], [1, 2]]
    assert trained.record['best_step'] == max(scores[0], key=lambda step: sum(fold[step] for fold in scores))
    assert (tmp_path/'run'/'fold_2'/'run.json').is_file()
    card = (tmp_path/'run'/ADAPTER/'README.md').read_text()
    assert '2 walk-forward folds of all these' in card
    with pytest.raises(StockerError, match='name one in the settings'):
        train(Splits(episodes[:10], episodes[10:], {}), replace(settings, out=tmp_path/'other'), pocket_exposures())


@pytest.mark.parametrize('folds', [1, 2, 5])
def test_a_fold_learns_from_nothing_that_had_not_ended(folds):
    episodes = load_splits('one-70', 3).training[:60]
    for fold in walk_forward(episodes, folds):
        ended = max(one.episode.dates[-1] for one in fold.training)
        assert ended < min(one.episode.dates[0] for one in fold.validation)
