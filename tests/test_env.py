"""The environment: Gymnasium's contract, whole snapshots, orders read strictly, one result however computed."""
import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import MappingProxyType

import gymnasium
import numpy as np
import pandas as pd
import pytest
from gymnasium.utils.env_checker import check_env

from stocker.market.conditions import conditions_at
from stocker.market.core import Portfolio, StockerError, Timing, TradeAction, canonical_json
from stocker.council.council import play, rule_council
from stocker.market.data import load_prices, load_table
from stocker.trading.env import MAX_QUANTITY, Snapshot, StockerEnv, simulate_rewards
from stocker.market.episodes import TASKS, Episode, load_task
from stocker.trading.reward import RewardWeights

CLOCKS = ('close', 'next_open')
EVERYWHERE = [(task, timing) for task in TASKS for timing in CLOCKS]
HOLD, BUY, SELL = 0, 1, 2


def made_up(closes, opens=None, **options):
    "A share that stood at 100 for 252 sessions and then did what is asked for."
    dates = pd.DatetimeIndex(load_table('calendar')['session'])
    dates = dates[dates >= '2020-01-02'][:252 + len(closes)].rename('date')
    close = np.concatenate([np.full(252, 100.0), closes])
    start = np.concatenate([np.full(252, 100.0), closes if opens is None else opens])
    columns = {'open': start, 'high': np.maximum(start, close), 'low': np.minimum(start, close), 'close': close,
               'adj_close': close, 'volume': np.full(len(dates), 1e6)}
    first, last = (str(dates[i].date()) for i in (252, -1))
    return Episode.from_prices(pd.DataFrame(columns, dates), 'XYZ', first, options.pop('end', last), **options)


def orders(steps, seed, most=60):
    rng = np.random.default_rng(seed)
    return list(zip(rng.integers(0, 3, steps).tolist(), rng.integers(-2, most, steps).tolist(), strict=True))


def finish(env, actions):
    "Play the rest of an episode; observations and what each step answered."
    seen, answers = [], []
    for action in actions:
        look, reward, terminated, truncated, information = env.step(action)
        seen.append(look.copy())
        answers.append((reward, terminated, truncated, information['portfolio_value'], information['traded'],
                        information['invalid'], env.run.cash, env.run.shares, env.run.step))
    return np.array(seen), answers


def lone_run(task, timing, actions, seed=0):
    env = StockerEnv(task, timing)
    first, _ = env.reset(seed=seed)
    seen, answers = finish(env, actions)
    return np.concatenate([first[None], seen]), answers


def same(one, other):
    return np.array_equal(one[0], other[0]) and one[1] == other[1]


def one_line(error):
    assert '\n' not in str(error.value)
    return str(error.value)


# --- Gymnasium ---

@pytest.mark.parametrize('task, timing', EVERYWHERE)
def test_gymnasium_finds_no_fault(task, timing):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore') # it wonders about unbounded observations
        check_env(StockerEnv(task, timing), skip_render_check=True)


def test_it_is_registered_under_its_name():
    env = gymnasium.make('Stocker-v0', task='task_hard', timing='next_open')
    look, information = env.reset(seed=3)
    assert look in env.observation_space and information == {'episode': 'task_hard'}
    for _ in range(42): look, reward, terminated, truncated, information = env.step(env.action_space.sample())
    assert terminated and not truncated and isinstance(reward, float)


@pytest.mark.filterwarnings('ignore')
def test_a_vector_of_environments_plays_as_each_would_alone():
    names, steps = ['task_easy', 'task_medium', 'task_hard', 'task_easy'], 41
    plans = [[(side, max(0, quantity)) for side, quantity in orders(steps, seed)] for seed in range(4)]
    vector = gymnasium.vector.SyncVectorEnv([lambda name=name: StockerEnv(name) for name in names])
    looks, _ = vector.reset(seed=5)
    seen, rewards = [looks.copy()], []
    for t in range(steps):
        looks, reward, *_ = vector.step(np.array([plan[t] for plan in plans]))
        seen.append(looks.copy())
        rewards.append(reward)
    for j, name in enumerate(names):
        lone, answers = lone_run(name, 'close', plans[j])
        assert np.array_equal(np.array(seen)[:, j], lone)
        assert np.array(rewards)[:, j].tolist() == [answer[0] for answer in answers]
    vector.close()


