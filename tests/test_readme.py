"""The README: its code runs as copied, its links lead somewhere, its commands exist."""
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
