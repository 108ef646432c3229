"""Failure is said: a model that is never reached or never answers has no returns to show, and exit code 3."""
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pandas as pd
import pytest

pytest.importorskip('openai')

from stocker.cli import main
from stocker.council.advice import advise
from stocker.council.council import Council, read_trace, rule_council, vote_mean
from stocker.council.evaluation import compare, headline, reading
from stocker.llm.client import OpenAIClient
from stocker.market.core import ROLES, Abstention, Decision, Failure, Refusal, StockerError, TradeAction
from stocker.market.data import load_prices
from stocker.market.episodes import load_task
from stocker.pages.report import write_report
from stocker.studies.tuning import choose, format_choice, seed_grid, sweep

VOTE = '{"signal": 0.5, "confidence": 0.5, "rationale": "it rises"}'
TRADE = '{"side": "buy", "quantity": 1, "rationale": "votes"}'
SHORT = 'AAPL:2023-08-01:2023-08-14' # ten decisions
BOAST = ('ahead of', 'behind', 'level with', 'buy and hold (')


def said(text):
    return 200, {'choices': [{'message': {'role': 'assistant', 'content': text}, 'finish_reason': 'stop'}]}


def refusing(status, words='this model only embeds'):
    return lambda request: (status, {'error': {'message': words}})


def in_prose(request): return said('On the whole I would be careful with this share.')


def is_vote(request): return 'signal' in request['messages'][0]['content'] and 'moderator' not in str(request)


@pytest.fixture
def serve(monkeypatch):
    "Starts a server on this machine whose answers are a function of the request; it keeps the requests."
    monkeypatch.setenv('MODEL_NAME', 'm')
    for name in ('API_BASE_URL', 'HF_TOKEN', 'OPENAI_API_KEY'): monkeypatch.delenv(name, raising=False)
    opened = []

    def start(behave):
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
                server.requests.append(request)
                status, answer = behave(request)
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header('Content-Length', str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments): pass
        server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
        server.requests, server.url = [], f'http://127.0.0.1:{server.server_port}/v1'
        threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.01}, daemon=True).start()
        opened.append(server)
        return server
    yield start
    for server in opened:
        server.shutdown()
        server.server_close()


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    "Runs the command in this process, in a folder of its own; its exit code, output and messages."
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, 'argv', ['stocker', *map(str, arguments)])
        with pytest.raises(SystemExit) as end: main()
        return end.value.code or 0, *capsys.readouterr()
    return run


def summary_in(folder):
    file, = folder.glob('**/summary.json')
    return json.loads(file.read_text())


# --- an endpoint ---

@pytest.mark.parametrize('status', [400, 401, 403, 404, 422])
def test_an_endpoint_that_refuses_everything_is_asked_one_batch_and_no_return_is_announced(
        status, serve, command, tmp_path):
    server = serve(refusing(status))
    code, output, _ = command('run', 'task_easy', '--model', server.url, '--out', tmp_path/'out')
    first = output.splitlines()[0]
    assert code == 3 and '0 of 301 votes and 0 of 43 decisions could be read' in first
    assert f'HTTP {status}: this model only embeds' in first and not any(word in output for word in BOAST)
    assert 0 < len(server.requests) <= 2 * 32 + 1
    summary = summary_in(tmp_path/'out')
    assert (summary['votes'], summary['failures'], summary['unreadable']) == (0, 301, 43)
    assert 'this model only embeds' in summary['reason']


def test_an_endpoint_that_answers_in_prose_has_no_headline_about_returns(serve, command, tmp_path):
    server = serve(in_prose)
    code, output, _ = command('run', 'task_easy', '--model', server.url, '--out', tmp_path/'out')
    first = output.splitlines()[0]
    assert code == 3 and '0 of 301 votes and 0 of 43 decisions could be read' in first
    assert 'unreadable: no JSON object' in first and 'I would be careful' in first
    assert not any(word in output for word in BOAST) and ' made ' not in output
    summary = summary_in(tmp_path/'out')
    assert (summary['votes'], summary['unreadable'], summary['results'][0]['unreadable']) == (0, 43, 1.0)
    assert 250 < summary['failures'] < 301 # on some days there was no news to ask about
    trace, = (tmp_path/'out').glob('**/trace.jsonl')
    page = write_report(trace.parent).read_text()
    assert '0 of 301 votes and 0 of 43 decisions could be read' in page and 'ahead of' not in page
    assert '43 decisions that could not be read' in page and 'I would be careful' in page


