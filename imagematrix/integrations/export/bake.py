"""A matrix as files for `docker buildx bake`, which builds images with the same content as `build`."""

from __future__ import annotations

import re

from imagematrix.build.plan import identity
from imagematrix.common import json_documents
from imagematrix.errors import UsageError
from imagematrix.images.catalog.labels import select_annotations
from imagematrix.integrations.export.target import ExportTarget

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from imagematrix.build.plan.protocols import BuildRequest
    from imagematrix.integrations.export.target import ExportSource

LIMIT = 250  # targets in one file: bake's parse time grows with their square


def make_bake_files(orders: Sequence[BuildRequest]) -> dict[str, str]:
    """Return the files by name, each with at most LIMIT of `orders` as targets of its default group."""
    targets = {make_target_name(order.reference): _make_target(order) for order in orders}
    if len(targets) < len(orders):
        raise UsageError("image names that differ only in / and _ are the same name for bake")
    names = list(targets)
    parts = [names[start : start + LIMIT] for start in range(0, len(names), LIMIT)]
    digits = len(str(len(parts)))  # of equal length, so that shells list the files in order
    return {
        f"docker-bake-{number:0{digits}}.json"
        if len(parts) > 1
        else "docker-bake.json": json_documents.dump_json(
            {"group": {"default": {"targets": part}}, "target": {name: targets[name] for name in part}}
        )
        for number, part in enumerate(parts, start=1)
    }


def _make_target(order: BuildRequest) -> dict[str, object]:
    # The keys and values that `build` passes to `docker buildx build`, or sets on the image afterwards.
    return {
        "context": _escape_template(str(order.sources.context)),
        "dockerfile-inline": _escape_template(order.sources.pin_references(order.dockerfile)),
        "platforms": [order.sources.platform],
        "tags": [_escape_template(order.reference)],
        "labels": {key: _escape_template(value) for key, value in sorted(order.labels.items())},
        "annotations": [
            f"{key}={_escape_template(value)}" for key, value in select_annotations(order.labels).items()
        ],
        "args": {"SOURCE_DATE_EPOCH": identity.EPOCH}
        | {key: _escape_template(value) for key, value in order.sources.args.items()},
        **({"secret": list(map(_escape_template, order.sources.secrets))} if order.sources.secrets else {}),
        **({"ssh": list(map(_escape_template, order.sources.ssh))} if order.sources.ssh else {}),
        "attest": ["type=provenance,disabled=true"],
        **({"contexts": order.sources.contexts} if order.sources.contexts else {}),
    }


def make_target_name(reference: str) -> str:
    """Return the name of a target: a reference without characters that are invalid in target names.

    The digits of the input digest at its end keep it unique.
    """
    return re.sub(r"[^A-Za-z0-9_-]", "_", reference)


def _escape_template(text: str) -> str:
    """Return `text` escaped for a string of the file, in which bake evaluates templates (HCL, JSON)."""
    return text.replace("${", "$${").replace("%{", "%%{")


def _make_files(source: ExportSource, wanted: int | None) -> dict[str, str]:
    if wanted is not None:
        raise UsageError("--jobs is for CI systems; bake decides how many targets it builds at once")
    return make_bake_files(source.orders(lambda reference: f"target:{make_target_name(reference)}"))


TARGET = ExportTarget(name="bake", help="JSON for docker buildx bake", files=_make_files)
