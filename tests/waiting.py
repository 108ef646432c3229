"Waiting for what a test needs instead of for a time: a busy machine takes longer, which is no fault."
import time

import pytest

PATIENCE = 300.0 # seconds; what takes longer is stuck rather than slow


def patiently(condition, seconds: float = PATIENCE, what: str = 'a condition', pause: float = 0.005):
    "The first true answer of a condition, or a failure that says what was waited for."
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if answer := condition(): return answer
        time.sleep(pause)
    pytest.fail(f'{what}: waited {seconds:g} s in vain')
