"""Prices of options on a basket of assets, by simulation. Numba compiles each function at its first call.

    python3 prices.py [--paths N]

The results are the same on every start. How long the first took is on stderr.
"""

import argparse
import sys
import time

import numpy as np
from numba import njit, prange

STARTED = time.perf_counter()
ASSETS, STEPS, YEARS, RATE = 8, 50, 1.0, 0.02
STRIKE, LIMIT = 100.0, 140.0
LEVELS = np.array([0.9, 0.95, 0.99])


@njit(cache=True)
def cholesky(matrix):
    """Return the lower triangle whose product with its transpose is `matrix`."""
    lower = np.zeros_like(matrix)
    for row in range(matrix.shape[0]):
        for column in range(row + 1):
            rest = matrix[row, column] - (lower[row, :column] * lower[column, :column]).sum()
            lower[row, column] = np.sqrt(rest) if row == column else rest / lower[column, column]
    return lower


@njit(parallel=True, fastmath=True, cache=True)
def simulate(spots, volatility, lower, paths, seed):
    """Return the prices of all assets at each step of each path: an array (paths, STEPS + 1, assets)."""
    drift = (RATE - 0.5 * volatility**2) * (YEARS / STEPS)
    scale = volatility * np.sqrt(YEARS / STEPS)
    prices = np.empty((paths, STEPS + 1, spots.size))
    for path in prange(paths):
        np.random.seed(seed + path)  # noqa: NPY002 - Numba's own, of each thread
        prices[path, 0] = spots
        for step in range(STEPS):
            normal = np.random.standard_normal(spots.size)  # noqa: NPY002
            shocks = (lower * normal).sum(axis=1)
            prices[path, step + 1] = prices[path, step] * np.exp(drift + scale * shocks)
    return prices


@njit(parallel=True, fastmath=True, cache=True)
def european(prices, weights):
    """Return the payoff of each path: what the basket is above the strike at the end."""
    payoffs = np.empty(prices.shape[0])
    for path in prange(prices.shape[0]):
        payoffs[path] = max((prices[path, -1] * weights).sum() - STRIKE, 0.0)
    return payoffs


@njit(parallel=True, fastmath=True, cache=True)
def asian(prices, weights):
    """Return the payoff of each path: what the basket's mean over time is above the strike."""
    payoffs = np.empty(prices.shape[0])
    for path in prange(prices.shape[0]):
        payoffs[path] = max((prices[path, 1:] * weights).sum(axis=1).mean() - STRIKE, 0.0)
    return payoffs


@njit(parallel=True, fastmath=True, cache=True)
def barrier(prices, weights):
    """Return the payoff of each path: that of a European option, unless the basket ever reached the limit."""
    payoffs = np.empty(prices.shape[0])
    for path in prange(prices.shape[0]):
        basket = (prices[path] * weights).sum(axis=1)
        payoffs[path] = max(basket[-1] - STRIKE, 0.0) if basket.max() < LIMIT else 0.0
    return payoffs


@njit(parallel=True, fastmath=True, cache=True)
def lookback(prices, weights):
    """Return the payoff of each path: what the basket lost since it was highest."""
    payoffs = np.empty(prices.shape[0])
    for path in prange(prices.shape[0]):
        basket = (prices[path] * weights).sum(axis=1)
        payoffs[path] = basket.max() - basket[-1]
    return payoffs


@njit(parallel=True, fastmath=True, cache=True)
def autocall(prices, weights):
    """Return the payoff of each path: a coupon for each step until the basket is first above the strike."""
    payoffs = np.empty(prices.shape[0])
    for path in prange(prices.shape[0]):
        above = np.flatnonzero((prices[path, 1:] * weights).sum(axis=1) > STRIKE)
        payoffs[path] = above[0] + 1 if above.size else 0.0
    return payoffs


@njit(parallel=True, fastmath=True, cache=True)
def find_losses(prices, weights, levels):
    """Return the loss that is not passed with each probability, and the mean of the losses beyond it."""
    losses = np.empty(prices.shape[0])
    for path in prange(prices.shape[0]):
        losses[path] = ((prices[path, 0] - prices[path, -1]) * weights).sum()
    at = np.quantile(losses, levels)
    beyond = np.empty_like(at)
    for position in prange(at.size):
        beyond[position] = losses[losses >= at[position]].mean()
    return at, beyond


@njit(parallel=True, fastmath=True, cache=True)
def correlate(prices):
    """Return the correlations of the assets' returns over all steps and paths: an array (assets, assets)."""
    returns = np.log(prices[:, 1:] / prices[:, :-1]).copy().reshape(-1, prices.shape[2])
    assets = returns.shape[1]
    result = np.eye(assets)
    for row in prange(assets):
        for column in range(assets):
            one, other = returns[:, row], returns[:, column]
            covariance = ((one - one.mean()) * (other - other.mean())).mean()
            result[row, column] = covariance / (one.std() * other.std())
    return result


def main() -> None:
    """Print the prices, the losses and a correlation."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--paths", type=int, default=20_000)
    paths = parser.parse_args().paths
    correlation = np.full((ASSETS, ASSETS), 0.3) + 0.7 * np.eye(ASSETS)
    spots, volatility = np.linspace(80.0, 120.0, ASSETS), np.linspace(0.15, 0.4, ASSETS)
    weights = np.full(ASSETS, 1 / ASSETS)

    prices = simulate(spots, volatility, cholesky(correlation), paths, 7)
    for option in (european, asian, barrier, lookback, autocall):
        payoffs = option(prices, weights)
        price = np.exp(-RATE * YEARS) * payoffs.mean()
        print(f"{option.__name__:<10}{price:8.3f}")
    for level, loss, beyond in zip(LEVELS, *find_losses(prices, weights, LEVELS), strict=True):
        print(f"loss {level:.0%}  {loss:8.3f}, beyond it {beyond:.3f}")
    print(f"correlation{correlate(prices)[0, -1]:7.3f}")
    print(f"done after {time.perf_counter() - STARTED:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
