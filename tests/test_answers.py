"""Reading answers: what is said beyond doubt is taken, everything else is refused with a reason, and nothing raises."""
import json
import math
import os
import random
import subprocess
import sys
import time

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stocker.llm import answers
from stocker.llm.answers import (
    DEEPEST, LONGEST_ANSWER, QUANTITY_LIMIT, TRADE_SCHEMA, VOTE_SCHEMA, TradeAnswer, Unreadable, answer_text,
    read_trade, read_vote)
from stocker.market.core import Side, TradeAction, Vote, canonical_json

OK = '{"signal":0.5,"confidence":0.6,"rationale":"ok"}'
DRAFT = '{"signal":-0.9,"confidence":0.9,"rationale":"draft"}'
BUY = Vote(signal=1.0, confidence=0.6, rationale='ok')
HALF = Vote(signal=0.5, confidence=0.6, rationale='ok')
SELL = '{"side":"sell","quantity":100,"rationale":"results"}'
HOLD = '{"side":"hold","quantity":0}'


def refused(result, reason=''):
    assert isinstance(result, Unreadable), result
    assert reason in result.reason, result.reason
    assert result.reason and '\n' not in result.reason and len(result.reason) < 200
    return True


def sound(result):
    "Whether a result is one of the three kinds, with every value in its range and fit to be written down."
    if isinstance(result, Vote):
        assert type(result.signal) is float and -1 <= result.signal <= 1 and math.isfinite(result.signal)
        assert type(result.confidence) is float and 0 <= result.confidence <= 1
        assert math.copysign(1, result.confidence) == 1 and type(result.rationale) is str
    elif isinstance(result, TradeAnswer):
        assert type(result.quantity) is int and 0 <= result.quantity <= QUANTITY_LIMIT
        assert type(result.side) is Side and type(result.rationale) is str and result.action.side is result.side
    else: assert type(result) is Unreadable and result.reason
    result.model_dump_json().encode()
    return True


# Thoughts

@pytest.mark.parametrize(('opens', 'ends'), [
    ('<think>', '</think>'), ('<thinking>', '</thinking>'), ('<THINK>', '</Think>'), ('<thought>', '</thought>'),
    ('<reasoning effort="high">', '</reasoning>'), ('<scratchpad>', '</scratchpad >'), ('[THINK]', '[/THINK]'),
    ('<|channel>thought\n', '<channel|>'), ('<reflection>', '</reflection>')])
def test_a_draft_in_thoughts_is_never_taken(opens, ends):
    assert read_vote(f'{opens}maybe {DRAFT}{ends}\n{OK}') == HALF
    assert read_vote(f'{opens}{ends}{OK}') == HALF
    assert read_vote(f'{opens}a {{ and a " that never close{ends}{OK}') == HALF
    assert read_vote(f'{opens}{DRAFT}{ends}more{opens}{DRAFT}{ends}{OK}') == HALF
    assert read_vote(f'maybe {DRAFT}{ends}{OK}') == HALF # the prompt opened the thoughts
    assert read_vote(f'{opens}one{opens}two {DRAFT}{ends}{OK}') == HALF
    assert read_vote(f'{opens}one{ends}two {DRAFT}{ends}{OK}') == HALF
    refused(read_vote(f'{opens}maybe {DRAFT}'), 'thinking never ends')
    refused(read_vote(f'{opens}maybe {DRAFT}{ends}'), 'no JSON object')
    refused(read_vote(f'{opens}maybe {DRAFT}{ends}{OK[:-1]}'), 'breaks off')
    refused(read_vote(f'{OK}{opens}or rather {DRAFT}'), 'thinking never ends')


def test_marks_of_thoughts_inside_a_string_are_words():
    for words in ('<think>', '</think>', '<think>x</think>', '<|channel>', '<channel|>', '[THINK]'):
        assert read_vote(OK.replace('ok', words)) == HALF.model_copy(update={'rationale': words})


def test_the_words_of_thoughts_outside_of_marks_mean_nothing():
    assert read_vote(f'I think: thinking > thought. <b>{OK}</b> < think') == HALF


