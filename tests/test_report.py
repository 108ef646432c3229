"""The static pages: nothing of the future, nothing from outside that is not escaped, the numbers of the run."""
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import browser

from stocker.council.council import Council, play, rule_council, vote_mean, write_trace
from stocker.council.evaluation import compare
from stocker.council.specialists import RULE_ANALYSTS
from stocker.market.core import Abstention, Vote, canonical_json, digest
from stocker.market.episodes import load_task, moment
from stocker.pages.inspection import changed_votes, inspect, read_run
from stocker.pages.report import comparison_html, inspector_html, other_reports, report_html, write_report
from stocker.pages.svg import safe
from stocker.trading.env import StockerEnv

EVERYWHERE = [(task, timing) for task in ('task_easy', 'task_medium', 'task_hard') for timing in ('close', 'next_open')]
WICKED = ['<script>alert(1)</script>', '</section></div><h1>mine', '"><img src=x onerror=alert(1)>',
          "' onmouseover='alert(1)", '\u2028\u2029]]>--><!--', '\u202eright to left override',
          '\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 mixed with English', 'half a \ud83d',
          '\x00\x07\x1b[31m',
          '&lt;b&gt; &amp; already escaped', '', 'very long ' * 3000, 'one' + 'word' * 2000, '\U0001f680' * 50]


class Tags(HTMLParser):
    "Collects the elements of a page, and checks that each is closed."

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.found, self.attributes, self.text = [], [], set(), []

    def handle_starttag(self, tag, attributes):
        self.found.append(tag)
        self.attributes |= {name for name, _ in attributes}
        if tag not in ('meta', 'input', 'br'): self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.found.append(tag)
        self.attributes |= {name for name, _ in attributes}

    def handle_endtag(self, tag): assert self.open.pop() == tag

    def handle_data(self, data): self.text.append(data)


def read(page):
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    return tags


def with_texts(inspection, texts, said=''):
    "The run with other words: the votes' numbers and the orders stay."
    steps, texts = [], iter(texts * 1000)
    for step in inspection.trace.steps:
        votes = {role: vote.model_copy(update={('rationale' if isinstance(vote, Vote) else 'reason'): next(texts)})
                 for role, vote in step.decision.votes.items()}
        decision = step.decision.model_copy(update={'votes': votes, 'rationale': next(texts), 'said': said})
        steps.append(replace(step, decision=decision))
    return replace(inspection, trace=replace(inspection.trace, steps=tuple(steps)))


@pytest.fixture(scope='module')
def easy(): return inspect(play(StockerEnv('task_easy'), rule_council()))


@pytest.fixture(scope='module')
def evening(): return inspect(play(StockerEnv('task_hard', 'next_open'), rule_council()))


@pytest.fixture(scope='module')
def long(long_episode): return inspect(play(StockerEnv(long_episode), rule_council()), long_episode)


# --- texts from outside ---

@pytest.mark.parametrize('text', WICKED)
def test_no_text_from_outside_becomes_markup(easy, text):
    wicked = with_texts(easy, [text], said=text)
    plain_page, page = read(inspector_html(with_texts(easy, ['plain'], said='plain'), 3)), inspector_html(wicked, 3)
    tags = read(page)
    assert tags.found.count('script') == tags.found.count('img') == 0
    assert tags.attributes <= plain_page.attributes and not any(name.startswith('on') for name in tags.attributes)
    assert page.count(safe(text)) >= 8 # seven seats and the moderator, in full
    page.encode('utf-8')


def test_every_rationale_is_there_in_full(easy):
    texts = [f'reason {i}: ' + 'and so on ' * 900 for i in range(9)]
    page = inspector_html(with_texts(easy, texts), 3)
    assert sum(text in page for text in texts) >= 7


def test_names_from_a_trace_are_escaped_too(easy):
    trace = replace(easy.trace, council='<b>mine</b>')
    page = report_html(replace(easy, trace=trace))
    assert '<b>mine' not in page and '&lt;b&gt;mine' in page


def test_text_takes_its_own_direction(easy):
    page = inspector_html(with_texts(easy, ['\u05e9\u05dc\u05d5\u05dd']), 3)
    assert page.count('<p dir="auto" class="outside">\u05e9\u05dc\u05d5\u05dd') == 8
    assert page.count('<bdi dir="auto"') >= 2


