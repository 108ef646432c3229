"What training changed: the page that is committed, and how figures of several seeds come together."
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

for package in ('torch', 'transformers', 'trl', 'peft', 'datasets'): pytest.importorskip(package)

from stocker.studies.statistics import evaluate
from stocker.training.results import (
    EVALUATION, comparisons, compile_results, joint_table, reopen, run_groups, seeds_of, stages, write_tables)

RUNS = Path(__file__).parents[1]/'training'/'runs'


def test_the_committed_page_is_what_its_records_say(tmp_path):
    "After a run is trained or judged again, the page has to be written again."
    for file in RUNS.glob('*/*.json'):
        (tmp_path/file.parent.name).mkdir(exist_ok=True)
        shutil.copy(file, tmp_path/file.parent.name/file.name)
    for file in RUNS.glob('*/*.png'): shutil.copy(file, tmp_path/file.parent.name/file.name)
    for file in RUNS.glob('*.parquet'): shutil.copy(file, tmp_path/file.name)
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


@pytest.mark.parametrize('folder', sorted(RUNS.glob('pocket_*_[0-9]')), ids=lambda folder: folder.name)
def test_every_test_of_a_run_was_played_under_both_timings(folder):
    judged = json.loads((folder/EVALUATION).read_text(encoding='utf-8'))
    first = [test for test in judged if not test.endswith(', next_open')]
    assert {f'{test}, next_open' for test in first} == set(judged) - set(first)
    for test, rows in judged.items():
        assert {row['timing'] for row in rows} == {'close' if test in first else 'next_open'}


def test_an_adapter_on_record_decides_what_its_record_says():
    from stocker.training.questions import EpisodeSet, load_splits
    trained = reopen(RUNS/'pocket_planted_1')
    for test, voted in load_splits('planted', 1).tests.items():
        rows = pd.DataFrame(json.loads((trained.folder/EVALUATION).read_text(encoding='utf-8'))[test])
        after = stages(trained, {test: EpisodeSet(voted[:2])})['after'][test]
        played = evaluate({'after': after}, voted[:2], progress=False)
        recorded = rows[rows['policy'] == 'after']['total_reward'].iloc[:2]
        assert played['total_reward'].tolist() == pytest.approx(recorded.tolist(), abs=1e-9)


SAID = (('higher', '▲'), ('lower', '▼'), ('No significant', '≈'), ('Too close', '?'), ('No verdict', ''))


def test_the_readme_says_of_training_what_the_page_of_results_says():
    page = (RUNS/'RESULTS.md').read_text(encoding='utf-8')
    readme = (RUNS.parents[1]/'README.md').read_text(encoding='utf-8')
    head, _, *rows = [line.strip('| ').split(' | ') for line in re.search(
        r'\| episodes \| timing \| after .*?\n\n', readme, re.S)[0].strip().splitlines()]
    seen = 0
    for title, timing, *cells in rows:
        worlds = ('planted', 'placebo without fees', 'placebo')
        world = next((world for world in worlds if title.startswith(world)), 'corpus')
        test = title.replace('placebo without fees', 'placebo') + (', next_open' if timing == 'next_open' else '')
        part = page.split(f"## pocket_{world.replace(' ', '-')}\n")[1].split('\n## ')[0]
        part = part.split(f'#### {test}\n')[1].split('\n#### ')[0]
        for rival, cell in zip(head[3:-1], cells[1:-1]):
            sentence = re.search(rf'- .*after (?:and|has .*than) {rival}(?:(?= in total)|:).*', part)
            said = next(sign for words, sign in SAID if words in sentence[0])
            assert re.sub(r'^\S+ ?', '', cell) == said, (title, timing, rival)
            seen += 1
    assert seen == 16 * 5


def test_all_comparisons_of_a_test_share_its_level():
    for name, records in run_groups(RUNS).items():
        found = comparisons(joint_table(records, next(iter(records[0]['evaluation']))))
        assert sum(1 - one.level for one in found) == pytest.approx(0.05), name


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
