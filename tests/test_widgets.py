"""The widgets: in Python under both major versions of ipywidgets, and by hand in a real JupyterLab."""
import json
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from browser import DIRECT, KEYS, browser
from waiting import PATIENCE, patiently

from stocker.market.core import ROLES, Abstention, Vote
from stocker.council.council import Council, play, rule_council, vote_mean
from stocker.trading.env import StockerEnv
from stocker.market.episodes import load_task
from stocker.pages.inspection import CHANGES
from stocker.pages.report import inspector_html, tuner_html
from stocker.trading.reward import RewardWeights

ipywidgets = pytest.importorskip('ipywidgets', reason='pip install ipywidgets, and this test runs')
from stocker.pages.widgets import CouncilInspector, RewardTuner, RunComparison

ROOT = Path(__file__).resolve().parent.parent
OLD = os.environ.get('STOCKER_WIDGETS_7', '') # Python of an environment with ipywidgets 7.7 and JupyterLab 3


@pytest.fixture(scope='module')
def trace(): return play(StockerEnv('task_easy'), rule_council())


# --- in Python ---

def test_every_position_of_the_controls_is_a_page_of_the_function(trace):
    shown = CouncilInspector(trace)
    for step, role, change in ((0, 'news', 'silent'), (17, 'indicator', 'flipped'), (42, 'geopolitics', 'silent')):
        shown.slider.value, shown.seats[role].value = step, change
        changes = {name: switch.value for name, switch in shown.seats.items()}
        assert shown.page.value == inspector_html(shown.inspection, step, changes)
        shown.seats[role].value = CHANGES[0]


def test_buttons_step_and_jump_and_stop_at_the_ends(trace):
    shown = CouncilInspector(trace)
    by_name = {button.description: button for button in shown.buttons}
    by_name['previous'].click()
    assert shown.slider.value == 0
    by_name['next'].click()
    assert shown.slider.value == 1
    leads = shown.inspection.jumps
    assert list(by_name) == ['previous', 'next', *(f'next {name}' for name, steps in leads.items() if steps)]
    for name, steps in leads.items():
        for _ in steps:
            expected = next((step for step in steps if step > shown.slider.value), steps[0])
            by_name[f'next {name}'].click()
            assert shown.slider.value == expected and f'Decision {expected + 1} of 43' in shown.page.value
    shown.go(1000)
    assert shown.slider.value == 42


def test_a_moderator_is_asked_only_when_something_is_changed(trace):
    asked = []
    def counted(votes, portfolio):
        asked.append(votes)
        return vote_mean(votes, portfolio)
    shown = CouncilInspector(trace, moderator=counted)
    shown.slider.value = 9
    assert asked == []
    shown.seats['news'].value = 'silent'
    assert len(asked) == 2 # the votes as they were, and the changed ones


def test_a_hostile_run_is_shown_safely():
    wicked = '</p><script>alert(1)</script><img src=x onerror=alert(1)>\u202e'
    seats = {role: (lambda look: Vote(signal=0.9, confidence=1.0, rationale=wicked)) if role != 'news' else
             (lambda look: Abstention(reason=wicked)) for role in ROLES}
    def failing(look): raise ValueError(wicked)
    council = Council(seats | {'indicator': failing}, vote_mean, wicked)
    episode = replace(load_task('task_easy'), chart_folder=Path('/nowhere'))
    shown = CouncilInspector(play(StockerEnv(episode), council), episode)
    shown.seats['chart_pattern'].value = 'flipped'
    assert '<script' not in shown.page.value and '<img' not in shown.page.value
    assert shown.page.value.count('&lt;script&gt;') == 7
    runs = RunComparison({wicked: shown.inspection.trace, 'other': shown.inspection.trace}, episode)
    assert '<script' not in runs.page.value


def test_the_tuner_grades_and_saves(trace, tmp_path):
    tuner = RewardTuner(trace, path=tmp_path/'deep'/'chosen_settings.json')
    assert tuner.weights == trace.weights
    for name, value in (('w_performance', 0.35), ('annual_inflation', 0.08)): tuner.sliders[name].value = value
    assert tuner.page.value == tuner_html(tuner.inspection, RewardWeights(0.35, 0.3, 0.08))
    tuner.button.click()
    saved = json.loads(tuner.path.read_text())
    assert saved['choice']['w_performance'] == 0.35 and 'no reason' in saved['reason']
    assert str(tuner.path) in tuner.saved.value
    before = tuner.path.read_bytes()
    tuner.sliders['w_performance'].value = 0.5
    for _ in range(2): tuner.button.click()
    assert tuner.path.read_bytes() == before and 'chosen_settings-2.json' in tuner.saved.value
    assert len(list(tuner.path.parent.iterdir())) == 2
    tuner.path = tmp_path/'deep'/'chosen_settings.json'/'below a file.json'
    tuner.button.click()
    assert tuner.saved.value.startswith('not saved: ')


