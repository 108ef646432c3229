"What training changed: the page that is committed, and how figures of several seeds come together."
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

for package in ('torch', 'transformers', 'trl', 'peft', 'datasets'): pytest.importorskip(package)

from stocker.training.results import EVALUATION, compile_results, joint_table, run_groups, seeds_of, write_tables

RUNS = Path(__file__).parents[1]/'training'/'runs'


def test_the_committed_page_is_what_its_records_say(tmp_path):
    "After a run is trained or judged again, the page has to be written again."
    for file in RUNS.glob('*/*.json'):
        (tmp_path/file.parent.name).mkdir(exist_ok=True)
        shutil.copy(file, tmp_path/file.parent.name/file.name)
    for file in RUNS.glob('*/*.png'): shutil.copy(file, tmp_path/file.parent.name/file.name)
    committed = (RUNS/'RESULTS.md').read_text(encoding='utf-8')
    notes = [line[2:] for line in committed.partition('## Not run here')[2].splitlines() if line.startswith('- ')]
    assert compile_results(tmp_path, notes).read_text(encoding='utf-8') == committed


def test_every_committed_run_says_how_it_was_made():
    for file in RUNS.glob('*/run.json'):
        record = json.loads(file.read_text(encoding='utf-8'))
        assert set(record) >= {
            'credit', 'curriculum', 'demonstrations', 'scores', 'seed', 'training', 'validation', 'weights'}
        assert record['training']['digest'] != record['validation']['digest']
        judged = json.loads((file.parent/EVALUATION).read_text(encoding='utf-8'))
        assert all({row['policy'] for row in rows} >= {'before', 'after', 'hold', 'vote mean', 'optimum'}
                   for rows in judged.values())


def tables_of(*seeds, episodes):
    "Records of runs in which `after` earned its seed."
    rows = [[{'policy': policy, 'episode': episode, 'timing': 'close', 'first': '2020-01-01', 'total_reward': reward}
             for episode in episodes(seed) for policy, reward in (('after', seed), ('hold', 0))] for seed in seeds]
    return [{'seed': seed, 'evaluation': {'a test': rows}} for seed, rows in zip(seeds, rows)]


def test_seeds_with_episodes_of_their_own_lie_under_each_other():
    table = joint_table(tables_of(1, 2, 3, episodes=lambda seed: [f'{seed}-a', f'{seed}-b']), 'a test')
    assert seeds_of(table, 'after') == ['after'] and len(table) == 12
    assert table.loc[table['policy'] == 'after', 'total_reward'].mean() == 2


def test_seeds_with_the_same_episodes_are_told_apart_and_rivals_are_counted_once():
    table = joint_table(tables_of(1, 2, episodes=lambda seed: ['a', 'b']), 'a test')
    assert seeds_of(table, 'after') == ['after seed 1', 'after seed 2']
    assert (table['policy'] == 'hold').sum() == 2


def test_a_run_that_was_not_judged_is_no_result(tmp_path):
    for name, judged in (('one_1', True), ('one_2', False)):
        (tmp_path/name).mkdir()
        (tmp_path/name/'run.json').write_text(json.dumps({'seed': int(name[-1])}))
        if judged: write_tables(tmp_path/name/EVALUATION, {'a test': pd.DataFrame({'total_reward': [np.float64(1)]})})
    assert [record['seed'] for record in run_groups(tmp_path)['one']] == [1]
