"""The static pages: nothing of the future, nothing from outside that is not escaped, the numbers of the run."""
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import permutations
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from browser import browser
from hypothesis import given, settings
from hypothesis import strategies as st

from stocker.pages import report
from stocker.market.core import ROLES, Abstention, Portfolio, StockerError, Vote, canonical_json
from stocker.council.council import (
    Council, VotedEpisode, collect_votes, mean_signal, moderate_episode, order_by_score, play, rule_council,
    vote_mean, write_trace)
from stocker.trading.env import StockerEnv
from stocker.market.episodes import Episode, load_task, moment
from stocker.council.evaluation import compare
from stocker.pages.report import (
    CHANGES, PLACEBO, agreement, alternatives, calibration, candles_svg, changed, changed_votes, comparison_html,
    council_report_html, council_scores, council_worths, credit, exact_sums, facts_html, independent_voices, inspect,
    inspector_html, inspector_page, jumps, leave_one_out, members, parting, read_run, regrets, reliability,
    report_html, reward_parts, seats_of, shapley, term_totals, training_svg, tuner_html, values_svg, voted_episode,
    what_if, with_placebo, write_report)
from stocker.pages.svg import plane_for, round_numbers, safe
from stocker.trading.reward import RewardWeights
from stocker.council.specialists import RULE_ANALYSTS
from stocker.studies.worlds import placebo_world, planted_world

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
def long():
    "A run of 250 decisions."
    base = load_task('task_easy')
    dates = base.prices.index.strftime('%Y-%m-%d')
    episode = Episode.from_prices(base.prices, 'AAPL', dates[base.first - 210], dates[base.first + 39],
                                  facts=base.facts, peers=base.peers)
    assert episode.steps == 250
    return inspect(play(StockerEnv(episode), rule_council()), episode)


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


@pytest.mark.parametrize('text', WICKED)
def test_a_picture_stays_whole_xml(text):
    label = report.label(0, 0, safe(text))
    assert ElementTree.fromstring(f'<svg>{label}</svg>')[0].tag == 'text'


@given(st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_text_is_safe(text):
    element = ElementTree.fromstring(f'<p title="{safe(text)}">{safe(text)}</p>')
    assert list(element) == []
    assert safe(text) == safe(text.encode('utf-8', 'replace').decode())


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
        shown = [fact for fact in report.visible_facts(run) if fact.first <= step <= fact.last] if step % 7 == 0 else []
        assert all(moment(fact.released_at) <= moment(look.decided_at) for fact in shown)
    assert facts_html(run, 5).count('<li') == sum(
        len(getattr(run.observations[5], name)) for name in ('news', 'forum', 'macro'))


def test_the_curtain_hides_every_later_session_and_trade(evening):
    for step in (0, 17, 41):
        root = ElementTree.fromstring(candles_svg(evening, step))
        now = root.find('.//*[@class="now"]')
        edge = float(re.search(r'\(([0-9.]+)', now.attrib['transform'])[1]) + float(now[0].attrib['x'])
        boxes = [node for node in root if node.tag.endswith('rect')][1:]
        at = [float(node.attrib['x']) + float(node.attrib['width']) / 2 for node in boxes]
        assert sum(x < edge for x in at) == report.SESSIONS_BEFORE + step + 1
        hidden = {int(node.attrib['data-from']) for node in root if node.attrib.get('visibility') == 'hidden'}
        assert hidden == {one.step for one in evening.trace.steps if one.traded and one.step > step}


@pytest.mark.parametrize('drawn', [candles_svg, values_svg])
def test_pictures_are_whole_xml_with_their_numbers_inside(evening, long, drawn):
    for run in (evening, long):
        for step in (None, 0, len(run.trace.steps) - 1):
            picture = drawn(run, step)
            root = ElementTree.fromstring(picture)
            height = float(root.attrib['viewBox'].split()[3])
            for text in root.iter('{http://www.w3.org/2000/svg}text'):
                wide = 6.7 * len(text.text)
                before = {'start': 0, 'middle': 0.5, 'end': 1}[text.attrib['text-anchor']]
                left = float(text.attrib['x']) - wide * before
                assert -2 <= left and left + wide <= report.WIDTH + 2, text.text
                assert 0 < float(text.attrib['y']) <= height
            assert 'nan' not in picture and 'inf' not in picture


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 8))
@settings(max_examples=200, deadline=None)
def test_a_scale_has_round_numbers(low, span, about):
    if span < 1e-9 * abs(low): return  # nearer than floats can tell apart
    found = round_numbers(low, low + span, about)
    assert 1 <= len(found) <= 3 * about and all(low - 1e-6 * span <= tick <= low + span * 1.000001 for tick in found)