# Fences and prose

@pytest.mark.parametrize('text', [
    '```json\n{}\n```', '```JSON\n{}\n```', '```\n{}\n```', '```json\r\n{}\r\n```\r\n', '```json\n{}', '\ufeff{}',
    '\ufeff```json\n{}\n```', '~~~\n{}\n~~~', '`{}`', 'Here is my vote: {}', '{}\nHope this helps! :-)', '\n\n  {}  \n',
    "It's {} and that's it", '"{}"', '**Vote** {} [1] [see there](x) (a) \\frac{{1}}{{2}} {{AAPL, MSFT}} {{}}',
    'Given {{"ticker": "AAPL", "close": 191.17}} I say {}', '[{{"ticker": "A"}}, {{"ticker": "B"}}] {}',
    '<answer>{}</answer>', '{}<turn|>', 'json\n{}', '{}\n\n{}', '- item\n- item\n\t{}\n\0'])
def test_what_stands_around_an_object_does_not_matter(text):
    for body, expected in ((OK, HALF), (OK.replace('ok', '```json } { ```'), HALF)):
        result = read_vote(text.replace('{{', '\1').replace('{}', body).replace('\1', '{').replace('}}', '}'))
        assert result.model_copy(update={'rationale': 'ok'}) == expected


# JSON

@pytest.mark.parametrize('text', [
    '{"side":"buy","side":"sell","quantity":1}', '{"side":"buy","side":"buy","quantity":1}',
    '{"side":"buy","quantity":1,"more":{"a":1,"a":2}}', r'{"side":"buy","s\u0069de":"sell","quantity":1}',
    "{'side':'buy','side':'sell','quantity':1}"])
def test_a_key_that_stands_twice_is_refused(text): refused(read_trade(text), 'stands twice')


def test_apostrophes():
    text = '{"signal":"hold","confidence":0.4,"rationale":"what\'s up, don\'t know"}'
    assert read_vote(text) == Vote(signal=0.0, confidence=0.4, rationale="what's up, don't know")
    text = "{'signal':'hold','confidence':0.4,'rationale':\"stock isn't cheap\"}"
    assert read_vote(text) == Vote(signal=0.0, confidence=0.4, rationale="stock isn't cheap")
    refused(read_vote("{'signal':'hold','confidence':0.4,'rationale':'stock isn't cheap'}"), 'not JSON')
    refused(read_vote("{'signal':'hold','confidence':0.4,'rationale':'stock isn\\'t cheap'}"), 'not JSON')
    assert read_vote(OK.replace('"', "'")) == HALF


def test_an_object_inside_a_single_quoted_string_is_not_the_answer():
    inner = '{"side":"buy","quantity":999}'
    for text in (f"{{'rationale':'a }} {inner} b','side':'sell','quantity':5}}",
                 f"{{'rationale':'{inner}','side':'sell','quantity':5}}", f"{{rationale: a }} {inner} b, side: sell}}",
                 f'{{“rationale”: “a }} {inner}”, “side”: “sell”}}', f"[{{'rationale':'a }}] {inner} b'}}]"):
        refused(read_trade(text))


@pytest.mark.parametrize('rationale', [
    'two\nlines', 'a\ttab', 'carriage\r\nreturn', 'a } brace', '{"side":"sell","quantity":9}', 'a \\" quote', '[[[',
    ']', '\u2028', 'naïve 📈', "'", 'side: down, signal: weak', 'NaN', '\x07', '\x00'])
def test_a_reason_is_kept_as_it_is(rationale):
    raw = rationale.replace('\\', '\\\\').replace('"', '\\"') # line breaks and the like stay as they are
    assert read_vote(OK.replace('ok', raw)).rationale == rationale
    assert read_vote(json.dumps({'signal': 0.5, 'confidence': 0.6, 'rationale': rationale})).rationale == rationale


