"""Fixtures of the selection tests."""

from __future__ import annotations

import pytest

from imagematrix.selection.candidate import evaluate_rules
from imagematrix.selection.selection_target import Target


@pytest.fixture(scope="module")
def judge():
    """Call it with a rule, a host and a variant to get the rule's result with all GPUs passed."""

    def ask(rule, host, variant, **options):
        target = Target(host=host, gpus=options.pop("gpus", host.gpus), **options)
        done = {result.rule: result for result in evaluate_rules(target, variant)}
        return done.get(rule)

    return ask