@pytest.mark.parametrize('task, timing', EVERYWHERE)
def test_observations_are_finite_and_tell_of_the_portfolio(task, timing):
    env = StockerEnv(task, timing)
    look, _ = env.reset()
    assert np.isfinite(look).all() and look[-5:].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]
    for action in orders(env.episode.steps, 1):
        look, _, terminated, *_ = env.step(action)
        where = env.portfolio
        expected = [where.cash / 1e4, where.shares * where.price / 1e4, where.value / 1e4 - 1, where.max_drawdown,
                    where.step / where.steps]
        assert look[-5:] == pytest.approx(expected, rel=1e-6, abs=1e-6) and np.isfinite(look).all()
    assert terminated and look[-1] == 1.0


# --- a run, its end and its beginning ---

def test_a_second_reset_begins_afresh_whatever_was_done_to_the_first_observation():
    env = StockerEnv('task_easy')
    lone = lone_run('task_easy', 'close', orders(43, 2))
    first, _ = env.reset(seed=1)
    finish(env, orders(43, 9))
    again, _ = env.reset(seed=1)
    kept = again.copy()
    again[:] = -7.0
    fresh, _ = env.reset(seed=1)
    assert np.array_equal(fresh, kept)
    assert (env.run.step, env.run.cash, env.run.shares, env.run.max_drawdown) == (0, 10_000.0, 0.0, 0.0)
    seen, answers = finish(env, orders(43, 2))
    assert same((np.concatenate([fresh[None], seen]), answers), lone)


def test_an_observation_that_was_handed_out_does_not_change_later():
    env = StockerEnv('task_easy')
    first, _ = env.reset()
    kept, handed = [first.copy()], [first]
    for action in orders(43, 4):
        look, *_ = env.step(action)
        kept.append(look.copy())
        handed.append(look)
    env.reset()
    env.step((BUY, 10))
    assert all(np.array_equal(a, b) for a, b in zip(kept, handed, strict=True))


def test_spoiling_an_observation_spoils_nothing_but_itself():
    env = StockerEnv('task_easy')
    env.reset()
    answers = []
    for action in orders(43, 4):
        look, reward, *_ = env.step(action)
        look[:] = np.nan
        answers.append(reward)
    assert answers == [answer[0] for answer in lone_run('task_easy', 'close', orders(43, 4))[1]]


def test_a_step_before_the_first_reset_is_refused():
    env = StockerEnv('task_easy')
    with pytest.raises(StockerError, match='reset') as error: env.step((HOLD, 0))
    one_line(error)


def test_before_the_first_reset_nothing_of_the_last_day_is_shown():
    env = StockerEnv('task_easy')
    try: assert env.market_observation.date == '2023-08-01'
    except StockerError: pass


@pytest.mark.parametrize('timing', CLOCKS)
def test_a_step_after_the_end_is_refused_and_charges_nothing(timing):
    env = StockerEnv('task_easy', timing)
    env.reset()
    finish(env, [(BUY, 99)] * 43)
    before = env.snapshot()
    for action in ((BUY, 1), (SELL, 99), (HOLD, 0)):
        with pytest.raises(StockerError, match='over') as error: env.step(action)
        one_line(error)
    assert env.snapshot() == before


def test_only_the_last_step_terminates_and_none_truncates():
    for task, timing in EVERYWHERE:
        _, answers = lone_run(task, timing, [(HOLD, 0)] * load_task(task).steps)
        assert [answer[1] for answer in answers] == [False] * (len(answers) - 1) + [True]
        assert not any(answer[2] for answer in answers)


def test_the_last_observation_shows_the_last_mark():
    env = StockerEnv('task_hard', 'next_open')
    env.reset()
    finish(env, [(BUY, 10)] * 42)
    assert env.portfolio.value == pytest.approx(env.run.value) and env.portfolio.price == env._path.marks[-1]
    assert env.market_observation.date == '2022-10-31'