def test_votes_without_a_decision_and_decisions_without_a_vote_are_failures_too(serve, command, tmp_path):
    server = serve(lambda request: said(VOTE) if is_vote(request) else in_prose(request))
    code, output, _ = command('run', SHORT, '--model', server.url, '--out', tmp_path/'mute')
    assert code == 3 and ' and 0 of 10 decisions could be read' in output.splitlines()[0] and 'ahead' not in output
    server = serve(in_prose)
    code, output, _ = command('run', SHORT, '--model', server.url, '--moderator', 'vote_mean', '--cache',
                              tmp_path/'other', '--out', tmp_path/'deaf')
    assert code == 3 and '0 of 70 votes and 10 of 10 decisions' in output.splitlines()[0] and 'ahead' not in output


def test_a_run_of_which_most_could_be_read_is_judged_and_a_worse_one_says_how_many(serve, command, tmp_path):
    server = serve(lambda request: said(VOTE) if is_vote(request) else said(TRADE))
    code, output, _ = command('run', SHORT, '--model', server.url, '--out', tmp_path/'well')
    assert code == 0 and 'buy and hold (' in output and 'could be read' not in output
    asked = iter(range(10 ** 6))
    server = serve(lambda request: said(VOTE) if is_vote(request) else said(TRADE if next(asked) % 5 else 'Hm.'))
    code, output, _ = command('run', SHORT, '--model', server.url, '--cache', tmp_path/'other', '--out',
                              tmp_path/'badly')
    assert code == 0 and 'only 8 of 10 decisions could be read; the first reason: ' in output.splitlines()[0]
    assert summary_in(tmp_path/'badly')['unreadable'] == 2


def test_what_was_kept_before_an_endpoint_refused_is_counted(serve, command, tmp_path):
    server = serve(lambda request: said(VOTE) if 'chart' in str(request['messages'][0]) else refusing(401)(request))
    code, output, _ = command('run', SHORT, '--model', server.url, '--out', tmp_path/'out')
    assert code == 3 and '10 of 70 votes and 0 of 10 decisions could be read' in output.splitlines()[0]
    assert len(server.requests) < 10 + 2 * 10


def test_pictures_that_a_model_does_not_see_cost_one_seat_and_not_the_run(serve, command, tmp_path):
    def text_only(request):
        if 'image_url' in str(request): return refusing(400, 'no pictures, please')(request)
        return said(VOTE) if is_vote(request) else said(TRADE)
    server = serve(text_only)
    code, output, _ = command('run', SHORT, '--model', server.url, '--out', tmp_path/'out')
    trace, = (tmp_path/'out').glob('**/trace.jsonl')
    votes = read_trace(trace).steps[0].decision.votes
    assert code == 0 and isinstance(votes['chart_pattern'], Failure) and 'no pictures' in votes['chart_pattern'].reason
    assert 'votes could be read; the first reason: ' in output.splitlines()[0] and 'no pictures' in output


def test_refusals_are_no_recording(serve, tmp_path):
    from stocker.llm.client import RecordedClient
    client = RecordedClient(tmp_path/'r.jsonl', OpenAIClient('m', serve(refusing(400)).url, key=''), record=True)
    questions = [[{'role': 'user', 'content': f'day {day}'}] for day in range(20)]
    with pytest.raises(Refusal, match='only embeds'): client.answer_all(questions)
    assert len((tmp_path/'r.jsonl').read_text().splitlines()) == 1


def test_questions_one_by_one_are_stopped_as_soon_as_a_batch_would_be(serve):
    server = serve(refusing(400))
    client = OpenAIClient('m', server.url, key='')
    with pytest.raises(Refusal):
        for day in range(100): client.answer([{'role': 'user', 'content': f'day {day}'}])
    assert len(server.requests) == 8 + 1


# --- councils without a model ---

def unreachable(observation): raise ConnectionError('nobody answers there')


def test_a_council_in_which_every_seat_abstains_made_nothing():
    for seat in (unreachable, lambda look: Abstention(reason='no data')):
        found = compare(load_task('task_easy'), Council(dict.fromkeys(ROLES, seat), vote_mean, 'mute'))
        assert found.reading.nothing and not any(word in headline(found) for word in BOAST)
        assert found.summary['abstentions'] == 301 and found.summary['reason']
    assert found.summary['failures'] == 0


def test_seats_without_data_do_not_count_as_unread():
    few = {role: (lambda look: Abstention(reason='no data')) for role in ROLES[:5]}
    found = compare(load_task('task_easy'), Council({**rule_council().specialists, **few}, vote_mean))
    assert not found.reading.nothing and found.reading.gaps == '' and 'could be read' not in headline(found)


