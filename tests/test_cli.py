"""The command: exit codes, one-line messages, whole files, and the same from any folder."""
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from waiting import PATIENCE

import stocker
from stocker.cli import app, episodes_of, main
from stocker.council.cache import VoteCache
from stocker.market.core import StockerError, Vote, data_path
from stocker.council.council import read_trace
from stocker.market.data import read_table, write_table
from stocker.trading.env import simulate_rewards
from stocker.market.episodes import TASKS, load_task

RUN_FILES = ('episode.png', 'summary.json', 'trace.jsonl')
HEAVY = ('pandas', 'matplotlib', 'torch', 'numpy')


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    "Runs the command in this process, in a folder of its own; its exit code, output and messages."
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, 'argv', ['stocker', *map(str, arguments)])
        code = 0
        try: main()
        except SystemExit as end: code = end.code or 0
        return code, *capsys.readouterr()
    return run


@pytest.fixture
def damaged(tmp_path, monkeypatch):
    "A copy of the data set that every chapter reads while the test runs."
    folder = Path(shutil.copytree(data_path(), tmp_path/'data'))
    monkeypatch.setenv('STOCKER_DATA', str(folder))
    return folder


def process(*arguments, folder, **environment):
    code = 'from stocker.cli import main; main()'
    home = Path(stocker.__file__).resolve().parents[1]
    paths = os.pathsep.join(filter(None, [str(home), os.environ.get('PYTHONPATH')]))
    return subprocess.run([sys.executable, '-c', code, *map(str, arguments)], cwd=folder, capture_output=True,
                          text=True, timeout=PATIENCE, env={**os.environ, 'PYTHONPATH': paths, **environment})


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob('*') if path.is_file())


def refused(answer, *words):
    "The exit code is 2, and there is one line that says all of these words."
    code, _, message = answer
    assert code == 2, answer
    assert message.count('\n') == 1 and message.startswith('stocker: ') and 'Traceback' not in message
    assert all(str(word) in message for word in words), message


# --- running ---

def test_a_run_writes_its_three_files_and_nothing_else(command, tmp_path):
    code, output, message = command('run', 'task_easy', '--out', tmp_path/'results')
    assert (code, message) == (0, '')
    assert files(tmp_path) == [f'results/task_easy-close/{name}' for name in RUN_FILES]
    words = 'final value', 'reward', 'drawdown', 'trades', 'vote mean', 'hold', 'buy and hold', 'ideal', 'optimum'
    assert all(word in output for word in words)
    assert '+0.380' in output # holding, as it is on record


def test_the_files_of_a_run_agree_with_each_other_and_with_a_replay(command, tmp_path):
    code, *_ = command('run', 'task_hard', '--timing', 'next_open', '--moderator', 'vote_mean_all_in', '--out',
                       tmp_path)
    folder = tmp_path/'task_hard-vote_mean_all_in-next_open'
    trace, summary = read_trace(folder/'trace.jsonl'), json.loads((folder/'summary.json').read_text())
    rewards = simulate_rewards(load_task('task_hard'), *trace.orders, 'next_open', trace.weights).rewards[:, 0]
    assert code == 0 and rewards.tolist() == [step.terms.reward for step in trace.steps]
    assert (summary['episode'], summary['timing'], summary['sessions']) == ('task_hard', 'next_open', 42)
    assert summary['results'][0]['policy'] == 'vote_mean_all_in'
    assert summary['results'][0]['final_value'] == trace.steps[-1].value
    assert (folder/'episode.png').read_bytes().startswith(b'\x89PNG')


def test_the_default_folder_lies_where_the_command_was_called(command, tmp_path):
    assert command('run', 'task_medium')[0] == 0
    assert len(files(tmp_path/'runs'/'task_medium-close')) == 3


def contents(folder):
    return {name: (folder/name).read_bytes() for name in files(folder)}


def test_a_run_under_another_moderator_leaves_the_first_one_as_it_was(command, tmp_path):
    command('run', 'task_easy', '--out', 'pk')
    command('report', 'pk')
    before = contents(tmp_path)
    code, output, _ = command('run', 'task_easy', '--out', 'pk', '--moderator', 'vote_mean_all_in')
    after, added = contents(tmp_path), Path('pk', 'task_easy-vote_mean_all_in-close')
    assert code == 0 and f'written to {added}' in output and {name: after[name] for name in before} == before
    assert sorted(after.keys() - before) == [f'{added}/{name}' for name in RUN_FILES]
    assert read_trace(tmp_path/'pk'/'task_easy-close'/'trace.jsonl').council == 'vote_mean'


