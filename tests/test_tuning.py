"""Tuning: a replay is exact, a sweep equals its replays, a trace that is not what it says is refused by its step."""
import json
from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pytest

from stocker.market.core import CouncilDecision, Side, StockerError, Timing, TradeAction, digest
from stocker.council.council import Trace, TraceStep, play, read_trace, rule_council, write_trace
from stocker.trading.env import StockerEnv
from stocker.market.episodes import TASKS, Episode, load_task
from stocker.trading.reward import RewardWeights
from stocker.studies.tuning import (
    CHECKED, MOST_CHECKED, SEED_GRID, SETTINGS, TRIED_ORDERS, ManyWeights, checked_episode, choose, find_trace,
    fits_heat_map, group_advantages, group_rewards, heat_map, observation_digests, random_settings, read_grid,
    read_settings, replay, seed_grid, setting_classes, setting_column, sweep, write_choice, write_sweep)

SIDES = list(Side)


def random_weights(rng):
    return RewardWeights(*map(float, rng.random(5) * [1.5, 1.0, 0.3, rng.choice([0.0, 0.001, 0.05, 0.4]), 0.1]))


def random_action(rng):
    "Orders of every size: none, below zero, more than anyone can buy, more digits than a float holds."
    quantity = int(rng.choice([0, -3, 1, int(rng.integers(0, 80)), 10_000, 10**18, 10**400]))
    return TradeAction(side=SIDES[rng.integers(0, 3)], quantity=quantity)


def played(name, timing, weights, actions):
    "A trace of given orders, made by the environment alone."
    env = StockerEnv(name, timing, weights)
    env.reset()
    episode, steps = env.episode, []
    seen = observation_digests(episode, timing)
    for t, action in enumerate(actions):
        info = env.step(action)[4]
        steps.append(TraceStep(
            t, episode.dates[t], '', seen[t], CouncilDecision(votes={}, action=action, rationale=''),
            float(env.run.path.fills[t]), info['traded'], info['invalid'], env.run.cash, env.run.shares,
            info['portfolio_value'], info['terms']))
    return Trace(episode.name, episode.ticker, timing.value, 'random', episode.starting_cash, weights, tuple(steps))


def random_trace(name, timing, rng):
    return played(name, timing, random_weights(rng), [random_action(rng) for _ in range(load_task(name).steps)])


@pytest.fixture(scope='module')
def trace():
    return play(StockerEnv('task_easy'), rule_council())


@pytest.fixture(scope='module')
def table(trace):
    return sweep(trace, seed_grid())


@pytest.mark.parametrize('timing', list(Timing))
@pytest.mark.parametrize('name', list(TASKS))
def test_replay_is_exact(name, timing):
    rng = np.random.default_rng(len(name))
    for _ in range(170): # 1,020 policies in all
        run = random_trace(name, timing, rng)
        terms = replay(run, run.weights)
        for field, column in terms._asdict().items():
            assert column.tolist() == [getattr(step.terms, field) for step in run.steps]


@pytest.mark.parametrize('timing', list(Timing))
@pytest.mark.parametrize('name', list(TASKS))
def test_replay_under_other_weights_is_the_environment_under_them(name, timing):
    rng = np.random.default_rng(7)
    for _ in range(10):
        run, other = random_trace(name, timing, rng), random_weights(rng)
        again = played(name, timing, other, [step.decision.action for step in run.steps])
        assert replay(run, other).reward.tolist() == [step.terms.reward for step in again.steps]


@pytest.mark.parametrize('count', [5, 40])
@pytest.mark.parametrize('timing', list(Timing))
@pytest.mark.parametrize('name', list(TASKS))
def test_sweep_equals_replay(name, timing, count):
    rng = np.random.default_rng(3)
    run = random_trace(name, timing, rng)
    settings = random_settings(count, rng).assign(invalid_penalty=rng.random(count) * 0.1)
    result = sweep(run, settings)
    for row in range(0, count, 4):
        weights = RewardWeights(**settings.iloc[row])
        again = played(name, timing, weights, [step.decision.action for step in run.steps])
        assert result.total[row] == pytest.approx(again.total_reward, abs=1e-11)
        assert result.final_value[row] == again.steps[-1].value
        assert result.trades[row] == sum(step.traded != 0 for step in again.steps)


