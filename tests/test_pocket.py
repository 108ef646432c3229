"The pocket model: its words, its answers, its files."
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from stocker.llm.answers import Unreadable, read_trade
from stocker.market.core import ROLES, Abstention, Portfolio, Side, TradeAction, Vote, data_path
from stocker.llm.prompts import decision_in
from stocker.training.pocket import (
    ModelModerator, load_pocket, new_pocket, pocket_answer, pocket_messages, pocket_tokenizer, portfolio_lines,
    vocabulary, vote_line)
from stocker.training.questions import NUMBERS, at_least, random_question

torch = pytest.importorskip('torch')
pytest.importorskip('transformers')


@pytest.fixture(scope='module')
def student():
    return load_pocket()


def test_importing_the_module_does_not_import_torch():
    code = "import sys, stocker.training.pocket, stocker.training.results; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, '-c', code]).returncode == 0


@pytest.mark.parametrize('signal', [-1.0, -0.5, 0.0, 0.49, 1.0])
@pytest.mark.parametrize('confidence', [0.0, 1 / 3, 0.999, 1.0])
def test_every_vote_is_one_known_word(signal, confidence):
    words = set(vocabulary())
    for role in ROLES: assert vote_line(role, Vote(signal=signal, confidence=confidence, rationale='')) in words
    assert vote_line('news', Abstention(reason='x')) in words


@pytest.mark.parametrize('changes', [
    {}, {'cash': 0.0}, {'shares': 0}, {'cash': 1e9, 'price': 0.01}, {'step': 0, 'steps': 1}, {'steps': 5000},
    {'max_drawdown': 0.999}, {'max_drawdown': 0.0}, {'shares': 10**9}, {'price': 1e6}])
def test_every_prompt_is_made_of_known_words(changes):
    values = dict(step=3, steps=43, cash=1000.0, shares=20, price=190.0, starting_cash=5000.0, transaction_cost=0.001,
                  max_drawdown=0.04)
    tokenizer = pocket_tokenizer()
    text = pocket_messages({}, Portfolio(**(values | changes)))[0]['content']
    numbers = tokenizer(text)['input_ids']
    assert tokenizer.unk_token_id not in numbers and tokenizer.decode(numbers) == text
    assert len(numbers) == 16


def test_the_named_number_is_enough_for_all():
    rng = np.random.default_rng(5)
    for _ in range(200):
        _, portfolio = random_question(rng)
        buy, sell = map(int, re.findall(r'can \w+: (\d+)', portfolio_lines(portfolio)))
        assert sell >= min(portfolio.shares, NUMBERS[-1])
        assert (buy + 1) * portfolio.price * (1 + portfolio.transaction_cost) > min(portfolio.cash, NUMBERS[-1])


def test_an_answer_is_over_with_its_brace(student):
    "Else a model that is trained for rewards goes on talking, for nothing in a reward tells it to stop."
    assert new_pocket().generation_config.eos_token_id == student.model.generation_config.eos_token_id
    rng, moderator = np.random.default_rng(1), ModelModerator(student.model, student.tokenizer, max_new_tokens=24)
    prompts = [pocket_messages(*random_question(rng)) for _ in range(200)]
    torch.manual_seed(1)
    said = moderator.answers(prompts, 2.0)
    assert sum('}' in text for text in said) > 100
    assert all(text.index('}') == len(text) - 1 for text in said if '}' in text)


def test_answers_are_json_that_every_reader_reads():
    for side in Side:
        for quantity in (0, 1, 3, 1000, 10**12):
            order = TradeAction(side=side, quantity=quantity)
            text = pocket_answer(order)
            assert json.loads(text) == {'side': side.value, 'quantity': at_least(quantity)}
            assert not isinstance(read_trade(text), Unreadable)


def test_likeliest_answers_can_be_read_and_do_not_depend_on_company(student):
    rng = np.random.default_rng(9)
    questions = [random_question(rng) for _ in range(60)]
    moderator = student.moderator()
    together = moderator.decide_batch(questions)
    assert not any(decision.unreadable for decision in together)
    small = ModelModerator(student.model, student.tokenizer, batch_size=7)
    assert [one.said for one in small.decide_batch(questions)] == [one.said for one in together]
    assert moderator(*questions[0]) == together[0]
    assert moderator.decide_batch([]) == []


def test_a_draw_is_repeated_by_its_seed(student):
    rng = np.random.default_rng(10)
    questions = [random_question(rng) for _ in range(20)]
    said = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        said.append([one.said for one in student.moderator().decide_batch(questions, temperature=1.0)])
    assert said[0] == said[1] != said[2]


def test_the_weights_are_those_that_the_readme_names():
    import hashlib
    weights = data_path('pocket', 'model.safetensors').read_bytes()
    readme = data_path('pocket', 'README.md').read_text()
    assert hashlib.sha256(weights).hexdigest() in readme
    assert sum(file.stat().st_size for file in data_path('pocket').iterdir()) < 4e6


def test_babble_is_no_trade():
    decision = decision_in('{"side": "buy", "quantity": ')
    assert decision.unreadable and decision.action.side is Side.HOLD and decision.said


def test_a_new_model_leaves_the_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    new_pocket(4)
    assert torch.equal(torch.rand(1), expected)
