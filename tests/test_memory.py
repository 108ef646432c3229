"What a model remembers: disguises hide what they say, and a score tells memory from chance."
import numpy as np
import pandas as pd
import pytest

from stocker.llm.client import ScriptedClient
from stocker.llm.prompts import vote_messages
from stocker.market.core import canonical_json
from stocker.market.episodes import load_task
from stocker.trust import memory

NUMBERS = ('seasonal_trend', 'peer_commodity')
VOTE_UP = canonical_json({'signal': 0.5, 'confidence': 0.5, 'rationale': ''})


@pytest.fixture(scope='module')
def episode(): return load_task('task_easy')


def constant(text): return ScriptedClient(lambda messages: text, 'constant')


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


@pytest.mark.parametrize('text', ['up', 'unknown', '', '{"signal": 9}', '1000', VOTE_UP])
def test_a_model_that_always_says_the_same_remembers_nothing(episode, text):
    found = memory.audit_memory(constant(text), [episode], 4, NUMBERS)
    assert found.contamination == 0.0 and found.consistency == 1.0 and found.input_dependency == 0.0


def test_a_model_that_votes_at_random_is_not_called_contaminated(episode):
    rng = np.random.default_rng(1)
    client = ScriptedClient(lambda messages: canonical_json(
        {'signal': float(rng.uniform(-1, 1)), 'confidence': 0.5, 'rationale': ''}), 'coin')
    found = memory.audit_memory(client, [episode], 12, NUMBERS)
    assert found.contamination == 0.0 and 0.2 < found.consistency < 0.8


def test_a_model_that_follows_the_name_is_found(episode):
    "It knows no price, but buys whatever is called AAPL."
    def fan(messages):
        signal = 1 if 'AAPL' in canonical_json(messages) else -1
        return canonical_json({'signal': signal, 'confidence': 1, 'rationale': ''})
    found = memory.audit_memory(ScriptedClient(fan, 'fan'), [episode], 6, NUMBERS)
    assert found.identity > 0.9 and found.consistency == 0.0 and found.closes == found.directions == 0.0


def test_a_model_that_knows_some_closes_is_found(episode):
    knows = memory.remembering_client(episode)
    def half(messages): return knows.script(messages) if 'At which price' in messages[-1]['content'] else 'unknown'
    found = memory.audit_memory(ScriptedClient(half, 'half'), [episode], 3, NUMBERS)
    assert found.closes > 0.9 and found.directions == 0.0 and found.contamination == found.closes


def test_the_score_stands_in_the_line_beside_a_result(episode):
    found = memory.audit_memory(constant(VOTE_UP), [episode], 2, NUMBERS)
    for cutoff, words in (('2025-01-31', 'in-sample'), (None, 'not stated'), ('2023-08-10', 'partly in-sample')):
        line = memory.result_label(found, episode.dates, cutoff)
        assert line.startswith(words) or words in line
        assert 'contamination 0.00' in line and '\n' not in line
        assert not line.startswith('out-of-sample')


@pytest.mark.parametrize('cutoff, name', [
    (None, 'unknown'), ('2023-07-31', 'out-of-sample'), ('2023-08-01', 'partly in-sample'),
    ('2023-09-28', 'partly in-sample'), ('2023-09-29', 'in-sample'), ('2030-01-01', 'in-sample')])
def test_nothing_before_the_cutoff_is_out_of_sample(cutoff, name):
    assert memory.sample_of('2023-08-01', '2023-09-29', cutoff) == name