def test_blocks_and_threads_change_nothing(trace, monkeypatch):
    settings = random_settings(500, np.random.default_rng(0))
    settings.loc[100:300, 'transaction_cost'] = 0.001
    whole = sweep(trace, settings)
    monkeypatch.setattr('stocker.studies.tuning.CELLS_AT_ONCE', 2_700)
    parts = sweep(trace, settings)
    pd.testing.assert_frame_equal(whole, parts, check_exact=True)


def test_the_order_and_names_of_rows_are_kept(trace):
    settings = random_settings(30, np.random.default_rng(0))
    shuffled = settings.sample(frac=1, random_state=1).rename(index='row {}'.format)
    expected = sweep(trace, settings)
    for name, total in sweep(trace, shuffled).total.items():
        assert total == pytest.approx(expected.total[int(name[4:])], abs=1e-12)


def test_no_inflation_and_no_weights(trace):
    settings = pd.DataFrame([(0, 0, 0, 0), (1, 0, 0, 0.999)], columns=list(SETTINGS))
    result = sweep(trace, settings.assign(invalid_penalty=0))
    assert result.total[0] == pytest.approx(replay(trace, RewardWeights(0, 0, 0, 0, 0)).reward.sum(), abs=1e-12)
    assert np.isfinite(result.to_numpy()).all()


def change(trace, step, **changes):
    steps = list(trace.steps)
    steps[step] = replace(steps[step], **changes)
    return replace(trace, steps=tuple(steps))


@pytest.mark.parametrize('step', [0, 17, 42])
@pytest.mark.parametrize('field', ['reward', 'gap', 'bonus', 'inflation'])
def test_an_edited_term_is_refused_by_its_step(trace, step, field):
    terms = trace.steps[step].terms
    nudged = terms._replace(**{field: float(np.nextafter(getattr(terms, field), 9))})
    with pytest.raises(StockerError, match=f'^step {step} .*: the trace has terms'):
        replay(change(trace, step, terms=nudged), RewardWeights())


@pytest.mark.parametrize('field', ['price', 'traded', 'cash', 'shares', 'value'])
def test_an_edited_outcome_is_refused_by_its_step(trace, field):
    edited = change(trace, 5, **{field: getattr(trace.steps[5], field) + 0.01})
    with pytest.raises(StockerError, match=f'^step 5 .*: the trace has {field} '):
        sweep(edited, seed_grid())


def test_an_edited_order_is_refused_by_its_step(trace):
    decision = trace.steps[0].decision.model_copy(update={'action': TradeAction(side='buy', quantity=3)})
    with pytest.raises(StockerError, match='^step 0 .*: the trace has traded'):
        replay(change(trace, 0, decision=decision), RewardWeights())


@pytest.mark.parametrize('weights', [RewardWeights(w_inflation=0.31), RewardWeights(transaction_cost=0.002)])
def test_edited_weights_are_refused(trace, weights):
    with pytest.raises(StockerError, match='^step [01] .*: the trace has'):
        replay(replace(trace, weights=weights), RewardWeights())


def test_a_not_a_number_is_refused(trace):
    nan = trace.steps[9].terms._replace(reward=float('nan'))
    with pytest.raises(StockerError, match='^step 9 '): replay(change(trace, 9, terms=nan), RewardWeights())


@pytest.mark.parametrize('kept', [0, 1, 42])
def test_a_truncated_trace_is_refused_by_its_step(trace, kept):
    with pytest.raises(StockerError, match=f'^step {kept} is missing: task_easy has 43 decisions'):
        replay(replace(trace, steps=trace.steps[:kept]), RewardWeights())


def test_missing_and_doubled_steps_are_refused(trace):
    steps = trace.steps
    with pytest.raises(StockerError, match='^step 3 is missing'):
        replay(replace(trace, steps=steps[:3] + steps[4:]), RewardWeights())
    with pytest.raises(StockerError, match='^step 4 is missing'):
        replay(replace(trace, steps=steps[:4] + steps[3:]), RewardWeights())
    with pytest.raises(StockerError, match='^step 43 is one too many'):
        replay(replace(trace, steps=(*steps, replace(steps[-1], step=43))), RewardWeights())


