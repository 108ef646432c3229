"What several test files share."
import numpy as np
import pytest


@pytest.fixture(scope='session')
def world():
    "Six short episodes in which one analyst knows the next move."
    from stocker.studies.worlds import planted_world
    return planted_world(1, episodes=6, steps=20).episodes


@pytest.fixture(scope='session')
def starts(world):
    "States of them that chance gets into."
    from stocker.training.questions import EpisodeSet, random_orders
    return EpisodeSet(world).visited(random_orders(np.random.default_rng(0)))


@pytest.fixture(scope='session')
def long_episode():
    "An episode of 250 decisions."
    from stocker.market.episodes import Episode, load_task
    base = load_task('task_easy')
    dates = base.prices.index.strftime('%Y-%m-%d')
    return Episode.from_prices(base.prices, 'AAPL', dates[base.first - 210], dates[base.first + 39], facts=base.facts,
                               peers=base.peers)