def test_nine_tenths_are_enough_and_less_is_said():
    decisions = compare(load_task('task_easy'), rule_council()).trace.steps
    decisions = [step.decision for step in decisions][:40]
    lost = [one.model_copy(update={'unreadable': True, 'rationale': 'no \x1b[31mJSON\nin it'}) for one in decisions]
    assert reading([*lost[:4], *decisions[4:]]).gaps == ''
    worse = reading([*lost[:5], *decisions[5:]])
    assert worse.gaps == 'only 35 of 40 decisions could be read' and worse.reason == 'no [31mJSON in it'


def test_a_failure_and_an_abstention_are_read_back_as_what_they_were(tmp_path):
    from stocker.council.council import write_trace
    seats = {'news': unreachable, 'indicator': lambda look: Abstention(reason='no data')}
    trace = compare(load_task('task_easy'), Council(seats, vote_mean)).trace
    write_trace(trace, tmp_path/'trace.jsonl')
    votes = read_trace(tmp_path/'trace.jsonl').steps[3].decision.votes
    assert {role: type(vote) for role, vote in votes.items()} == {'news': Failure, 'indicator': Abstention}


class Prices:
    "The data set as a source of prices."
    def fetch(self, tickers, start, end): return {ticker: load_prices(ticker) for ticker in tickers}, {}


def test_advice_of_a_council_that_was_not_heard_is_none(monkeypatch):
    observation = load_task('task_easy').observations('next_open')[-1]
    monkeypatch.setattr('stocker.council.advice.observe_latest', lambda *arguments: (observation, []))
    def asked(seats, moderator=vote_mean): return advise('AAPL', Council(seats, moderator), None)
    def lost(votes, portfolio): return Decision(TradeAction(side='hold'), 'Hm.', unreadable=True)
    for unheard in (asked({}), asked({'news': unreachable}), asked(rule_council().specialists, lost)):
        assert not unheard.heard and 'No advice: ' in unheard.text and 'On paper' not in unheard.text
    assert asked(rule_council().specialists).heard


# --- tuning, corpus, training ---

def test_a_trace_of_which_nothing_could_be_read_is_not_tuned(command, serve, tmp_path):
    server = serve(refusing(401))
    command('run', 'task_easy', '--model', server.url, '--moderator', 'vote_mean', '--out', tmp_path/'out')
    trace, = (tmp_path/'out').glob('**/trace.jsonl')
    code, output, message = command('tune', trace.parent)
    assert code == 2 and output == '' and '0 of 301 votes and 0 of 43 decisions could be read' in message
    assert not (trace.parent/'chosen_settings.json').exists()


def test_a_trace_that_never_traded_says_so_before_its_choice():
    trace = compare(load_task('task_hard'), rule_council()).trace
    assert format_choice(choose(sweep(trace, seed_grid()))).startswith('This run never traded: ')
    with pytest.raises(StockerError): sweep(compare(load_task('task_easy'), Council(
        {'news': unreachable}, vote_mean)).trace, seed_grid())


def test_a_corpus_run_that_was_never_heard_has_no_verdict(serve, command, tmp_path):
    server = serve(in_prose)
    code, output, _ = command('corpus', 'run', '--split', 'validation', '--few', '1', '--model', server.url, '--out',
                              tmp_path/'out')
    assert code == 3 and '0 of 294 votes were cast' in output and 'nothing could be read' in output
    assert 'interval' not in output and 'invalid  unreadable' in output
    assert pd.concat(map(pd.read_parquet, (tmp_path/'out').glob('validation-*.parquet')))['votes'].eq(0).all()


def test_training_whose_answers_cannot_be_read_has_no_verdict():
    for package in ('torch', 'transformers', 'trl', 'peft', 'datasets'): pytest.importorskip(package)
    from stocker.training.results import read_share, test_part
    rows = [{'policy': policy, 'episode': f'e{i}', 'timing': 'close', 'first': f'{2000 + i}-01-03', 'total_reward': i,
             'return': 0.0, 'return_before_fees': 0.0, 'max_drawdown': 0.0, 'exposure': 0.0, 'turnover': 0.0,
             'trades': 0, 'invalid': 0.25, 'unreadable': float(policy == 'after')}
            for i in range(20) for policy in ('before', 'after', 'hold', 'vote mean')]
    page = test_part([{'seed': 1, 'evaluation': {'a test': rows}}], 'a test')
    assert 'No verdict on after: none of its decisions could be read.' in page and 'interval' not in page
    assert '| 25.0% | 100.0% |' in page and 'invalid | unreadable |' in page
    assert read_share({'a test': pd.DataFrame(rows)}) == 0
    some = [{**row, 'unreadable': row['unreadable'] / 2} for row in rows]
    page = test_part([{'seed': 1, 'evaluation': {'a test': some}}], 'a test')
    assert 'Only 50% of the decisions of after could be read.' in page and 'interval' in page