def corrected(episode, row, **changes):
    "The episode with one price of its history corrected."
    prices = episode.prices.copy()
    prices.iloc[row] *= 1.0001
    return Episode.from_prices(
        prices, episode.ticker, episode.dates[0], episode.dates[-1],
        **{'name': episode.name, 'facts': episode.facts, 'peers': episode.peers,
           'share_splits': episode.share_splits, **changes})


def test_another_version_of_the_data_is_refused_by_its_step(trace):
    episode = load_task('task_easy')
    with pytest.raises(StockerError, match='^step 20 .*saw another observation'):
        replay(trace, RewardWeights(), corrected(episode, episode.first + 20))
    with pytest.raises(StockerError, match='^step 0 .*saw another observation'):
        replay(trace, RewardWeights(), corrected(episode, episode.first - 30))
    facts = replace(episode.facts, news=load_task('task_hard').facts.news)
    with pytest.raises(StockerError, match=r'^step \d+ .*saw another observation'):
        replay(trace, RewardWeights(), replace(episode, facts=facts))


def test_the_other_timing_is_refused_by_its_step(trace):
    with pytest.raises(StockerError, match='^step 0 .*saw another observation'):
        replay(replace(trace, timing='next_open'), RewardWeights())


def test_another_episode_is_refused(trace):
    for episode in (load_task('task_hard'), replace(load_task('task_easy'), starting_cash=5_000.0)):
        with pytest.raises(StockerError, match='hand in the episode it was played on'):
            replay(trace, RewardWeights(), episode)
    with pytest.raises(StockerError, match='not a task'): replay(replace(trace, episode='../x'), RewardWeights())


def test_an_episode_of_ones_own_is_handed_in():
    easy = load_task('task_easy')
    own = Episode.from_prices(easy.prices, 'AAPL', '2022-03-01', '2022-04-29')
    run = play(StockerEnv(own, 'next_open'), rule_council())
    assert replay(run, run.weights, own).reward.sum() == pytest.approx(run.total_reward, abs=1e-12)
    settings = random_settings(20, np.random.default_rng(0))
    total = replay(run, RewardWeights(**settings.iloc[7]), own).reward.sum()
    assert sweep(run, settings, own).total[7] == pytest.approx(total, abs=1e-11)
    with pytest.raises(StockerError, match='not a task: hand in its episode'): replay(run, run.weights)


def test_a_trace_from_its_file_replays_exactly(trace, tmp_path):
    write_trace(trace, tmp_path/'trace.jsonl')
    again = read_trace(tmp_path/'trace.jsonl')
    assert replay(again, again.weights).reward.tolist() == [step.terms.reward for step in trace.steps]


@pytest.mark.parametrize('value', [float('nan'), float('inf'), -0.1, 'much', None, True, 10**400])
@pytest.mark.parametrize('column', [*SETTINGS, 'invalid_penalty'])
def test_a_wrong_cell_is_named(trace, column, value):
    settings = random_settings(4, np.random.default_rng(0)).assign(invalid_penalty=0.01)
    settings[column] = pd.Series([0.1, 0.1, value, 0.1], dtype=object)
    with pytest.raises(StockerError, match=f'^settings, row 2, {column} = '): sweep(trace, settings)
    if isinstance(value, float):
        with pytest.raises(StockerError, match=f'row 2, {column} = '):
            sweep(trace, settings.assign(**{column: settings[column].astype(float)}))


def test_missing_numbers_of_nullable_columns_are_named():
    settings = random_settings(3, np.random.default_rng(0)).astype('Float64')
    assert read_settings(settings, 0.01).w_inflation.dtype == np.float64
    settings.loc[1, 'w_inflation'] = pd.NA
    with pytest.raises(StockerError, match='row 1, w_inflation'): read_settings(settings, 0.01)


def test_a_fee_of_the_whole_trade_is_refused(trace):
    with pytest.raises(StockerError, match='row 0, transaction_cost = .* below one'):
        sweep(trace, random_settings(1, np.random.default_rng(0)).assign(transaction_cost=1.0))


@pytest.mark.parametrize('name', list(ManyWeights._fields))
@pytest.mark.parametrize('value', [-0.1, float('nan'), float('inf')])
def test_weights_outside_their_meaning_are_refused(name, value):
    with pytest.raises(StockerError, match=name): RewardWeights(**{name: value})


