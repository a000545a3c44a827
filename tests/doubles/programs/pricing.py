"""A price that Numba compiles for the CPU.

It prints the seconds from its start, imports included, to its first result.
"""

import time

started = time.monotonic()

import numba
import numpy as np


@numba.njit(cache=True, parallel=False)
def price(paths, steps):
    """Return a number that takes several of numpy's functions to compute."""
    total = np.zeros(paths)
    for path in range(paths):
        for step in range(steps):
            total[path] += np.sin(path + step) * np.exp(-step)
    return np.sort(total).mean() + np.median(total) + np.percentile(total, 90)


value = price(100, 10)
print(f"result {value:.4f} after {time.monotonic() - started:.1f} s", flush=True)