@pytest.mark.parametrize('text', [
    '{"signal":"buy","confidence":.8,}', '{"signal":"buy","confidence":.8}', '{"signal":"buy","confidence":0.8,}',
    '{"signal":+0.5,"confidence":0.8}', '{"signal":−0.5,"confidence":0.8}', '{"signal":0,5,"confidence":0.8}',
    '{signal:0.5,confidence:0.8}', '{"signal":0.5 "confidence":0.8}', '{"signal":0.5,"confidence":0.8]',
    '{"signal":"confidence":1}', '{"signal":0.5,"confidence":0.8 // sure\n}', '{“signal”:0.5,“confidence”:0.8}',
    '{"signal":05,"confidence":0.8}', '{"signal":0x1,"confidence":0.8}', '{"signal":1_0,"confidence":0.8}',
    "{'signal':True,'confidence':0.8}", '{"signal":<number>,"confidence":<number>}',
    r'{"signal":0.5,"confidence":0.8,"rationale":"\d"}', '{"signal":0.5,\xa0"confidence":0.8}',
    '{{"signal":0.5,"confidence":0.8}}', '{"signal":１,"confidence":0.8}'])
def test_what_is_not_json_is_refused(text):
    refused(read_vote(text))
    refused(read_vote(f'{OK} {text}')) # nor does a good answer beside it help


@pytest.mark.parametrize('whole', [SELL, f'```json\n{SELL}', f'[{SELL}]', SELL.replace('"', "'"), f'Done: {SELL}',
                                   f'<think>{HOLD}</think>{SELL}', SELL.replace('results', '} ] \\" { [')])
def test_no_part_of_an_answer_is_an_answer(whole):
    assert read_trade(whole).quantity == 100
    for end in range(len(whole)): refused(read_trade(whole[:end]))
    first = whole.index('{', whole.rfind('</think>') + 1) + 1
    for start in range(first, len(whole)): refused(read_trade(whole[start:]))


@pytest.mark.parametrize('text', [
    '42', '"buy"', 'null', '[]', '{}', '', ' ', 'buy', 'true', 'NaN', '[42]', '[null]', '[[]]', '[{}]',
    '"{\\"signal\\":1,\\"confidence\\":1}"', '{"rationale":"x"}', '{"a":{}}', '}{', ']', '}'])
def test_what_is_not_an_object_with_the_fields_is_refused(text):
    refused(read_vote(text))
    refused(read_trade(text))


def test_lists():
    assert read_vote(f'[{OK}]') == read_vote(f' [ \n{OK} ]') == HALF
    assert read_vote('[{"signal":"buy","confidence":0.6,"rationale":"ok"}]') == BUY
    for text in (f'[{OK},{OK}]', f'[{OK},{DRAFT}]', f'[[{OK}]]', f'[{OK},1]'): refused(read_vote(text), 'a list where')
    refused(read_vote(f'[{OK}'), 'breaks off')


def test_several_objects():
    assert read_vote(f'{OK} again: {OK}') == HALF
    assert read_vote(f'{OK} again: {OK.replace("ok", "other words")}') == HALF
    assert read_vote(f'{SELL} {OK}') == HALF and read_trade(f'{SELL} {OK}').quantity == 100
    refused(read_vote(f'{DRAFT} {OK}'), 'contradict')
    refused(read_vote(f'{OK} {OK.replace("0.6", "0.7")}'), 'contradict')
    refused(read_trade(f'{SELL} {SELL.replace("100", "10")}'), 'contradict')
    refused(read_vote(f'{OK} {{"signal":0.5}}'), 'confidence is missing')
    refused(read_vote(f'{{"vote":{OK}}}'), 'signal is missing')
    refused(read_vote(f'{{"vote":{DRAFT}}} {OK}'), 'signal is missing')


def test_further_fields_are_ignored():
    assert read_vote(OK.replace('}', ',"side":"sell","mood":[1,{"a":null}]}')) == HALF
    assert read_trade('{"side":"buy","quantity":1,"signal":NaN}'.replace('NaN', '9')).quantity == 1


# Values

@pytest.mark.parametrize(('value', 'expected'), [
    ('0.85', 0.85), ('1', 1.0), ('0', 0.0), ('-0.0', 0.0), ('-0', 0.0), ('1e-1', 0.1), ('"0.8"', 0.8), ('" 0.8 "', 0.8),
    ('"85%"', 0.85), ('"85 %"', 0.85), ('"7.5%"', 0.075), ('"100%"', 1.0), ('"1"', 1.0)])