def test_wrong_columns_are_named(trace):
    grid = seed_grid()
    with pytest.raises(StockerError, match='column w_inflation is missing'):
        sweep(trace, grid.drop(columns='w_inflation'))
    with pytest.raises(StockerError, match='column reward is unknown'): sweep(trace, grid.assign(reward=1.0))
    with pytest.raises(StockerError, match='column w_inflation comes twice'):
        sweep(trace, pd.concat([grid, grid[['w_inflation']]], axis=1))
    with pytest.raises(StockerError, match='at least one setting'): sweep(trace, grid.iloc[:0])


def test_advantages_forget_scale_and_offset():
    rng = np.random.default_rng(0)
    rewards = rng.normal(size=(20, 6))
    expected = group_advantages(rewards)
    assert np.allclose(group_advantages(rewards * 7 + rng.normal(size=(20, 1))), expected, atol=1e-12)
    assert (group_advantages(np.full((3, 4), 0.1)) == 0).all()


@pytest.mark.parametrize('timing', list(Timing))
@pytest.mark.parametrize('name', list(TASKS))
def test_group_rewards_are_the_environments(name, timing):
    rng = np.random.default_rng(5)
    run, weights, horizon = random_trace(name, timing, rng), random_weights(rng), 4
    run = played(name, timing, weights, [step.decision.action for step in run.steps])
    rewards = group_rewards(run, weights, horizon, load_task(name))
    for start in (0, 9, len(rewards) - 1):
        for i, order in enumerate(TRIED_ORDERS.tolist()):
            env = StockerEnv(name, timing, weights)
            env.reset()
            for step in run.steps[:start]: env.step(step.decision.action)
            orders = [(2 if order < 0 else 1 if order else 0, int(abs(order))), *[(0, 0)] * (horizon - 1)]
            assert rewards[start, i] == sum(env.step(one)[1] for one in orders)


def test_a_common_scale_is_no_other_setting():
    "No clip, no inflation term, no order that cannot trade: weight, inflation and fee cancel, and buying costs."
    hold = [TradeAction(side='hold')] * load_task('task_medium').steps
    run = played('task_medium', Timing.CLOSE, RewardWeights(), hold)
    settings = pd.DataFrame([(w, 0.0, a, c) for w in (0.1, 0.3) for a in (0.0, 0.05) for c in (0.001, 0.002)],
                            columns=list(SETTINGS))
    orders = TRIED_ORDERS[:3]
    first = [group_advantages(group_rewards(run, RewardWeights(*row), 1, load_task('task_medium'), orders))[:5]
             for row in settings.itertuples(index=False)]
    assert max(np.abs(one - first[0]).max() for one in first) < 1e-8
    assert (first[0].argmax(axis=1) == 0).all()


def test_classes(trace):
    same = pd.concat([seed_grid().iloc[[5]]] * 3, ignore_index=True)
    assert setting_classes(trace, same).tolist() == [0, 0, 0]
    with pytest.raises(StockerError, match='horizon = 43'): setting_classes(trace, same, horizon=43)
    with pytest.raises(StockerError, match='horizon = 0'): setting_classes(trace, same, horizon=0)


def test_the_choice_comes_back_from_its_file(trace, table, tmp_path):
    path = tmp_path/'new'/'chosen_settings.json'
    write_choice(path, trace, table)
    written = json.loads(path.read_text(encoding='utf-8'))
    assert RewardWeights(**written['choice']) == RewardWeights()
    assert written['trace'] == digest(trace) and written['episode'] == 'task_easy'
    assert written['total'] == pytest.approx(trace.total_reward, abs=1e-12)
    assert {key: written[key] for key in ('choice', 'total', 'reason', 'alternatives')} == choose(table)
    assert [file.name for file in path.parent.iterdir()] == ['chosen_settings.json']


def test_a_choice_from_another_trace_leaves_the_file_alone(trace, table, tmp_path):
    path = tmp_path/'chosen_settings.json'
    path.write_text('before')
    other = played('task_easy', Timing.CLOSE, RewardWeights(), [TradeAction(side='hold')] * 43)
    with pytest.raises(StockerError, match='sweep this trace first'): write_choice(path, other, table)
    assert path.read_text() == 'before'
    assert list(tmp_path.iterdir()) == [path]


