"""The audit: every check holds, and every check fails when the thing it guards is broken."""
import contextlib
import inspect
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from stocker.trust import attacks, audit, books, leaks, memory
from stocker.trading.accounting import affordable_quantity, fill_order, greedy_orders, simulate
from stocker.council.cache import VoteCache
from stocker.market.core import ROLES, Timing, Vote, canonical_json, package_path, write_atomically
from stocker.council.council import ask_all, rule_council, write_trace
from stocker.market.episodes import TASKS, Timeline, load_task
from stocker.llm.client import ScriptedClient
from stocker.llm.prompts import fenced, vote_messages
from stocker.trust.books import (
    SHAPES, check_fees, check_fills, check_optimum, check_processes, check_threads, odd_episode)
from stocker.trust.checks import Result, audit_table
from stocker.leaks.leaks import (
    CHANGES, INVENTED, check_tasks, everything_seen, last_moment, later_facts, leak_check, leaks, some_of,
    without_future)

needs_fork = pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs fork and SIGKILL')


def one(look):
    "The check of two days of a task under both clocks."
    return leak_check('one task', [load_task('task_medium')], 2, look)


# --- results ---

def test_a_check_that_looked_at_nothing_does_not_hold():
    assert not Result('empty', {}).holds and not Result('empty', {'days': 0}).holds
    assert Result('full', {'days': 1}).holds and not Result('full', {'days': 1}, ('A fault.',)).holds


def test_the_table_names_faults_and_says_how_many_it_left_out():
    faults = tuple(f'Fault {i}.' for i in range(7))
    table = audit_table([Result('a', {'days': 1200}), Result('bb', {'days': 1}, faults)])
    assert table.splitlines()[0] == 'a   holds   1,200 days'
    assert table.splitlines()[1].startswith('bb  BROKEN')
    assert 'Fault 4.' in table and 'Fault 5.' not in table and table.endswith('and 2 more')
    assert audit_table([]) == ''


# --- no look-ahead ---

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
    assert same == ['ticker']


@pytest.mark.parametrize('name', list(INVENTED))
def test_an_invented_fact_would_be_seen_if_it_were_earlier(name):
    episode, session = load_task('task_easy'), '2023-09-05'
    moment = last_moment(session, Timing.CLOSE)
    step = episode.dates.index(session)
    early = leaks.released_at(INVENTED[name], moment)
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


def test_the_audit_of_the_tasks_reports_a_leak():
    assert not check_tasks(look=LEAKS['the next close']).holds


def test_a_decision_without_its_future_is_one_decision():
    for change in CHANGES:
        again = without_future(load_task('task_easy'), 7, Timing.CLOSE, change)
        assert again.steps == 1 and again.dates == load_task('task_easy').dates[7:8] and again.chart_folder is None


# --- the books ---

def debt(cash, shares, side, quantity, price, cost):
    "An order is filled as if there were no fee, and the fee is taken afterwards."
    money, held, traded, invalid = fill_order(cash, shares, side, quantity, price, 0.0)
    return money - abs(traded) * price * cost, held, traded, invalid


def short(cash, shares, side, quantity, price, cost):
    "A sale of more than there is."
    if side != 2 or quantity < 1: return fill_order(cash, shares, side, quantity, price, cost)
    return cash + quantity * price * (1 - cost), shares - quantity, -quantity, False


def silent(*order):
    "No order is ever invalid."
    return (*fill_order(*order)[:3], False)


def whole_cents(*order):
    "Cash is rounded to cents."
    cash, *rest = fill_order(*order)
    return round(cash, 2), *rest


@pytest.mark.parametrize('fill', [debt, short, silent, whole_cents])
def test_a_bookkeeper_that_makes_a_mistake_is_found(fill):
    assert not check_fills(fill=fill).holds


def test_every_shape_of_market_is_what_its_name_says():
    made = {shape: odd_episode(np.random.default_rng(5), shape) for shape in SHAPES}
    fills = {shape: episode.market('next_open').fills for shape, episode in made.items()}
    assert (made['no volume'].prices['volume'] == 0).all() and np.ptp(fills['flat']) == 0
    assert fills['cents'].max() < 0.2 and fills['millions'].min() > 5e5
    assert fills['split'][6] < 0.4 * fills['split'][4]


def shifted(*arguments):
    "Rewards come a step late."
    run = books.batched(*arguments)
    return books.Played((0.0, *run.rewards[:-1]), run.values)