def test_confidence(value, expected):
    vote = read_vote(f'{{"signal":0.5,"confidence":{value}}}')
    assert vote == Vote(signal=0.5, confidence=expected, rationale='') and math.copysign(1, vote.confidence) == 1


@pytest.mark.parametrize('value', [
    '"high"', '85', '1.2', '-0.1', 'true', 'false', 'null', '"150%"', '"-5%"', '"%"', '"true"', '"nan"', '"inf"',
    '"NaN%"', '""', '[]', '[0.8]', '{}', '"0,8"', '"8e-1"', '".8"', '"8."', '"０.８"', '"0.8/1"', '"80 percent"',
    '"1_0%"', '1e999', '-1e999', 'NaN', 'Infinity', '-Infinity', '"85%%"', '1.0000001', '9' * 5000,
    '0.' + '9' * 5000 + 'e3'])
def test_confidence_that_is_refused(value):
    refused(read_vote(f'{{"signal":0.5,"confidence":{value}}}'))
    refused(read_vote('{"signal":0.5,"rationale":"sure"}'), 'confidence is missing')


@pytest.mark.parametrize(('value', 'expected'), [
    ('"buy"', 1), ('"sell"', -1), ('"hold"', 0), ('"BUY"', 1), ('" Sell "', -1), ('-1', -1), ('1', 1), ('0.25', 0.25),
    ('"-0.3"', -0.3), ('"+1"', 1), ('-0.0', 0)])
def test_signal(value, expected):
    vote = read_vote(f'{{"signal":{value},"confidence":0.6}}')
    assert (vote.signal, vote.confidence) == (expected, 0.6) and '-0.0' not in canonical_json(vote)


@pytest.mark.parametrize('value', [
    '"strong buy"', '"bullish"', '"buy or sell"', '1.01', '-2', '85', '"60%"', 'true', 'null', '"−0.5"', '[1]',
    '["buy"]', '{"a":1}', 'NaN', '1e400', '""', '"0.5 (weak)"'])
def test_signal_that_is_refused(value): refused(read_vote(f'{{"signal":{value},"confidence":0.6}}'))


@pytest.mark.parametrize(('value', 'expected'), [
    ('10', 10), ('0', 0), ('-0', 0), ('5.0', 5), ('1e3', 1000), ('1E3', 1000), ('"10"', 10), ('"5.0"', 5), ('" 7 "', 7),
    ('1e12', 10**12)])
def test_quantity(value, expected):
    answer = read_trade(f'{{"side":"buy","quantity":{value}}}')
    assert answer == TradeAnswer(side='buy', quantity=expected) and type(answer.quantity) is int
    assert answer.action == TradeAction(side='buy', quantity=expected)


@pytest.mark.parametrize('value', [
    '"10 shares"', '"1,000"', '1,000', '10.7', '"１０"', '１０', '"1_000"', '"−5"', '−5', '-5', '-5.0', '"-5"', 'true',
    'false', '"all"', 'null', '[10]', '{"shares":10}', '""', '"1e3"', '"0x10"', '1e13', '1e300', '1e999', 'NaN',
    'Infinity', '-1e999', '"Infinity"', '1000000000001', '9' * 19, '9' * 5000, '-' + '9' * 5000,
    '"' + '9' * 5000 + '"', '1e-3', '0.5', '"½"', '"٣"', '"10%"'])
def test_quantity_that_is_refused(value):
    for side in ('buy', 'sell', 'hold'): refused(read_trade(f'{{"side":"{side}","quantity":{value}}}'))


def test_side():
    for side in ('buy', 'BUY', ' Buy '): assert read_trade(f'{{"side":"{side}","quantity":1}}').side is Side.BUY
    for side in ('"long"', '"short"', '1', 'true', 'null', '["buy"]', '"buy/sell"', '""', '{"buy":1}', '"Side.BUY"'):
        refused(read_trade(f'{{"side":{side},"quantity":1}}'), 'side')
    refused(read_trade('{"quantity":1}'), 'side is missing')
    refused(read_trade('{"side":"buy"}'), 'quantity is missing')
    assert read_trade('{"side":"hold"}') == read_trade(HOLD) == TradeAnswer(side='hold', quantity=0)
    assert read_trade('{"side":"hold","quantity":7}').action.side is Side.HOLD