def test_no_committed_notebook_holds_the_view_of_a_widget():
    for path in sorted((ROOT/'nbs').rglob('*.ipynb')):
        book = json.loads(path.read_text(encoding='utf-8'))
        assert 'widgets' not in book['metadata'], path.name
        outputs = [output for cell in book['cells'] for output in cell.get('outputs', [])]
        views = [output for output in outputs if 'application/vnd.jupyter.widget-view+json' in output.get('data', {})]
        assert views == [], path.name


def test_the_same_under_ipywidgets_7(tmp_path):
    "All of the above in the other environment, without its browser."
    if not OLD: pytest.skip('STOCKER_WIDGETS_7 names no Python of an environment with ipywidgets 7.7')
    ask = 'import ipywidgets; print(ipywidgets.__version__)'
    said = subprocess.run([OLD, '-c', ask], capture_output=True, text=True)
    assert said.stdout.startswith('7.7'), said
    done = subprocess.run([OLD, '-m', 'pytest', '-q', '-k', 'not ipywidgets_7 and not jupyterlab and not committed',
                           '-p', 'no:cacheprovider', __file__], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and 'skipped' not in done.stdout, done.stdout[-3000:]


# --- by hand ---

CELLS = ['''from stocker.council.council import play, rule_council
from stocker.trading.env import StockerEnv
from stocker.pages.widgets import CouncilInspector, RewardTuner
trace = play(StockerEnv('task_easy'), rule_council())
CouncilInspector(trace, step=25)''', '''from stocker.market.episodes import Episode, load_task
base = load_task('task_easy')
dates = base.prices.index.strftime('%Y-%m-%d')
episode = Episode.from_prices(base.prices, 'AAPL', dates[base.first - 210], dates[base.first + 39], facts=base.facts,
                              peers=base.peers)
CouncilInspector(play(StockerEnv(episode), rule_council()), episode, step=100)''',
         'RewardTuner(trace)', '''from IPython.display import HTML
from stocker.pages.inspection import inspect
from stocker.pages.report import inspector_page
HTML(inspector_page(inspect(trace), 7))''']


def notebook(cells):
    "A notebook without outputs."
    return {'nbformat': 4, 'nbformat_minor': 4, 'metadata': {'kernelspec': {
        'name': 'python3', 'display_name': 'python3', 'language': 'python'}}, 'cells': [
        {'cell_type': 'code', 'source': source, 'metadata': {}, 'outputs': [], 'execution_count': None}
        for source in cells]}


@contextmanager
def jupyterlab(python, folder):
    "A JupyterLab of its own; gives its address."
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    own = {f'JUPYTER_{name}_DIR': str(folder/name) for name in ('RUNTIME', 'CONFIG', 'DATA')}
    own |= {f'JUPYTERLAB_{name}_DIR': str(folder/name) for name in ('SETTINGS', 'WORKSPACES')}
    command = [python, '-m', 'jupyterlab', '--no-browser', '--allow-root', f'--ServerApp.port={port}',
               '--ServerApp.ip=127.0.0.1', '--ServerApp.token=', '--ServerApp.password=',
               f'--ServerApp.root_dir={folder/"books"}', '--LabApp.expose_app_in_browser=True', '--LabApp.news_url=']
    with open(folder/'server.log', 'w') as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | own, cwd=folder)
    address = f'http://127.0.0.1:{port}'
    def answers():
        assert process.poll() is None, (folder/'server.log').read_text()[-2000:]
        try: return DIRECT.open(f'{address}/api', timeout=2)
        except OSError: return None
    try:
        patiently(answers, what='JupyterLab starts', pause=0.1)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE)