def without_the_bonus(*arguments):
    "The last reward lacks its last bit."
    run = books.replayed(*arguments)
    return books.Played((*run.rewards[:-1], float(np.nextafter(run.rewards[-1], 2))), run.values)


@pytest.mark.parametrize('way', [shifted, without_the_bonus])
def test_a_way_to_play_that_differs_is_found(way):
    rng = np.random.default_rng(18)
    assert all(books.run_faults(rng, shape, {'other': way}) for shape in SHAPES)


def test_a_reward_out_of_its_range_is_found(monkeypatch):
    class Generous(trust.StockerEnv):
        def step(self, action):
            look, reward, *rest = super().step(action)
            return look, 1.5 * reward, *rest
    monkeypatch.setattr(trust, 'StockerEnv', Generous)
    faults = books.run_faults(np.random.default_rng(0), 'wild', {})
    faults += [fault for seed in range(10) for fault in books.run_faults(np.random.default_rng(seed), 'ordinary', {})]
    assert faults and all('a reward of' in fault for fault in faults)


def lazy(fills, marks, cash, cost): return np.zeros(len(fills))


def first_day(fills, marks, cash, cost):
    most = affordable_quantity(cash, fills[0] * (1 + cost))
    return np.where(np.arange(len(fills)) == 0, most, 0.0)


@pytest.mark.parametrize('find', [lazy, first_day, lambda fills, marks, cash, cost: greedy_orders(fills, marks)])
def test_an_optimum_that_is_none_is_found(find):
    assert check_optimum().holds
    assert not check_optimum(find=find).holds


def test_a_fee_that_pays_is_found():
    def paying(fills, marks, wanted, cash, fees):
        runs = simulate(fills, marks, wanted, cash, fees)
        return replace(runs, value=runs.value + 2 * np.cumsum(abs(runs.traded) * fills[:, None] * fees, axis=0))
    assert check_fees().holds
    assert not check_fees(play_all=paying).holds


# --- the same twice ---

def test_a_program_that_prints_a_set_is_found():
    "Ten names in a set come out in another order in another process."
    assert check_processes(program='print(1 + 1)').holds
    assert not check_processes(program=f'print(set({ROLES!r}))').holds


def test_a_program_that_fails_is_a_fault():
    result = check_processes(program='raise SystemError("no such luck")')
    assert not result.holds and 'no such luck' in result.faults[0]


def test_votes_that_depend_on_who_answered_first_are_found():
    def sharing():
        heard = []
        def opinion(look):
            heard.append(look.date)
            return Vote(signal=len(heard) % 3 - 1.0, confidence=len(heard) % 5 / 5, rationale='')
        return replace(rule_council(), specialists=dict.fromkeys(ROLES, opinion))
    assert not check_threads(make=sharing).holds


# --- memory ---

@pytest.fixture(scope='module')
def episode(): return load_task('task_easy')


NUMBERS = ('seasonal_trend', 'peer_commodity')


def test_a_market_mirrored_twice_is_the_market(episode):
    look = episode.observations()[7]
    twice = memory.mirrored_bars(memory.mirrored_bars(look.bars))
    assert np.allclose([bar[1:] for bar in twice], [bar[1:] for bar in look.bars])
    again = memory.mirrored_look(memory.mirrored_look(look))
    assert again.season.return_252 == pytest.approx(look.season.return_252)
    assert again.season.high_252 == pytest.approx(look.season.high_252)
    assert [peer.return_5 for peer in again.peers] == pytest.approx([peer.return_5 for peer in look.peers])
    assert memory.mirrored_return(None) is None


def test_an_indicator_of_the_bars_alone_is_that_of_the_whole_history(episode):
    "So a mirrored day differs from the real one by the mirror only."
    look = episode.observations()[7]
    again = memory.mirrored_look(memory.mirrored_look(look)).indicators
    assert all(again[name] == pytest.approx(value, rel=1e-4, abs=1e-4) for name, value in look.indicators.items())


@pytest.mark.parametrize('disguise', memory.ARMS.values(), ids=list(memory.ARMS))
def test_a_disguise_hides_what_it_says_and_nothing_else(episode, disguise):
    look = episode.observations()[7]
    hidden = memory.disguised(look, disguise)
    said = canonical_json([vote_messages(role, hidden) for role in memory.NUMBER_ROLES])
    assert ('AAPL' in said) == ('MSFT' in said) == (disguise.name is None)
    assert ('2023' in said) == (disguise.years == 0) and ('1995' in said) == (disguise.years != 0)
    assert (hidden.bars[-5].close == look.bars[-5].close) == (not disguise.mirrored)
    assert hidden.bars[-1].close == pytest.approx(look.close) and hidden.news == hidden.forum == ()


