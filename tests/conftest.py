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