@pytest.mark.parametrize('cash', [10_000, 250, 1.5])
def test_the_starting_cash_may_be_any_number(cash):
    prices, task = load_prices('AAPL'), TASKS['task_easy']
    episode = Episode.from_prices(prices, 'AAPL', task.start, task.end, starting_cash=cash)
    sides, quantities = (np.array(column)[:, None] for column in zip(*orders(43, 6), strict=True))
    batch = simulate_rewards(episode, sides, quantities)
    assert batch.rewards[:, 0].tolist() == [answer[0] for answer in lone_run(episode, 'close', orders(43, 6))[1]]


def test_money_figures_of_a_run_to_the_cent():
    env = StockerEnv(made_up([100.0, 110.0]))
    env.reset()
    information = env.step((BUY, 1000))[4]
    assert information['traded'] == 99.0 and round(env.run.cash, 8) == 90.10
    assert round(env.step((HOLD, 0))[4]['portfolio_value'], 8) == 10980.10 # marked, not sold
    env = StockerEnv(made_up([100.0, 100.0]))
    env.reset()
    env.step((BUY, 10))
    assert round(env.step((SELL, 10))[4]['portfolio_value'], 8) == 9998.00


def test_an_invalid_order_costs_its_penalty_and_nothing_else():
    for action in ((SELL, 5), (BUY, 0), (BUY, -3), (SELL, -1), (SELL, 0)):
        free, charged = (StockerEnv('task_easy', weights=RewardWeights(invalid_penalty=penalty))
                         for penalty in (0.0, 0.01))
        free.reset(), charged.reset()
        _, gained, _, _, information = free.step(action)
        assert charged.step(action)[1] == pytest.approx(gained - 0.01, abs=1e-15)
        assert information['invalid'] and charged.run.cash == 10_000.0 and charged.run.shares == 0.0


# --- what an action may depend on ---

def test_the_bar_that_fills_an_order_is_not_in_the_observation_it_was_based_on():
    "Under the next open, changing the next bar changes the fill and no byte of what was seen."
    calm, wild = (made_up([100.0, 100.0, 200.0, 80.0], opens, end='2021-01-05') for opens in (
        [100.0, 100.0, 200.0, 80.0], [100.0, 173.0, 200.0, 80.0]))
    first, other = StockerEnv(calm, 'next_open'), StockerEnv(wild, 'next_open')
    assert first.reset()[0].tobytes() == other.reset()[0].tobytes()
    assert canonical_json(first.market_observation) == canonical_json(other.market_observation)
    assert first.portfolio == other.portfolio
    first.step((BUY, 10)), other.step((BUY, 10))
    assert first.run.cash - other.run.cash == pytest.approx(10 * 73 * 1.001)


def test_under_the_close_an_order_is_filled_at_the_last_price_seen():
    env = StockerEnv('task_easy')
    env.reset()
    for _ in range(43):
        seen, before = env.market_observation.close, env.run.cash
        traded = env.step((BUY, 1))[4]['traded']
        assert before - env.run.cash == pytest.approx(traded * seen * 1.001, abs=1e-9)


def test_buying_before_a_doubling_earns_another_reward_than_holding():
    rewards = []
    for action in ((BUY, 50), (HOLD, 0)):
        env = StockerEnv(made_up([100.0, 100.0, 200.0, 80.0]))
        env.reset()
        env.step((HOLD, 0)), env.step(action)
        rewards.append(env.step((HOLD, 0))[1])
    assert rewards[0] > rewards[1]


# --- how orders are read ---

@pytest.mark.parametrize('action', [
    TradeAction(side='buy', quantity=5), {'side': 'buy', 'quantity': 5},
    MappingProxyType({'side': 'buy', 'quantity': 5}),
    {'side': 'buy', 'quantity': np.int64(5)}, {'side': np.str_('buy'), 'quantity': np.uint8(5)},
    (np.int8(1), np.int16(5)), TradeAction(side='buy', quantity=np.int32(5)),
    (1, 5), [1, 5], np.array([1, 5]), np.array([1, 5], np.int8), np.array([1, 5], np.uint64)])