@pytest.mark.parametrize('day', ['2024-02-29', '2023-12-31', '2023-08-03T15:55:00-04:00'])
def test_a_moved_date_is_a_date_on_the_same_weekday(day):
    assert pd.Timestamp(memory.moved(day, memory.YEARS_BACK)).day_of_week == pd.Timestamp(day).day_of_week


def test_no_information_on_the_market_is_in_a_probe(episode):
    probes = memory.recall_probes(episode)
    assert len({canonical_json(probe.messages) for probe in probes}) == len(probes)
    for probe in probes:
        text = probe.messages[0]['content']
        assert 'AAPL' in text and 'unknown' in text and str(probe.truth) not in text.replace('up or down', '')


@pytest.mark.parametrize('text, direction, close', [
    ('Up', 'up', None), ('down 3 %', 'down', 3.0), ('It closed at $178.85.', None, 178.85), ('unknown', None, None),
    ('between 170 and 1,180.5', None, 1180.5), ('', None, None),
    ('up, then down', None, None), ('upwards', None, None)])
def test_answers_are_read(text, direction, close):
    assert (memory.said_direction(text), memory.said_close(text)) == (direction, close)


def test_chance_is_no_memory():
    rng, scores = np.random.default_rng(0), []
    for _ in range(200):
        truth = rng.choice(['up', 'down'], 40)
        scores.append(memory.beyond_chance([(one, bool(rng.integers(2))) for one in truth]))
    assert np.mean(np.array(scores) > 0) < 0.05
    assert memory.beyond_chance([]) == 0.0


def constant(text): return ScriptedClient(lambda messages: text, 'constant')


VOTE_UP = canonical_json({'signal': 0.5, 'confidence': 0.5, 'rationale': ''})


@pytest.mark.parametrize('text', ['up', 'unknown', '', '{"signal": 9}', '1000', VOTE_UP])
def test_a_model_that_always_says_the_same_remembers_nothing(episode, text):
    memory = memory.audit_memory(constant(text), [episode], 4, NUMBERS)
    assert memory.contamination == 0.0 and memory.consistency == 1.0 and memory.input_dependency == 0.0


def test_a_model_that_votes_at_random_is_not_called_contaminated(episode):
    rng = np.random.default_rng(1)
    client = ScriptedClient(lambda messages: canonical_json(
        {'signal': float(rng.uniform(-1, 1)), 'confidence': 0.5, 'rationale': ''}), 'coin')
    memory = memory.audit_memory(client, [episode], 12, NUMBERS)
    assert memory.contamination == 0.0 and 0.2 < memory.consistency < 0.8


def test_a_model_that_follows_the_name_is_found(episode):
    "It knows no price, but buys whatever is called AAPL."
    def fan(messages):
        signal = 1 if 'AAPL' in canonical_json(messages) else -1
        return canonical_json({'signal': signal, 'confidence': 1, 'rationale': ''})
    memory = memory.audit_memory(ScriptedClient(fan, 'fan'), [episode], 6, NUMBERS)
    assert memory.identity > 0.9 and memory.consistency == 0.0 and memory.closes == memory.directions == 0.0


def test_a_model_that_knows_some_closes_is_found(episode):
    knows = memory.remembering_client(episode)
    def half(messages): return knows.script(messages) if 'At which price' in messages[-1]['content'] else 'unknown'
    memory = memory.audit_memory(ScriptedClient(half, 'half'), [episode], 3, NUMBERS)
    assert memory.closes > 0.9 and memory.directions == 0.0 and memory.contamination == memory.closes


def test_the_score_stands_in_the_line_beside_a_result(episode):
    memory = memory.audit_memory(constant(VOTE_UP), [episode], 2, NUMBERS)
    for cutoff, words in (('2025-01-31', 'in-sample'), (None, 'not stated'), ('2023-08-10', 'partly in-sample')):
        line = memory.result_label(memory, episode.dates, cutoff)
        assert line.startswith(words) or words in line
        assert 'contamination 0.00' in line and '\n' not in line
        assert not line.startswith('out-of-sample')


