"The ladder of worlds: what is listed, drawn and reported."
import numpy as np
import pandas as pd
import pytest
from stocker.market.core import StockerError
from stocker.studies.worlds import GRADES, graded_world, world_picture
from stocker.training.results import world_parts
from stocker.training.world_results import (
    UNDONE, drawn_gains, keep_rows, learn_world, undone_table, world_figure, world_lines, world_settings, world_table)


def made_rows(world='one-70', seed=1, after=1.9, logistic=2.0, noise=0.5, timing='close', count=40):
    rng = np.random.default_rng([seed, len(world)])
    day = rng.normal(0, noise, count)
    worths = {'hold': 0.0, 'before': -1.0, 'after': after, 'logistic': logistic, 'logistic with pairs': logistic,
              'boosted trees': logistic, 'best rule': 2.1}
    return pd.DataFrame([
        {'world': world, 'timing': timing, 'seed': seed, 'policy': policy, 'episode': f'{seed}-{place}',
         'total_reward': worth + day[place], 'return': 0.0, 'invalid': 0.0, 'unreadable': 0.0, 'trades': 0.5,
         'constant': policy == 'after' and after == 0, 'seconds': 60.0}
        for policy, worth in worths.items() for place in range(count)])


def test_a_share_is_that_of_the_gain_and_its_interval_holds_it():
    rows = pd.concat([made_rows(seed=seed) for seed in (1, 2, 3)])
    row = world_table(rows).iloc[0]
    assert row['share'] == pytest.approx(0.95) and row['yardstick'] == 'logistic' and row['seeds'] == 3
    assert row['share low'] <= row['share'] <= row['share high']
    assert row['ahead of logistic'] == pytest.approx(-0.1)


def test_drawn_gains_scatter_like_the_mean_of_the_episodes():
    rng = np.random.default_rng(0)
    rows = made_rows(count=200)
    rows.loc[rows['policy'] == 'after', 'total_reward'] += rng.normal(0, 2.0, 200)
    drawn = drawn_gains(rows, ['after'])[1:, 0]
    gains = rows[rows['policy'] == 'after'].set_index('episode')['total_reward'] - rows[
        rows['policy'] == 'hold'].set_index('episode')['total_reward']
    assert drawn.std() == pytest.approx(gains.std(ddof=0) / 200 ** 0.5, rel=0.05)
    assert drawn.mean() == pytest.approx(gains.mean(), abs=0.01)


def test_rows_are_kept_once_and_in_the_order_of_the_ladder(tmp_path):
    keep_rows(made_rows('xor', 2), tmp_path)
    keep_rows(made_rows('one-70', 1), tmp_path)
    file = keep_rows(made_rows('xor', 2, after=0.3), tmp_path)
    kept = pd.read_parquet(file)
    assert kept.groupby(['world', 'seed'], sort=False).size().to_dict() == {('one-70', 1): 280, ('xor', 2): 280}
    assert kept.loc[(kept['world'] == 'xor') & (kept['policy'] == 'after'), 'total_reward'].mean() < 1
    page = '\n'.join(world_parts(tmp_path))
    assert 'one-70' in page and 'xor' in page and (tmp_path/'worlds.png').stat().st_size > 10_000
    assert 'What each part is worth' not in page


def test_a_constant_policy_stands_in_the_table():
    lines = world_lines(world_table(pd.concat([made_rows(), made_rows('coins', 1, after=0.0, logistic=0.0)])))
    assert any('| 0 of 1 |' in line and 'one-70' in line for line in lines)
    assert any('| 1 of 1 |' in line and 'coins' in line for line in lines)
    assert world_figure(world_table(pd.concat([made_rows(), made_rows('gated')]))).axes


def test_a_part_that_is_missing_is_measured_against_the_whole():
    rows = pd.concat([made_rows().assign(undone='as it is'), made_rows(after=0.0).assign(undone='one session counts')])
    found = undone_table(rows).set_index('undone')
    assert found.loc['one session counts', 'beside the whole'] == pytest.approx(-1.9)
    assert found.loc['one session counts', 'high'] < 0 and found.loc['one session counts', 'constant'] == 1


@pytest.mark.parametrize('undone', [*UNDONE])
def test_what_is_undone_is_a_setting_of_the_run(tmp_path, undone):
    settings = world_settings('gated', 1, tmp_path, **UNDONE[undone])
    assert undone == 'as it is' or settings != world_settings('gated', 1, tmp_path)


def test_an_unknown_world_is_told_before_anything_is_made(tmp_path):
    with pytest.raises(StockerError, match='one-55'): learn_world('flat', 1, tmp_path)


@pytest.mark.parametrize('name', [*GRADES])
def test_every_world_can_be_drawn(name):
    assert len(world_picture(name, 3).axes) == 2
    assert len(graded_world(name, 3, 2).episodes) == 2
