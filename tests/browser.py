"""A headless Chromium for tests, driven over its debugging protocol; Jupyter brings the one package that this needs."""
import base64
import json
import os
import shutil
import socket
import subprocess
import tempfile
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import PATIENCE, patiently

CHROMIUM = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({})) # this machine needs no proxy to reach itself
SWITCHES = ('--headless', '--no-sandbox', '--disable-gpu', '--no-first-run', '--no-proxy-server', '--hide-scrollbars',
            '--disable-background-networking', '--disable-component-update', '--disable-extensions',
            '--disable-dev-shm-usage', '--remote-debugging-port=0')
KEYS = {'ArrowLeft': 37, 'ArrowRight': 39, 'Home': 36, 'End': 35}


def pictures() -> Path:
    "Where screenshots are left to be looked at: STOCKER_SCREENSHOTS, or a temporary folder."
    folder = Path(os.environ.get('STOCKER_SCREENSHOTS') or Path(tempfile.gettempdir())/'stocker-screenshots')
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Page:
    "One tab: runs scripts, presses keys, takes pictures, and keeps every error and every request."

    def __init__(self, talk):
        self.talk, self.number, self.problems, self.requests = talk, 0, [], []
        for domain in ('Page', 'Runtime', 'Log', 'Network'): self.call(f'{domain}.enable')
        self.call('Emulation.setFocusEmulationEnabled', enabled=True) # as if the window were in front

    def note(self, event: dict) -> None:
        "Keep what a test may not overlook."
        method, values = event.get('method'), event.get('params', {})
        if method == 'Runtime.exceptionThrown':
            details = values['exceptionDetails']
            self.problems.append(details.get('exception', {}).get('description') or details['text'])
        if method == 'Log.entryAdded' and values['entry']['level'] == 'error':
            self.problems.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")
        if method == 'Runtime.consoleAPICalled' and values['type'] == 'error':
            self.problems.append(' '.join(str(a.get('value', a.get('description'))) for a in values['args']))
        if method == 'Network.requestWillBeSent': self.requests.append(values['request']['url'])

    def call(self, method: str, **values):
        "One command of the protocol and its answer."
        self.number += 1
        self.talk.send(json.dumps({'id': self.number, 'method': method, 'params': values}))
        while True:
            answer = json.loads(self.talk.recv())
            if answer.get('id') == self.number: break
            self.note(answer)
        if 'error' in answer: raise RuntimeError(f'{method}: {answer["error"]["message"]}')
        return answer['result']

    def run(self, script: str):
        "The value of a JavaScript expression; a promise is waited for."
        answer = self.call('Runtime.evaluate', expression=script, returnByValue=True, awaitPromise=True)
        if fault := answer.get('exceptionDetails'):
            raise RuntimeError(fault.get('exception', {}).get('description') or fault['text'])
        return answer['result'].get('value')

    def open(self, address: str) -> None:
        "Go to an address and wait until it is loaded."
        self.call('Page.navigate', url=address)
        self.until('document.readyState === "complete" && location.href !== "about:blank"')

    def until(self, condition: str, seconds: float = PATIENCE):
        "Wait for a JavaScript expression to become true."
        return patiently(lambda: self.run(condition), seconds, condition)

    def press(self, key: str) -> None:
        "Press a key in the element that has the focus."
        values = {'key': key, 'code': key, 'windowsVirtualKeyCode': KEYS[key]}
        self.call('Input.dispatchKeyEvent', type='rawKeyDown', **values)
        self.call('Input.dispatchKeyEvent', type='keyUp', **values)

    def look(self, width: int, height: int, dark: bool = False) -> None:
        "Set the size of the window and the theme of the system."
        self.call('Emulation.setDeviceMetricsOverride', width=width, height=height, deviceScaleFactor=1, mobile=False)
        theme = {'name': 'prefers-color-scheme', 'value': 'dark' if dark else 'light'}
        self.call('Emulation.setEmulatedMedia', features=[theme])

    def picture(self, name: str) -> bytes:
        "Leave a picture of the window to be looked at."
        png = base64.b64decode(self.call('Page.captureScreenshot', format='png')['data'])
        (pictures()/name).write_bytes(png)
        return png


@contextmanager
def browser():
    "A tab of a Chromium of its own; where there is none, the test is skipped and says so."
    if CHROMIUM is None: pytest.skip('no Chromium here: apt-get install chromium, and this test runs')
    websocket = pytest.importorskip('websocket', reason='websocket-client comes with Jupyter: pip install jupyter')
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen([CHROMIUM, *SWITCHES, f'--user-data-dir={folder}', 'about:blank'],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            said = Path(folder)/'DevToolsActivePort'
            patiently(lambda: said.exists() and said.read_text().count('\n') >= 1, what='Chromium starts')
            port = said.read_text().split()[0]
            tabs = json.load(DIRECT.open(f'http://127.0.0.1:{port}/json/list'))
            address = next(tab['webSocketDebuggerUrl'] for tab in tabs if tab['type'] == 'page')
            line = socket.create_connection(('127.0.0.1', int(port)), timeout=PATIENCE) # past any proxy
            talk = websocket.create_connection(address, timeout=PATIENCE, suppress_origin=True, socket=line)
            yield Page(talk)
            talk.close()
        finally:
            process.terminate()
            process.wait(timeout=PATIENCE)