def test_two_round_numbers_are_not_asked_for_in_vain(): # five hundred millions would lie beyond the upper end
    assert round_numbers(1.0, 400_000_002.0, 2) == [200_000_000.0, 400_000_000.0]


def test_a_plane_fits_anything():
    for values in ([], [float('nan')], [0.0, 0.0], [5.0], [1e12, -1e12], [float('inf'), 3.0]):
        plane = plane_for(0, 1, values)
        assert plane.y_to > plane.y_from


# --- days worth opening ---

@pytest.mark.parametrize('task, timing', EVERYWHERE)
def test_regret_is_never_negative_and_zero_for_the_ideal(task, timing):
    trace = play(StockerEnv(task, timing), rule_council())
    cost = regrets(trace, load_task(task))
    assert (cost >= -1e-15).all() and cost.sum() > 0
    market = load_task(task).market(timing)
    rising = np.append(market.fills[1:], market.marks[-1]) > market.fills
    best = tuple(replace(step, cash=0.0 if up else 10_000.0, shares=10_000 / step.price if up else 0.0)
                 for step, up in zip(trace.steps, rising))
    assert np.abs(regrets(replace(trace, steps=best), load_task(task))).max() < 1e-12


def test_jumps_lead_where_they_say(evening):
    leads, steps = jumps(evening), evening.trace.steps
    assert leads['trade'] == [step.step for step in steps if step.traded]
    for step in leads['divided council']:
        weights = [v.signal * v.confidence for v in steps[step].decision.votes.values() if isinstance(v, Vote)]
        assert max(weights) >= report.CLEAR and min(weights) <= -report.CLEAR
    assert len(leads['worst regret']) == 5 and leads['worst regret'] == sorted(leads['worst regret'])


# --- what if ---

def test_a_change_is_what_it_says():
    vote, silent = Vote(signal=0.4, confidence=0.7, rationale='so'), Abstention(reason='no data')
    assert changed(vote, 'as voted') is vote and changed(vote, 'flipped').signal == -0.4
    assert changed(changed(vote, 'flipped'), 'flipped') == vote
    assert isinstance(changed(vote, 'silent'), Abstention) and changed(silent, 'flipped') is silent
    assert [changed(silent, change) for change in CHANGES] == [silent] * 3
    with pytest.raises(StockerError, match='unknown change'): changed(vote, 'louder')


def test_what_if_equals_a_run_of_its_own(evening):
    "The changed order in a real environment, followed by the recorded ones."
    cases = {0: {'indicator': 'silent'}, 20: dict.fromkeys(ROLES, 'flipped'), 41: {'news': 'flipped'}}
    for step, changes in cases.items():
        answer = what_if(evening, step, changes)
        env, rewards = StockerEnv('task_hard', 'next_open'), []
        env.reset()
        for one in evening.trace.steps:
            if one.step == step:
                assert env.portfolio == evening.portfolios[step]
                votes = changed_votes(one.decision.votes, changes)
                assert answer.decision == vote_mean(votes, env.portfolio)
            _, reward, _, _, told = env.step(answer.decision.action if one.step == step else one.decision.action)
            rewards.append(reward)
            if one.step == step: assert told['terms'] == answer.terms and told['traded'] == answer.traded
        assert math.fsum(rewards) == answer.total_reward and told['portfolio_value'] == answer.final_value


def test_any_moderator_can_be_asked(easy):
    asked = []
    def contrarian(votes, portfolio):
        asked.append(votes)
        return vote_mean({role: changed(vote, 'flipped') for role, vote in votes.items()}, portfolio)
    run = replace(easy, moderator=contrarian)
    page = inspector_html(run, 5, {'news': 'silent'})
    assert 'contrarian would answer' in page and len(asked) == 2
    inspector_html(run, 5, {})
    assert len(asked) == 2 # nothing is asked where nothing is changed


