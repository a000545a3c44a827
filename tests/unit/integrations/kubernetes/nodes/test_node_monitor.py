"""A node and its users, as whatever gives out GPUs reads them."""

import pytest

from imagematrix.errors import EngineError, ProbeError
from imagematrix.integrations.kubernetes.nodes.node_monitor import NodeMonitor


class Node:
    """A node that a test changes; it is what a probe returns."""

    def __init__(self):
        self.error = None
        self.unknown = None
        self.lines = []

    def probe(self):
        if self.error:
            raise self.error
        return self

    def survey(self, node):
        assert node is self
        if self.unknown:
            raise self.unknown
        return {}

    def monitor(self):
        return NodeMonitor(
            probe=self.probe,
            survey=self.survey,
            on_line=self.lines.append,
            effect="nothing is offered",
        )


async def test_what_was_read_last_counts():
    node = Node()
    monitor = node.monitor()
    await monitor.read_node()
    node.unknown = EngineError("no answer")
    await monitor.update_usage()
    assert monitor.usage is None
    node.unknown = None
    await monitor.update_usage()
    node.error = ProbeError("no /proc")
    node.unknown = EngineError("no answer")
    for _ in range(2):
        await monitor.update_node()
        await monitor.update_usage()
    with pytest.raises(ProbeError):
        await monitor.read_node()
    assert (monitor.node, monitor.usage) == (node, {})
    assert node.lines == [
        "usage of GPUs outside of pods unknown, nothing is offered: no answer",
        "the node cannot be probed: no /proc",
        "usage of GPUs outside of pods unknown, the last known counts: no answer",
    ]


def test_users_are_reported_as_they_come_and_go():
    node = Node()
    monitor = node.monitor()
    for users in ({"a": "process p"}, {"a": "process q"}, {"b": "lease l"}):
        monitor.report_users(users)
    assert node.lines == [
        "a is in use by process p",
        "b is in use by lease l",
        "a is no longer in use outside of pods",
    ]


def test_a_problem_is_reported_once_until_it_changes_or_is_solved():
    """The last line in the log is always what is the case."""
    node = Node()
    monitor = node.monitor()
    for problem in ("A", "A", "B", "A", None, "A"):
        monitor.report_state("x", problem)
    assert "".join(node.lines) == "ABAA"
