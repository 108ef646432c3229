"The chapters as a whole: each builds on earlier ones only."
import ast
import json
from pathlib import Path

CHAPTERS = sorted((Path(__file__).parents[1]/'nbs').rglob('[0-9]*.ipynb'))


def code_of(path):
    "The code cells of a notebook, without lines that only a notebook understands."
    cells = json.loads(path.read_text(encoding='utf-8'))['cells']
    return [''.join(line for line in cell['source'] if not line.lstrip().startswith(('%', '!')))
            for cell in cells if cell['cell_type'] == 'code' and 'google.colab' not in ''.join(cell['source'])]


def imported(code):
    "The modules of Stocker that a cell imports."
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.ImportFrom) or not node.module: continue
        if node.module.startswith('stocker.'): yield node.module.split('.')[1]
        if node.module == 'stocker': yield from (name.name for name in node.names)


def test_a_chapter_imports_from_earlier_ones_only():
    modules = {}
    for path in CHAPTERS:
        first = ''.join(json.loads(path.read_text(encoding='utf-8'))['cells'][1]['source'])
        if first.startswith('#| default_exp '): modules[first.split()[2]] = path.stem
    assert len(modules) > 25
    late = [(path.stem, module) for path in CHAPTERS for code in code_of(path) for module in imported(code)
            if module in modules and modules[module][:2] > path.stem[:2]]
    assert late == []