def test_rationale():
    assert read_vote('{"signal":0.5,"confidence":0.6}').rationale == ''
    assert read_vote('{"signal":0.5,"confidence":0.6,"rationale":null}').rationale == ''
    for value in ('1', 'true', '["a"]', '{"a":1}'):
        refused(read_vote(f'{{"signal":0.5,"confidence":0.6,"rationale":{value}}}'), 'rationale')
    assert read_vote(r'{"signal":0.5,"confidence":0.6,"rationale":"\ud83d\udcc8 \ud83d"}').rationale == '📈 ?'
    assert read_vote(OK.replace('ok', '\ud800')).rationale == '?'


# Any text

@pytest.mark.parametrize('text', [
    '[' * 100_000, '{"a":' * 40_000, '[{' * 100_000, '{}' * 100_000, '{"' * 100_000, '{"' + '\\"' * 99_990,
    '<think>' * 28_000, '<think ' * 28_000, '</think>' * 25_000, '<think></think>' * 13_000, '{' + "'" * 199_990 + '}',
    '[ ' * 100_000, '[' + ' ' * 199_990, '{signal' + ' ' * 199_000 + '}', '{"signal":1' + '"' * 199_980 + '}',
    OK * 4_000, "{'signal':'" + "a'" * 99_000 + '}', '{"signal":' + '9' * 199_000 + '}',
    '{"signal":1.' + '9' * 199_000 + '}', '{"signal":1e' + '9' * 199_000 + '}', '"' * 200_000, '\\' * 200_000,
    '\ud800' * 200_000, '\0' * 200_000, '{:' * 3 + '}' * 3, '{"signal":' + '[' * 15 + ']' * 15 + ',"confidence":1}',
    '{"\ud800":1,"\ud800":2}', '{"signal":"\ud800","confidence":1}', ' ' * (LONGEST_ANSWER + 1),
    '{' + ''.join(f'"k{i}":1,' for i in range(10_000)) + '"signal":1,"k9999":1}',
    '{"signal":"' + 'x' * 190_000 + '","confidence":1}', '{:}' * 60_000, '{a:' * 19 + '}' * 19])
def test_nothing_that_is_written_to_break_it_does(text):
    began = time.process_time()
    for reader in (read_vote, read_trade): assert sound(reader(text))
    assert time.process_time() - began < 3


@pytest.mark.parametrize('thing', [None, 5, 10**400, 0.5, True, b'{}', [OK], {'content': OK}, object(), type])
def test_what_is_no_text_is_refused_and_not_raised(thing):
    for reader in (read_vote, read_trade): refused(reader(thing), 'instead of text')
    assert type(answer_text(thing)) is str


def test_quotes_are_mended_only_where_plain_json_failed(monkeypatch):
    asked = []
    monkeypatch.setattr(answers, 'double_quoted', lambda text: asked.append(text) or text)
    assert read_vote(OK) == HALF and not asked
    refused(read_vote(OK.replace('"', "'")), 'not JSON')
    assert asked


def test_a_message_without_an_end_says_nothing():
    endless = {'role': 'assistant'}
    endless['content'] = [endless]
    deep = OK
    for _ in range(5000): deep = [deep]
    assert answer_text(endless) == answer_text(deep) == ''


def test_limits():
    nested = '{"signal":0.5,"confidence":0.6,"more":' + '[' * (DEEPEST - 1) + ']' * (DEEPEST - 1) + '}'
    assert read_vote(nested).signal == 0.5
    refused(read_vote(nested.replace('[]', '[[]]')), 'nested deeper')
    assert read_vote(OK + ' ' * (LONGEST_ANSWER - len(OK))) == HALF
    refused(read_vote(OK + ' ' * LONGEST_ANSWER), 'longer than 200,000')


