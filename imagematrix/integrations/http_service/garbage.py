"""Python's collector of garbage, in a service whose clients leave large cycles behind."""

from __future__ import annotations

import gc

# New objects, collections of the young generation, and of the middle one, after which the next is collected.
THRESHOLDS = (700, 10, 2)


def collect_often() -> None:
    """Collect garbage of all generations after 2 collections of the middle one, where Python waits for 10.

    The command line collects young objects less often. Connections that clients leave may be in cycles with
    buffers of a quarter MiB, as that is with which aiohttp's error for a wrong head is raised.
    """
    gc.set_threshold(*THRESHOLDS)


def exempt_from_collection() -> None:
    """Collect garbage now, and let later collections skip what remains: what a service keeps anyway.

    A full collection stops a service while it walks over all objects, and comes only after a quarter as many
    new ones. With modules, nodes or policies among them, the garbage would be hundreds of MiB by then.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
