"What a moderator is trained on, and who must not be paid by it."
import math

import numpy as np
import pytest
from stocker.market.core import Portfolio, Side, StockerError, TradeAction
from stocker.market.episodes import Market
from stocker.studies.fidelity import paid_for_timing
from stocker.trading.engine import ALL_SHARES, Runs, beginnings, prepare_path
from stocker.trading.exposure import EXPOSURES, exposure_action
from stocker.trading.objectives import OBJECTIVES, UNSKILLED, Objective, session_worths, unskilled_table


@pytest.fixture(scope='module')
def unskilled():
    return unskilled_table(40_000, seed=3)


def test_no_objective_pays_for_timing_and_the_reward_of_the_environment_does(unskilled):
    found = paid_for_timing(unskilled).set_index('objective')['fails']
    assert found.to_dict() == {'environment': True, 'wealth': False, 'budget': False}


def test_without_premium_and_penalty_no_policy_is_ahead_of_another():
    bare = {'wealth': Objective(risk_aversion=0.0), 'budget': Objective(0.0, 0.0, 0.0)}
    for name, worths in unskilled_table(40_000, seed=4, objectives=bare).items():
        apart = worths - worths[0]
        errors = apart.std(axis=1) / apart.shape[1] ** 0.5
        assert (abs(apart.mean(axis=1)) <= 3.0 * errors + 1e-12).all(), name


def test_policies_without_skill_stand_in_the_order_of_their_risk(unskilled):
    wealth, budget = (dict(zip(UNSKILLED, unskilled[name].mean(axis=1))) for name in ('wealth', 'budget'))
    assert wealth['hold cash'] > wealth['half invested'] > wealth['first half only'] > wealth['buy and hold']
    assert budget['half invested'] > budget['hold cash'] > budget['buy and hold'] # 32 % a year is over the budget


@pytest.mark.parametrize('fee', [0.0, 0.001, 0.02])
def test_a_fee_costs_what_was_paid_and_nothing_else(fee):
    prices = np.full(4, 50.0)
    path = prepare_path(Market(prices, prices, prices), 10_000.0, fee)
    begin = beginnings(path, np.zeros(1, np.int64))
    played = Runs(path, begin).trade(np.array([[1], [2], [0], [0]]), np.full((4, 1), ALL_SHARES))
    bought = math.floor(10_000 / (50 * (1 + fee)))
    for objective in (Objective(), Objective(0.0, 0.0, 5.0)):
        worths = session_worths(objective, path, begin, played).sum()
        assert worths == pytest.approx(-2 * bought * 50 * fee / 10_000, rel=0.03, abs=1e-12)
        assert (worths == 0) == (fee == 0)


@pytest.mark.parametrize('target', [*EXPOSURES, math.nan, 0.333])
@pytest.mark.parametrize('shares,cash', [(0, 10_000.0), (120, 0.5), (37, 4_321.0), (0, 0.0)])
def test_an_order_for_a_target_can_always_trade(target, shares, cash):
    portfolio = Portfolio(step=1, steps=9, cash=cash, shares=shares, price=83.21, starting_cash=10_000.0,
                          transaction_cost=0.001, max_drawdown=0.0)
    action = exposure_action(target, portfolio)
    if action.side is Side.BUY: assert 0 < action.quantity * 83.21 * 1.001 <= cash
    if action.side is Side.SELL: assert 0 < action.quantity <= shares
    if math.isnan(target): assert action == TradeAction(side=Side.HOLD)
    elif action.side is not Side.HOLD and cash + shares * 83.21 > 0:
        value = cash + shares * 83.21
        held = shares + action.quantity * (1 if action.side is Side.BUY else -1)
        assert abs(held * 83.21 / value - target) < 0.02


@pytest.mark.parametrize('target', [-0.1, 1.01, math.inf])
def test_a_target_outside_the_portfolio_is_refused(target):
    portfolio = Portfolio(step=0, steps=9, cash=1e4, shares=0, price=50.0, starting_cash=1e4, transaction_cost=0.0,
                          max_drawdown=0.0)
    with pytest.raises(StockerError, match='use 0'): exposure_action(target, portfolio)


def test_every_objective_has_a_name_and_the_first_is_the_environments_own():
    assert list(OBJECTIVES) == ['environment', 'wealth', 'budget'] and OBJECTIVES['environment'] is None
