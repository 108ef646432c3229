"""The council: one bad specialist harms nobody, order decides nothing, and a trace is read back whole or not at all."""
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from waiting import PATIENCE, patiently

from stocker.council.cache import CachedSpecialist, Place, VoteCache, place_path, read_stored
from stocker.market.core import (
    ROLES, Abstention, Failure, Portfolio, Decision, Side, StockerError, TradeAction, Vote, canonical_json, digest)
from stocker.council.council import (
    MODERATORS, THRESHOLD, Council, ask, ask_all, collect_votes, mean_signal, moderate_episode, order_by_score, play,
    read_trace, rule_council, vote_mean, vote_mean_all_in, write_trace)
from stocker.trading.env import StockerEnv
from stocker.market.episodes import load_task
from stocker.trading.reward import RewardWeights
from stocker.council.specialists import RULE_ANALYSTS


class Unprintable(Exception):
    "An error whose text is itself an error."

    def __str__(self): raise RuntimeError('no text')


def saying(signal, confidence=0.5, rationale='so it is'):
    return lambda observation: Vote(signal=float(signal), confidence=float(confidence), rationale=rationale)


def failing(error):
    def specialist(observation): raise error
    return specialist


def seven(signals, confidence=0.5):
    return {role: Vote(signal=float(signal), confidence=confidence, rationale='')
            for role, signal in zip(ROLES, signals, strict=True)}


def purse(cash=10_000.0, shares=10, price=100.0):
    return Portfolio(3, 43, cash, shares, price, 10_000.0, 0.001, 0.0)


@pytest.fixture(scope='module')
def look(): return load_task('task_easy').observations()[0]


@pytest.fixture(scope='module')
def trace(): return play(StockerEnv('task_easy'), rule_council())


@pytest.fixture
def written(trace, tmp_path):
    write_trace(trace, tmp_path/'trace.jsonl')
    return tmp_path/'trace.jsonl'


# --- asking ---

@pytest.mark.parametrize('error', [
    ValueError('no data'), KeyError('rsi_14'), ZeroDivisionError(), AssertionError(), RecursionError(), StopIteration(),
    MemoryError(), ValueError('two\nlines'), ValueError('\ud800'), Unprintable()],
    ids=lambda error: type(error).__name__)
def test_a_specialist_that_raises_abstains_and_names_its_error(error, look):
    specialists = {role: saying(0.5) for role in ROLES} | {'indicator': failing(error)}
    votes = ask_all(specialists, look)
    assert list(votes) == list(ROLES)
    assert sum(isinstance(vote, Vote) for vote in votes.values()) == 6
    assert isinstance(votes['indicator'], Abstention) and type(error).__name__ in votes['indicator'].reason
    canonical_json(votes)


@pytest.mark.parametrize('answer', [
    None, 0.5, True, 'buy', '', [], {}, {'signal': 1.0, 'confidence': 1.0, 'rationale': 'x'}, Vote, object(),
    float('nan'),
    [Vote(signal=1.0, confidence=1.0, rationale='')], TradeAction(side=Side.BUY, quantity=1)],
    ids=lambda answer: repr(answer)[:14])
def test_an_answer_that_is_no_vote_is_an_abstention_and_never_a_hold(answer, look):
    found = ask(lambda observation: answer, look)
    assert isinstance(found, Abstention) and type(answer).__name__ in found.reason


def test_an_abstention_does_not_dilute_the_others(look):
    specialists = dict.fromkeys(ROLES, saying(0.8)) | {'news': failing(ValueError('x')), 'indicator': lambda o: 'buy'}
    votes = ask_all(specialists, look)
    assert mean_signal(votes) == pytest.approx(0.8)
    assert 'mean of 5 votes is +0.80' in vote_mean(votes, purse())[1]


def test_a_run_goes_on_when_everyone_fails():
    council = Council({role: failing(ValueError('x')) for role in ROLES}, vote_mean, 'broken')
    run = play(StockerEnv('task_easy'), council)
    assert len(run.steps) == 43 and all(step.decision.action == TradeAction(side='hold') for step in run.steps)
    assert run.steps[0].decision.rationale == 'Nobody voted.'
    assert round(run.total_reward, 5) == 0.38011


def test_interrupting_is_not_a_specialists_failure(look):
    with pytest.raises(KeyboardInterrupt): ask(failing(KeyboardInterrupt()), look)


