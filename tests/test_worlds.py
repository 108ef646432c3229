"""The control worlds: what they are worth is known, under both timings, and the placebo is worth nothing."""
import numpy as np
import pandas as pd
import pytest

from stocker.market.core import ROLES, Abstention, StockerError, Vote
from stocker.council.council import mean_signal, moderate_episode, vote_mean, vote_mean_all_in
from stocker.market.data import check_prices, nyse_sessions
from stocker.trading.env import StockerEnv
from stocker.market.episodes import WARM_UP_SESSIONS, Episode
from stocker.trading.engine import market_path
from stocker.studies.worlds import (
    directions, follow, LEAST_STRENGTH, martingale_prices, martingale_ratios, placebo_world, planted_world, shuffle,
    silence, told, vote_signs, world_sessions)


def mean_reward(world, moderator):
    return np.mean([moderate_episode(voted, moderator).total_reward for voted in world.episodes])


def optimum_return(voted):
    return market_path(voted.episode, voted.timing).optimal_pnl_pct[-1]


@pytest.mark.parametrize('timing', ['close', 'next_open'])
@pytest.mark.parametrize('seed', [101, 102])
def test_only_following_helps_in_the_planted_world(seed, timing):
    world = planted_world(seed, episodes=12, timing=timing)
    followed = mean_reward(world, follow('news'))
    assert followed > 22
    for moderator in (vote_mean, vote_mean_all_in, *(follow(role) for role in ROLES if role != 'news')):
        assert mean_reward(world, moderator) < 0.25 * followed


@pytest.mark.parametrize('timing', ['close', 'next_open'])
def test_the_placebo_shows_no_edge_net_of_costs(timing):
    world = placebo_world(103, episodes=40, steps=20, timing=timing)
    for moderator in (vote_mean, vote_mean_all_in, follow('news'), follow('indicator')):
        returns = np.array([moderate_episode(voted, moderator).values[-1] / 1e4 - 1 for voted in world.episodes])
        assert returns.mean() < 2.5 * returns.std(ddof=1) / len(returns) ** 0.5


@pytest.mark.parametrize('informed', ROLES)
def test_any_role_can_be_the_informed_one(informed):
    world = planted_world(104, episodes=3, informed=informed)
    assert world.informed == informed
    assert mean_reward(world, follow(informed)) > 20


@pytest.mark.parametrize('timing', ['close', 'next_open'])
def test_the_informed_vote_tells_the_move_from_fill_to_fill(timing):
    world = planted_world(105, episodes=4, accuracy=1.0, timing=timing)
    for voted in world.episodes:
        market = voted.episode.market(timing)
        moves = np.append(market.fills[1:], market.marks[-1]) - market.fills
        assert [votes['news'].signal > 0 for votes in voted.votes] == (moves > 0).tolist()
        run, best = moderate_episode(voted, follow('news')), optimum_return(voted)
        assert run.values[-1] / 1e4 - 1 <= best + 1e-12
        assert run.values[-1] / 1e4 - 1 > 0.8 * best


def test_noise_is_worthless_and_has_the_same_distribution():
    rng = np.random.default_rng(106)
    direction = np.where(martingale_ratios(rng, 30_000, 0.02) > 1, 1, -1)
    knows = lambda rng, moves, storms: told(rng, moves, 0.97)
    signs = vote_signs(rng, direction, np.zeros(len(direction), bool), ['geopolitics'], knows, 0.9)
    for role, column in zip(ROLES, signs.T):
        buys, right = ((np.mean(column == side) - 0.5) * 2 * len(column) ** 0.5 for side in (1, direction))
        assert abs(buys) < 4 # standard errors
        assert abs(right) < 4 or (role == 'geopolitics' and right > 100)


def test_strength_and_confidence_say_nothing():
    world = planted_world(107, episodes=20)
    rows = [(abs(votes[role].signal), votes[role].confidence, role == 'news')
            for voted in world.episodes for votes in voted.votes for role in ROLES]
    table = pd.DataFrame(rows, columns=['strength', 'confidence', 'informed'])
    assert table[['strength', 'confidence']].min().min() >= LEAST_STRENGTH
    means = table.groupby('informed').mean()
    assert (means.loc[True] - means.loc[False]).abs().max() < 0.03


def test_the_mean_of_the_votes_says_next_to_nothing():
    world = planted_world(108, episodes=60)
    right = [(mean_signal(votes) > 0) == (way > 0) for voted in world.episodes
             for votes, way in zip(voted.votes, directions(voted.episode.market(voted.timing)))]
    assert 0.47 < np.mean(right) < 0.56


@pytest.mark.parametrize('volatility', [0.0, 0.01, 0.05, 0.2])
def test_prices_neither_rise_nor_fall_on_average(volatility):
    ratios = martingale_ratios(np.random.default_rng(109), 400_000, volatility)
    assert abs(ratios.mean() - 1) <= 5 * volatility / 400_000 ** 0.5 * 1.1 + 1e-12


