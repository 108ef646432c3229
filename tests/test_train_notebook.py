"The training notebook: a small run goes from top to bottom and leaves nothing outside its folder."
import json
from pathlib import Path

import pytest
from waiting import PATIENCE

nbclient, nbformat = pytest.importorskip('nbclient'), pytest.importorskip('nbformat')
for package in ('torch', 'transformers', 'trl', 'peft', 'datasets'): pytest.importorskip(package)
NOTEBOOK = Path(__file__).parents[1]/'training'/'train_grpo.ipynb'


@pytest.fixture
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def test_it_trains_judges_and_saves(notebook, tmp_path, monkeypatch):
    for name, value in (('STOCKER_ROUNDS', '1'), ('STOCKER_PROMPTS', '16'), ('HF_HUB_OFFLINE', '1')):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv('STOCKER_OUT', raising=False)
    there = sorted(NOTEBOOK.parent.rglob('*'))
    resources = {'metadata': {'path': str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=PATIENCE, kernel_name='python3', resources=resources).execute()
    assert sorted(NOTEBOOK.parent.rglob('*')) == there
    assert [path.name for path in tmp_path.iterdir()] == ['runs']
    folder = tmp_path/'runs'/'notebook'
    assert sorted(path.name for path in folder.iterdir()) == [
        'checkpoints', 'evaluation.json', 'moderator-lora', 'portfolios.png', 'run.json']
    record = json.loads((folder/'run.json').read_text(encoding='utf-8'))
    assert (record['steps'], record['horizon'], record['seed']) == (1, 2, 1)


def test_it_is_committed_as_it_ran(notebook):
    first, code = notebook.cells[0].source, [cell for cell in notebook.cells if cell.cell_type == 'code']
    assert first.startswith('# ') and 'blob/main/training/train_grpo.ipynb' in first
    assert "'google.colab' in sys.modules" in code[0].source and 'torchao' in code[0].source
    assert set(notebook.metadata) == {'kernelspec'} and not any(cell.metadata for cell in notebook.cells)
    assert sum(bool(cell.outputs) for cell in code) >= 7
    text = json.dumps([{name: data for name, data in output.get('data', {'text': output.get('text')}).items()
                        if name != 'image/png'} for cell in code for output in cell.outputs])
    assert not any(word in text for word in ('/home', '/tmp', '/work', 'stderr', 'Loading weights'))
