"""A kubeconfig: the API server of a cluster, for a process outside of pods.

See https://kubernetes.io/docs/reference/config-api/kubeconfig.v1. Credentials are read from files, which
their owners renew, as in the kubeconfig that kubelet has.
"""

from __future__ import annotations

import base64
import binascii

from imagematrix.common.json_documents import Fields
from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.client import yaml
from imagematrix.integrations.kubernetes.client.api import ApiServer, require_url

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

REMEDY = "give one with tokenFile, or client-certificate and client-key, such as /etc/kubernetes/kubelet.conf"


def load_kubeconfig(path: Path) -> ApiServer:
    """Return the API server of the current context in a kubeconfig.

    Raises UsageError if the file is invalid, or has other credentials than files.
    """
    documents = yaml.load_yaml(path)
    if len(documents) != 1:
        raise UsageError(f"{path}: expected one document, found {len(documents)}", remedy=REMEDY)
    fields = Fields(documents[0], str(path))
    context = _find_entry(fields, "contexts", "context", fields.get_text("current-context"))
    cluster = _find_entry(fields, "clusters", "cluster", context.get_text("cluster"))
    user = _find_entry(fields, "users", "user", context.get_text("user"))
    names = ("tokenFile", "client-certificate", "client-key")
    token, certificate, key = (_resolve_file(path, user, name) for name in names)
    if token is None and (certificate is None or key is None):
        raise UsageError(f"{path}: no credentials in files", remedy=REMEDY)
    data = cluster.get_text_or_none("certificate-authority-data")
    try:
        text = base64.b64decode(data, validate=True).decode("ascii") if data else None
    except (binascii.Error, UnicodeDecodeError) as error:
        raise cluster.fail("certificate-authority-data", "is not a certificate in base64") from error
    return ApiServer(
        url=require_url(cluster.get_text("server")),
        token=token,
        authorities=_resolve_file(path, cluster, "certificate-authority"),
        authority_text=text,
        certificate=(certificate, key) if certificate and key else None,
    )


def _find_entry(fields: Fields, section: str, kind: str, name: str) -> Fields:
    for entry in fields.list_objects(section):
        if entry.get_text_or_none("name") == name and (content := entry.get_object_or_none(kind)):
            return content
    raise fields.fail(section, f"{name[:80]!r} not found")


def _resolve_file(path: Path, fields: Fields, key: str) -> Path | None:
    """Return a file that a kubeconfig names, by default relative to its folder."""
    name = fields.get_text_or_none(key)
    return path.parent / name if name else None
