"""The installation before this one, from its manifests: its certificate, and what is no longer part of it.

So an upgrade has no gap in which the API server does not trust the webhook.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
from dataclasses import dataclass

from imagematrix.common import json_documents
from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.client.yaml import load
from imagematrix.integrations.kubernetes.install import authority
from imagematrix.integrations.kubernetes.install.authority import Tls
from imagematrix.integrations.kubernetes.install.install import HOOK, NAME, service_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path
    from typing import Any

__all__ = ["LEFT", "Previous", "Resource", "read", "renewed"]

LEFT = dt.timedelta(days=60)  # before its end, at which a certificate is replaced
WRITTEN = "give the manifests that installed it, or `kubectl get -o yaml` of its Secret and its configuration"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Resource:
    """An object of a cluster, by its API group, kind, namespace and name."""

    group: str
    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace + '/' if self.namespace else ''}{self.name}"

    @classmethod
    def of(cls, manifest: Mapping[str, Any], where: str) -> Resource:
        """Return what a manifest describes; raise UsageError if it does not say."""
        fields = json_documents.Fields(manifest, where)
        metadata = fields.object_or_none("metadata")
        if metadata is None:
            raise fields.fail("metadata", "is missing (expected an object)")
        return cls(
            group=fields.text("apiVersion").rpartition("/")[0],
            kind=fields.text("kind"),
            namespace=metadata.text_or_none("namespace") or "",
            name=metadata.text("name"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Previous:
    """An installation: its certificate, and its resources."""

    tls: Tls
    resources: frozenset[Resource]

    def without(self, manifests: Iterable[Mapping[str, Any]]) -> list[Resource]:
        """Return the resources that other manifests no longer have."""
        return sorted(self.resources - {Resource.of(each, "manifest") for each in manifests})


def read(path: Path, namespace: str) -> Previous:
    """Return the installation in a file; raise UsageError if it is invalid, or of another namespace."""
    where = str(path)
    manifests = list(_objects(load(path), where))
    resources = [Resource.of(each, where) for each in manifests]
    found = dict(zip(resources, manifests, strict=True))
    secret = _only(found, "Secret", where)
    configuration = _only(found, "MutatingWebhookConfiguration", where)
    data = json_documents.Fields(found[secret], where).object_or_empty("data")
    hook = _hook(json_documents.Fields(found[configuration], where), where)
    if secret.namespace != namespace:
        raise UsageError(
            f"{where}: installed to the namespace {secret.namespace[:80]!r}",
            remedy="give the same --namespace; an installation cannot move",
        )
    tls = Tls(
        chain=_decoded(data, "tls.crt"), key=_decoded(data, "tls.key"), authorities=_decoded(hook, "caBundle")
    )
    parts = (f"{where}: tls.crt", f"{where}: tls.key", f"{where}: caBundle")
    authority.require_valid(tls, parts, service_names(namespace)[0])
    return Previous(tls=tls, resources=frozenset(resources))


def renewed(previous: Tls, given: Tls | None, names: tuple[str, ...], now: dt.datetime) -> Tls:
    """Return the certificate of an upgrade: `given`, or the previous one until 60 days before its end.

    The API server trusts the previous authorities too, because webhooks use the previous certificate until
    the kubelet has given them the other.
    """
    end = authority.ends(previous)
    keep = given is None and end is not None and end - now > LEFT
    new = given or (previous if keep else authority.make(names, now))
    authorities = authority.together([new.authorities, previous.authorities], now)
    return Tls(chain=new.chain, key=new.key, authorities=authorities)


def _objects(manifests: Iterable[object], where: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file, also those in a List of kubectl."""
    for each in manifests:
        if each is None:  # between two separators
            continue
        fields = json_documents.Fields(each, where)
        if fields.text("kind") == "List":
            yield from (item.data for item in fields.objects("items"))
        else:
            yield fields.data


def _only(found: Iterable[Resource], kind: str, where: str) -> Resource:
    some = [each for each in found if (each.kind, each.name) == (kind, NAME)]
    if len(some) != 1:
        raise UsageError(f"{where}: expected one {kind} {NAME}, found {len(some)}", remedy=WRITTEN)
    return some[0]


def _hook(configuration: json_documents.Fields, where: str) -> json_documents.Fields:
    hooks = [each for each in configuration.objects("webhooks") if each.text_or_none("name") == HOOK]
    if len(hooks) != 1:
        raise UsageError(f"{where}: expected one webhook {HOOK}, found {len(hooks)}", remedy=WRITTEN)
    return hooks[0].object_or_empty("clientConfig")


def _decoded(fields: json_documents.Fields, key: str) -> bytes:
    try:
        return base64.b64decode("".join(fields.text(key).split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise fields.fail(key, "invalid base64") from error
