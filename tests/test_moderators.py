"""The logistic moderator: it finds the seat that knows, learns nothing from the future, refuses what is none."""
import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stocker.market.core import ROLES, Portfolio, Side, StockerError, Vote
from stocker.council.council import VotedEpisode, collect_votes, moderate_episode
from stocker.market.episodes import TASKS, load_task
from stocker.council.moderators import (
    LogisticModerator, fit_logistic, log_loss, moves_ahead, read_logistic, write_logistic)

NUMBERS = st.floats(-5, 5)


def purse(cash=10_000.0, shares=10, price=100.0, cost=0.001):
    return Portfolio(3, 43, cash, shares, price, 10_000.0, cost, 0.0)


def noisy(voted, rng, knowing=None):
    "Random votes; one role may know what the share does over the next five sessions."
    steps = len(voted.votes)
    signs = {role: rng.choice([-1.0, 1.0], steps) for role in ROLES}
    if knowing: signs[knowing][:-5] = np.sign(moves_ahead(voted))
    return replace(voted, votes=tuple({role: Vote(signal=float(signs[role][t]), confidence=0.5, rationale='')
                                       for role in ROLES} for t in range(steps)))


@pytest.fixture(scope='module')
def tasks(): return [collect_votes({}, load_task(name), timing) for name in TASKS for timing in ('close', 'next_open')]


@pytest.mark.parametrize('knowing', ROLES)
def test_a_seat_that_knows_is_found(knowing, tasks):
    rng = np.random.default_rng(ROLES.index(knowing))
    fitted = fit_logistic(noisy(voted, rng, knowing) for voted in tasks * 2)
    trust = dict(zip(ROLES, fitted.trust, strict=True))
    others = [value for role, value in trust.items() if role != knowing]
    assert trust[knowing] > 3 * max(map(abs, others))
    held_out = noisy(tasks[0], np.random.default_rng(99), knowing)
    assert moderate_episode(held_out, fitted).values[-1] > 10_000  # the share fell by an eighth


@pytest.mark.parametrize('timing', ['close', 'next_open'])
def test_a_move_counts_from_the_fill_and_ends_within_the_episode(timing, tasks):
    voted = tasks[0] if timing == 'close' else tasks[1]
    market, ahead = voted.episode.market(timing), moves_ahead(voted, 3)
    assert len(ahead) == voted.episode.steps - 3
    assert all(ahead[t] == market.marks[t + 3] / market.fills[t] - 1 for t in range(len(ahead)))


@pytest.mark.parametrize('horizon', [0, -1, 43, 1000])
def test_a_horizon_that_an_episode_cannot_carry_is_refused(horizon, tasks):
    with pytest.raises(StockerError, match='horizon'): moves_ahead(tasks[0], horizon)


@given(trust=st.lists(NUMBERS, min_size=7, max_size=7), lean=NUMBERS, move=st.floats(0, 1), cash=st.floats(0, 1e7),
       shares=st.integers(0, 10**6), signals=st.lists(st.floats(-1, 1), min_size=7, max_size=7))
@settings(max_examples=200, deadline=None)
def test_every_order_can_be_filled(trust, lean, move, cash, shares, signals):
    moderator = LogisticModerator(tuple(trust), lean, move)
    votes = {role: Vote(signal=signal, confidence=1.0, rationale='')
             for role, signal in zip(ROLES, signals, strict=True)}
    action = moderator(votes, purse(cash, shares)).action
    assert action.side is not Side.BUY or 0 < action.quantity * 100 * 1.001 <= cash
    assert action.side is not Side.SELL or 0 < action.quantity <= shares
    assert 0 <= moderator.probability(votes) <= 1


@given(st.lists(NUMBERS, min_size=8, max_size=8), st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_the_gradient_is_that_of_the_loss(at, seed):
    rng = np.random.default_rng(seed)
    rows, rises, at = rng.normal(size=(20, 8)), rng.integers(0, 2, 20).astype(float), np.array(at)
    slopes = [(log_loss(at + 1e-5 * unit, rows, rises, 0.2)[0] - log_loss(at - 1e-5 * unit, rows, rises, 0.2)[0]) / 2e-5
              for unit in np.eye(8)]
    assert np.allclose(log_loss(at, rows, rises, 0.2)[1], slopes, atol=1e-5)


@pytest.mark.parametrize('change', [{'trust': [1.0] * 6}, {'lean': math.inf}, {'move': -0.1}, {'trust': None},
                                    {'surprise': 1}, {'trust': ['a'] * 7}, {'lean': None}])
def test_what_is_no_moderator_is_refused_with_the_file(change, tmp_path):
    good = LogisticModerator((0.0,) * 7, 0.1, 0.02)
    path = tmp_path/'moderator.json'
    write_logistic(good, path)
    assert read_logistic(path) == good
    path.write_text(json.dumps({**asdict(good), **change}))
    with pytest.raises(StockerError, match=r'moderator\.json'): read_logistic(path)


def test_the_fit_looks_at_nothing_after_the_episode(tasks):
    "Prices after the last mark, and votes of the decisions that have no answer yet, change nothing."
    voted = noisy(tasks[0], np.random.default_rng(3))
    episode, last = voted.episode, voted.episode.first + voted.episode.steps
    later = episode.prices.copy()
    later.iloc[last:, :4] *= 10
    silent = tuple(votes if t < episode.steps - 5 else {} for t, votes in enumerate(voted.votes))
    other = VotedEpisode(replace(episode, prices=later), voted.timing, silent)
    assert fit_logistic([other]) == fit_logistic([voted])
