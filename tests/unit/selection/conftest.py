"""What tests of the selection share."""

from __future__ import annotations

import pytest

from imagematrix.selection.candidate import results
from imagematrix.selection.target import Target


@pytest.fixture(scope="module")
def judge():
    """Return what one rule says about a variant on a host that passes all its GPUs."""

    def ask(rule, host, variant, **options):
        target = Target(host=host, gpus=options.pop("gpus", host.gpus), **options)
        done = {result.rule: result for result in results(target, variant)}
        return done.get(rule)

    return ask