# --- what a decision could see ---

@pytest.mark.parametrize('task, timing', EVERYWHERE)
def test_nothing_from_the_future_is_listed(task, timing):
    run = inspect(play(StockerEnv(task, timing), rule_council()))
    for step, look in enumerate(run.observations):
        shown = [fact for fact in run.facts if fact.first <= step <= fact.last] if step % 7 == 0 else []
        assert all(moment(fact.released_at) <= moment(look.decided_at) for fact in shown)
    assert inspector_html(run, 5).count('<li') == sum(
        len(getattr(run.observations[5], name)) for name in ('news', 'forum', 'macro'))


# --- pages ---

def test_any_moderator_can_be_asked(easy):
    asked = []
    def contrarian(votes, portfolio):
        asked.append(votes)
        return vote_mean(changed_votes(votes, dict.fromkeys(votes, 'flipped')), portfolio)
    run = replace(easy, moderator=contrarian)
    page = inspector_html(run, 5, {'news': 'silent'})
    assert 'contrarian would answer' in page and len(asked) == 2
    inspector_html(run, 5, {})
    assert len(asked) == 2 # nothing is asked where nothing is changed


def test_abstentions_errors_and_lost_answers_are_shown():
    "A council of which some fail, some abstain and one is not there."
    def broken(look): raise ValueError('the chart is missing')
    seats = dict(RULE_ANALYSTS) | {'chart_pattern': broken, 'news': lambda look: Abstention(reason='no headlines')}
    del seats['geopolitics']
    def lost(votes, portfolio): return vote_mean(votes, portfolio)._replace(
        action={'side': 'hold', 'quantity': 0}, rationale='there is no JSON in it', unreadable=True, said='Buy?')
    episode = replace(load_task('task_easy'), chart_folder=Path('/nowhere'))
    trace = play(StockerEnv(episode), Council(seats, lost, 'half a council'))
    page = report_html(inspect(trace, episode))
    tags = read(page)
    assert 'ValueError: the chart is missing' in page and 'no headlines' in page
    assert page.count('could not be read: no trade') == 43 and tags.found.count('section') == 43
    assert 'geopolitics' not in page.split('<h2>Decision 1 of')[1].split('What it was asked')[0]


def test_a_council_without_any_votes_has_a_report():
    mute = Council({'news': lambda look: Abstention(reason='silent')}, vote_mean, 'mute')
    trace = play(StockerEnv('task_medium'), mute)
    page = report_html(inspect(trace))
    assert not re.search(r'\bnan\b', page) and 'Nobody voted.' in page


def test_the_report_has_the_numbers_of_the_summary(tmp_path):
    found = compare(load_task('task_medium'), rule_council(), 'next_open')
    write_trace(found.trace, tmp_path/'trace.jsonl')
    (tmp_path/'summary.json').write_text(canonical_json(found.summary), encoding='utf-8')
    page = write_report(tmp_path).read_text(encoding='utf-8')
    for row in json.loads((tmp_path/'summary.json').read_text())['results']:
        cells = (f'{row["final_value"]:,.2f}', f'{row["total_return"]:+.2%}', f'{row["reward"]:+.4f}',
                 f'{row["max_drawdown"]:.2%}', f'{row["trades"]}')
        assert ''.join(f'<td>{cell}</td>' for cell in cells) in page
    assert f'{found.summary["votes"]} votes, {found.summary["abstentions"]} abstentions' in page
    assert len(page.encode()) < 3_000_000 and read(page).found.count('script') == 1
    assert re.findall(r'(?:src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)', page) == []
    assert page == report_html(read_run(tmp_path)) # nothing in it changes from one writing to the next


def test_a_report_knows_its_trace_and_is_never_replaced(tmp_path):
    runs = [play(StockerEnv('task_easy'), rule_council(name)) for name in ('vote_mean', 'vote_mean_all_in')]
    write_trace(runs[0], tmp_path/'trace.jsonl')
    first = write_report(tmp_path)
    page = first.read_bytes()
    assert digest(runs[0]).encode() in page and other_reports(tmp_path) == [] and write_report(tmp_path) == first
    write_trace(runs[1], tmp_path/'trace.jsonl')
    assert other_reports(tmp_path) == [first]
    second = write_report(tmp_path)
    assert (first.read_bytes(), second.name) == (page, 'report-2.html') and other_reports(tmp_path) == [first]
    write_trace(runs[0], tmp_path/'trace.jsonl')
    assert other_reports(tmp_path) == [second] and write_report(tmp_path) == first