def test_open_to_open_and_close_to_close_are_martingales_too():
    rng, ends = np.random.default_rng(110), []
    sessions = world_sessions(0, 20)[:30]
    for _ in range(1500):
        table = martingale_prices(rng, sessions, 5, 0.03)
        ends.append((table['close'].iloc[-1] / 100, table['open'].iloc[-1] / table['open'].iloc[6]))
    spread = np.std(ends, axis=0) / len(ends) ** 0.5
    assert (np.abs(np.mean(ends, axis=0) - 1) < 4 * spread).all()


def test_tables_and_dates_are_those_of_real_sessions():
    for voted in planted_world(111, episodes=3, steps=15).episodes:
        episode = voted.episode
        calendar = nyse_sessions(episode.prices.index[0], episode.prices.index[-1])
        check_prices(episode.prices, episode.ticker, sessions=calendar)
        same = Episode.from_prices(episode.prices, episode.ticker, episode.dates[0], episode.dates[-1])
        assert (same.first, same.steps) == (episode.first, episode.steps)
        assert (episode.first, episode.steps, len(episode.prices)) == (WARM_UP_SESSIONS, 15, WARM_UP_SESSIONS + 16)
        assert episode.prices['close'].iloc[episode.first] == pytest.approx(100)


def test_episodes_follow_each_other_and_start_again_when_the_calendar_ends():
    world = planted_world(112, episodes=3, steps=10)
    days = [voted.episode.dates for voted in world.episodes]
    assert days[0][-1] < days[1][0] < days[2][0]
    assert world_sessions(0, 3000) == world_sessions(2, 3000)
    assert len({voted.episode.name for voted in world.episodes}) == 3
    for steps in (1, 0, -3, 10_000):
        with pytest.raises(StockerError, match='steps'): world_sessions(0, steps)


def test_the_same_seed_is_the_same_world_and_another_seed_another():
    one, same, other = planted_world(113, 2), planted_world(113, 2), planted_world(114, 2)
    assert [voted.votes for voted in one.episodes] == [voted.votes for voted in same.episodes]
    pd.testing.assert_frame_equal(one.episodes[1].episode.prices, same.episodes[1].episode.prices)
    assert one.episodes[0].votes != other.episodes[0].votes
    longer = planted_world(113, 3)
    assert longer.episodes[1].votes == one.episodes[1].votes
    drawn = [planted_world(np.random.default_rng(1), 1).name for _ in range(2)]
    assert drawn[0] == drawn[1]


def test_planted_and_placebo_differ_in_one_seat_only():
    planted, placebo = planted_world(115, 2), placebo_world(115, 2)
    for one, other in zip(planted.episodes, placebo.episodes):
        for votes, guesses in zip(one.votes, other.votes):
            assert all(votes[role] == guesses[role] for role in ROLES if role != 'news')
            assert abs(votes['news'].signal) == abs(guesses['news'].signal)


def test_silence_and_shuffle_leave_everything_else_alone():
    world = planted_world(116, 4)
    for changed in (silence(world, 'news'), shuffle(world, 'news', np.random.default_rng(2))):
        assert changed.informed is None
        for one, other in zip(world.episodes, changed.episodes):
            assert one.episode is other.episode
            assert all(votes[role] == others[role] and list(votes) == list(others) for role in ROLES if role != 'news'
                       for votes, others in zip(one.votes, other.votes))
    silent = [votes['news'] for voted in silence(world, 'news').episodes for votes in voted.votes]
    assert all(isinstance(seat, Abstention) for seat in silent)
    shuffled = shuffle(world, 'news', np.random.default_rng(2))
    said = [sorted(votes['news'].signal for voted in kind.episodes for votes in voted.votes)
            for kind in (world, shuffled)]
    assert said[0] == said[1]
    assert shuffle(world, 'indicator', np.random.default_rng(2)).informed == 'news'
    with pytest.raises(StockerError, match='unknown role'): silence(world, 'oracle')


def test_a_silent_role_is_followed_into_doing_nothing():
    world = silence(planted_world(117, 1), 'news')
    run = moderate_episode(world.episodes[0], follow('news'))
    assert not run.traded.any() and not run.invalid.any()
    assert 'silent' in run.decisions[0].rationale


def test_the_environment_plays_a_world():
    voted = planted_world(118, 1).episodes[0]
    env = StockerEnv(voted.episode, voted.timing)
    env.reset()
    assert env.market_observation.ticker == 'PLANTED' and not env.market_observation.news
    assert isinstance(voted.votes[0]['news'], Vote)


@pytest.mark.parametrize('wrong', [{'episodes': 0}, {'accuracy': 1.2}, {'accuracy': float('nan')}, {'herd': -0.1},
                                   {'informed': 'nobody'}, {'timing': 'noon'}])
def test_what_cannot_be_a_world_is_refused(wrong):
    with pytest.raises(StockerError): planted_world(1, **wrong)
