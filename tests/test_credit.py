"What answers are worth."
import math

import numpy as np
import pytest
from stocker.studies.worlds import planted_world
from stocker.trading.engine import Start
from stocker.training.credit import CreditReward, order_rewards
from stocker.training.questions import EpisodeSet, start_columns


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


@pytest.mark.parametrize('credit', ['step', 'horizon'])
def test_every_text_gets_one_finite_number(world, starts, credit):
    reward = CreditReward(EpisodeSet(world), credit)
    some = [starts[(7 * i) % len(starts)] for i in range(len(ODD_TEXTS))]
    values = reward(ODD_TEXTS, **start_columns(some))
    assert len(values) == len(ODD_TEXTS) and all(type(value) is float and math.isfinite(value) for value in values)


def test_no_completions_no_rewards(world):
    assert CreditReward(EpisodeSet(world))([], **{name: [] for name in Start._fields}) == []


@pytest.mark.parametrize('timing', ['close', 'next_open'])
@pytest.mark.parametrize('credit,horizon', [('step', 1), ('horizon', 3), ('horizon', 5), ('horizon', 50)])
def test_what_cannot_be_read_is_below_everything_that_can(timing, credit, horizon):
    episodes = EpisodeSet(planted_world(3, episodes=3, steps=20, timing=timing).episodes)
    reward = CreditReward(episodes, credit, horizon)
    for start in episodes.mixed_starts(None, 60, np.random.default_rng(1)):
        orders = [f'{{"side": "{side}", "quantity": {quantity}}}' for side in ('buy', 'sell', 'hold')
                  for quantity in (0, 1, 3, 10, 40, 10**9)]
        values = reward([*orders, 'no idea'], **start_columns([start] * (len(orders) + 1)))
        assert values[-1] < min(values[:-1])


def test_four_usual_answers_are_not_all_worth_the_same(world):
    rising = next(Start(place, step, 10_000.0, 0.0, 10_000.0, 0.0) for place in range(6) for step in range(10)
                  if np.diff(world[place].episode.market('close').marks)[step] > 0)
    said = ['', '{"side": "hold", "quantity": 0}', '{"side": "buy", "quantity": 50}', '{"side": "buy" "quantity"']
    values = CreditReward(EpisodeSet(world))(said, **start_columns([rising] * 4))
    assert len({round(value, 6) for value in values}) == 3 # the two that cannot be read are alike


def test_rewards_equal_the_environment_step_by_step(world, starts):
    reward, rng = CreditReward(EpisodeSet(world), 'horizon', 4), np.random.default_rng(2)
    for start in starts:
        side, quantity = int(rng.integers(0, 3)), int(rng.choice([0, 1, 7, 1000]))
        run = reward.episodes.run(start)
        expected = run.trade(side, quantity)[2].reward
        for _ in range(3):
            if not run.over: expected += run.trade(0, 0)[2].reward
        text = f'{{"side": "{("hold", "buy", "sell")[side]}", "quantity": {quantity}}}'
        assert reward([text], **start_columns([start]))[0] == pytest.approx(expected, abs=1e-12)


def test_a_group_is_not_mixed_up_with_another(world, starts):
    said = ['{"side": "buy", "quantity": 20}', '{"side": "sell", "quantity": 20}']
    reward = CreditReward(EpisodeSet(world))
    one, other = starts[5], starts[60]
    alone = [reward([text], **start_columns([start]))[0] for start in (one, other) for text in said]
    assert reward(said * 2, **start_columns([one, one, other, other])) == alone


@pytest.mark.parametrize('credit,horizon', [('step', 1), ('horizon', 2), ('horizon', 5), ('horizon', 50)])
def test_beside_holding_no_answer_gains_on_its_group(world, starts, credit, horizon):
    said = ['{"side": "hold", "quantity": 0}', '{"side": "buy", "quantity": 8}', '{"side": "sell", "quantity": 1024}',
            '{"side": "buy", "quantity": 0}', 'I would rather not say']
    many = start_columns([start for start in starts for _ in said])
    plain, beside = (np.array(CreditReward(EpisodeSet(world), credit, horizon, beside_holding=taken_off)(
        said * len(starts), **many)).reshape(-1, len(said)) for taken_off in (False, True))
    gain, same_gain = (values - values.mean(axis=1, keepdims=True) for values in (plain, beside))
    np.testing.assert_allclose(same_gain, gain, rtol=0, atol=1e-12)
    assert (beside[:, 0] == 0.0).all() # to hold is the measure, and worth nothing to the last bit
    assert (beside[:, -1] < beside[:, :-1].min(axis=1)).all()


def test_beside_holding_the_states_no_longer_differ_by_what_they_held(world, starts):
    said, many = ['{"side": "hold", "quantity": 0}'] * len(starts), start_columns(starts)
    assert np.ptp(CreditReward(EpisodeSet(world))(said, **many)) > 0.1
    assert np.ptp(CreditReward(EpisodeSet(world), beside_holding=True)(said, **many)) == 0.0


def test_an_order_is_worth_the_same_beside_a_longer_episode():
    voted = [planted_world(seed, episodes=1, steps=steps).episodes[0] for seed, steps in ((1, 12), (2, 30))]
    starts = Start(*map(np.array, zip(*[Start(0, step, 1e4, 0.0, 1e4, 0.0) for step in range(12)])))
    earned = [order_rewards(EpisodeSet(some), starts, np.ones(12), np.full(12, 10.0), 5) for some in (voted, voted[:1])]
    assert np.array_equal(*earned)
    assert (earned[0][:, -1] != 0).sum() == 1 # the last decision has no other after it
