"""Figures of the first build, whose errand was written in nine places: the one engine gives the same."""
import json
from pathlib import Path

import numpy as np
import pytest

from stocker.council.council import play, rule_council
from stocker.market.episodes import TASKS, load_task
from stocker.studies.tuning import seed_grid, sweep
from stocker.trading.engine import Runs, Start, market_path, stack_paths
from stocker.trading.env import StockerEnv, simulate_rewards
from stocker.trading.reward import RewardWeights

GOLDEN = json.loads((Path(__file__).parent/'golden.json').read_text())
CLOSE = 1e-12 # a power may be rounded otherwise on another processor; where it was recorded nothing differed


def numbers(texts):
    return [float.fromhex(text) for text in texts]


@pytest.mark.parametrize('name', GOLDEN['runs'])
def test_random_runs_of_every_task_timing_and_fee(name):
    task, timing, fee = name.split()
    episode, rng = load_task(task), np.random.default_rng(7)
    sides, quantities = rng.integers(0, 3, (episode.steps, 4)), rng.integers(-3, 90, (episode.steps, 4))
    played = simulate_rewards(episode, sides, quantities, timing, RewardWeights(transaction_cost=float(fee)))
    assert played.rewards.sum(axis=0) == pytest.approx(numbers(GOLDEN['runs'][name]['rewards']), abs=CLOSE)
    assert played.values[-1] == pytest.approx(numbers(GOLDEN['runs'][name]['values']), rel=CLOSE)
    assert played.invalid.sum(axis=0).tolist() == GOLDEN['runs'][name]['invalid']


@pytest.mark.parametrize('task', TASKS)
def test_a_sweep_of_the_tuning_bench(task):
    table = sweep(play(StockerEnv(task), rule_council()), seed_grid())
    assert table['total'][::9].tolist() == pytest.approx(numbers(GOLDEN['sweep'][task]), abs=CLOSE)


@pytest.mark.parametrize('horizon', [1, 5, 21])
def test_the_credit_of_orders_in_many_states(horizon):
    rng, count = np.random.default_rng(11), 40
    place, step = rng.integers(0, 3, count), rng.integers(0, 41, count)
    shares, cash = rng.integers(0, 40, count).astype(float), rng.uniform(0, 9000, count).round(2)
    wanted, sides, quantities = rng.integers(-60, 60, count), *np.zeros((2, horizon, count))
    sides[0], quantities[0] = np.where(wanted > 0, 1, np.where(wanted < 0, 2, 0)), np.abs(wanted)
    paths = stack_paths([market_path(load_task(task)) for task in TASKS])
    start = Start(place, step, cash, shares, np.full(count, 11_000.0), np.full(count, 0.02))
    rewards = Runs(paths, start).trade(sides, quantities).rewards.sum(axis=0)
    assert rewards == pytest.approx(numbers(GOLDEN['credit'][str(horizon)]), abs=CLOSE)