@pytest.mark.parametrize('signal, confidence', [(1.1, 0.5), (-1.1, 0.5), (0.5, 1.1), (0.5, -0.1), (float('nan'), 0.5),
                                                (0.5, float('nan')), (float('inf'), 0.5), (True, 0.5), (0.5, True)])
def test_an_impossible_vote_cannot_be_made_and_counts_as_an_abstention(signal, confidence, look):
    made = lambda observation: Vote(signal=signal, confidence=confidence, rationale='')
    assert isinstance(ask(made, look), Abstention)


# --- merging ---

@pytest.mark.parametrize('signals', [(1, 1, 1, -1, -1, -1, 0), (-1, 0, 1, -1, 1, -1, 1), (0,) * 7])
def test_a_tie_holds_whatever_the_order(signals):
    for seed in range(20):
        votes = list(seven(signals).items())
        random.Random(seed).shuffle(votes)
        for moderator in MODERATORS.values():
            action, reason, *_ = moderator(dict(votes), purse())
            assert action == TradeAction(side='hold', quantity=0) and 'mean of 7 votes is +0.00' in reason


def test_the_order_of_votes_does_not_change_a_bit_of_their_mean():
    rng = random.Random(0)
    for _ in range(200):
        votes = [Vote(signal=rng.uniform(-1, 1), confidence=rng.random(), rationale='') for _ in ROLES]
        means = set()
        for _ in range(10):
            rng.shuffle(votes)
            means.add(mean_signal(dict(zip(ROLES, votes, strict=True))))
        assert len(means) == 1


def test_votes_without_any_confidence_are_no_mean():
    assert mean_signal(seven([1] * 7, confidence=0.0)) is None and mean_signal({}) is None
    assert vote_mean(seven([1] * 7, confidence=0.0), purse())[0] == TradeAction(side='hold', quantity=0)


@pytest.mark.parametrize('score, all_in, cash, shares, expected', [
    (1.0, False, 1000.0, 0, ('buy', 9)), (0.5, False, 10_000.0, 0, ('buy', 50)), (0.5, True, 10_000.0, 0, ('buy', 99)),
    (THRESHOLD, False, 10_000.0, 0, ('buy', 10)), (0.0999, True, 10_000.0, 0, ('hold', 0)),
    (-0.0999, True, 0.0, 9, ('hold', 0)),
    (0.2, False, 150.0, 0, ('buy', 1)), (1.0, True, 100.0, 5, ('hold', 0)), (-1.0, False, 0.0, 7, ('sell', 7)),
    (-0.2, False, 0.0, 1, ('sell', 1)), (-0.5, True, 0.0, 7, ('sell', 7)), (-1.0, True, 10_000.0, 0, ('hold', 0))])
def test_a_score_becomes_an_order_that_can_be_filled(score, all_in, cash, shares, expected):
    action = order_by_score(score, purse(cash, shares), all_in)
    assert (action.side.value, action.quantity) == expected


def test_the_embedded_moderators_never_give_an_invalid_order_under_the_close():
    for task, name in zip(('task_medium', 'task_hard'), MODERATORS, strict=True):
        assert not any(step.invalid for step in play(StockerEnv(task), rule_council(name)).steps)


@pytest.mark.parametrize('name', ['nobody', '', None, 'VOTE_MEAN'])
def test_an_unknown_moderator_is_an_error_that_names_the_known_ones(name):
    with pytest.raises(StockerError) as error: rule_council(name)
    assert all(known in str(error.value) for known in MODERATORS) and '\n' not in str(error.value)


# --- the same run every time ---

def test_the_order_of_the_seats_does_not_change_a_run(trace):
    for seed in range(2):
        seats = list(RULE_ANALYSTS.items())
        random.Random(seed).shuffle(seats)
        run = play(StockerEnv('task_easy'), Council(dict(seats), vote_mean, 'vote_mean'))
        assert canonical_json(run) == canonical_json(trace)


PLAY = '''
import sys
from stocker.council.council import play, rule_council, write_trace
from stocker.trading.env import StockerEnv
write_trace(play(StockerEnv('task_medium', 'next_open'), rule_council('vote_mean_all_in')), sys.argv[1])
'''


