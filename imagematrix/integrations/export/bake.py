"""A matrix as files for `docker buildx bake`, which builds images with the same content as `build`."""

from __future__ import annotations

import re

from imagematrix.build.plan import identity
from imagematrix.common import json_documents
from imagematrix.errors import UsageError
from imagematrix.images.catalog.labels import select_annotations
from imagematrix.integrations.export.export_target import ExportTarget

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from imagematrix.build.plan.protocols import BuildRequest
    from imagematrix.integrations.export.export_target import ExportSource

LIMIT = 250  # targets in one file: bake's parse time grows with their square


def make_bake_files(requests: Sequence[BuildRequest]) -> dict[str, str]:
    """Return the files by name, each with at most LIMIT of `requests` as targets of its default group."""
    targets = {make_target_name(request.reference): _make_target(request) for request in requests}
    if len(targets) < len(requests):
        raise UsageError("image names that differ only in / and _ are the same name for bake")
    names = list(targets)
    parts = [names[start : start + LIMIT] for start in range(0, len(names), LIMIT)]
    digits = len(str(len(parts)))  # of equal length, so that shells list the files in request
    return {
        f"docker-bake-{number:0{digits}}.json"
        if len(parts) > 1
        else "docker-bake.json": json_documents.dump_json(
            {"group": {"default": {"targets": part}}, "target": {name: targets[name] for name in part}}
        )
        for number, part in enumerate(parts, start=1)
    }


def _make_target(request: BuildRequest) -> dict[str, object]:
    # The keys and values that `build` passes to `docker buildx build`, or sets on the image afterwards.
    sources = request.sources
    return {
        "context": _escape_template(str(sources.context)),
        "dockerfile-inline": _escape_template(sources.pin_references(request.dockerfile)),
        "platforms": [sources.platform],
        "tags": [_escape_template(request.reference)],
        "labels": {key: _escape_template(value) for key, value in sorted(request.labels.items())},
        "annotations": [
            f"{key}={_escape_template(value)}" for key, value in select_annotations(request.labels).items()
        ],
        "args": {"SOURCE_DATE_EPOCH": identity.EPOCH}
        | {key: _escape_template(value) for key, value in sources.args.items()},
        **({"secret": list(map(_escape_template, sources.secrets))} if sources.secrets else {}),
        **({"ssh": list(map(_escape_template, sources.ssh))} if sources.ssh else {}),
        "attest": ["type=provenance,disabled=true"],
        **({"contexts": sources.contexts} if sources.contexts else {}),
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
    return make_bake_files(source.make_requests(lambda reference: f"target:{make_target_name(reference)}"))


TARGET = ExportTarget(name="bake", help="JSON for docker buildx bake", files=_make_files)