def test_a_report_beside_another_trace_is_named_and_kept(command, tmp_path):
    command('run', 'task_easy')
    command('run', 'task_easy', '--moderator', 'vote_mean_all_in')
    command('report', 'runs')
    plain, other = (tmp_path/'runs'/f'task_easy{label}-close' for label in ('', '-vote_mean_all_in'))
    page = (plain/'report.html').read_bytes()
    for name in ('trace.jsonl', 'summary.json'): shutil.copy(other/name, plain/name)
    code, output, message = command('report', plain)
    assert code == 0 and 'report-2.html' in output and (plain/'report.html').read_bytes() == page
    assert message == f"{plain/'report.html'}: not made from the trace beside it\n"


def test_a_second_run_of_the_same_name_gets_a_number(command, tmp_path):
    command('run', 'task_easy')
    (tmp_path/'runs'/'task_easy-close'/'summary.json').write_text('mine')
    before = contents(tmp_path)
    outputs = [command('run', 'task_easy')[1] for _ in range(2)]
    after = contents(tmp_path)
    assert [text.strip().rpartition('close')[2] for text in outputs] == ['-2', '-3']
    assert {name: after[name] for name in before} == before and len(after) == 9


def test_a_corpus_run_under_another_moderator_leaves_the_first_table(command, tmp_path):
    options = 'corpus', 'run', '--split', 'tasks', '--few', '1'
    for more in ((), ('--moderator', 'vote_mean_all_in'), ()): assert command(*options, *more)[0] == 0
    assert command(*options[:-1], '2')[0] == 0
    names = [name for name in files(tmp_path/'corpus') if not name.startswith('parts')]
    assert names == ['tasks-2.parquet', 'tasks-vote_mean_all_in.parquet', 'tasks.parquet']


def test_packing_replaces_a_file_only_when_it_is_told_to(command, tmp_path):
    (tmp_path/'votes.parquet').write_text('mine')
    VoteCache(tmp_path/'votes').put('news', 'AAPL', '2023-08-07', '0' * 64, Vote(signal=0, confidence=0, rationale=''),
                                    model='a model')
    refused(command('cache', 'pack', 'votes.parquet', '--root', 'votes'), 'votes.parquet', 'it is there already')
    assert (tmp_path/'votes.parquet').read_text() == 'mine'
    assert command('cache', 'pack', 'votes.parquet', '--root', 'votes', '--replace')[0] == 0


def test_all_tasks_in_a_process_of_its_own_from_another_folder(tmp_path):
    done = process('run', 'all', '--out', 'here', folder=tmp_path)
    assert done.returncode == 0 and done.stderr == ''
    assert len(files(tmp_path/'here')) == 3 * len(TASKS)


def test_the_data_set_may_be_named_by_a_relative_path(command, monkeypatch, tmp_path):
    monkeypatch.setenv('STOCKER_DATA', os.path.relpath(data_path(), tmp_path))
    assert command('run', 'task_hard')[0] == 0


def test_help_and_nothing_at_all(command):
    assert command('--help')[0] == 0
    code, output, message = command()
    assert code == 2 and 'run' in output + message


# --- refusing ---

def test_an_unknown_task_is_told_the_known_ones(command, tmp_path):
    refused(command('run', 'task_x'), 'task_x', *TASKS, 'all')
    assert files(tmp_path) == []
    with pytest.raises(StockerError): episodes_of('')
    assert [episode.name for episode in episodes_of('all')] == list(TASKS)


@pytest.mark.parametrize('option, value, known', [
    ('--moderator', 'nobody', ['vote_mean', 'vote_mean_all_in']), ('--timing', 'never', ['close', 'next_open'])])
def test_an_unknown_choice_is_told_the_known_ones_in_one_line(option, value, known, command, tmp_path):
    refused(command('run', 'task_easy', option, value), value, *known)
    assert files(tmp_path) == []


@pytest.mark.parametrize('arguments, word', [
    (['run'], 'target'), (['run', 'task_easy', '--speed', '3'], '--speed'), (['fly'], 'fly'),
    (['run', 'task_easy', '--out'], '--out')])
def test_a_command_that_cannot_be_read_is_refused_in_one_line(arguments, word, command):
    refused(command(*arguments), word)


@pytest.mark.parametrize('name', ['prices', 'calendar', 'news', 'forum', 'macro', 'earnings'])
@pytest.mark.parametrize('length', [500, None])
def test_a_damaged_or_missing_table_is_named_and_nothing_is_written(name, length, damaged, command, tmp_path):
    path = damaged/f'{name}.parquet'
    content = path.read_bytes()
    path.unlink()
    if length is not None: path.write_bytes(content[:length])
    refused(command('run', 'task_easy', '--out', tmp_path/'results'), path)
    assert not (tmp_path/'results').exists()