def test_a_trace_has_the_same_bytes_in_every_process(tmp_path):
    names = [tmp_path/f'{seed}.jsonl' for seed in (0, 1)]
    started = [subprocess.Popen([sys.executable, '-c', PLAY, str(name)],
                                env={**os.environ, 'PYTHONHASHSEED': name.stem})
               for name in names]
    assert [process.wait(timeout=PATIENCE) for process in started] == [0, 0]
    assert len({hashlib.sha256(name.read_bytes()).hexdigest() for name in names}) == 1


def test_a_step_of_a_trace_is_what_was_decided_and_done():
    env = StockerEnv('task_easy')
    step, *_, last = play(env, Council({'news': saying(1.0, 1.0)}, vote_mean_all_in, 'bull')).steps
    assert (step.step, step.date, step.observation) == (0, '2023-08-01', digest(env.episode.observations()[0]))
    assert (step.price, step.traded, step.shares, step.invalid) == (195.610001, 51.0, 51.0, False)
    assert step.cash == pytest.approx(10_000 - 51 * 195.610001 * 1.001) and step.value == step.cash + 51 * step.price
    assert last.cash == env.run.cash and last.value == env.run.value


# --- reading back ---

def test_a_trace_is_read_back_as_it_was(trace, written):
    assert read_trace(written) == trace
    assert read_trace(written).total_reward == trace.total_reward


def test_the_votes_are_read_back_in_the_order_of_the_roles(written):
    assert all(list(step.decision.votes) == list(ROLES) for step in read_trace(written).steps)


def test_writing_a_trace_again_gives_the_same_bytes_and_leaves_nothing_else(trace, written):
    before = written.read_bytes()
    write_trace(read_trace(written), written)
    assert written.read_bytes() == before and [path.name for path in written.parent.iterdir()] == ['trace.jsonl']


@pytest.mark.parametrize('sign', ['\n', '\r\n', '\x0b', '\x0c', '\x1c', '\x85', '\u2028', '\u2029', '"', '\\', '\t',
                                  '\U0001f600', 'é'],
                         ids=ascii)
def test_any_sign_in_a_reason_survives(sign, tmp_path):
    run = play(StockerEnv('task_easy'), Council({'news': saying(0.5, 0.5, f'before{sign}after')}, vote_mean))
    write_trace(run, tmp_path/'trace.jsonl')
    assert read_trace(tmp_path/'trace.jsonl') == run


def test_lines_may_have_been_given_windows_ends(trace, written):
    written.write_bytes(written.read_bytes().replace(b'\n', b'\r\n'))
    assert read_trace(written) == trace


def changed(line, **values):
    return json.dumps({**json.loads(line), **values})


DAMAGE = {
    'empty': (lambda lines: [], 1), 'blank first line': (lambda lines: ['', *lines[1:]], 1),
    'no first line': (lambda lines: lines[1:], 1), 'cut in a line': (lambda lines: [*lines[:-1], lines[-1][:40]], 44),
    'blank line': (lambda lines: [*lines[:3], '', *lines[4:]], 4),
    'deep nesting': (lambda lines: [*lines[:3], '[' * 100_000, *lines[4:]], 4),
    'no votes': (lambda lines: [*lines[:3], changed(lines[3], decision={}), *lines[4:]], 4),
    'a vote out of range': (lambda lines: [*lines[:3], lines[3].replace('"confidence":', '"confidence":7'),
                                           *lines[4:]], 4),
    'no terms': (lambda lines: [*lines[:3], changed(lines[3], terms={}), *lines[4:]], 4),
    'a field too many': (lambda lines: [*lines[:3], changed(lines[3], mood='good'), *lines[4:]], 4),
    'bad weights': (lambda lines: [changed(lines[0], weights={'w_performance': -1}), *lines[1:]], 1),
    'no weights': (lambda lines: [changed(lines[0], weights=None), *lines[1:]], 1)}
DAMAGE |= {f'{text} for a step': (lambda lines, text=text: [*lines[:3], text, *lines[4:]], 4)
           for text in ('42', 'null', '[]', '{}', '"x"', 'true')}
DAMAGE |= {f'{text} for the head': (lambda lines, text=text: [text, *lines[1:]], 1)
           for text in ('42', 'null', '[]', '{}', '"x"', 'true')}


@pytest.mark.parametrize('name', DAMAGE)
def test_a_damaged_line_is_named(name, written):
    damage, number = DAMAGE[name]
    written.write_text('\n'.join(damage(written.read_text().splitlines())))
    with pytest.raises(StockerError) as error: read_trace(written)
    assert '\n' not in str(error.value) and str(written) in str(error.value)
    assert f'line {number}:' in str(error.value)


