"The chapters as a whole: each builds on earlier ones only."
import ast
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHAPTERS = sorted((ROOT/'nbs').rglob('[0-9]*.ipynb'), key=lambda path: path.name)
PARTS = ('market', 'trading', 'council', 'llm', 'studies', 'training', 'pages', 'serving', 'trust')


def code_of(path):
    "The code cells of a notebook, without lines that only a notebook understands."
    cells = json.loads(path.read_text(encoding='utf-8'))['cells']
    return [''.join(line for line in cell['source'] if not line.lstrip().startswith(('%', '!')))
            for cell in cells if cell['cell_type'] == 'code' and 'google.colab' not in ''.join(cell['source'])]


def imported(code):
    "The modules of Stocker that a cell imports."
    for node in ast.walk(ast.parse(code)):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.Import): yield from names
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f'{node.module}.{name}' for name in names)


def module_of(path):
    "The module that a notebook exports; None for one that exports none."
    cells = json.loads(path.read_text(encoding='utf-8'))['cells']
    found = [match[1] for cell in cells if (match := re.search(r'^#\| default_exp (\S+)', ''.join(cell['source'])))]
    assert len(found) <= 1
    return found[0] if found else None


def test_a_chapter_imports_from_earlier_ones_only():
    "In test cells too."
    modules = {f'stocker.{module}': path.name[:2] for path in CHAPTERS if (module := module_of(path))}
    assert len(modules) > 40
    last = {path: path.name[:2] if module_of(path) else f'{path.name[0]}9' for path in CHAPTERS} # a page shows its part
    late = [(path.stem, module) for path in CHAPTERS for code in code_of(path) for module in imported(code)
            if modules.get(module, '') > last[path]]
    assert late == []


def test_every_number_is_there_once_and_every_module_is_written_by_one_notebook():
    numbers, modules = [path.name[:2] for path in CHAPTERS], [*filter(None, map(module_of, CHAPTERS))]
    assert len(set(numbers)) == len(numbers) and len(set(modules)) == len(modules)


def test_a_notebook_lies_in_the_folder_of_its_part_and_each_part_opens_with_a_page():
    for path in CHAPTERS:
        place, module = path.relative_to(ROOT/'nbs').parts[:-1], module_of(path)
        if module: assert module.split('.')[:-1] == list(place), path
    for part in PARTS:
        first = min((ROOT/'nbs'/part).glob('*.ipynb'), key=lambda path: path.name)
        assert first.name == f'{PARTS.index(part)}0_{part}.ipynb' and module_of(first) is None


def test_no_module_outgrows_its_page():
    long = {str(path.relative_to(ROOT)): count for path in (ROOT/'stocker').rglob('*.py')
            if path.name != '_modidx.py' and (count := len(path.read_text(encoding='utf-8').splitlines())) > 760}
    assert long == {}


def test_no_output_is_a_warning_or_names_a_machine():
    for path in [*(ROOT/'nbs').rglob('*.ipynb'), *(ROOT/'training').glob('*.ipynb')]:
        for cell in json.loads(path.read_text(encoding='utf-8'))['cells']:
            for output in cell.get('outputs', []):
                assert output.get('name') != 'stderr', (path, cell['id'])
                assert 'site-packages' not in json.dumps(output), (path, cell['id'])
