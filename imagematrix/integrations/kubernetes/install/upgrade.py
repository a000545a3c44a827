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
from imagematrix.integrations.kubernetes.client.yaml import load_yaml
from imagematrix.integrations.kubernetes.install import certificates
from imagematrix.integrations.kubernetes.install.certificates import Tls
from imagematrix.integrations.kubernetes.install.install import HOOK, NAME, make_service_names
from imagematrix.integrations.kubernetes.nodes.nodes import list_objects

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path
    from typing import Any

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
    def from_manifest(cls, manifest: Mapping[str, Any], where: str) -> Resource:
        """Return what a manifest describes; raise UsageError if it does not say."""
        fields = json_documents.Fields(manifest, where)
        metadata = fields.get_object_or_none("metadata")
        if metadata is None:
            raise fields.fail("metadata", "is missing (expected an object)")
        return cls(
            group=fields.get_text("apiVersion").rpartition("/")[0],
            kind=fields.get_text("kind"),
            namespace=metadata.get_text_or_none("namespace") or "",
            name=metadata.get_text("name"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviousInstallation:
    """An installation: its certificate, and its resources."""

    tls: Tls
    resources: frozenset[Resource]

    def list_obsolete(self, manifests: Iterable[Mapping[str, Any]]) -> list[Resource]:
        """Return the resources that the manifests of an upgrade no longer have."""
        upgraded = {Resource.from_manifest(manifest, "manifest") for manifest in manifests}
        return sorted(self.resources - upgraded)


def read_installation(path: Path, namespace: str) -> PreviousInstallation:
    """Return the installation in a file; raise UsageError if it is invalid, or of another namespace."""
    where = str(path)
    documents = [document for document in load_yaml(path) if document is not None]  # between two separators
    manifests = [item.data for document in documents for item in list_objects(document, where)]
    resources = [Resource.from_manifest(manifest, where) for manifest in manifests]
    by_resource = dict(zip(resources, manifests, strict=True))
    secret = _require_single(by_resource, "Secret", where)
    configuration = _require_single(by_resource, "MutatingWebhookConfiguration", where)
    data = json_documents.Fields(by_resource[secret], where).get_object_or_empty("data")
    webhooks = json_documents.Fields(by_resource[configuration], where).list_objects("webhooks")
    hooks = [hook for hook in webhooks if hook.get_text_or_none("name") == HOOK]
    if len(hooks) != 1:
        raise UsageError(f"{where}: expected one webhook {HOOK}, found {len(hooks)}", remedy=WRITTEN)
    client = hooks[0].get_object_or_empty("clientConfig")
    if secret.namespace != namespace:
        raise UsageError(
            f"{where}: installed to the namespace {secret.namespace[:80]!r}",
            remedy="give the same --namespace; an installation cannot move",
        )
    tls = Tls(
        chain=_decode_field(data, "tls.crt"),
        key=_decode_field(data, "tls.key"),
        authorities=_decode_field(client, "caBundle"),
    )
    parts = (f"{where}: tls.crt", f"{where}: tls.key", f"{where}: caBundle")
    certificates.require_valid_certificate(tls, parts, make_service_names(namespace)[0])
    return PreviousInstallation(tls=tls, resources=frozenset(resources))


def renew_certificate(
    previous: Tls, replacement: Tls | None, names: tuple[str, ...], now: dt.datetime
) -> Tls:
    """Return the certificate of an upgrade: `replacement`, or the previous one until 60 days before its end.

    The API server trusts the previous authorities too, because webhooks use the previous certificate until
    the kubelet has given them the other.
    """
    end = certificates.get_end_of_trust(previous)
    keep = replacement is None and end is not None and end - now > LEFT
    new = replacement or (previous if keep else certificates.make_certificate(names, now))
    authorities = certificates.merge_authorities([new.authorities, previous.authorities], now)
    return Tls(chain=new.chain, key=new.key, authorities=authorities)


def _require_single(resources: Iterable[Resource], kind: str, where: str) -> Resource:
    matches = [resource for resource in resources if (resource.kind, resource.name) == (kind, NAME)]
    if len(matches) != 1:
        raise UsageError(f"{where}: expected one {kind} {NAME}, found {len(matches)}", remedy=WRITTEN)
    return matches[0]


def _decode_field(fields: json_documents.Fields, key: str) -> bytes:
    try:
        return base64.b64decode("".join(fields.get_text(key).split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise fields.fail(key, "invalid base64") from error
