"""A run, opened: regrets, what other votes would have changed, and which runs are not opened at all."""
import math
from dataclasses import replace

import numpy as np
import pytest

from stocker.council.council import play, rule_council, vote_mean, write_trace
from stocker.market.core import ROLES, Abstention, StockerError, Vote, canonical_json
from stocker.market.episodes import load_task
from stocker.pages.inspection import CHANGES, CLEAR, changed_votes, inspect, parting, read_run, what_if
from stocker.pages.report import write_report
from stocker.trading.env import StockerEnv

EVERYWHERE = [(task, timing) for task in ('task_easy', 'task_medium', 'task_hard') for timing in ('close', 'next_open')]


@pytest.fixture(scope='module')
def easy(): return inspect(play(StockerEnv('task_easy'), rule_council()))


@pytest.fixture(scope='module')
def evening(): return inspect(play(StockerEnv('task_hard', 'next_open'), rule_council()))


@pytest.mark.parametrize('task, timing', EVERYWHERE)
def test_regret_is_never_negative_and_zero_for_the_ideal(task, timing):
    trace = play(StockerEnv(task, timing), rule_council())
    run = inspect(trace)
    cost = run.regrets
    assert (cost >= -1e-15).all() and cost.sum() > 0
    market = load_task(task).market(timing)
    rising = np.append(market.fills[1:], market.marks[-1]) > market.fills
    best = tuple(replace(step, cash=0.0 if up else 10_000.0, shares=10_000 / step.price if up else 0.0)
                 for step, up in zip(trace.steps, rising))
    assert np.abs(replace(run, trace=replace(trace, steps=best)).regrets).max() < 1e-12


def test_jumps_lead_where_they_say(evening):
    leads, steps = evening.jumps, evening.trace.steps
    assert leads['trade'] == [step.step for step in steps if step.traded]
    for step in leads['divided council']:
        weights = [v.signal * v.confidence for v in steps[step].decision.votes.values() if isinstance(v, Vote)]
        assert max(weights) >= CLEAR and min(weights) <= -CLEAR
    assert len(leads['worst regret']) == 5 and leads['worst regret'] == sorted(leads['worst regret'])


def test_a_change_is_what_it_says():
    votes = {'news': Vote(signal=0.4, confidence=0.7, rationale='so'), 'forum_sentiment': Abstention(reason='no data')}
    assert changed_votes(votes, dict.fromkeys(votes, 'as voted')) == votes
    assert changed_votes(changed_votes(votes, {'news': 'flipped'}), {'news': 'flipped'}) == votes
    for change in CHANGES: assert changed_votes(votes, {'forum_sentiment': change}) == votes


def test_what_if_equals_a_run_of_its_own(evening):
    "The changed order in a real environment, followed by the recorded ones."
    cases = {0: {'indicator': 'silent'}, 20: dict.fromkeys(ROLES, 'flipped'), 41: {'news': 'flipped'}}
    for step, changes in cases.items():
        [answer] = what_if(evening, step, [changes])
        env, rewards = StockerEnv('task_hard', 'next_open'), []
        env.reset()
        for one in evening.trace.steps:
            if one.step == step:
                assert env.portfolio == evening.portfolios[step]
                votes = changed_votes(one.decision.votes, changes)
                assert answer.decision == vote_mean(votes, env.portfolio)
            _, reward, _, _, information = env.step(answer.decision.action if one.step == step else one.decision.action)
            rewards.append(reward)
            if one.step == step: assert (reward, information['traded']) == (answer.reward, answer.traded)
        assert math.fsum(rewards) == answer.total_reward and information['portfolio_value'] == answer.final_value


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


def test_runs_of_other_episodes_are_not_compared(easy):
    for wrong in (play(StockerEnv('task_hard'), rule_council()), replace(easy.trace, starting_cash=5.0)):
        with pytest.raises(StockerError, match='differ in their'): parting(easy.trace, wrong)