@pytest.mark.parametrize('content', [b'', b'\xff\xfe\x00', b'\x80{}'], ids=ascii)
def test_a_file_that_is_no_text_is_no_trace(content, tmp_path):
    (tmp_path/'trace.jsonl').write_bytes(content)
    with pytest.raises(StockerError) as error: read_trace(tmp_path/'trace.jsonl')
    assert '\n' not in str(error.value)


def test_a_folder_or_nothing_is_no_trace(tmp_path):
    for path in (tmp_path, tmp_path/'none.jsonl'):
        with pytest.raises(StockerError) as error: read_trace(path)
        assert '\n' not in str(error.value) and str(path) in str(error.value)


NOT_WHOLE = {
    'last line lost': lambda lines: lines[:-1], 'all steps lost': lambda lines: lines[:1],
    'a line twice': lambda lines: [*lines, lines[-1]],
    'two lines swapped': lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
    'text for a price': lambda lines: [*lines[:3], changed(lines[3], price='high'), *lines[4:]],
    'no value': lambda lines: [*lines[:3], changed(lines[3], value=None), *lines[4:]],
    'text for the cash': lambda lines: [changed(lines[0], starting_cash='much'), *lines[1:]]}


@pytest.mark.parametrize('name', NOT_WHOLE)
def test_a_trace_that_is_not_whole_is_not_taken_for_one(name, written):
    written.write_text('\n'.join(NOT_WHOLE[name](written.read_text().splitlines())) + '\n')
    with pytest.raises(StockerError) as error: read_trace(written)
    assert '\n' not in str(error.value)


def test_a_trace_of_another_weighting_keeps_its_weights(tmp_path):
    weights = replace(RewardWeights(), transaction_cost=0.01, w_performance=1)
    run = play(StockerEnv('task_easy', weights=weights), rule_council())
    write_trace(run, tmp_path/'trace.jsonl')
    assert read_trace(tmp_path/'trace.jsonl').weights == weights


# a time limit

@pytest.mark.parametrize('seconds', [0.5, 1.0])
def test_a_specialist_that_raises_and_one_that_hangs_stop_nobody(seconds, look):
    gate, alone = threading.Event(), ask_all(RULE_ANALYSTS, look)
    def hanging(observation): gate.wait(PATIENCE)
    at_once = {role: lambda observation, vote=vote: vote for role, vote in alone.items()}
    votes = ask_all({**at_once, 'indicator': failing(ValueError('no data')), 'forum_sentiment': hanging}, look, seconds)
    assert tuple(votes) == ROLES and not gate.is_set() # it is not waited for
    gate.set()
    assert votes['indicator'] == Failure(reason='ValueError: no data')
    assert votes['forum_sentiment'] == Failure(reason=f'TimeoutError: no answer within {seconds:g} seconds')
    assert all(votes[role] == alone[role] for role in ROLES if role not in ('indicator', 'forum_sentiment'))


def test_a_hanging_specialist_does_not_keep_the_program_from_ending():
    code = '''
import time
from stocker.council.council import Council, vote_mean
from stocker.market.episodes import load_task
from stocker.market.core import Portfolio
council = Council({'news': lambda observation: time.sleep(600)}, vote_mean, seconds=0.1)
decision = council.decide(load_task('task_easy').observations()[0], Portfolio(0, 43, 1e4, 0, 1e2, 1e4, 0.001, 0.0))
print(decision.votes['news'].reason)'''
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout == 'TimeoutError: no answer within 0.1 seconds\n', done.stderr


def test_a_late_answer_changes_nothing_any_more(look):
    gate, threads = threading.Event(), []
    def late(observation):
        threads.append(threading.current_thread())
        gate.wait(PATIENCE)
        return Vote(signal=1.0, confidence=1.0, rationale='late')
    votes = ask_all({'news': late, 'indicator': RULE_ANALYSTS['indicator']}, look, seconds=0.05)
    before = dict(votes)
    gate.set()
    patiently(lambda: threads, what='the late specialist is asked')[0].join(PATIENCE)
    assert votes == before and isinstance(votes['news'], Abstention)