def test_an_order_in_each_of_its_forms_means_the_same(action):
    env = StockerEnv('task_easy')
    env.reset()
    assert env.step(action)[4]['traded'] == 5.0


BAD_ORDERS = [
    None, True, 5, 1.0, 'buy', '', b'buy', {}, [], (), (1,), (1, 2, 3), [[1, 5], [1, 5]],
    {'side': 'buy', 'quantity': 0.1}, {'side': 'buy', 'quantity': np.float64(5)}, {'side': 'buy', 'quantity': np.True_},
    (1, np.float32(5)), (1, np.True_), {'side': 10**400, 'quantity': 5}, (10**400, 5), 10**400,
    {'side': 'buy', 'quantity': 5.5}, {'side': 'buy', 'quantity': True}, {'side': 'buy', 'quantity': None},
    {'side': 'buy', 'quantity': '5'}, {'side': 'buy', 'quantity': [5]}, {'side': 'buy', 'quantity': float('nan')},
    {'side': 'Buy', 'quantity': 5}, {'side': None, 'quantity': 5}, {'side': 1, 'quantity': 5}, {'quantity': 5},
    {'side': 'buy', 'quantity': 5, 'price': 1}, (1, 0.1), (1, 5.0), (1, True), (1, None), (1, '5'), (1, [5]), (True, 5),
    (3, 5), (-1, 5), (1.0, 5), ('buy', 5), (None, 5), np.array(5), np.array([1.0, 5.0]), np.array([True, True]),
    np.array([[1, 5], [1, 5]]), np.array([]), np.array(['buy', '5'])]


@pytest.mark.parametrize('action', BAD_ORDERS, ids=repr)
def test_an_order_that_is_none_is_refused_in_one_line_and_changes_nothing(action):
    env = StockerEnv('task_easy')
    env.reset(seed=0)
    env.step((BUY, 10))
    before = env.snapshot()
    with pytest.raises(StockerError) as error: env.step(action)
    one_line(error)
    assert env.snapshot() == before


@pytest.mark.parametrize('number', [10**400, -10**400, 10**5000, float('inf'), '1'], ids=range(5))
def test_absurd_numbers_are_told_wherever_a_number_is_asked_for(number):
    env = StockerEnv('task_easy')
    env.reset()
    for make in (lambda: RewardWeights(transaction_cost=number), lambda: RewardWeights(w_inflation=number),
                 lambda: replace(env.snapshot(), cash=number), lambda: replace(env.snapshot(), shares=number),
                 lambda: env.step((number, 1)), lambda: env.step({'side': number, 'quantity': 1})):
        with pytest.raises(StockerError) as error: make()
        assert len(str(error.value)) < 300


@pytest.mark.parametrize('quantity', [MAX_QUANTITY + 1, 10**15, 2**63, 10**30, 10**400],
                         ids=lambda n: f'{len(str(n))} digits')
def test_an_order_larger_than_anything_buys_all_there_is_money_for(quantity):
    for action in ((BUY, quantity), {'side': 'buy', 'quantity': quantity}):
        env = StockerEnv('task_easy')
        env.reset()
        assert env.step(action)[4]['traded'] == 51.0 # at 195.61 with the fee
        assert env.step((SELL, quantity))[4]['traded'] == -51.0 and env.run.shares == 0.0


@pytest.mark.parametrize('quantity', [-1, -10**15, -10**400], ids=lambda n: f'{len(str(-n))} digits')
def test_a_negative_quantity_is_an_invalid_order_not_the_opposite_one(quantity):
    env = StockerEnv('task_easy')
    env.reset()
    env.step((BUY, 10))
    for side in (BUY, SELL):
        information = env.step((side, quantity))[4]
        assert information['invalid'] and information['traded'] == 0.0
    assert env.run.shares == 10.0


@pytest.mark.parametrize('task', ['task_x', '', None, 5, [], ()])
def test_an_environment_without_an_episode_is_refused(task):
    with pytest.raises(StockerError) as error: StockerEnv(task)
    one_line(error)


