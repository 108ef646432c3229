"""The README: its code runs as copied, its links lead somewhere, its commands exist."""
import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT/'README.md').read_text(encoding='utf-8')
BLOCKS = re.findall(r'```python\n(.*?)```', README, re.S)


def test_its_code_runs_as_copied_in_order_in_a_clean_process(tmp_path):
    "What the page's own setup imports is not there for a reader."
    assert len(BLOCKS) >= 2
    done = subprocess.run([sys.executable, '-c', '\n'.join(BLOCKS)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-500:]


@pytest.mark.parametrize('link', sorted(set(re.findall(r'\]\((?!https?:|#)([^)#]+)', README))))
def test_its_links_lead_to_files(link):
    assert (ROOT/link).exists()


@pytest.mark.parametrize('path', sorted(set(re.findall(r'/blob/main/([^)\s]+\.ipynb)', README))))
def test_its_badges_open_notebooks_that_are_there(path):
    assert (ROOT/path).is_file()


@pytest.mark.parametrize('path', sorted(ROOT.glob('nbs/**/*.ipynb')), ids=lambda path: path.stem)
def test_the_links_and_the_badge_of_a_notebook_lead_to_files(path):
    text = path.read_text(encoding='utf-8')
    for link in set(re.findall(r'\]\((?!https?:|#|attachment|data:)([^)#\s\\]+\.(?:ipynb|md|yaml|py))', text)):
        assert (path.parent/link).exists(), link
    for badge in set(re.findall(r'colab\.research\.google\.com/github/[^/]+/[^/]+/blob/main/([^)\s\\]+)', text)):
        assert (ROOT/badge).is_file(), badge


# Figures

WORDS = ('four five six seven eight nine ten eleven twelve dozen hundred thousand thousands million half third quarter '
         'twice').split()
TYPED = ('Python 3.10', 'exit code 2', 'Apache-2.0', 'at 95 %', 'SmolLM2', 'E4B', 'T4', 'Gemma 4', 'sha256')


def prose(text):
    "What a reader reads as words: without code, addresses and what is not a figure."
    text = re.sub(r'```.*?```', '', text, flags=re.S)
    text = re.sub(r'`[^`]*`|\]\([^)]*\)|https?://\S+', '', text)
    for known in TYPED: text = text.replace(known, '')
    return text


def typed_figures(text):
    "Figures in digits and in words."
    return re.findall(rf'\d[\d,.]*|\b(?:{"|".join(WORDS)})\b', prose(text), re.I)


def page_strings(source):
    "What a cell writes on the page of itself: the fixed parts of its strings, without what formats and finds."
    tree, inside = ast.parse(source), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FormattedValue) and node.format_spec: inside |= {*map(id, ast.walk(node.format_spec))}
    calls = [node for node in ast.walk(tree)
             if isinstance(node, ast.Call) and getattr(node.func, 'id', '') in ('Markdown', 'table')]
    return [one.value for call in calls for one in ast.walk(call)
            if isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in inside]


def test_no_figure_is_typed_that_a_cell_could_give():
    "Prose has no figures of its own, and neither have the sentences that cells fill in."
    found = {}
    for cell in json.loads((ROOT/'nbs'/'index.ipynb').read_text(encoding='utf-8'))['cells']:
        source = ''.join(cell['source'])
        texts = [source] if cell['cell_type'] == 'markdown' else page_strings(re.sub(r'^%.*$', '', source, flags=re.M))
        if figures := [figure for text in texts for figure in typed_figures(text)]: found[cell['id']] = figures
    assert not found


@pytest.mark.parametrize('text, figures', [
    ('Seven specialists and 96 answers', ['Seven', '96']), ('half an hour', ['half']), ('`stocker demo 3`', []),
    ('since Python 3.10, a [page](one_2.md)', []), ('from 2015 on, 1,180 MB', ['2015', '1,180'])])
def test_typed_figures_are_found(text, figures):
    assert typed_figures(text) == figures


def test_what_cells_compute_is_not_typed():
    assert typed_figures(''.join(page_strings("Markdown(f'{share:.2f} of seven')"))) == ['seven']
    assert page_strings("test_eq(3, '4')") == []
