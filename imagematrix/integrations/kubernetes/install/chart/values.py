"""The values of the chart: their defaults, what is allowed, and what they mean; one for each option."""

from __future__ import annotations

import json
from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
VERSION = r"^[^\s\"'\\@/]+/[^\s\"'\\@]+:[^\s\"'\\@/:]+$"  # REGISTRY/NAME:VERSION
PATH = r"^/[^\x00-\x1f:]*[^\x00-\x1f:/]$"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A value: its path, its default, what it means, and the keywords of its JSON Schema."""

    path: tuple[str, ...]
    default: Any
    what: str
    allowed: dict[str, Any]


def _make_text_schema(pattern: str) -> dict[str, Any]:
    """Return the schema of a text that may be empty."""
    return {"type": "string", "pattern": f"^$|{pattern}"}


def _make_list_schema(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "uniqueItems": True}


BOOLEAN = {"type": "boolean"}
VALUES = (
    Value(
        path=("images",),
        default=[],
        what="The versions that the webhook serves, such as reg.example.com/ml/training:v1. Required.",
        allowed=_make_list_schema({"type": "string", "pattern": VERSION}),
    ),
    Value(
        path=("program",),
        default="",
        what="An image with imagematrix and a shell. Required.",
        allowed=_make_text_schema(r"^[^\s]+$"),
    ),
    Value(
        path=("onUnknown",),
        default="default",
        what="Leave a pod whose image is undecided as it is (default), or refuse it (deny).",
        allowed={"enum": ["default", "deny"]},
    ),
    Value(
        path=("excludeNamespaces",),
        default=[],
        what="Namespaces whose pods the webhook ignores, besides kube-system and its own.",
        allowed=_make_list_schema({"type": "string", "maxLength": 63, "pattern": NAME}),
    ),
    Value(
        path=("pullSecret",),
        default="",
        what="The Secret with the credentials for registries.",
        allowed=_make_text_schema(r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"),
    ),
    Value(
        path=("timeoutSeconds",),
        default=5,
        what="The webhook's time limit.",
        allowed={"type": "integer", "minimum": 1, "maximum": 30},
    ),
    Value(
        path=("matchConditions",),
        default=True,
        what="Send only pods with one of the images to the webhook, from Kubernetes 1.28 on.",
        allowed=BOOLEAN,
    ),
    Value(
        path=("events",),
        default=True,
        what="Write Events about pods that cannot start, for which the webhook lists pods.",
        allowed=BOOLEAN,
    ),
    Value(
        path=("where",),
        default=[],
        what="Conditions on variants, such as python=3.13, as for --where.",
        allowed=_make_list_schema({"type": "string", "minLength": 1}),
    ),
    Value(
        path=("allowCpu",),
        default=False,
        what="If no GPU variant fits, accept a CPU-only one.",
        allowed=BOOLEAN,
    ),
    Value(
        path=("devicePlugin", "enabled"),
        default=False,
        what="Also offer the nodes' GPUs, by a device plugin.",
        allowed=BOOLEAN,
    ),
    Value(
        path=("devicePlugin", "by"),
        default=[],
        what="Also offer each GPU by its product, or by the node's class.",
        allowed=_make_list_schema({"enum": ["product", "class"]}),
    ),
    Value(
        path=("draDriver", "enabled"),
        default=False,
        what="In its place, publish the nodes' GPUs for dynamic resource allocation.",
        allowed=BOOLEAN,
    ),
    Value(
        path=("kubelet",),
        default="/var/lib/kubelet",
        what="The --root-dir of the nodes' kubelets.",
        allowed={"type": "string", "pattern": PATH},
    ),
    Value(
        path=("tls", "cert"),
        default="",
        what="The webhook's certificate chain, PEM; by default a new one, which later upgrades keep.",
        allowed={"type": "string"},
    ),
    Value(path=("tls", "key"), default="", what="Its key, PEM.", allowed={"type": "string"}),
    Value(
        path=("tls", "ca"),
        default="",
        what="The authorities that signed it, PEM.",
        allowed={"type": "string"},
    ),
)


def render_defaults() -> str:
    """Return values.yaml."""
    lines: list[str] = []
    group: tuple[str, ...] = ()
    for value in VALUES:
        *outer, key = value.path
        if tuple(outer) != group:
            group = tuple(outer)
            lines += [f"{name}:" for name in outer]
        pad = "  " * len(outer)
        lines += [f"{pad}# {value.what}", f"{pad}{key}: {json.dumps(value.default)}"]
    return "\n".join(lines) + "\n"


def make_schema() -> dict[str, Any]:
    """Return the JSON Schema of the values, draft 7, which Helm reads."""
    enabled = {"properties": {"enabled": {"const": True}}, "required": ["enabled"]}
    both = {"properties": {"devicePlugin": enabled, "draDriver": enabled}}
    schema: dict[str, Any] = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values",
        "type": "object",
        "properties": {"global": {"type": "object"}},
        "additionalProperties": False,
        "not": both | {"required": [*both["properties"]]},
    }
    for value in VALUES:
        *outer, key = value.path
        properties = schema["properties"]
        for name in outer:
            group = {"type": "object", "properties": {}, "additionalProperties": False}
            properties = properties.setdefault(name, group)["properties"]
        properties[key] = {"description": value.what, **value.allowed, "default": value.default}
    return schema