def test_the_nearest_setting_is_taken(table):
    wanted = RewardWeights(w_performance=0.72, w_inflation=0.28)
    assert RewardWeights(**choose(table, wanted)['choice']) == RewardWeights()
    assert set(choose(table)['choice']) == set(asdict(wanted))
    with pytest.raises(StockerError, match='a table from sweep'): choose(table.iloc[:0])


def test_heat_maps_need_a_whole_grid(table):
    assert len(heat_map(table, 'totals').axes) == 4
    with pytest.raises(StockerError, match='whole grid'): heat_map(table.iloc[:-1], '')
    with pytest.raises(StockerError, match='come twice'): heat_map(pd.concat([table, table]), '')


def test_a_table_read_as_a_whole_is_read_as_its_columns_are():
    rng = np.random.default_rng(2)
    plain = random_settings(50, rng)
    tables = [plain, plain.assign(invalid_penalty=0.02), plain[list(SETTINGS)[::-1]], plain.astype('float32'),
              plain.astype('Float64'), plain.assign(w_inflation=1), plain.astype(object), plain.iloc[::-2]]
    for settings in tables:
        many = read_settings(settings, 0.01)
        for name in settings: assert getattr(many, name).tolist() == setting_column(settings[name]).tolist()
    before = plain.copy()
    sweep(find_trace('task_easy'), plain)
    pd.testing.assert_frame_equal(plain, before)


def test_what_was_checked_is_kept_for_that_trace_alone(trace, table):
    again = sweep(trace, seed_grid())
    pd.testing.assert_frame_equal(again, table, check_exact=True)
    steps = [*trace.steps]
    steps[20] = replace(steps[20], terms=steps[20].terms._replace(reward=0.5))
    with pytest.raises(StockerError, match='^step 20 '): sweep(replace(trace, steps=tuple(steps)), seed_grid())
    with pytest.raises(StockerError, match='^step 42 is missing'):
        sweep(replace(trace, steps=trace.steps[:-1]), seed_grid())
    with pytest.raises(StockerError, match='saw another observation'):
        sweep(trace, seed_grid(), corrected(load_task('task_easy'), load_task('task_easy').first + 20))
    with pytest.raises(StockerError, match='hand in the episode it was played on'):
        sweep(trace, seed_grid(), replace(load_task('task_easy'), starting_cash=5_000.0))


def test_a_trace_that_can_change_is_checked_each_time(trace):
    loose = replace(trace, steps=list(trace.steps))
    before = sweep(loose, seed_grid().iloc[:3])
    assert id(loose) not in CHECKED
    loose.steps[7] = replace(loose.steps[7], cash=1.0)
    with pytest.raises(StockerError, match='^step 7 '): sweep(loose, seed_grid())
    assert len(before) == 3


def test_not_every_trace_is_kept(trace):
    one = seed_grid().iloc[:1]
    for _ in range(MOST_CHECKED + 2): sweep(replace(trace), one)
    assert len(CHECKED) <= MOST_CHECKED and checked_episode(trace) is load_task('task_easy')


def written(path, text):
    path.write_text(text, encoding='utf-8')
    return path


@pytest.mark.parametrize(('text', 'told'), [
    ('', 'not JSON'), ('{"random": ', 'not JSON'), ('[' * 100_000, 'not JSON'),
    ('[1, 2]', 'an object'), ('null', 'an object'),
    ('{}', 'column w_performance is missing'), ('{"w_performance": [0.5]}', 'column w_inflation is missing'),
    ('{"w_performance": 0.5}', 'w_performance: give a list'), ('{"w_performance": []}', 'w_performance: give a list'),
    ('{"random": 0}', 'random = 0'), ('{"random": true}', 'random = True'), ('{"random": 2.5}', 'random = 2.5'),
    ('{"random": "many"}', "random = 'many'"), ('{"random": 3, "seed": -1}', 'seed = -1'),
    ('{"random": 3, "seed": null}', 'seed = None'), ('{"random": 1e99}', 'random = 1e'),
    ('{"random": 99999999999}', '99,999,999,999 settings are too many'),
    ('{"random": 3, "w_performance": [1]}', 'w_performance does not go with random'),
    ('{"seed": 3}', 'seed: give a list')])
def test_a_file_that_asks_for_no_grid_is_told_in_one_line(tmp_path, text, told):
    path = written(tmp_path/'grid.json', text)
    with pytest.raises(StockerError, match=told) as caught: read_grid(path)
    assert str(caught.value).startswith(f'{path}: ') and '\n' not in str(caught.value)


