"The tuning notebook: it runs from top to bottom, with rules and with a language model, and leaves its files behind."
import json
from pathlib import Path

import pytest
from waiting import PATIENCE

from stocker.market.core import digest
from stocker.council.council import play, read_trace, rule_council
from stocker.trading.env import StockerEnv
from stocker.studies.tuning import ManyWeights, choose, replay, seed_grid, sweep

nbclient, nbformat = pytest.importorskip('nbclient'), pytest.importorskip('nbformat')
NOTEBOOK = Path(__file__).parents[1]/'training'/'tune_easy_gemma4.ipynb'
SCRIPTED = '''
import stocker.llm.models
import stocker.llm.smollm2
from stocker.llm.client import ScriptedClient

def answers(messages):
    "Votes for the seats; for the moderator an order, with one answer that cannot be read."
    text = messages[-1]['content']
    if 'Your order' not in text: return '{"signal": 0.5, "confidence": 0.5, "rationale": "It looks fine."}'
    if 'Decision 5 of 43' in text: return 'I would rather not say.'
    return '{"side": "buy", "quantity": 1, "rationale": "One more."}'

def refuse(**options): raise AssertionError('the other model was asked for')

script = ScriptedClient(answers)
stocker.llm.smollm2.smollm2_client, stocker.llm.models.gemma_client = refuse, lambda: script
'''
AFTERWARDS = '''
print(script.calls, 'calls')
'''


def execute(folder, notebook):
    "Run a notebook in a folder; the text it printed."
    resources = {'metadata': {'path': str(folder)}}
    nbclient.NotebookClient(notebook, timeout=PATIENCE, kernel_name='python3', resources=resources).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == 'code' for output in cell.outputs]
    return ''.join(output.get('text', '') for output in outputs if output.get('name') == 'stdout')


@pytest.fixture
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def test_it_runs_with_rules(notebook, tmp_path):
    notebook.cells.append(nbformat.v4.new_code_cell("print('torch' in sys.modules, 'openai' in sys.modules)"))
    text = execute(tmp_path, notebook)
    assert text.endswith('False False\n')
    folder, = (tmp_path/'training'/'runs').glob('easy_rules_*')
    assert sorted(file.name for file in folder.iterdir()) == [
        'chosen_settings.json', 'heat_map.png', 'sweep.parquet', 'trace.jsonl']
    assert [path.name for path in tmp_path.iterdir()] == ['training']
    trace = read_trace(folder/'trace.jsonl')
    assert digest(trace) == digest(play(StockerEnv('task_easy'), rule_council()))
    assert replay(trace, trace.weights).reward.tolist() == [step.terms.reward for step in trace.steps]
    written = json.loads((folder/'chosen_settings.json').read_text(encoding='utf-8'))
    assert written['trace'] == digest(trace) and set(written['choice']) == set(ManyWeights._fields)
    assert {key: written[key] for key in ('choice', 'total', 'reason', 'alternatives')} == choose(
        sweep(trace, seed_grid()))


def test_it_runs_with_a_language_model_in_all_seats(notebook, tmp_path):
    choice, = (cell for cell in notebook.cells if cell.source.startswith("model = 'rules'"))
    choice.source = "model = 'gemma'"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(SCRIPTED))
    notebook.cells.append(nbformat.v4.new_code_cell(AFTERWARDS))
    (tmp_path/'training').mkdir()
    text = execute(tmp_path/'training', notebook)
    folder, = (tmp_path/'training'/'runs').glob('easy_gemma4_*')
    trace = read_trace(folder/'trace.jsonl')
    unreadable = [step.step for step in trace.steps if step.decision.unreadable]
    assert (trace.council, unreadable, trace.steps[0].traded) == ('script', [4], 1.0)
    asked = sum(hasattr(vote, 'signal') for step in trace.steps for vote in step.decision.votes.values())
    assert f'{asked + len(trace.steps)} calls' in text, 'each vote is asked for once, then it comes from the cache'
    assert len(list((tmp_path/'training'/'.cache'/'council').rglob('*.json'))) == asked
    assert (folder/'heat_map.png').stat().st_size > 10_000


def test_it_is_committed_as_it_ran(notebook):
    first, code = notebook.cells[0].source, [cell for cell in notebook.cells if cell.cell_type == 'code']
    assert first.startswith('# ') and 'blob/main/training/tune_easy_gemma4.ipynb' in first
    assert "'google.colab' in sys.modules" in code[0].source and 'torchao' in code[0].source
    assert not [word for word in code[0].source.split() if word.strip('"').startswith('torch>')]
    assert set(notebook.metadata) == {'kernelspec'} and not any(cell.metadata for cell in notebook.cells)
    assert sum(bool(cell.outputs) for cell in code) >= 8
    text = json.dumps([cell.outputs for cell in code if not any('data' in out and 'image/png' in out.data
                                                               for out in cell.outputs)])
    assert '/home' not in text and '/tmp' not in text and 'stderr' not in text