@pytest.mark.parametrize('error', [KeyboardInterrupt, SystemExit])
def test_an_interruption_in_a_thread_reaches_the_caller(error, look):
    with pytest.raises(error): ask_all({'news': failing(error()), 'indicator': saying(1)}, look, seconds=PATIENCE)


def test_asking_works_where_an_event_loop_runs(look):
    import asyncio
    async def cell(): return ask_all(RULE_ANALYSTS, look, seconds=PATIENCE)
    assert asyncio.run(cell()) == ask_all(RULE_ANALYSTS, look)


def test_the_order_in_which_answers_come_decides_nothing(look):
    rng = random.Random(1)
    def slowly(signal):
        pause = rng.uniform(0, 0.02)
        def specialist(observation):
            time.sleep(pause)
            return Vote(signal=float(signal), confidence=0.5, rationale='')
        return specialist
    for _ in range(5):
        specialists = {role: slowly(signal) for role, signal in zip(ROLES, [1, 1, 1, -1, -1, -1, 0], strict=True)}
        votes = ask_all(specialists, look, seconds=PATIENCE)
        assert tuple(votes) == ROLES and vote_mean(votes, purse()).action.side is Side.HOLD


# votes that stay

@pytest.mark.parametrize('timing', ['close', 'next_open'])
@pytest.mark.parametrize('moderator', MODERATORS)
def test_a_moderator_judged_on_kept_votes_trades_as_in_the_council(moderator, timing):
    voted = collect_votes(RULE_ANALYSTS, load_task('task_medium'), timing)
    judged = moderate_episode(voted, MODERATORS[moderator], RewardWeights(transaction_cost=0.002))
    played = play(StockerEnv('task_medium', timing, RewardWeights(transaction_cost=0.002)), rule_council(moderator))
    assert judged.rewards.tolist() == [step.terms.reward for step in played.steps]
    assert judged.values.tolist() == [step.value for step in played.steps]
    assert judged.total_reward == played.total_reward


def test_a_moderator_may_answer_with_a_plain_pair():
    voted = collect_votes({}, load_task('task_easy'))
    judged = moderate_episode(voted, lambda votes, portfolio: (TradeAction(side='hold'), 'no'))
    assert judged.decisions[0] == Decision(TradeAction(side='hold'), 'no') and not judged.traded.any()


def test_an_unreadable_answer_is_kept_apart_from_a_decision_to_hold(tmp_path):
    def mumbling(votes, portfolio): return Decision(TradeAction(side='hold'), 'no object', unreadable=True, said='Buy!')
    played = play(StockerEnv('task_easy'), Council(RULE_ANALYSTS, mumbling, 'mumbling'))
    write_trace(played, tmp_path/'trace.jsonl')
    steps = read_trace(tmp_path/'trace.jsonl').steps
    assert all(step.decision.unreadable and step.decision.said == 'Buy!' and not step.invalid for step in steps)


# filling

class Counting:
    "A specialist that is asked in batches and notes what it was asked."

    def __init__(self, silent=()): self.asked, self.batches, self.silent = [], [], set(silent)

    def __call__(self, observation): return self.vote_all([observation])[0]

    def vote_all(self, observations):
        self.batches.append(len(observations))
        self.asked += [look.date for look in observations]
        return [Abstention(reason='nothing to say') if look.date in self.silent else
                Vote(signal=0.5, confidence=0.5, rationale=look.date) for look in observations]


def remembering(specialist, root, **changes):
    return CachedSpecialist(specialist, VoteCache(root), **{'role': 'news', 'model': 'm', 'prompt': 'p', **changes})


def test_filling_asks_once_in_batches_and_then_never_again(tmp_path):
    easy, counting = load_task('task_easy'), Counting()
    council = Council({'news': remembering(counting, tmp_path), 'indicator': saying(1)}, vote_mean)
    assert council.fill([easy], batch_size=10, progress=False) == (43, 43, 0)
    assert counting.batches == [10, 10, 10, 10, 3] and counting.asked == list(easy.dates)
    assert council.fill([easy], progress=False) == (43, 0, 0) and len(counting.asked) == 43
    played = play(StockerEnv(easy), council)
    assert len(counting.asked) == 43
    assert [step.decision.votes['news'].rationale for step in played.steps] == list(easy.dates)