def test_a_data_set_that_is_not_there_is_named(command, monkeypatch, tmp_path):
    monkeypatch.setenv('STOCKER_DATA', str(tmp_path/'nowhere'))
    refused(command('run', 'task_easy'), tmp_path/'nowhere'/'prices.parquet', 'missing')


def test_a_process_says_the_same_without_a_traceback(tmp_path):
    done = process('run', 'all', folder=tmp_path, STOCKER_DATA=str(tmp_path/'nowhere'))
    refused((done.returncode, done.stdout, done.stderr), tmp_path/'nowhere'/'prices.parquet')
    assert files(tmp_path) == []


@pytest.mark.parametrize('place', ['a file', 'below a file'])
def test_results_that_cannot_be_written_are_refused_in_one_line(place, command, tmp_path):
    (tmp_path/'taken').write_text('x')
    out = {'a file': 'taken', 'below a file': 'taken/deeper'}[place]
    refused(command('run', 'task_easy', '--out', tmp_path/out), tmp_path/out)
    assert not [name for name in files(tmp_path) if name.endswith('.tmp')]


@pytest.mark.parametrize('arguments, words', [
    (['--source', 'nowhere'], ['nowhere', 'yahoo']), (['--source', 'Yahoo!'], ['Yahoo!', 'yahoo']),
    (['--source', '.'], ['AAPL.csv', 'missing']), (['--source', '.', '--facts', 'nowhere'], ['nowhere']),
    (['--source', '.', '--forum', 'AAPL'], ['AAPL']),
    (['--source', '.', '--forum', 'AAPL=nowhere.jsonl'], ['nowhere.jsonl']),
    (['--source', '.', '--forum', '../x=nowhere.jsonl'], ['../x'])], ids=str)
def test_a_build_from_nothing_is_refused_and_leaves_nothing(arguments, words, command, tmp_path):
    refused(command('data', 'build', '--out', tmp_path/'new'/'data', *arguments), *words)
    assert files(tmp_path) == []


@pytest.mark.parametrize('end', ['tomorrow', '2023-13-01', '1990-01-01'])
def test_an_impossible_last_day_is_refused(end, command, tmp_path):
    lines = [f'2023-01-{day:02},1,1,1,1,1,1' for day in (3, 4, 5)]
    (tmp_path/'AAPL.csv').write_text('\n'.join(['date,open,high,low,close,adj_close,volume', *lines]))
    refused(command('data', 'build', '--out', 'new', '--source', '.', '--end', end), end)
    assert not (tmp_path/'new').exists()


def test_an_unknown_benchmark_is_told_the_known_ones(command):
    refused(command('bench', '--only', 'luck'), 'luck', 'steps', 'charts', 'council', 'sweep', 'start')


# --- checking ---

def test_a_sound_data_set_passes_its_check(command):
    assert command('data', 'check') == (0, 'the data set is sound\n', '')


def test_a_damaged_price_fails_the_check_by_file_ticker_and_date(damaged, command):
    table = read_table(damaged/'prices.parquet')
    rows = (table['ticker'] == 'INTC') & (table['date'] == '2024-01-25')
    table.loc[rows, 'high'] = table.loc[rows, 'low'] / 2
    write_table(table, damaged/'prices.parquet')
    code, output, message = command('data', 'check')
    assert code == 1 and output == ''
    assert all(line.startswith(str(damaged)) for line in message.splitlines())
    assert any(all(word in line for word in ('prices.parquet', 'INTC', '2024-01-25')) for line in message.splitlines())


@pytest.mark.parametrize('damage', ['truncated', 'no record', 'broken record', 'broken fact', 'no chart', 'no folder'])
def test_every_damage_fails_the_check_with_one_line_each(damage, damaged, command):
    if damage == 'truncated': (damaged/'ideal.parquet').write_bytes((damaged/'ideal.parquet').read_bytes()[:300])
    if damage == 'no record': (damaged/'manifest.json').unlink()
    if damage == 'broken record': (damaged/'manifest.json').write_text('{"files": {')
    if damage == 'broken fact': (damaged/'facts'/'macro.csv').write_text('country\nUS\n')
    if damage == 'no chart': (damaged/'charts'/'INTC_2024-01-25.png').unlink()
    code, output, message = command('data', 'check', '--data', damaged/'deeper' if damage == 'no folder' else damaged)
    assert code == 1 and output == '' and message
    assert all(line.startswith(str(damaged)) for line in message.splitlines())


# --- importing ---

@pytest.mark.parametrize('module, absent', [('stocker', HEAVY), ('stocker.cli', ('pandas', 'matplotlib', 'torch')),
                                            ('stocker.trading.env', ('matplotlib', 'mplfinance', 'yfinance', 'torch'))])
