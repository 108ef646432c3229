"""The council, counted: by hand, by brute force, and over every task and timing."""
import math
import time
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stocker.council.council import (
    VotedEpisode, collect_votes, mean_signal, moderate_episode, order_by_score, vote_mean)
from stocker.council.specialists import RULE_ANALYSTS
from stocker.market.core import ROLES, Abstention, Portfolio, Timing, Vote
from stocker.market.episodes import load_task
from stocker.studies.seats import (
    agreement, calibration, council_scores, council_worths, credit, exact_sums, independent_voices, leave_one_out,
    members, orders_by_score, outcomes, reliability, seats_of, shapley, with_placebo)
from stocker.studies.worlds import placebo_world
from stocker.trading.reward import RewardWeights

EVERYWHERE = [(task, timing) for task in ('task_easy', 'task_medium', 'task_hard') for timing in ('close', 'next_open')]


def council_of(weights, episode=None, confidence=1.0):
    "A council with these votes; rows are days, columns seats; NaN abstains."
    episode = episode or load_task('task_easy')
    votes = tuple({role: Abstention(reason='given') if math.isnan(value) else
                   Vote(signal=float(value), confidence=confidence, rationale='given')
                   for role, value in zip(ROLES, row)} for row in weights)
    return VotedEpisode(episode, Timing.CLOSE, votes)


def test_agreement_counts_common_days_only():
    nan = math.nan
    table = agreement([council_of([[1, 1, -1, 0, nan], [1, -1, -1, 1, nan], [-1, nan, 1, 0, nan]])]).to_numpy()
    assert table[0, 1] == 0.5 and table[0, 2] == 0.0 and table[0, 3] == 1.0 and table[1, 2] == 0.5
    assert np.isnan(table[4]).all()


@given(st.lists(st.lists(st.floats(-1, 1) | st.just(math.nan), min_size=3, max_size=3), min_size=3, max_size=12))
@settings(max_examples=60, deadline=None)
def test_voices_lie_between_none_and_the_number_of_seats(rows):
    assert 0 <= independent_voices([council_of(rows)]) <= 3 + 1e-9
    table = agreement([council_of(rows)]).to_numpy()
    assert ((table >= 0) & (table <= 1) | np.isnan(table)).all()


def test_brier_scores_by_hand():
    voted = council_of([[0.5], [-0.5], [1.0], [math.nan]] + [[0.0]] * 39, confidence=0.5)
    rose = (outcomes(voted.episode.market('close')) > 0)[:42]
    row = calibration([voted]).loc['chart_pattern']
    stated = np.array([0.75, 0.25, 1.0] + [0.5] * 38)
    happened = np.delete(rose, 3).astype(float)
    assert row.votes == 41 and row.brier_signal == pytest.approx(((stated - happened) ** 2).mean())
    modest = 0.5 + (stated - 0.5) / 2
    assert row.brier == pytest.approx(((modest - happened) ** 2).mean())
    assert row.right == pytest.approx(np.mean([rose[0], not rose[1], rose[2]]))


def test_bins_hold_every_statement_once():
    stated, rng = np.random.default_rng(1).random(500), np.random.default_rng(2)
    found = reliability(stated, rng.random(500) < 0.5, 7)
    assert sum(one.count for one in found) == 500
    assert all(0 <= one.low <= one.happened <= one.high <= 1 for one in found)
    assert reliability(np.array([0.0, 1.0]), np.array([False, True]))[-1].happened == 1.0


@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=5, max_size=5), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_sums_are_those_of_fsum(rows):
    terms, councils = np.array(rows), members(5)
    sums = exact_sums(terms, councils)
    for row, found in zip(terms, sums):
        for council in range(32):
            assert found[council] == math.fsum(row[councils[:, council]])