@pytest.mark.parametrize('change', [{'model': 'n'}, {'prompt': 'q'}, {'settings': {'temperature': 1}}])
def test_another_question_is_asked_once_for_each_decision(change, tmp_path):
    easy, counting = load_task('task_easy'), Counting()
    Council({'news': remembering(counting, tmp_path)}, vote_mean).fill([easy], progress=False)
    for _ in range(2):
        Council({'news': remembering(counting, tmp_path, **change)}, vote_mean).fill([easy], progress=False)
    assert len(counting.asked) == 86


def test_abstentions_are_counted_and_asked_again(tmp_path):
    easy = load_task('task_easy')
    counting = Counting(silent=easy.dates[:5])
    council = Council({'news': remembering(counting, tmp_path)}, vote_mean)
    assert council.fill([easy], progress=False) == (43, 43, 5)
    assert council.fill([easy], progress=False) == (43, 5, 5) and counting.asked[43:] == list(easy.dates[:5])


def test_the_two_timings_ask_two_questions(tmp_path):
    easy, counting = load_task('task_easy'), Counting()
    for timing in ('close', 'next_open'):
        Council({'news': remembering(counting, tmp_path/timing)}, vote_mean).fill([easy], timing, progress=False)
    assert len(counting.asked) == 86


def test_a_batch_that_comes_back_short_is_refused(tmp_path):
    class Short(Counting):
        def vote_all(self, observations): return super().vote_all(observations)[:-1]
    council = Council({'news': remembering(Short(), tmp_path)}, vote_mean)
    with pytest.raises(StockerError, match='answers came to'): council.fill([load_task('task_easy')], progress=False)


KILLS = 100
FILLING = """
import os, random, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
import test_council
from waiting import kill_once

root, log, rng = sys.argv[1], sys.argv[2], random.Random(7)
episodes, council = test_council.episodes_to_fill(), test_council.slow_council(root, log)
for episode in episodes: episode.observations()
def slow_disk(path, content):
    half = len(content) // 2
    with open(path, 'wb') as file:
        for part in (content[:half], content[half:]):
            file.write(part)
            file.flush()
            time.sleep(0.0002)

Path.write_bytes = slow_disk # so that many of the kills fall into a writing

def called(): return os.path.getsize(log) if os.path.exists(log) else 0

stopped = 0
for _ in range(int(sys.argv[4])):
    before, child = called(), os.fork()
    if not child:
        try: council.fill(episodes, batch_size=3, progress=False)
        finally: os._exit(0)
    stopped += kill_once(child, lambda: called() > before, rng.uniform(0, 0.006))
print(stopped)
"""


def episodes_to_fill(): return [load_task('task_easy'), load_task('task_medium')]


def slow_council(root, log):
    "All seats, each noting what it is asked before it answers."
    class Noting(Counting):
        def __init__(self, role):
            super().__init__()
            self.role = role
        def vote_all(self, observations):
            handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(handle, ''.join(f'{self.role} {look.ticker} {look.date}\n' for look in observations).encode())
            os.close(handle)
            return super().vote_all(observations)
    seats = {role: remembering(Noting(role), root, role=role) for role in ROLES}
    return Council(seats, vote_mean)


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs fork and SIGKILL')
def test_filling_survives_a_hundred_kills(tmp_path):
    root, log, here = tmp_path/'root', tmp_path/'calls.txt', os.path.dirname(__file__)
    done = subprocess.run([sys.executable, '-c', FILLING, str(root), str(log), here, str(KILLS)],
                          capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= KILLS // 2, 'too few of the processes were still at work when they were killed'
    kept = {path.relative_to(root).as_posix() for path in root.rglob('*.json') if not path.name.startswith('.')}
    assert kept and all(read_stored(root/path) for path in kept)
    places = {(role, episode.ticker, date)
              for role in ROLES for episode in episodes_to_fill() for date in episode.dates}
    missing = {place for place in places if place_path(Place(place[0], 'base', *place[1:])) not in kept}
    assert missing, 'everything was filled before the last kill, so there is nothing left to ask for'
    calls = log.read_text().splitlines()
    assert len(calls) - len(set(calls)) <= 3 * KILLS, 'more than the batch in hand was asked for again'
    log.unlink()
    filled = slow_council(root, log).fill(episodes_to_fill(), progress=False)
    asked = [tuple(line.split()) for line in log.read_text().splitlines()] if log.exists() else []
    assert filled.asked == len(asked) == len(missing) and set(asked) == missing
    assert slow_council(root, log).fill(episodes_to_fill(), progress=False).asked == 0