def test_names_of_runs_are_escaped(easy):
    other = inspect(play(StockerEnv('task_easy'), rule_council('vote_mean_all_in')))
    page = comparison_html(easy, other, ('<before>', 'after'))
    assert '<before>' not in page and '&lt;before&gt;' in page
    read(page)


# --- in a browser ---

CUT = '''[...document.querySelectorAll('.stocker svg text')].filter(text => {
  if (!text.checkVisibility()) return false;
  const own = text.getBoundingClientRect(), whole = text.ownerSVGElement.getBoundingClientRect();
  return own.left < whole.left - 1 || own.right > whole.right + 1 || own.bottom > whole.bottom + 1;
}).map(text => text.textContent)'''
STEP = 'document.querySelector("section:not([hidden])").dataset.step'
TIMES = '''(async () => {
  const slider = document.querySelector('input[type=range]'), times = [];
  for (let k = 0; k < 30; k++) {
    const start = performance.now();
    slider.value = (k * 37) % (+slider.max + 1);
    slider.dispatchEvent(new Event('input'));
    document.body.getBoundingClientRect();
    await new Promise(requestAnimationFrame);
    await new Promise(done => setTimeout(done));
    times.push(performance.now() - start);
  }
  return times.sort((a, b) => a - b);
})()'''


def test_the_report_in_a_browser(tmp_path, easy, long):
    "Opens from a file, steps by key and button, redraws at once, fits its window, is readable under a dark theme."
    short, longer = tmp_path/'short.html', tmp_path/'long.html'
    short.write_text(report_html(with_texts(easy, WICKED, said='Buy <b>3</b>')), encoding='utf-8')
    longer.write_text(report_html(long), encoding='utf-8')
    with browser() as page:
        for name, width, dark in (('report-900-light.png', 900, False), ('report-1400-dark.png', 1400, True)):
            page.look(width, 1500, dark)
            page.open(short.as_uri())
            page.picture(name)
            assert page.run('document.documentElement.scrollWidth') <= width and page.run(CUT) == []
            look = 'getComputedStyle(document.querySelector(".stocker"))'
            assert page.run(f'[{look}.backgroundColor, {look}.color]') == ['rgb(255, 255, 255)', 'rgb(34, 34, 34)']
        at = int(page.run(STEP))
        page.press('ArrowRight')
        assert int(page.run(STEP)) == at + 1
        page.press('ArrowLeft')
        page.press('ArrowLeft')
        assert int(page.run(STEP)) == at - 1 == int(page.run('document.querySelector("input[type=range]").value'))
        page.run('document.querySelector("[data-jump]").click()')
        assert int(page.run(STEP)) in easy.jumps['trade']
        page.run('document.querySelector("input[type=range]").value = 0, document.querySelector("input").oninput()')
        page.run('document.querySelector("[data-play]").click()')
        page.until(f'{STEP} === "2"')
        page.run('document.querySelector("[data-play]").click()')
        visible = page.run('[...document.querySelectorAll("li")].filter(li => li.checkVisibility()).length')
        look = easy.observations[int(page.run(STEP))]
        assert visible == len(look.news) + len(look.forum) + len(look.macro)
        shift = '[...document.querySelectorAll(".now")].map(now => now.getAttribute("transform"))'
        before = page.run(shift)
        page.press('ArrowRight')
        assert len(before) == 2 and not set(before) & set(page.run(shift))
        quick = page.run(TIMES)
        page.open(longer.as_uri())
        slow = page.run(TIMES)
        print(f'redraw, ms: 43 decisions {quick[15]:.1f} (worst {quick[-1]:.1f}), '
              f'250 decisions {slow[15]:.1f} (worst {slow[-1]:.1f})')
        assert quick[15] < 150 and slow[15] < 250
        assert page.problems == [] and all(url.startswith('file:') for url in page.requests)