@pytest.mark.parametrize('task, timing', EVERYWHERE)
def test_every_council_trades_as_the_vote_mean_would(task, timing):
    voted = collect_votes(RULE_ANALYSTS, load_task(task), timing)
    seats, weights = seats_of([voted]), RewardWeights(transaction_cost=0.003)
    scores = council_scores(voted, seats)
    rewards, returns = council_worths(voted, seats, weights)
    for council in (0, 1, 5, 42, 77, 99, 126, 127):
        inside = [role for i, role in enumerate(seats) if council >> i & 1]
        fewer = replace(voted, votes=tuple({role: votes[role] for role in inside} for votes in voted.votes))
        own = moderate_episode(fewer, vote_mean, weights)
        assert rewards[council] == pytest.approx(own.total_reward, abs=1e-9)
        assert returns[council] == own.values[-1] / 10_000 - 1
        assert [None if math.isnan(score) else score for score in scores[:, council]] == [
            mean_signal(votes) for votes in fewer.votes]


@given(st.floats(-1, 1), st.floats(0, 20_000), st.integers(0, 200), st.floats(0.5, 900), st.floats(0, 0.05))
@settings(max_examples=300, deadline=None)
def test_an_order_among_many_is_the_order_of_one(score, cash, shares, price, fee):
    one = order_by_score(score, Portfolio(0, 1, cash, shares, price, 10_000.0, fee, 0.0), all_in=False)
    signed = {'hold': 0, 'buy': one.quantity, 'sell': -one.quantity}[one.side.value]
    many = orders_by_score(np.array([score, math.nan]), np.array([cash] * 2), np.array([float(shares)] * 2),
                                  price, fee)
    assert many.tolist() == [signed, 0]


@given(st.integers(1, 5), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_shapley_shares_are_means_over_all_orders(count, seed):
    worths = np.random.default_rng(seed).normal(size=2 ** count)
    shares, orders = np.zeros(count), list(permutations(range(count)))
    for order in orders:
        council = 0
        for seat in order:
            shares[seat] += (worths[council | 1 << seat] - worths[council]) / len(orders)
            council |= 1 << seat
    assert shapley(worths) == pytest.approx(shares, abs=1e-12)
    assert shapley(worths).sum() == pytest.approx(worths[-1] - worths[0], abs=1e-12)
    fewer = [worths[(2 ** count - 1) ^ (1 << i)] for i in range(count)]
    assert leave_one_out(worths) == pytest.approx(worths[-1] - fewer)
    assert shapley(np.stack([worths, 2 * worths]))[1] == pytest.approx(2 * shares, abs=1e-12)


@pytest.mark.parametrize('task, timing', EVERYWHERE)
def test_credit_adds_up(task, timing):
    voted = collect_votes(RULE_ANALYSTS, load_task(task), timing)
    table = credit([voted, voted])
    rewards, returns = council_worths(voted, seats_of([voted]))
    assert table.shapley.sum() == pytest.approx(rewards[-1] - rewards[0], abs=1e-9)
    assert table.return_shapley.sum() == pytest.approx(returns[-1] - returns[0], abs=1e-12)
    assert (table.standard_error == 0).all()


def test_a_seat_that_never_votes_gets_nothing_and_twins_get_the_same():
    rng = np.random.default_rng(3)
    rows = rng.uniform(-1, 1, (43, 4))
    rows[:, 2], rows[:, 3] = math.nan, rows[:, 0]
    table = credit([council_of(rows)])
    assert table.shapley['indicator'] == table.leave_one_out['indicator'] == 0.0
    assert table.shapley['chart_pattern'] == pytest.approx(table.shapley['news'], abs=1e-12)


def test_a_placebo_world_gives_nobody_any_credit():
    rng = np.random.default_rng(0)
    noise = credit([with_placebo(one, rng) for one in placebo_world(seed=1, episodes=16).episodes])
    assert (noise.shapley.abs() < 4 * noise.standard_error).all()


def test_credit_is_quick():
    "A corpus of a hundred episodes in seconds: 128 councils of one episode take no longer than a few plain runs."
    pytest.importorskip('numba', reason="pip install 'stocker[fast]', and this test runs")
    voted = collect_votes(RULE_ANALYSTS, load_task('task_easy'))
    seats = seats_of([voted])
    def timed(work):
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    def seconds(work): return min(timed(work) for _ in range(5))
    assert seconds(lambda: council_worths(voted, seats)) < 30 * seconds(lambda: moderate_episode(voted, vote_mean))
