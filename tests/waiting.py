"Waiting for what a test needs instead of for a time: a busy machine takes longer, which is no fault."
import os
import signal
import time

import pytest

PATIENCE = 600.0 # seconds; what takes longer is stuck rather than slow


def patiently(condition, seconds: float = PATIENCE, what: str = 'a condition', pause: float = 0.005):
    "The first true answer of a condition, or a failure that says what was waited for."
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if answer := condition(): return answer
        time.sleep(pause)
    pytest.fail(f'{what}: waited {seconds:g} s in vain')


def kill_once(child: int, condition, seconds: float = 0.0) -> bool:
    "Kill a forked process some seconds after a condition is met: whether it was still at work then."
    end = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < end:
        if ended := os.waitpid(child, os.WNOHANG)[0]: return not ended
        time.sleep(0.0005)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])
