"""Pictures as SVG: whole XML, inside their frame, nothing of the future, no markup from outside."""
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stocker.council.council import play, rule_council
from stocker.council.evaluation import compare
from stocker.market.episodes import load_task
from stocker.pages.svg import (
    SESSIONS_BEFORE, WIDTH, candles_svg, label, plane_for, reward_parts, round_numbers, safe, values_svg)
from stocker.trading.env import StockerEnv
from stocker.trading.reward import RewardWeights

EVERYWHERE = [(task, timing) for task in ('task_easy', 'task_medium', 'task_hard') for timing in ('close', 'next_open')]


@pytest.fixture(scope='module')
def evening(): return compare(load_task('task_hard'), rule_council(), 'next_open')


@given(st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_text_is_safe(text):
    assert ElementTree.fromstring(f'<svg>{label(0, 0, text)}</svg>')[0].tag == 'text'
    element = ElementTree.fromstring(f'<p title="{safe(text)}">{safe(text)}</p>')
    assert list(element) == []
    assert safe(text) == safe(text.encode('utf-8', 'replace').decode())


def test_the_curtain_hides_every_later_session_and_trade(evening):
    for step in (0, 17, 41):
        root = ElementTree.fromstring(candles_svg(evening.trace, evening.episode, step))
        now = root.find('.//*[@class="now"]')
        edge = float(re.search(r'\(([0-9.]+)', now.attrib['transform'])[1]) + float(now[0].attrib['x'])
        boxes = [node for node in root if node.tag.endswith('rect')][1:]
        at = [float(node.attrib['x']) + float(node.attrib['width']) / 2 for node in boxes]
        assert sum(x < edge for x in at) == SESSIONS_BEFORE + step + 1
        hidden = {int(node.attrib['data-from']) for node in root if node.attrib.get('visibility') == 'hidden'}
        assert hidden == {one.step for one in evening.trace.steps if one.traded and one.step > step}


@pytest.mark.parametrize('drawn', [lambda run, step: candles_svg(run.trace, run.episode, step),
                                   lambda run, step: values_svg(run, step)])
def test_pictures_are_whole_xml_with_their_numbers_inside(evening, long_episode, drawn):
    for run in (evening, compare(long_episode, rule_council())):
        for step in (None, 0, len(run.trace.steps) - 1):
            picture = drawn(run, step)
            root = ElementTree.fromstring(picture)
            height = float(root.attrib['viewBox'].split()[3])
            for text in root.iter('{http://www.w3.org/2000/svg}text'):
                wide = 6.7 * len(text.text)
                before = {'start': 0, 'middle': 0.5, 'end': 1}[text.attrib['text-anchor']]
                left = float(text.attrib['x']) - wide * before
                assert -2 <= left and left + wide <= WIDTH + 2, text.text
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


@pytest.mark.parametrize('task, timing', EVERYWHERE)
def test_reward_parts_sum_to_the_reward(task, timing):
    for step in play(StockerEnv(task, timing), rule_council('vote_mean_all_in')).steps:
        parts = reward_parts([step.terms], RewardWeights())
        assert math.fsum(parts.values()) == pytest.approx(step.terms.reward, abs=1e-12)
        assert (parts['orders that cannot trade'] < 0) == step.invalid
