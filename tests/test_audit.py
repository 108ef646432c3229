"The audit as a whole: which checks it runs, and that each was seen failing."
import inspect
import json
import re
from pathlib import Path

import pytest

from stocker.trust import attacks, audit, books


def test_a_check_that_breaks_down_is_a_fault_and_the_others_run():
    def breaks(quick): raise KeyError('no such table')
    results = audit.audit(True, [breaks, attacks.check_fence, attacks.check_paths], progress=False)
    assert [result.holds for result in results] == [False, True, True] and 'KeyError' in results[0].faults[0]


ALL = (*audit.CHECKS, books.check_training)


def test_every_check_has_a_name_of_its_own_and_can_be_handed_something_broken():
    for check in ALL:
        parameters = list(inspect.signature(check).parameters.values())
        assert len(parameters) >= 2 and parameters[0].name == 'quick', check
    assert len(set(ALL)) == len(ALL) >= 17


def test_every_check_is_seen_failing_in_its_notebook():
    folder = Path(audit.__file__).parents[2]/'nbs'/'trust'
    if not folder.is_dir(): pytest.skip('no notebooks here')
    cells = [''.join(cell['source']) for path in folder.glob('*.ipynb')
             for cell in json.loads(path.read_text(encoding='utf-8'))['cells']]
    failing = re.compile(r'False, |assert not |\.faults')
    shown = '\n'.join(cell for cell in cells if failing.search(cell) and '#| export' not in cell)
    for check in ALL: assert check.__name__ in shown, check


def test_what_cannot_run_is_left_out(monkeypatch):
    monkeypatch.setattr(audit, 'find_spec', lambda name: None)
    assert audit.checks_of(False) == audit.CHECKS
    monkeypatch.setattr(audit, 'find_spec', lambda name: 'installed')
    assert audit.checks_of(False) == ALL and audit.checks_of(True) == audit.CHECKS