def test_importing_brings_nothing_heavy_along(module, absent):
    code = f'import {module}, sys; print(*[name for name in {absent!r} if name in sys.modules])'
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.strip() == ''


def test_the_installed_package_needs_no_development_tools():
    tools = 'nbdev', 'fastcore', 'execnb', 'hypothesis', 'pytest', 'IPython'
    code = ('import sys, stocker.cli, stocker.bench, stocker.trading.dataset, stocker.council.evaluation;'
            f'print(*[name for name in {tools} if name in sys.modules])')
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.strip() == ''


def command_names(app):
    "All commands, those of groups as 'group command'."
    names = {command.name or command.callback.__name__.replace('_', '-') for command in app.registered_commands}
    for group in app.registered_groups:
        names |= {group.name} | {f'{group.name} {name}' for name in command_names(group.typer_instance)}
    return names


def test_every_command_that_the_readme_names_is_there():
    known, named = command_names(app), set()
    readme = (Path(__file__).parent.parent/'README.md').read_text(encoding='utf-8')
    for code in re.findall(r'`stocker ([^`]+)`', readme):
        first, *rest = code.replace('\\|', '|').split()
        subcommands = rest[0].split('|') if rest and f'{first} {rest[0].split("|")[0]}' in known else []
        named |= {f'{first} {name}' for name in subcommands} or {first}
    assert len(named) > 12
    assert named <= known, f'not there: {sorted(named - known)}'


def test_training_gets_what_the_command_says(command, monkeypatch):
    from types import SimpleNamespace

    from stocker.trading.reward import RewardWeights
    got = {}
    monkeypatch.setattr('stocker.training.questions.load_splits', lambda *given: given)
    monkeypatch.setattr('stocker.training.grpo.train', lambda splits, settings: got.update(
        splits=splits, settings=settings) or SimpleNamespace(record={'best_step': 7}))
    monkeypatch.setattr('stocker.training.results.judge', lambda trained, splits: got.update(judged=splits) or {
        'test': pd.DataFrame({'policy': ['after'], 'unreadable': [got.get('unreadable', 0.0)]})})
    monkeypatch.setattr('stocker.training.results.compile_results', lambda folder: folder/'RESULTS.md')
    code, out, _ = command('train', '--episodes', 'placebo', '--seed', '3', '--credit', 'step', '--rounds', '2',
                           '--transaction-cost', '0', '--set', 'beta=0.1', '--brief', '--out', 'here/one_3')
    assert code == 0 and 'step 7 was kept' in out and got['splits'] == got['judged'] == ('placebo', 3, 'close')
    settings = got['settings']
    assert (settings.model, settings.credit, settings.seed, settings.rounds) == ('pocket', 'step', 3, 2)
    assert settings.weights == RewardWeights(transaction_cost=0.0) and settings.trainer == {'beta': 0.1}
    assert settings.brief and settings.out == Path('here/one_3')
    assert '100.0% of its decisions could be read' in out
    got['unreadable'] = 1.0
    code, out, _ = command('train', '--out', 'here/two_3')
    assert code == 3 and '0.0% of its decisions could be read' in out
    assert command('train', '--transaction-cost', '-0.1')[0] == 2


def test_worlds_are_listed_and_drawn(command, tmp_path):
    code, out, _ = command('worlds')
    assert code == 0 and out.splitlines()[0].startswith('one-55') and 'stormy' in out
    code, out, _ = command('worlds', 'gated', '--out', str(tmp_path/'gated.png'))
    assert code == 0 and (tmp_path/'gated.png').stat().st_size > 10_000
    code, _, error = command('worlds', 'flat')
    assert code == 2 and 'choose one of one-55' in error


def test_learning_a_world_keeps_its_rows(command, tmp_path, monkeypatch):
    import stocker.training.world_results as world_results
    from test_world_results import made_rows
    monkeypatch.setattr(world_results, 'learn_world', lambda name, seed: made_rows(name, seed))
    code, out, _ = command('worlds', 'xor', '--learn', '--seeds', '2', '--out', str(tmp_path))
    assert code == 0 and (tmp_path/'worlds.parquet').is_file()
    assert 'seed 1: **xor**' in out and 'seed 2: **xor**' in out


def test_a_model_may_be_asked_how_much_to_own(command, monkeypatch):
    from stocker import cli
    from stocker.llm.client import ScriptedClient
    monkeypatch.setattr(cli, 'client_of', lambda model, recording: ScriptedClient([]))
    council = cli.council_of('smollm2', 'exposures', 'close', Path('votes'))
    assert council.moderator.form == 'exposures'
    assert cli.council_of('smollm2', None, 'close', Path('votes')).moderator.form == 'orders'
    code, _, error = command('run', 'task_easy', '--moderator', 'exposures')
    assert code == 2 and 'name one with --model' in error
