"""Objects of a cluster: their names, and manifests of them."""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Manifest = dict[str, Any]

CONTROL_PLANE = "kube-system"  # a namespace whose pods no webhook may hold up
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
DNS_SUBDOMAIN = re.compile(rf"(?=.{{1,253}}$){DNS_LABEL.pattern}(\.{DNS_LABEL.pattern})*", re.ASCII)


def make_manifest(version: str, kind: str, name: str, **fields: object) -> Manifest:
    """Return an object of a cluster. `namespace` and `labels` are parts of its metadata."""
    metadata = {key: fields.pop(key) for key in ("namespace", "labels") if key in fields}
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, **metadata}, **fields}
