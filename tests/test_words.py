"Worlds of words, and a model of which only the last layers are trained."
import json
from dataclasses import replace

import numpy as np
import pytest

from stocker.market.core import ROLES, StockerError, Timing
from stocker.studies.words import COINS, PARTS, WORD_WORLDS, clauses, frames, meanings, perfect_reader, word_world
from stocker.studies.worlds import directions, graded_world
from stocker.training import grpo
from stocker.training.grpo import TrainingSettings, train
from stocker.training.questions import EpisodeSet, Splits, one_by_one

QUIET = {'disable_tqdm': True, 'report_to': [], 'logging_steps': 1}


def total(name, seed=1, part='training', episodes=12, timing='close'):
    "Mean gain over holding of the perfect reader."
    voted = EpisodeSet(word_world(name, seed, episodes, part, timing).episodes)
    from stocker.market.core import Decision, Side, TradeAction
    hold = one_by_one(lambda votes, portfolio: Decision(TradeAction(side=Side.HOLD), ''))
    return voted.mean_reward(one_by_one(perfect_reader(name, seed))) - voted.mean_reward(hold)


@pytest.mark.parametrize('timing', [one.value for one in Timing])
def test_reading_pays_in_the_worlds_and_not_in_their_placebos(timing):
    assert total('reader-97', timing=timing) > 15
    for name in WORD_WORLDS: assert total(name, episodes=40, timing=timing) > 2, name
    assert total(f'reader-97{COINS}', episodes=40, timing=timing) < 1


def test_parts_share_no_topic_no_company_and_no_frame():
    for kind in ({part: {clause.topic for clause in clauses(part)} for part in PARTS},
                 {part: set(frames()['companies'][part]) for part in PARTS},
                 *({part: set(status[part]) for part in PARTS} for status in frames()['frames'].values())):
        everything = [one for part in PARTS for one in kind[part]]
        assert len(everything) == len(set(everything))


def test_no_sentence_means_two_things():
    texts = [clause.text for part in PARTS for clause in clauses(part)]
    assert len(texts) == len(set(texts))
    assert len(meanings()) > 10 * len(texts)


def test_the_numbers_know_nothing_where_words_tell():
    right = []
    for one in word_world('whom', 5, 40).episodes:
        moves = directions(one.episode.market(one.timing))
        right += [[np.sign(votes[role].signal) == move for role in ROLES] for votes, move in zip(one.votes, moves)]
    assert (abs(np.mean(right, axis=0) - 0.5) < 0.06).all()


def test_a_world_asks_with_the_sentences_of_its_part_alone():
    own = {part: {clause.text for clause in clauses(part)} for part in PARTS}
    for part in PARTS:
        said = {votes['news'].rationale for one in word_world('reader-97', 3, 2, part).episodes for votes in one.votes}
        for other in PARTS:
            met = {text for text in own[other] if any(text[1:] in line for line in said)}
            assert bool(met) == (other == part)


def test_an_unknown_world_is_named():
    with pytest.raises(StockerError, match='reader-97'): word_world('poems', 1)


@pytest.mark.parametrize('fit', ['worths', 'expectation'])
def test_layers_that_are_kept_change_nothing_in_training(tmp_path, monkeypatch, fit):
    splits = Splits(graded_world('one-97', 1, 6).episodes, graded_world('one-97', 2, 2).episodes, {})
    settings = TrainingSettings(tmp_path/'kept', answers='exposures', horizon=2, fit=fit, rounds=1, prompts=256,
                                last_layers=1, trainer=QUIET)
    kept = train(splits, settings)
    assert kept.reader.reader.first == 2
    assert len(kept.reader.reader.kept) > 0
    monkeypatch.setattr(grpo, 'KEPT_BYTES', 0)
    plain = train(splits, replace(settings, out=tmp_path/'plain'))
    assert plain.reader.reader.first == 0
    assert kept.record['last_layers'] == 1
    for one, other in zip(kept.record['log'], plain.record['log'], strict=True):
        assert one['loss'] == pytest.approx(other['loss'], rel=1e-3, abs=1e-4)
    assert list(kept.record['scores'].values()) == pytest.approx(list(plain.record['scores'].values()), abs=0.05)
    adapters = [name for name, _ in kept.model.named_parameters() if 'lora' in name]
    assert adapters and all('.layers.2.' in name for name in adapters)


def test_more_layers_than_there_are_is_an_error(tmp_path):
    splits = Splits(graded_world('one-97', 1, 2).episodes, graded_world('one-97', 2, 1).episodes, {})
    with pytest.raises(StockerError, match='the model has 3'):
        train(splits, TrainingSettings(tmp_path, answers='exposures', last_layers=4, rounds=1, prompts=128,
                                       trainer=QUIET))


def test_the_frames_are_json_that_a_person_can_read():
    from stocker.market.core import data_path
    assert json.loads(data_path('words', 'frames.json').read_text()).keys() == {'frames', 'companies'}


def test_a_model_that_learned_nothing_reads_at_chance(monkeypatch):
    from typer.testing import CliRunner

    from stocker.cli import app
    from stocker.llm.tiny import tiny_gemma
    from stocker.training import adapters
    from stocker.training.pocket import Student, pocket_messages
    from stocker.training.word_results import QUESTION_FORMS, reading_areas
    student = Student('tiny', *tiny_gemma(), pocket_messages, 8, 512)
    areas = reading_areas(student, most=24)
    assert areas.keys() == QUESTION_FORMS.keys()
    assert all(0.2 < area < 0.8 for area in areas.values())
    monkeypatch.setattr(adapters, 'load_student', lambda name: student)
    said = CliRunner().invoke(app, ['prompt', '--probe', 'tiny'])
    assert said.exit_code == 0, said.output
    assert said.output.count('?') >= 3 and all(f' {name}: ' in said.output for name in QUESTION_FORMS)
