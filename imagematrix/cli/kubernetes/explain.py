"""`imagematrix kubernetes explain`: why a pod got no image, or cannot be placed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.kubernetes.options import NodesAndPods, Pods, load_lists, require_used_name
from imagematrix.cli.shared.options import AllowCpu, Json, Policy, Where
from imagematrix.cli.shared.output import escape_text, format_names, print_json, print_lines, print_table
from imagematrix.common.text import format_count
from imagematrix.errors import UsageError
from imagematrix.selection.selection import NothingFits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.integrations.kubernetes.explain.explain_pod import Explanation
    from imagematrix.integrations.kubernetes.explain.pod import Pod


def command(
    pod: Annotated[
        Path,
        typer.Argument(metavar="POD.json", help="The pod, from `kubectl get pod NAME -o json`; - for stdin."),
    ],
    nodes: NodesAndPods,
    catalog: Annotated[
        list[str],
        typer.Option("--catalog", metavar="FILE|REF", help="A version that the pod may use; repeatable."),
    ],
    pods: Pods = None,
    policy: Policy = None,
    used_as: Annotated[
        str | None,
        typer.Option("--as", metavar="NAME", help="The image's name in pods, as for `render policy`."),
    ] = None,
    where: Where = None,
    allow_cpu: AllowCpu = False,
    json: Json = False,
) -> None:
    """Show why a pod that uses a version got no image or cannot be placed: for each class of nodes.

    With --pods, or nodes and pods in one list, GPUs that pods of each node request are not free.
    """
    from imagematrix.images.catalog.sources import open_catalog
    from imagematrix.integrations.kubernetes.admission.cluster_policy import make_cluster_policy
    from imagematrix.integrations.kubernetes.explain.explain_pod import explain_pod, make_pending_document
    from imagematrix.integrations.kubernetes.explain.obstacles import KnownNodes
    from imagematrix.integrations.kubernetes.explain.pod import get_pod_name, parse_pod
    from imagematrix.integrations.kubernetes.nodes.gpu_counts import count_used, split_by_kind
    from imagematrix.integrations.kubernetes.nodes.nodes import STREAM, describe_nodes, name_file, read_json
    from imagematrix.selection import query

    require_used_name(used_as)
    if used_as is not None and len(catalog) > 1:
        raise UsageError("--as is for a single --catalog")
    if str(pod) == STREAM and STREAM in {str(nodes), str(pods)}:
        raise UsageError("only one file can be read from stdin")
    shown = parse_pod(read_json(pod, sys.stdin.buffer), name_file(pod))
    objects = split_by_kind(load_lists(nodes, pods))
    cluster_nodes = describe_nodes(objects.nodes, name_file(nodes))
    conditions = query.parse_where(where or ())
    clusters = [
        make_cluster_policy(
            cluster_nodes,
            open_catalog(name, policy=policy),
            name=used_as,
            allow_cpu=allow_cpu,
            where=conditions,
        )
        for name in dict.fromkeys(catalog)
    ]
    # GPUs that the pod has are free for it.
    others = [pod for pod in objects.pods if get_pod_name(pod) != shown.name]
    explanations = explain_pod(shown, clusters, KnownNodes(cluster_nodes, count_used(others)))
    if not explanations:
        raise UsageError(
            f"{shown.name} uses no image of {', '.join(catalog)}: it has {', '.join(shown.images) or 'none'}",
            remedy="give the --catalog of its image, or with --as the name that pods use",
        )
    if json:
        print_json(make_pending_document(shown, explanations))
    else:
        for explanation in explanations:
            _print_explanation(shown, explanation)
    if any(explanation.cause for explanation in explanations):
        raise typer.Exit(NothingFits.exit_code)


def _print_explanation(pod: Pod, explanation: Explanation) -> None:
    fix = [f"  -> {escape_text(explanation.fix)}"] if explanation.fix else []
    print_lines(f"{escape_text(pod.name)}: {escape_text(explanation.summary)}", *fix, "")
    prefix = f"{explanation.image}-"
    rows = []
    for verdict in explanation.classes:
        image = verdict.selected
        if image and image.startswith(prefix):  # the tag is enough, without the digest
            image = image.removeprefix(prefix).partition("@")[0]
        cell = escape_text(image) if image else "[red]nothing[/]"
        rows.append((escape_text(verdict.name), str(len(verdict.nodes)), str(verdict.able), cell))
    print_table(("class", "nodes", "could run it", "image"), rows)
    for verdict in explanation.classes:
        # What keeps the pod from the class, and from some of its nodes.
        lines = []
        if verdict.selected is None:
            lines += [f"  {escape_text(verdict.why)}", *_format_remedy(verdict.fix)]
        for obstacle in verdict.obstacles:
            lines.append(f"  {format_count(obstacle.nodes, 'node')}: {escape_text(obstacle.why)}")
            lines += _format_remedy(obstacle.fix)
        if lines:
            print_lines("", f"{escape_text(verdict.name)}: {format_names(verdict.nodes)}", *lines)
    if explanation.left_out:
        count = format_count(len(explanation.left_out), "node")
        without = f"left out: {count} without a matching class label: {format_names(explanation.left_out)}"
        print_lines("", without)


def _format_remedy(fix: str | None) -> list[str]:
    return [f"    -> {escape_text(fix)}"] if fix else []
