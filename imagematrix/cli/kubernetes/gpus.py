"""`imagematrix kubernetes gpus`: how many GPUs of a cluster are free."""

from __future__ import annotations

from imagematrix.cli.kubernetes.options import NodesAndPods, Pods, load_lists
from imagematrix.cli.shared.options import Json
from imagematrix.cli.shared.output import escape_text, print_json, print_table, print_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.integrations.kubernetes.nodes.gpu_counts import Count

COLUMNS = ("resource", "capacity", "healthy", "requested", "free")


def command(nodes: NodesAndPods, pods: Pods = None, json: Json = False) -> None:
    """Show how many GPUs the nodes and classes of a cluster have, and how many of them pods request."""
    from imagematrix.integrations.kubernetes.nodes.gpu_counts import count_gpus

    usage = count_gpus(load_lists(nodes, pods))
    if json:
        print_json(usage.to_json())
        return
    rows = [
        (escape_text(node.name), "" if node.schedulable else "takes no pods", *cells)
        for node in usage.nodes
        for cells in _format_counts(node.counts)
    ]
    if not rows:
        print_text("no node offers GPUs")
        return
    print_table(("node", "", *COLUMNS), rows)
    print_text("")
    print_table(
        ("class", "nodes", *COLUMNS),
        [
            (escape_text(name), str(nodes), *cells)
            for name, (nodes, sums) in usage.classes.items()
            for cells in _format_counts(sums)
        ],
    )
    if usage.pending:
        print_text("")
        pending = [
            (escape_text(request.resource), str(request.pods), str(request.requested))
            for request in usage.pending
        ]
        print_table(("pending", "pods", "requested"), pending)


def _format_counts(counts: Iterable[Count]) -> Iterable[tuple[str, ...]]:
    for count in counts:
        numbers = (count.capacity, count.allocatable, count.requested, count.free)
        yield (escape_text(count.resource), *map(str, numbers))
