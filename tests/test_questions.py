"States that are really reached, and chances that a curriculum gives."
import numpy as np
import pytest
from stocker.council.council import moderate_episode
from stocker.market.core import Side
from stocker.studies.statistics import BASELINE_POLICIES, evaluate
from stocker.studies.worlds import follow
from stocker.training.questions import (
    EpisodeSet, curriculum, difficulty, one_by_one, possible_order, random_question)


def test_made_up_orders_are_possible():
    rng = np.random.default_rng(6)
    for _ in range(300):
        _, portfolio = random_question(rng)
        order = possible_order(rng, portfolio)
        if order.side is Side.SELL: assert portfolio.shares >= 1
        if order.side is Side.BUY: assert portfolio.cash >= portfolio.price
        assert (order.quantity == 0) == (order.side is Side.HOLD)


def test_played_on_from_every_state_a_run_goes_on_as_it_did(world):
    episodes = EpisodeSet(world)
    whole, starts = episodes.play(one_by_one(follow('news'))), episodes.visited(one_by_one(follow('news')))
    for start, run in zip(starts, episodes.play(one_by_one(follow('news')), starts)):
        assert run.rewards.tolist() == whole[start.place].rewards[start.step:].tolist()
    for one, run in zip(world, whole): assert run.decisions == moderate_episode(one, follow('news')).decisions


def test_harder_episodes_come_in_as_training_goes_on(world):
    chances, hard = curriculum('easy first', EpisodeSet(world)), difficulty(EpisodeSet(world))
    let_in = [set(np.flatnonzero(chances(progress))) for progress in (0.0, 0.5, 1.0)]
    assert let_in[0] < let_in[1] < let_in[2] == set(range(6))
    assert max(hard[list(let_in[0])]) <= min(hard[list(let_in[2] - let_in[0])])


def test_difficulty_is_the_distance_of_the_best_simple_policy(world):
    table = evaluate(BASELINE_POLICIES, world, progress=False).set_index(['episode', 'policy'])['return'].unstack()
    for one, hard in zip(world, difficulty(EpisodeSet(world))):
        row = table.loc[one.episode.name]
        assert hard == pytest.approx(1 - max(row[['hold', 'buy and hold', 'vote mean']]) / row['optimum'], abs=1e-12)