READY = '''(() => {
  const book = window.jupyterapp.shell.currentWidget, kernel = book?.sessionContext?.session?.kernel;
  return kernel?.connectionStatus === 'connected' && kernel.status === 'idle'
    && window.jupyterapp.commands.isEnabled('notebook:run-all-cells');
})()'''
OUTPUT = 'document.querySelectorAll(".jp-OutputArea")[%d]'
MOVE = '''(async () => {
  const output = document.querySelectorAll('.jp-OutputArea')[%d], times = [];
  const handle = output.querySelector('.noUi-handle, .ui-slider-handle');
  for (let k = 0; k < 12; k++) {
    const title = () => output.querySelector('.stocker h2').textContent, before = title(), start = performance.now();
    const [key, code] = ['%s', %d], press = { key, code: key, keyCode: code, which: code, bubbles: true };
    handle.dispatchEvent(new KeyboardEvent('keydown', press));
    handle.dispatchEvent(new KeyboardEvent('keyup', press));
    while (title() === before && performance.now() - start < 2000) await new Promise(done => setTimeout(done, 2));
    output.getBoundingClientRect();
    times.push(title() === before ? 9999 : performance.now() - start);
  }
  return times.sort((a, b) => a - b);
})()'''
CHOOSE = '''(() => {
  const row = [...document.querySelectorAll('.widget-dropdown')].find(one => one.textContent.startsWith('indicator'));
  const list = row.querySelector('select');
  list.selectedIndex = 1;
  list.dispatchEvent(new Event('change', { bubbles: true }));
})()'''


@pytest.mark.parametrize('version', [8, 7])
def test_the_inspector_in_a_jupyterlab(tmp_path, version):
    "Run a notebook, move the slider, flip a vote: title, bar, reward and text change at once, and nothing complains."
    if version == 7 and not OLD: pytest.skip('STOCKER_WIDGETS_7 names no Python of an environment with ipywidgets 7.7')
    (tmp_path/'books').mkdir()
    (tmp_path/'books'/'look.ipynb').write_text(json.dumps(notebook(CELLS)))
    with browser() as page, jupyterlab(OLD if version == 7 else sys.executable, tmp_path) as address:
        page.look(1400, 1700)
        page.open(f'{address}/lab/tree/look.ipynb?reset')
        page.until('window.jupyterapp && document.querySelectorAll(".jp-CodeCell").length >= 2')
        page.until(READY)
        page.run('window.jupyterapp.commands.execute("notebook:run-all-cells")')
        page.until('document.querySelectorAll(".stocker").length >= 4')
        title, bar = '.stocker h2', '.stocker .vote[data-role=indicator] svg title'
        first = page.run(f'document.querySelector("{title}").textContent')
        assert first.startswith('Decision 26 of 43')
        page.run('document.querySelector(".noUi-handle, .ui-slider-handle").focus()')
        page.press('ArrowRight')
        page.until(f'document.querySelector("{title}").textContent.startsWith("Decision 27 of 43")')
        before = page.run(f'document.querySelector("{bar}").textContent')
        page.run(CHOOSE)
        page.until('document.querySelector(".stocker .answer") !== null')
        after = page.run(f'document.querySelector("{bar}").textContent')
        told = page.run('document.querySelector(".stocker .answer").textContent')
        assert before.replace('+', '-') == after and 'indicator flipped' in told and 'reward' in told
        page.picture(f'inspector-ipywidgets-{version}.png')
        page.run(f'{OUTPUT % 2}.querySelector(".noUi-handle, .ui-slider-handle").focus()')
        graded = page.run(f'{OUTPUT % 2}.querySelector("table").textContent')
        page.press('ArrowRight')
        page.until(f'{OUTPUT % 2}.querySelector("table").textContent !== {json.dumps(graded)}')
        live = f'{OUTPUT % 3}.querySelector("section:not([hidden])").dataset.step'
        page.run(f'{OUTPUT % 3}.querySelector("[data-by=\\"1\\"]").click()')
        assert page.run(live) == '8'
        for k, steps, limit in ((0, 43, 150), (1, 250, 250)):
            busy = max(1.0, os.getloadavg()[0] / os.cpu_count()) # how many others each processor has to serve
            for key in ('ArrowRight', 'ArrowLeft'):
                times = page.run(MOVE % (k, key, KEYS[key]))
                if times[6] < limit: break
            print(f'ipywidgets {version}, {steps} decisions: a move of the slider takes {times[6]:.0f} ms '
                  f'({times[0]:.0f} to {times[-1]:.0f}) under a load of {busy:.1f}')
            assert times[6] < limit * busy
        assert page.problems == []
