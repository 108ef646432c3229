"The books: a mistake in a fill, a way to play, an optimum, a fee or a thread is found."
from dataclasses import replace

import numpy as np
import pytest

from stocker.council.council import rule_council
from stocker.market.core import ROLES, Vote
from stocker.trading.env import StockerEnv
from stocker.trading.orders import affordable_quantity, fill_order
from stocker.trust import books
from stocker.trust.books import SHAPES, check_fills, check_optimum, check_processes, check_threads


def debt(cash, shares, wanted, price, cost):
    "An order is filled as if there were no fee, and the fee is taken afterwards."
    money, held, traded = fill_order(cash, shares, wanted, price, 0.0)
    return money - abs(traded) * price * cost, held, traded


def short(cash, shares, wanted, price, cost):
    "A sale of more than there is."
    if wanted >= 0: return fill_order(cash, shares, wanted, price, cost)
    return cash - wanted * price * (1 - cost), shares + wanted, wanted


def eager(cash, shares, wanted, price, cost):
    "Everything that cash allows is bought, whatever was wanted."
    return fill_order(cash, shares, 1e15 if wanted > 0 else wanted, price, cost)


def whole_cents(*order):
    "Cash is rounded to cents."
    cash, *rest = fill_order(*order)
    return round(cash, 2), *rest


@pytest.mark.parametrize('fill', [debt, short, eager, whole_cents])
def test_a_bookkeeper_that_makes_a_mistake_is_found(fill):
    assert not check_fills(fill=fill).holds


def shifted(*arguments):
    "Rewards come a step late."
    rewards, values = books.batched(*arguments)
    return np.array([[0.0, *rewards[:-1]], values])


def without_the_last_bit(*arguments):
    "The last reward lacks its last bit."
    run = books.batched(*arguments)
    run[0, -1] = np.nextafter(run[0, -1], 2)
    return run


@pytest.mark.parametrize('way', [shifted, without_the_last_bit])
def test_a_way_to_play_that_differs_is_found(way):
    rng = np.random.default_rng(18)
    assert all(books.run_faults(rng, shape, {'other': way}) for shape in SHAPES)


def test_a_reward_out_of_its_range_is_found(monkeypatch):
    class Generous(StockerEnv):
        def step(self, action):
            look, reward, *rest = super().step(action)
            return look, 1.5 * reward, *rest
    monkeypatch.setattr(books, 'StockerEnv', Generous)
    faults = [fault for seed in range(10) for fault in books.run_faults(np.random.default_rng(seed), 'ordinary', {})]
    assert faults and all('a reward of' in fault for fault in faults)


def lazy(fills, marks, cash, cost): return np.zeros(len(fills))


def first_day(fills, marks, cash, cost):
    most = affordable_quantity(cash, fills[0] * (1 + cost))
    return np.where(np.arange(len(fills)) == 0, most, 0.0)


@pytest.mark.parametrize('find', [lazy, first_day])
def test_an_optimum_that_is_none_is_found(find):
    assert not check_optimum(find=find).holds


def test_a_program_that_fails_is_a_fault():
    result = check_processes(program='raise SystemError("no such luck")')
    assert not result.holds and 'no such luck' in result.faults[0]
    assert check_processes(program='print(1 + 1)').holds


def test_votes_that_depend_on_who_answered_first_are_found():
    def sharing():
        heard = []
        def opinion(look):
            heard.append(look.date)
            return Vote(signal=len(heard) % 3 - 1.0, confidence=len(heard) % 5 / 5, rationale='')
        return replace(rule_council(), specialists=dict.fromkeys(ROLES, opinion))
    assert not check_threads(make=sharing).holds