@pytest.mark.parametrize('cutoff, name', [
    (None, 'unknown'), ('2023-07-31', 'out-of-sample'), ('2023-08-01', 'partly in-sample'),
    ('2023-09-28', 'partly in-sample'), ('2023-09-29', 'in-sample'), ('2030-01-01', 'in-sample')])
def test_nothing_before_the_cutoff_is_out_of_sample(cutoff, name):
    assert memory.sample_of('2023-08-01', '2023-09-29', cutoff) == name


# --- nothing gets in ---

@pytest.mark.parametrize('line, found', [
    ('import pickle', 1), ('from pickle import loads', 1), ('import joblib.pool', 1), ('eval(x)', 1), ('exec(x)', 1),
    ('import os; os.system("ls")', 1), ('torch.load(path)', 1), ('yaml.load(text)', 1), ('run(x, shell=True)', 1),
    ('load(x, trust_remote_code=True)', 1), ('settings = {"trust_remote_code": True}', 1),
    ('np.load(x, allow_pickle=True)', 1), ('torch.load(path, weights_only=False)', 2),
    ('model.eval()', 0), ('run(x, shell=False)', 0), ('# import pickle', 0), ('text = "eval(x)"', 0),
    ('yaml.safe_load(x)', 0), ('load(x, trust_remote_code=False)', 0), ('re.compile(x)', 0),
    ('np.load(x, allow_pickle=False)', 0)])
def test_code_that_could_run_a_strangers_code_is_found_and_no_other(line, found):
    assert len(attacks.check_sources(sources={'a.py': line}).faults) == found


def test_the_sources_of_the_package_are_searched_and_sound():
    result = attacks.check_sources()
    assert result.faults == () and result.counted['files'] > 20
    assert not attacks.check_sources(sources={'models.py': 'import pickle'}).holds


def test_names_stay_inside_and_a_door_that_is_open_is_found():
    assert attacks.check_paths().holds
    assert {'role', 'adapter', 'ticker', 'date', 'file name'} == set(attacks.path_makers())
    doors = str, lambda name: name.replace('/', '_'), lambda name: f'a/{name}.json', lambda name: name.replace('..', '')
    for door in doors:
        assert not attacks.check_paths(makers={'a': door}).holds


def test_a_page_that_lets_markup_through_is_found():
    def careless(old, new): return lambda trace, episode: attacks.report_page(trace, episode).replace(old, new)
    assert attacks.check_pages().holds
    for old, new in (('&lt;', '<'), ('</html>', ''), ('<p', '<p title="steal"'), ('<style>', '<style>steal')):
        assert attacks.check_pages(render=careless(old, new)).holds == (old == '</html>')
    assert not attacks.check_pages(render=lambda trace, episode: '').holds


def test_a_seat_that_obeys_headlines_is_found():
    def obeys(look):
        worst = any('administrator' in fact.headline for fact in look.macro)
        return Vote(signal=-1.0 if worst else 0.0, confidence=1.0, rationale='')
    council = rule_council()
    council = replace(council, specialists={**council.specialists, 'geopolitics': obeys})
    assert not attacks.check_headlines(council=council).holds


def test_the_effect_of_instructions_on_a_model_is_measured(episode):
    looks = episode.observations()
    assert attacks.injection_effect(constant(VOTE_UP), looks) == 0.0
    led = ScriptedClient(lambda messages: canonical_json(
        {'signal': -1 if 'administrator' in messages[1]['content'] else 1, 'confidence': 1, 'rationale': ''}), 'led')
    assert attacks.injection_effect(led, looks) == pytest.approx(0.2)
    assert attacks.injection_effect(led, looks[:0]) == 0.0
    assert attacks.injection_effect(led, looks, role='geopolitics') == pytest.approx(0.2)
    assert 0.1 < attacks.injection_effect(led, looks, role='forum_sentiment') <= 0.2 # long posts are cut before it


def test_the_effect_of_instructions_on_orders_is_measured(episode):
    def gullible(look):
        return Vote(signal=-1.0 if 'sell' in look.news[0].headline else 1.0, confidence=1.0, rationale='')
    looks = [look for look in episode.observations() if look.news][:3]
    council = replace(rule_council(), specialists={'news': gullible})
    assert attacks.order_effect(council, looks) == pytest.approx(0.4)
    assert attacks.order_effect(rule_council(), looks) == attacks.order_effect(rule_council(), []) == 0.0