def test_alternatives_are_single_changes(easy):
    for step in (0, 12, 42):
        for role, answers in alternatives(easy, step).items():
            assert list(answers) == ['flipped', 'silent']
            for change, answer in answers.items(): assert answer == what_if(easy, step, {role: change})


def test_a_change_for_an_empty_seat_is_refused(easy):
    with pytest.raises(StockerError, match='astrology has no seat'): inspector_html(easy, 0, {'astrology': 'silent'})
    for step in (-1, 43):
        with pytest.raises(StockerError, match='steps 0 to 42'): inspector_html(easy, step)
        with pytest.raises(StockerError, match='steps 0 to 42'): inspector_page(easy, step)


# --- pages ---

@pytest.mark.parametrize('task, timing', EVERYWHERE)
def test_reward_parts_sum_to_the_reward(task, timing):
    for step in play(StockerEnv(task, timing), rule_council('vote_mean_all_in')).steps:
        parts = reward_parts(step.terms, RewardWeights())
        assert math.fsum(parts.values()) == pytest.approx(step.terms.reward, abs=1e-12)
        assert ('order that cannot trade' in parts) == step.invalid


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


def test_a_summary_that_does_not_fit_is_refused(tmp_path, easy):
    write_trace(easy.trace, tmp_path/'trace.jsonl')
    assert read_run(tmp_path).trace == easy.trace # a run without a summary has a report too
    summary = easy.comparison.summary
    summary['results'][0]['reward'] += 1e-9
    for text in (canonical_json(summary), '{}', '[1]'):
        (tmp_path/'summary.json').write_text(text)
        with pytest.raises(StockerError, match='does not fit'): write_report(tmp_path)
    (tmp_path/'summary.json').write_text('{"results":')
    with pytest.raises(StockerError, match='no JSON'): write_report(tmp_path)
    assert not (tmp_path/'report.html').exists()
    with pytest.raises(StockerError, match='no such trace'): write_report(tmp_path/'elsewhere')


def test_an_edited_trace_has_no_report(tmp_path, easy):
    steps = list(easy.trace.steps)
    steps[4] = replace(steps[4], value=steps[4].value + 1)
    write_trace(replace(easy.trace, steps=tuple(steps)), tmp_path/'trace.jsonl')
    with pytest.raises(StockerError, match='step 4'): write_report(tmp_path)


# --- grading again, and two runs ---

def test_the_tuner_shows_both_totals(easy):
    weights = RewardWeights(0.4, 0.9, 0.02, 0.01)
    rewards, parts = term_totals(easy.trace, weights, easy.episode)
    page = tuner_html(easy, weights)
    read(page)
    assert f'{parts["total reward"]:,.4f}' in page and f'{easy.trace.total_reward:,.4f}' in page
    assert rewards.sum() == pytest.approx(parts['total reward'])
    assert sum(list(parts.values())[:5]) == pytest.approx(parts['total reward'], abs=1e-9)


def test_runs_part_where_their_orders_do(easy):
    other = inspect(play(StockerEnv('task_easy'), rule_council('vote_mean_all_in')))
    at = parting(easy.trace, other.trace)
    assert at == next(i for i, (one, two) in enumerate(zip(easy.trace.steps, other.trace.steps))
                      if one.traded != two.traded)
    page = comparison_html(easy, other, ('<before>', 'after'))
    assert '<before>' not in page and f'decision {at + 1} of 43' in page
    read(page)
    for wrong in (play(StockerEnv('task_hard'), rule_council()), replace(easy.trace, starting_cash=5.0)):
        with pytest.raises(StockerError, match='differ in their'): parting(easy.trace, wrong)


@pytest.mark.parametrize('log', [[{'loss': 1.0}], [{'loss': float('nan'), 'step': 1}, {'loss': 2.0, 'step': 9}],
                                 [{'step': i, 'loss': 1 / (i + 1), 'text': 'x'} for i in range(500)]])
def test_training_curves_take_any_log(log):
    drawn = training_svg(log, ['loss'])
    ElementTree.fromstring(drawn)
    assert 'nan' not in drawn
    for missing in ('entropy', 'text'):
        with pytest.raises(StockerError, match='no record of the log'): training_svg(log, [missing])