def test_an_unknown_episode_or_clock_is_refused_by_name():
    with pytest.raises(StockerError, match='task_x'): StockerEnv('all').reset(options={'episode': 'task_x'})
    with pytest.raises(StockerError, match='next_open'): StockerEnv(timing='tomorrow')
    assert StockerEnv('all').reset(options={'episode': 'task_hard'})[1] == {'episode': 'task_hard'}


def test_the_seed_draws_the_episode():
    drawn = []
    for _ in range(2):
        env = StockerEnv('all')
        names = [env.reset(seed=7)[1]['episode']] + [env.reset()[1]['episode'] for _ in range(20)]
        drawn.append(names)
    assert drawn[0] == drawn[1] and set(drawn[0]) == set(TASKS)


# --- snapshots ---

@pytest.mark.parametrize('through_json', [False, True])
@pytest.mark.parametrize('task, timing', EVERYWHERE)
def test_a_restored_run_goes_on_as_if_nothing_had_been(task, timing, through_json):
    env, plan = StockerEnv(task, timing), orders(40, 3)
    env.reset(seed=11)
    finish(env, plan[:10])
    saved = env.snapshot()
    written = canonical_json(saved)
    env.step((BUY, 3))
    first, draws = finish(env, plan[12:14]), env.np_random.random(3).tolist()
    assert canonical_json(saved) == written # later steps leave the snapshot alone
    env.restore(Snapshot.from_json(written) if through_json else saved)
    env.step((BUY, 3))
    assert same(finish(env, plan[12:14]), first) and env.np_random.random(3).tolist() == draws


def test_restoring_gives_the_observation_of_that_point_and_a_fresh_array():
    env = StockerEnv('task_easy')
    env.reset()
    look = env.step((BUY, 3))[0].copy()
    saved = env.snapshot()
    again = env.restore(saved)
    assert np.array_equal(again, look)
    again[:] = 0.0
    assert np.array_equal(env.restore(saved), look)


def test_a_snapshot_brings_back_its_own_episode_and_its_end():
    env = StockerEnv('all')
    env.reset(options={'episode': 'task_medium'})
    finish(env, [(BUY, 5)] * 41)
    end = env.snapshot()
    env.reset(options={'episode': 'task_hard'})
    env.restore(end)
    assert env.episode.name == 'task_medium' and env.portfolio.step == 41
    with pytest.raises(StockerError, match='over'): env.step((HOLD, 0))


def test_one_snapshot_serves_many_branches():
    env = StockerEnv('task_hard')
    env.reset()
    finish(env, [(BUY, 2)] * 20)
    saved = env.snapshot()
    ends = []
    for quantity in (1, 5, 1):
        env.restore(saved)
        ends.append(finish(env, [(SELL, quantity)] * 22)[1])
    assert ends[0] == ends[2] != ends[1]


def test_another_environment_can_take_a_run_over():
    one, other = StockerEnv('task_easy'), StockerEnv('task_easy')
    one.reset(seed=1)
    finish(one, orders(20, 8))
    other.restore(Snapshot.from_json(canonical_json(one.snapshot())))
    assert same(finish(other, orders(23, 5)), finish(one, orders(23, 5)))


@pytest.mark.parametrize('change', [
    {'episode': 'task_hard'}, {'timing': 'next_open'}, {'step': 44}, {'step': -1}, {'step': 1.5}, {'cash': -5.0},
    {'cash': float('nan')}, {'shares': -1.0}, {'cash': 'much'}, {'random_state': {}}], ids=str)
def test_a_snapshot_that_does_not_fit_is_refused_and_changes_nothing(change):
    env = StockerEnv('task_easy')
    env.reset(seed=0)
    env.step((BUY, 10))
    before = env.snapshot()
    with pytest.raises(StockerError) as error: env.restore(replace(before, **change))
    one_line(error)
    assert env.snapshot() == before


@pytest.mark.parametrize('text', ['', '{', 'null', '[]', '42', '{}', '{"step": 1}', '{"cash": 1, "owner": "me"}'])
def test_text_that_is_no_snapshot_is_refused(text):
    with pytest.raises(StockerError) as error: Snapshot.from_json(text)
    one_line(error)


# --- one result, however it is computed ---