@pytest.mark.parametrize('fence', [
    lambda items: '\n'.join(['<data 00aa11bb>', *(f'- {item}' for item in items), '</data 00aa11bb>']),
    lambda items: fenced(items).replace('‹', '<'), lambda items: fenced(items).replace('- ', ''),
    lambda items: '\n'.join(fenced(items).splitlines()[:-1]), lambda items: fenced([*items, 'one more'])])
def test_a_fence_with_a_hole_is_found(fence):
    assert attacks.check_fence().holds
    assert not attacks.check_fence(fence=fence).holds


@pytest.mark.parametrize('host, own', [
    ('127.0.0.1', True), ('::1', True), ('localhost', True), ('0.0.0.0', False), ('::', False), ('', False),
    ('example.org', False)])
def test_only_this_machine_reaches_the_server(host, own):
    assert attacks.check_server(host=lambda: host).holds == own
    assert attacks.check_server().holds


def test_changed_weights_and_files_that_can_run_code_are_found(tmp_path):
    folder = Path(shutil.copytree(package_path('pocket'), tmp_path/'pocket'))
    assert attacks.check_weights().holds and attacks.check_weights(folder=folder).holds
    (folder/'modeling.py').write_text('')
    assert 'modeling.py' in attacks.check_weights(folder=folder).faults[0]
    (folder/'modeling.py').unlink()
    assert not attacks.check_weights(folder=folder, pinned='0' * 64).holds
    content = bytearray((folder/'model.safetensors').read_bytes())
    content[-1] ^= 1
    (folder/'model.safetensors').write_bytes(content)
    assert not attacks.check_weights(folder=folder).holds


# --- the power fails ---

@needs_fork
def test_a_cache_is_whole_after_every_kill_and_a_careless_one_is_found():
    class Careless(VoteCache):
        def put(self, role, ticker, date, digest, vote, adapter='base', *, model):
            path = self.path(role, ticker, date, adapter)
            super().put(role, ticker, date, digest, vote, adapter, model=model)
            text = path.read_text()
            with open(path, 'w') as file:
                for part in (text[:60], text[60:]):
                    file.write(part)
                    file.flush()
                    time.sleep(0.005)
            return vote
    assert not attacks.check_killed_cache(cache=Careless).holds


@needs_fork
def test_the_lock_of_a_killed_childs_bar_blocks_nobody():
    "Bars share a lock with their children; one who dies with it would stop everyone else for ever."
    def bars():
        while True:
            with trust.tqdm.get_lock(): time.sleep(0.001)
    assert all(attacks.killed(bars, 0.002) for _ in range(10))
    assert trust.tqdm.get_lock().acquire(timeout=5) is not False
    trust.tqdm.get_lock().release()


@needs_fork
def test_a_file_written_in_parts_is_found_damaged():
    def parts(value, path):
        with open(path, 'w') as file:
            for letter in value:
                file.write(letter)
                file.flush()
                time.sleep(0.001)
    def whole(value, path):
        with write_atomically(path) as temporary: temporary.write_text(value)
    rng = np.random.default_rng(0)
    assert attacks.kill_writers(whole, ('aaaa', 'bbbb'), 10, rng) == 0
    assert attacks.kill_writers(parts, ('aaaa', 'bbbb'), 10, rng) > 0


def test_a_disk_that_refuses_is_told_and_a_careless_writer_found():
    def silent(trace, path):
        with contextlib.suppress(OSError): write_trace(trace, path)
    def careless(trace, path): path.write_text(canonical_json(trace), encoding='utf-8')
    trace = trust.play(trust.StockerEnv('task_easy'), rule_council())
    assert not list(attacks.disk_faults('full', trace, write_trace))
    assert list(attacks.disk_faults('full', trace, silent)) == ['A full disk: nobody was told.']
    assert 'A full disk: the old file is damaged.' in list(attacks.disk_faults('full', trace, careless))
    assert not list(attacks.disk_faults('read-only', trace, write_trace))


# --- the clock jumps ---

def test_files_get_any_time_and_keep_what_they_hold(tmp_path):
    for name in 'abc': (tmp_path/name).write_text(name)
    (tmp_path/'folder').mkdir()
    before = attacks.contents(tmp_path)
    attacks.wrong_times(tmp_path, np.random.default_rng(1))
    times = [path.stat().st_mtime for path in tmp_path.iterdir()]
    assert attacks.contents(tmp_path) == before and len(set(times)) == 4 and max(times) - min(times) > 1e8


