"No look-ahead: everything that could depend on the future is found when it does."
from dataclasses import is_dataclass, replace

import pandas as pd
import pytest

from stocker.market.core import Timing
from stocker.market.episodes import TASKS, Timeline, load_task
from stocker.trust.leaks import INVENTED, everything_seen, last_moment, later_facts, leak_check, leaks, some_of


def one(look):
    "The check of two days of a task under both timings."
    return leak_check('one task', [load_task('task_medium')], 2, look)


@pytest.mark.parametrize('task', TASKS)
def test_what_is_seen_of_a_decision_is_seen_without_the_future_too(task):
    episode = load_task(task)
    for timing in Timing:
        for step in some_of(episode.steps, 2): assert leaks(episode, step, timing) == []


def test_every_part_that_is_compared_can_differ():
    "Nothing in the list of what is seen is a constant."
    episode = load_task('task_easy')
    sights = [everything_seen(episode, step, timing) for timing, step in ((Timing.CLOSE, 2), (Timing.NEXT_OPEN, 30))]
    same = [name for name in sights[0] if name in sights[1] and sights[0][name] == sights[1][name]]
    assert same == ['ticker', 'split_adjusted']


@pytest.mark.parametrize('name', list(INVENTED))
def test_an_invented_fact_would_be_seen_if_it_were_earlier(name):
    episode, session = load_task('task_easy'), '2023-09-05'
    moment = last_moment(session, Timing.CLOSE)
    step = episode.dates.index(session)
    invented, now = INVENTED[name], {'released_at': moment.isoformat()}
    early = replace(invented, **now) if is_dataclass(invented) else invented._replace(**now)
    facts = replace(episode.facts, **{name: Timeline([*getattr(episode.facts, name).facts, early])})
    before, after = (everything_seen(one, step, Timing.CLOSE) for one in (episode, replace(episode, facts=facts)))
    assert before != after
    late = later_facts(name, Timeline(), moment, 'made wrong')
    assert late.window(moment) == () and len(late.facts) == 1


def indicator(make):
    "Eyes that see one more number, made of the closes up to the end of the table."
    def look(episode, step, timing):
        return {'number': repr(float(make(episode.prices['close'], episode.first + step)))}
    return look


LEAKS = {
    'the next close': indicator(lambda close, row: close.iloc[row + 1]),
    'a centred window': indicator(lambda close, row: close.rolling(5, center=True).mean().iloc[row]),
    'the mean of the whole series': indicator(lambda close, row: close.iloc[row] / close.mean()),
    'a backward fill': indicator(lambda close, row: close.where(close.index.day_of_week == 4).bfill().iloc[row]),
    'the highest close of the month': indicator(
        lambda close, row: close.groupby(close.index.to_period('M')).transform('max').iloc[row])}


@pytest.mark.parametrize('name', LEAKS)
def test_a_planted_leak_in_the_prices_is_found(name):
    found = one(LEAKS[name])
    assert not found.holds and found.counted == {'decisions': 4, 'rebuilt': 8}


def test_a_number_made_of_earlier_prices_is_no_leak():
    assert one(indicator(lambda close, row: close.iloc[:row + 1].ewm(span=20).mean().iloc[-1])).holds


@pytest.mark.parametrize('name', ['news', 'forum', 'macro', 'earnings'])
def test_a_window_of_facts_that_reaches_forward_is_found(name):
    "Facts of the seven days around the decision."
    def look(episode, step, timing):
        moment = last_moment(episode.dates[step], timing) + pd.Timedelta(days=7).to_pytimedelta()
        return {name: repr(getattr(episode.facts, name).window(moment, 14))}
    found = one(look)
    assert len(found.faults) >= 4 and name in found.faults[0]


def test_facts_of_the_same_evening_are_a_leak_at_the_close_and_none_in_the_evening():
    def look(episode, step, timing):
        return {'news': repr(episode.facts.news.window(last_moment(episode.dates[step], Timing.NEXT_OPEN), 7))}
    episode, step = load_task('task_medium'), load_task('task_medium').dates.index('2024-01-25')
    assert leaks(episode, step, Timing.CLOSE, look) and not leaks(episode, step, Timing.NEXT_OPEN, look)


def test_a_commodity_of_the_same_day_is_a_leak_at_the_close_only():
    def look(episode, step, timing):
        table = episode.peers['CL=F'][1]
        return {'oil': repr(table[table.index <= episode.dates[step]]['close'].iloc[-1])}
    episode = load_task('task_hard')
    assert len(leaks(episode, 20, Timing.CLOSE, look)) == 2 and leaks(episode, 20, Timing.NEXT_OPEN, look) == []