CRUMBS = [
    '"', "'", '{', '}', '[', ']', ',', ':', '\\', '\n', '\r\n', '\0', '\ud800', '\ufeff', '\\u', '\\ud83d', 'NaN',
    '-Infinity', '-', '+', '.', 'e', '1e999', '-1', '0', '9' * 30, 'true', 'null', '```', '```json\n', '<think>',
    '</think>', '<|channel>', '<channel|>', '−5', '１０', '%', '"side":', '"quantity":', '"signal":', '"confidence":',
    '"sell"', 'buy', ' ', '{"', '"}', ',"', '[[', '{}', OK, SELL]
SEEDS = [
    OK, f'```json\n{OK}\n```', f'<think>{DRAFT}</think>{OK}', f'[{OK}]', OK.replace('"', "'"), f'My vote: {OK} Done.',
    OK.replace('0.5', '"buy"').replace('0.6', '"85%"'), SELL, HOLD, f'```json\n{SELL}\n```',
    '{"side":"buy","quantity":1e3}']


def mutated(text, rng):
    for _ in range(1 + rng.getrandbits(1)):
        start, kind = int(rng.random() * (len(text) + 1)), rng.getrandbits(3)
        crumb = CRUMBS[int(rng.random() * len(CRUMBS))]
        end = start + int(rng.random() * 12)
        if kind < 3: text = text[:start] + crumb + text[start:]
        elif kind < 5: text = text[:start] + crumb + text[end:]
        elif kind == 5: text = text[:start] + text[end:]
        elif kind == 6: text = text[:end] + text[start:]
        else: text = text[:start] or text
    return text


def test_100_000_damaged_answers():
    rng, counts = random.Random(20260801), {Vote: 0, TradeAnswer: 0, Unreadable: 0}
    for number in range(100_000):
        text = mutated(SEEDS[number % len(SEEDS)], rng)
        reader = read_trade if 'side' in text else read_vote
        result = reader(text)
        counts[type(result)] += 1
        if type(result) is not Unreadable or number % 10 == 0: assert sound(result) and reader(text) == result, text
    assert min(counts.values()) > 5_000


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) |
    st.sampled_from(['buy', '0.8', '85%', 'all']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=5)
votes = st.builds(Vote, signal=st.floats(-1, 1), confidence=st.floats(0, 1),
                  rationale=st.text(st.characters(exclude_categories=['Cs']), max_size=60))
trades = st.builds(TradeAnswer, side=st.sampled_from(Side), quantity=st.integers(0, QUANTITY_LIMIT),
                   rationale=st.text(st.characters(exclude_categories=['Cs']), max_size=60))


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters()) | st.text('{}[]":,\\\'0.9eE+-<think>/side`\n'))
def test_any_text(text):
    for reader in (read_vote, read_trade): assert sound(reader(text)) and reader(text) == reader(text)


def test_a_reason_does_not_quote_a_whole_tree():
    tree = {'00\x08': None, '\U0001b2fc\U0001bc6b': {'000\U00018d09': [None, 4.9480588893305966e+107],
                                                  '000\U00018d0a': None, '\U00018d09': {'000\U00018d09': None}}}
    for value in (tree, [tree] * 5, {'a' * 40: tree}):
        assert refused(read_trade(json.dumps({'side': value, 'quantity': 1, 'rationale': ''})), "Input should be")
        assert refused(read_vote(json.dumps({'signal': value, 'confidence': 1, 'rationale': ''})))


@settings(max_examples=300, deadline=None)
@given(json_values, json_values, json_values)
def test_any_values(first, second, third):
    vote = read_vote(json.dumps({'signal': first, 'confidence': second, 'rationale': third}))
    trade = read_trade(json.dumps({'side': first, 'quantity': second, 'rationale': third}))
    assert sound(vote) and sound(trade)
    if isinstance(second, bool) or second is None: assert refused(vote) and refused(trade)
    if isinstance(second, (int, float)) and not isinstance(second, bool) and isinstance(trade, TradeAnswer):
        assert trade.quantity == second
    if isinstance(second, (int, float)) and isinstance(vote, Vote): assert vote.confidence == second