def test_a_clock_that_jumps_goes_back_and_forward_and_is_put_right_again():
    true = time.time, time.time_ns
    with pytest.raises(KeyError), attacks.jumping_clock():
        seen = [time.time() for _ in attacks.JUMPS]
        assert abs(time.time_ns() - true[1]()) < 1e9
        raise KeyError
    assert (time.time, time.time_ns) == true
    steps = np.diff(seen)
    assert steps.min() < -1e9 and steps.max() > 1e9


class ByTime(VoteCache):
    "A cache that reads a file again only if its time and its size have changed."

    known = {}

    def get(self, role, ticker, date, digest, adapter='base'):
        path = self.path(role, ticker, date, adapter)
        key = path, (path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else None
        if key not in self.known: self.known[key] = super().get(role, ticker, date, digest, adapter)
        return self.known[key]


class Expiring(VoteCache):
    "A cache whose votes count for a year."

    def get(self, role, ticker, date, digest, adapter='base'):
        path = self.path(role, ticker, date, adapter)
        if path.exists() and time.time() - path.stat().st_mtime > 3e7: return None
        return super().get(role, ticker, date, digest, adapter) or Vote(signal=0.0, confidence=0.0, rationale='')


def test_a_cache_that_trusts_the_clock_is_found():
    assert list(attacks.clock_cache_faults()) == []
    assert 'is not the one that is read' in next(attacks.clock_cache_faults(ByTime))
    assert 'is not the one that is read' in next(attacks.clock_cache_faults(Expiring))


def test_patience_by_the_clock_of_the_system_is_found(monkeypatch):
    assert list(attacks.clock_council_faults()) == []
    monkeypatch.setattr('stocker.council.council.time', SimpleNamespace(monotonic=lambda: time.time()))
    early, late = attacks.clock_council_faults()
    assert 'called late' in early and 'waited for' in late


def test_a_council_without_patience_or_without_a_limit_is_found():
    short, = attacks.clock_council_faults(lambda seats, look, seconds: ask_all(seats, look, min(seconds, 0.001)))
    endless, = attacks.clock_council_faults(lambda seats, look, seconds: ask_all(seats, look))
    assert 'called late' in short and 'waited for' in endless


def test_a_server_that_trusts_the_clock_is_found():
    assert list(attacks.clock_server_faults()) == []
    assert list(attacks.clock_server_faults(lambda: time.time()))


# --- kills of a sweep, a build and a training ---

@needs_fork
def test_a_sweep_that_writes_in_place_is_found():
    def in_place(folder, trace, table):
        folder.mkdir(exist_ok=True)
        with open(folder/'sweep.csv', 'w') as file:
            for total in table['total'][:60]:
                print(total, file=file, flush=True)
                time.sleep(0.001)
    def not_the_same(folder, trace, table):
        folder.mkdir(exist_ok=True)
        with write_atomically(folder/'sweep.csv') as temporary: temporary.write_text(f'{os.getpid()} {time.time_ns()}')
    assert 'sweep.csv is damaged.' in attacks.check_killed_sweep(write=in_place).faults
    assert not attacks.check_killed_sweep(write=not_the_same).holds


def steps_of(folder, begin, more):
    "Steps that add up, each kept with all that `more` adds; goes on where it stopped."
    file = Path(folder, 'checkpoint', 'adapter_model.safetensors')
    state = json.loads(file.read_text()) if file.is_file() else begin
    while state['step'] < 20:
        state = more({**state, 'step': state['step'] + 1})
        with write_atomically(file) as temporary: temporary.write_text(json.dumps(state))
        (file.parent/'trainer_state.json').touch()
        time.sleep(0.005)


@needs_fork
def test_a_training_that_goes_on_where_it_stopped_is_sound(tmp_path):
    kills, faults = attacks.kill_trainings(
        lambda folder: steps_of(folder, {'step': 0, 'sum': 0}, lambda state: {**state, 'sum': state['sum'] + 1}),
        tmp_path, 8)
    assert kills > 2 and [fault for fault in faults if 'damaged' not in fault] == []


@needs_fork
def test_a_training_that_forgets_where_it_stopped_is_found(tmp_path):
    def drawn(folder):
        rng = np.random.default_rng(0)
        steps_of(folder, {'step': 0, 'sum': 0.0}, lambda state: {**state, 'sum': state['sum'] + rng.random()})
    kills, faults = attacks.kill_trainings(drawn, tmp_path, 4)
    assert kills and any('learned something else' in fault for fault in faults)


@needs_fork
def test_a_training_that_fails_or_cannot_go_on_is_found(tmp_path):
    def fails(folder): raise SystemExit('no such luck')
    def once(folder):
        Path(folder).mkdir(parents=True)
        steps_of(folder, {'step': 0}, dict)
    assert attacks.kill_trainings(fails, tmp_path/'a', 1) == (0, ['The training fails.'])
    assert 'A killed run cannot go on.' in attacks.kill_trainings(once, tmp_path/'b', 1)[1]


def test_only_finished_checkpoints_are_looked_at(tmp_path):
    for name in ('checkpoint-2', 'checkpoint-4'):
        (tmp_path/name).mkdir()
        (tmp_path/name/'optimizer.pt').write_text('whole')
        (tmp_path/name/'training_args.bin').write_text(name)
    (tmp_path/'checkpoint-2'/'trainer_state.json').write_text('{}')
    expected = attacks.learned(tmp_path)
    assert set(expected) == {'checkpoint-2/optimizer.pt', 'checkpoint-4/optimizer.pt'}
    for name in ('checkpoint-2', 'checkpoint-4'): (tmp_path/name/'optimizer.pt').write_text('who')
    assert attacks.damaged(tmp_path, expected) == ['checkpoint-2/optimizer.pt']


def test_a_program_for_training_that_breaks_down_is_a_fault():
    result = attacks.check_killed_training(program='raise SystemExit("no such luck")')
    assert result.faults == ('no such luck',)
    assert attacks.check_killed_training(program='print([3, []])').holds
    assert not attacks.check_killed_training(program='print([0, []])').holds


# --- the audit ---

def test_a_check_that_breaks_down_is_a_fault_and_the_others_run():
    def breaks(quick): raise KeyError('no such table')
    results = audit.audit(True, [breaks, attacks.check_fence, attacks.check_paths], progress=False)
    assert [result.holds for result in results] == [False, True, True] and 'KeyError' in results[0].faults[0]


def test_every_check_has_a_name_of_its_own_and_can_be_handed_something_broken():
    for check in (*audit.CHECKS, *audit.FULL_CHECKS):
        parameters = list(inspect.signature(check).parameters.values())
        assert len(parameters) >= 2 and parameters[0].name == 'quick', check
    assert len(set(audit.CHECKS)) == len(audit.CHECKS) >= 20


def test_every_check_is_seen_failing_in_the_notebook():
    notebook = Path(trust.__file__).parents[2]/'nbs'/'trust'/'86_audit.ipynb'
    if not notebook.is_file(): pytest.skip('no notebooks here')
    cells = [''.join(cell['source']) for cell in json.loads(notebook.read_text(encoding='utf-8'))['cells']]
    shown = '\n'.join(cell for cell in cells if 'test_eq(' in cell and ('False' in cell or '.faults' in cell))
    for check in (*audit.CHECKS, *audit.FULL_CHECKS): assert check.__name__ in shown, check


def test_a_build_that_writes_in_place_is_found():
    "The program writes half of a file, waits, and writes the rest."
    program = '''
import sys, time
from pathlib import Path
folder = Path(sys.argv[1]); folder.mkdir(exist_ok=True)
with open(folder/'prices.csv', 'w') as file:
    file.write('half'); file.flush(); time.sleep(3); file.write('rest')
'''
    assert not attacks.check_killed_build(True, program).holds
    whole = program.replace('time.sleep(3); ', '').replace("'prices.csv'", "'prices.tmp'") + 'time.sleep(1)\n'
    assert attacks.check_killed_build(True, whole + "(folder/'prices.tmp').replace(folder/'prices.csv')\n").holds


def test_training_that_differs_is_found():
    told = iter(['one', 'one', 'one', 'two'])
    assert attacks.check_training(True, lambda folder: next(told)).holds
    assert not attacks.check_training(True, lambda folder: next(told)).holds


def test_what_cannot_run_is_left_out(monkeypatch):
    monkeypatch.setattr(trust, 'find_spec', lambda name: None)
    assert {attacks.check_training, attacks.check_killed_training}.isdisjoint(audit.checks_of(False))
    assert attacks.check_killed_build in audit.checks_of(False)
    monkeypatch.delattr(os, 'fork', raising=False)
    assert len(audit.checks_of(True)) == len(audit.CHECKS) - 4