@pytest.mark.parametrize('task, timing', EVERYWHERE)
def test_the_batch_equals_the_environment_exactly_on_random_policies(task, timing):
    "Three hundred under each of six markets."
    episode, runs = load_task(task), 300
    rng = np.random.default_rng(1)
    sides = rng.integers(0, 3, (episode.steps, runs))
    quantities = rng.integers(-3, 80, (episode.steps, runs))
    quantities[rng.random(quantities.shape) < 0.05] = 10**15
    batch = simulate_rewards(episode, sides, quantities, timing)
    env = StockerEnv(episode, timing)
    for j in range(runs):
        env.reset()
        for t, action in enumerate(zip(sides[:, j].tolist(), quantities[:, j].tolist(), strict=True)):
            _, reward, _, _, information = env.step(action)
            assert reward == batch.rewards[t, j]
            assert information['portfolio_value'] == batch.values[t, j]
            assert information['traded'] == batch.traded[t, j] and information['invalid'] == batch.invalid[t, j]


@pytest.mark.parametrize('moderator', ['vote_mean', 'vote_mean_all_in'])
@pytest.mark.parametrize('task, timing', EVERYWHERE)
def test_replaying_a_trace_gives_its_rewards_exactly(task, timing, moderator):
    trace = play(StockerEnv(task, timing), rule_council(moderator))
    batch = simulate_rewards(load_task(task), *trace.orders, timing, trace.weights)
    assert batch.rewards[:, 0].tolist() == [step.terms.reward for step in trace.steps]
    assert batch.values[:, 0].tolist() == [step.value for step in trace.steps]


def test_two_environments_in_turn_do_not_influence_each_other():
    plans = orders(41, 1), orders(41, 2)
    lone = [lone_run(task, 'close', plan) for task, plan in zip(('task_medium', 'task_easy'), plans, strict=True)]
    for order in ((0, 1), (1, 0)):
        environments = StockerEnv('task_medium'), StockerEnv('task_easy')
        seen, answers = [[env.reset()[0].copy()] for env in environments], ([], [])
        for t in range(41):
            for j in order:
                looks, answer = finish(environments[j], [plans[j][t]])
                seen[j].append(looks[0])
                answers[j].append(answer[0])
        assert all(same((np.array(seen[j]), answers[j]), lone[j]) for j in (0, 1))


def test_threads_play_as_each_would_alone():
    jobs = [(task, timing, seed) for task, timing in EVERYWHERE for seed in range(4)]
    run = lambda job: lone_run(job[0], job[1], orders(load_task(job[0]).steps, job[2]))
    with ThreadPoolExecutor(8) as pool: together = list(pool.map(run, jobs))
    assert all(same(run(job), found) for job, found in zip(jobs, together, strict=True))


def test_the_portfolio_is_what_the_moderator_needs():
    env = StockerEnv('task_easy')
    env.reset()
    env.step((BUY, 10))
    closes = load_task('task_easy').market().closes
    assert env.portfolio == Portfolio(1, 43, env.run.cash, 10, closes[1], 10_000.0, 0.001, env.run.max_drawdown,
                                      conditions_at(load_task('task_easy'), Timing.CLOSE, 1))
    assert json.loads(canonical_json(env.portfolio))['shares'] == 10


def test_two_episodes_of_one_name_are_refused():
    with pytest.raises(StockerError, match='same name'): StockerEnv([load_task('task_easy'), load_task('task_easy')])


def test_a_long_window_needs_no_search_for_the_optimum(monkeypatch):
    "The reward does not ask for the optimum, so an environment must not compute it."
    def forbidden(*arguments): raise AssertionError('the optimum was computed')
    monkeypatch.setattr('stocker.trading.engine.optimal_orders', forbidden)
    episode = Episode.from_prices(load_prices('SNAP'), 'SNAP', '2020-01-02', '2021-12-31')
    env = StockerEnv(episode)
    env.reset()
    assert env.step((BUY, 10))[1] == simulate_rewards(episode, np.eye(1, episode.steps, dtype=int).T,
                                                      np.full((episode.steps, 1), 10)).rewards[0, 0]
