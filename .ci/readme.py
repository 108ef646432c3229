"Write README.md from nbs/index.ipynb: prose, code, and the outputs its cells really gave."
import base64
import json
import re
from pathlib import Path
from posixpath import normpath

TOP = Path(__file__).resolve().parent.parent
IMAGES = TOP / 'nbs' / 'images'


def output_text(output: dict, name: str) -> str:
    "One output as markdown; a picture is written to nbs/images under the name."
    data = output.get('data', {})
    if 'image/png' in data:
        IMAGES.mkdir(exist_ok=True)
        (IMAGES / f'{name}.png').write_bytes(base64.b64decode(''.join(data['image/png'])))
        return f'![{name}](images/{name}.png)'
    if 'text/markdown' in data: return ''.join(data['text/markdown'])
    text = ''.join(data.get('text/plain', output.get('text', [])))
    return f'```\n{text.rstrip()}\n```' if text.strip() else ''


def cell_text(cell: dict, number: int) -> str:
    "One cell as markdown; `#| hide` drops it, `#| echo: false` keeps only what it printed."
    source = ''.join(cell['source'])
    if cell['cell_type'] == 'markdown': return source
    if re.search(r'^#\|\s*(hide|default_exp)', source, re.M): return ''
    shown = '' if re.search(r'^#\|\s*echo:\s*false', source, re.M) else f'```python\n{source.strip()}\n```'
    name = match[1] if (match := re.search(r'^#\|\s*name:\s*(\S+)', source, re.M)) else f'index-{number}'
    return '\n\n'.join(filter(None, [shown, *(output_text(output, name) for output in cell['outputs'])]))


def readme() -> str:
    "The whole page."
    cells = json.loads((TOP / 'nbs' / 'index.ipynb').read_text(encoding='utf-8'))['cells']
    page = '\n\n'.join(filter(None, (cell_text(cell, i) for i, cell in enumerate(cells)))) + '\n'
    return re.sub(r'\]\((?!https?:|#)([^)]+)\)', lambda link: f"]({normpath('nbs/' + link[1])})", page)


if __name__ == '__main__': (TOP / 'README.md').write_text(readme(), encoding='utf-8')