@settings(max_examples=200, deadline=None)
@given(votes, st.booleans())
def test_every_vote_is_read_as_it_was_written(vote, escaped):
    said = json.dumps(vote.model_dump(), ensure_ascii=escaped)
    assert read_vote(said) == read_vote(f'<think>{DRAFT}</think>\n```json\n{said}\n```') == vote
    if len(vote.rationale) <= 400: jsonschema.validate(json.loads(said), VOTE_SCHEMA)


@settings(max_examples=200, deadline=None)
@given(trades)
def test_every_trade_is_read_as_it_was_written(trade):
    said = json.dumps(trade.model_dump(mode='json'))
    assert read_trade(said) == read_trade(f'Well: {said}.') == trade
    jsonschema.validate(json.loads(said), TRADE_SCHEMA)


# Schemas, forms, determinism

def test_schemas_refuse_what_the_reader_refuses():
    for schema in (VOTE_SCHEMA, TRADE_SCHEMA): jsonschema.Draft202012Validator.check_schema(schema)
    for wrong in ({'signal': 2, 'confidence': 0.5}, {'signal': 0, 'confidence': 85}, {'signal': 0},
                  {'signal': True, 'confidence': 0.5}):
        with pytest.raises(jsonschema.ValidationError): jsonschema.validate(wrong | {'rationale': ''}, VOTE_SCHEMA)
    for wrong in ({'side': 'short', 'quantity': 1}, {'side': 'buy', 'quantity': -1}, {'side': 'buy'},
                  {'side': 'buy', 'quantity': 1.5}):
        with pytest.raises(jsonschema.ValidationError): jsonschema.validate(wrong | {'rationale': ''}, TRADE_SCHEMA)


@pytest.mark.parametrize('said', [OK, SELL, HOLD, '', 'no answer', f'<think>{DRAFT}</think>{OK}'])
def test_all_forms_of_a_completion_say_the_same(said):
    forms = [
        said, [{'role': 'assistant', 'content': said}], {'role': 'assistant', 'content': said},
        [{'role': 'assistant', 'content': [{'type': 'text', 'text': said}]}], [{'type': 'text', 'text': said}],
        [{'role': 'assistant', 'content': None, 'tool_calls': []}, {'role': 'tool', 'content': DRAFT},
         {'role': 'assistant', 'content': [{'type': 'text', 'text': said[:5]}, {'type': 'text', 'text': said[5:]}]}]]
    for form in forms: assert answer_text(form) == said
    assert len({canonical_json(read_vote(answer_text(form))) for form in forms}) == 1


def test_a_completion_of_an_unknown_form_says_nothing():
    for form in (None, [], {}, 5, [None], {'role': 'user', 'content': OK}, {'content': {'a': 1}}, [[{'text': None}]]):
        assert answer_text(form) == ''
        refused(read_vote(answer_text(form)), 'no JSON object')


def test_the_order_of_hashing_does_not_matter():
    program = ('import json, sys; from stocker.llm.answers import *; '
               'print([(repr(read_vote(t)), repr(read_trade(t))) for t in json.load(sys.stdin)])')
    texts = json.dumps([
        *SEEDS, f'{OK}{DRAFT}', '{"signal":1,"signal":2,"confidence":1,"confidence":2}', '{"side":{"b":1,"a":2}}'])
    outputs = {subprocess.run([sys.executable, '-c', program], input=texts, text=True, capture_output=True, check=True,
                              env=os.environ | {'PYTHONHASHSEED': seed}).stdout for seed in '01'}
    assert len(outputs) == 1 and len(outputs.pop()) > 1000


def test_an_ordinary_vote_is_read_quickly():
    said = json.dumps({'signal': 0.6, 'confidence': 0.8, 'rationale': 'The close is above both averages. ' * 7})
    best = math.inf
    for _ in range(10):
        began = time.process_time()
        for _ in range(200): read_vote(said)
        best = min(best, (time.process_time() - began) / 200)
    assert best < 200e-6 # 20 microseconds on an idle machine