# --- the council, counted ---

def told(weights, episode=None, confidence=1.0):
    "A council that says what it is told; rows are days, columns seats; NaN abstains."
    episode = episode or load_task('task_easy')
    votes = tuple({role: Abstention(reason='told to') if math.isnan(value) else
                   Vote(signal=float(value), confidence=confidence, rationale='told')
                   for role, value in zip(ROLES, row)} for row in weights)
    return VotedEpisode(episode, report.as_timing('close'), votes)


def test_agreement_counts_common_days_only():
    nan = math.nan
    table = agreement([told([[1, 1, -1, 0, nan], [1, -1, -1, 1, nan], [-1, nan, 1, 0, nan]])]).to_numpy()
    assert table[0, 1] == 0.5 and table[0, 2] == 0.0 and table[0, 3] == 1.0 and table[1, 2] == 0.5
    assert np.isnan(table[4]).all()


@given(st.lists(st.lists(st.floats(-1, 1) | st.just(math.nan), min_size=3, max_size=3), min_size=3, max_size=12))
@settings(max_examples=60, deadline=None)
def test_voices_lie_between_none_and_the_number_of_seats(rows):
    assert 0 <= independent_voices([told(rows)]) <= 3 + 1e-9
    table = agreement([told(rows)]).to_numpy()
    assert ((table >= 0) & (table <= 1) | np.isnan(table)).all()


def test_brier_scores_by_hand():
    voted = told([[0.5], [-0.5], [1.0], [math.nan]] + [[0.0]] * 39, confidence=0.5)
    rose = (report.outcomes(voted) > 0)[:42]
    row = calibration([voted]).loc['chart_pattern']
    stated = np.array([0.75, 0.25, 1.0] + [0.5] * 38)
    happened = np.delete(rose, 3).astype(float)
    assert row.votes == 41 and row.brier_signal == pytest.approx(((stated - happened) ** 2).mean())
    modest = 0.5 + (stated - 0.5) / 2
    assert row.brier == pytest.approx(((modest - happened) ** 2).mean())
    assert row.right == pytest.approx(np.mean([rose[0], not rose[1], rose[2]]))


@pytest.mark.parametrize('horizon', [0, 44, -1])
def test_a_horizon_outside_the_window_is_refused(easy, horizon):
    with pytest.raises(StockerError, match='horizon'): calibration([voted_episode(easy)], horizon)


def test_bins_hold_every_statement_once():
    stated, rng = np.random.default_rng(1).random(500), np.random.default_rng(2)
    found = reliability(stated, rng.random(500) < 0.5, 7)
    assert sum(one.count for one in found) == 500
    assert all(0 <= one.low <= one.happened <= one.high <= 1 for one in found)
    assert reliability(np.array([0.0, 1.0]), np.array([False, True]))[-1].happened == 1.0


@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=5, max_size=5), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_sums_are_those_of_fsum(rows):
    terms, councils = np.array(rows), members(5)
    sums = exact_sums(terms, councils)
    for row, found in zip(terms, sums):
        for council in range(32):
            assert found[council] == math.fsum(row[councils[:, council]])


@pytest.mark.parametrize('task, timing', EVERYWHERE)
def test_every_council_trades_as_the_vote_mean_would(task, timing):
    voted = collect_votes(RULE_ANALYSTS, load_task(task), timing)
    seats, weights = seats_of([voted]), RewardWeights(transaction_cost=0.003)
    scores = council_scores(voted, seats)
    rewards, returns = council_worths(voted, seats, weights)
    for council in (0, 1, 5, 42, 77, 99, 126, 127):
        inside = [role for i, role in enumerate(seats) if council >> i & 1]
        fewer = replace(voted, votes=tuple({role: votes[role] for role in inside} for votes in voted.votes))
        own = moderate_episode(fewer, vote_mean, weights)
        assert rewards[council] == pytest.approx(own.total_reward, abs=1e-9)
        assert returns[council] == own.values[-1] / 10_000 - 1
        assert [None if math.isnan(score) else score for score in scores[:, council]] == [
            mean_signal(votes) for votes in fewer.votes]