@pytest.mark.parametrize(
    'cell', ['-0.1', 'NaN', 'Infinity', '"much"', 'null', 'true', '[0.1]', '{}', '1e400', '9' * 400])
@pytest.mark.parametrize('name', [*SETTINGS, 'invalid_penalty'])
def test_a_wrong_cell_of_a_file_is_named(tmp_path, name, cell):
    lists = {**SEED_GRID, 'invalid_penalty': (0.01,), name: (0.1,)}
    text = json.dumps(lists).replace(f'"{name}": [0.1]', f'"{name}": [0.1, {cell}]')
    with pytest.raises(StockerError, match=rf'grid\.json: settings, row \d+, {name} = '):
        read_grid(written(tmp_path/'grid.json', text))


def test_a_grid_may_be_large_but_not_endless(tmp_path):
    lists = {name: [i / 1000 for i in range(100)] for name in SETTINGS}
    with pytest.raises(StockerError, match='100,000,000 settings are too many'):
        read_grid(written(tmp_path/'grid.json', json.dumps(lists)))
    with pytest.raises(StockerError, match='there is no such grid'): read_grid(tmp_path/'none.json')
    with pytest.raises(StockerError, match='there is no such grid'): read_grid(tmp_path)


def test_a_grid_from_its_file_is_swept_like_ours(trace, table, tmp_path):
    grid = read_grid(written(tmp_path/'grid.json', json.dumps(SEED_GRID)))
    pd.testing.assert_frame_equal(sweep(trace, grid), table, check_exact=True)
    whole = read_grid(written(tmp_path/'grid.json', json.dumps({name: [0, 1] for name in SETTINGS[:3]} |
                                                               {'transaction_cost': [0], 'invalid_penalty': [0.5]})))
    assert (len(whole), set(sweep(trace, whole).invalid_penalty)) == (8, {0.5})


def test_what_fits_a_heat_map_can_be_drawn(trace):
    columns = {name: [0.1, 0.2] for name in SETTINGS}
    for settings in (seed_grid(), pd.DataFrame({name: [0.1] for name in SETTINGS})):
        assert fits_heat_map(settings) and heat_map(sweep(trace, settings), '')
    assert not fits_heat_map(pd.DataFrame(columns))
    assert not fits_heat_map(random_settings(100, np.random.default_rng(0)))


def test_the_files_of_a_sweep(trace, table, tmp_path):
    folder = tmp_path/'new'/'run'
    files = write_sweep(folder, trace, table)
    assert sorted(file.name for file in folder.iterdir()) == ['chosen_settings.json', 'heat_map.png', 'sweep.parquet']
    assert sorted(folder.iterdir()) == sorted(files)
    pd.testing.assert_frame_equal(pd.read_parquet(folder/'sweep.parquet'), table, check_exact=True)
    before, few = {file: file.read_bytes() for file in files}, sweep(trace, seed_grid().iloc[:7])
    names = [file.name for file in write_sweep(folder, trace, few)]
    assert names == ['chosen_settings-2.json', 'sweep-2.parquet'] and write_sweep(folder, trace, table) == files
    assert {file: file.read_bytes() for file in files} == before and len(list(folder.iterdir())) == 5


def test_a_sweep_of_another_trace_writes_nothing(table, tmp_path):
    other = played('task_easy', Timing.CLOSE, RewardWeights(), [TradeAction(side='hold')] * 43)
    with pytest.raises(StockerError, match='sweep this trace first'): write_sweep(tmp_path/'run', other, table)
    assert not list(tmp_path.glob('**/*.*'))


def test_a_trace_is_found_by_its_file_its_folder_or_its_task(trace, tmp_path):
    write_trace(trace, tmp_path/'trace.jsonl')
    assert digest(find_trace('task_easy')) == digest(find_trace(tmp_path)) == digest(find_trace(tmp_path/'trace.jsonl'))
    for source in ('task_esy', tmp_path/'none.jsonl', tmp_path/'none', ''):
        with pytest.raises(StockerError, match='no such trace, and the tasks are task_easy'): find_trace(source)
    written(tmp_path/'trace.jsonl', 'no trace')
    with pytest.raises(StockerError, match='line 1: not a line of a trace'): find_trace(tmp_path)