@given(st.floats(-1, 1), st.floats(0, 20_000), st.integers(0, 200), st.floats(0.5, 900), st.floats(0, 0.05))
@settings(max_examples=300, deadline=None)
def test_an_order_among_many_is_the_order_of_one(score, cash, shares, price, fee):
    one = order_by_score(score, Portfolio(0, 1, cash, shares, price, 10_000.0, fee, 0.0), all_in=False)
    signed = {'hold': 0, 'buy': one.quantity, 'sell': -one.quantity}[one.side.value]
    many = report.orders_by_score(np.array([score, math.nan]), np.array([cash] * 2), np.array([float(shares)] * 2),
                                  price, fee)
    assert many.tolist() == [signed, 0]


@given(st.integers(1, 5), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_shapley_shares_are_means_over_all_orders(count, seed):
    worths = np.random.default_rng(seed).normal(size=2 ** count)
    shares, orders = np.zeros(count), list(permutations(range(count)))
    for order in orders:
        council = 0
        for seat in order:
            shares[seat] += (worths[council | 1 << seat] - worths[council]) / len(orders)
            council |= 1 << seat
    assert shapley(worths) == pytest.approx(shares, abs=1e-12)
    assert shapley(worths).sum() == pytest.approx(worths[-1] - worths[0], abs=1e-12)
    fewer = [worths[(2 ** count - 1) ^ (1 << i)] for i in range(count)]
    assert leave_one_out(worths) == pytest.approx(worths[-1] - fewer)
    assert shapley(np.stack([worths, 2 * worths]))[1] == pytest.approx(2 * shares, abs=1e-12)


@pytest.mark.parametrize('task, timing', EVERYWHERE)
def test_credit_adds_up(task, timing):
    voted = collect_votes(RULE_ANALYSTS, load_task(task), timing)
    table = credit([voted, voted])
    rewards, returns = council_worths(voted, seats_of([voted]))
    assert table.shapley.sum() == pytest.approx(rewards[-1] - rewards[0], abs=1e-9)
    assert table.return_shapley.sum() == pytest.approx(returns[-1] - returns[0], abs=1e-12)
    assert (table.standard_error == 0).all()


def test_a_seat_that_never_votes_gets_nothing_and_twins_get_the_same():
    rng = np.random.default_rng(3)
    rows = rng.uniform(-1, 1, (43, 4))
    rows[:, 2], rows[:, 3] = math.nan, rows[:, 0]
    table = credit([told(rows)])
    assert table.shapley['indicator'] == table.leave_one_out['indicator'] == 0.0
    assert table.shapley['chart_pattern'] == pytest.approx(table.shapley['news'], abs=1e-12)


def test_who_knows_gets_the_credit_and_a_placebo_none():
    rng = np.random.default_rng(0)
    planted = planted_world(seed=1, episodes=16, informed='peer_commodity').episodes
    table = credit([with_placebo(one, rng) for one in planted])
    assert table.shapley.idxmax() == 'peer_commodity' and table.shapley[PLACEBO] < 2 * table.standard_error[PLACEBO]
    noise = credit([with_placebo(one, rng) for one in placebo_world(seed=1, episodes=16).episodes])
    assert (noise.shapley.abs() < 4 * noise.standard_error).all()


def test_too_many_seats_and_no_episode_are_refused():
    with pytest.raises(StockerError, match='12 seats at most'): members(13)
    for count in (credit, agreement, calibration, independent_voices, council_report_html):
        with pytest.raises(StockerError, match='at least one'): count([])


def test_credit_is_quick():
    "A corpus of a hundred episodes in seconds: 128 councils of one episode take no longer than a few plain runs."
    import time
    voted = collect_votes(RULE_ANALYSTS, load_task('task_easy'))
    seats = seats_of([voted])
    def seconds(work): return min(timed(work) for _ in range(5))
    def timed(work):
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    assert seconds(lambda: council_worths(voted, seats)) < 30 * seconds(lambda: moderate_episode(voted, vote_mean))


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
        assert int(page.run(STEP)) in jumps(easy)['trade']
        page.run('document.querySelector("input[type=range]").value = 0, document.querySelector("input").oninput()')
        page.run('document.querySelector("[data-play]").click()')
        page.until(f'{STEP} === "2"', 10)
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
