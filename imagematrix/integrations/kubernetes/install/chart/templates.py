"""The templates of the chart, made from manifests of `install` with each option changed."""

from __future__ import annotations

import base64
import dataclasses

from imagematrix.integrations.kubernetes.install.certificates import VALID, Tls
from imagematrix.integrations.kubernetes.install.chart.nodes import When, make_conditional, make_repeated
from imagematrix.integrations.kubernetes.install.chart.text import EACH, Number, Writer
from imagematrix.integrations.kubernetes.install.install import (
    NAME,
    Installation,
    make_manifests,
    make_service_names,
)
from imagematrix.integrations.kubernetes.install.upgrade import LEFT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    Manifests = dict[tuple[str, str], Any]

# Texts in manifests that stand for values. Helm replaces them with these expressions.
PROGRAM, NAMESPACE, SECRET, KUBELET = "zz-program", "zz-namespace", "zz-secret", "/zz-kubelet"
IMAGES, KINDS = ("zz-image", "zz-image-two"), ("zz-kind", "zz-kind-two")
EXCLUDED, CONDITIONS = ("zz-excluded", "zz-excluded-two"), ("zz-condition", "zz-condition-two")
RENEW = "zz-renew"
TLS = Tls(chain=b"zz-chain", key=b"zz-key", authorities=b"zz-authorities")
EXPRESSIONS = {
    PROGRAM: '(required "program: give an image with imagematrix" $.Values.program)',
    NAMESPACE: "$.Release.Namespace",
    SECRET: "$.Values.pullSecret",
    KUBELET: "$.Values.kubelet",
    **dict.fromkeys((IMAGES[0], KINDS[0], EXCLUDED[0], CONDITIONS[0]), EACH),
    base64.b64encode(TLS.chain).decode(): "($tls.cert | b64enc)",
    base64.b64encode(TLS.key).decode(): "($tls.key | b64enc)",
    base64.b64encode(TLS.authorities).decode(): "($tls.ca | b64enc)",
    RENEW: "$tls.renew",
}
TIMEOUT = Number(5, "int $.Values.timeoutSeconds")
CPU = "--allow-cpu"
WHERE = ("--where", CONDITIONS[0])
BASE = Installation(
    names=(IMAGES[0],),
    program=PROGRAM,
    namespace=NAMESPACE,
    excluded=(EXCLUDED[0],),
    deny=True,
    timeout_s=TIMEOUT,
    pull_secret=SECRET,
    options=(*WHERE, CPU),
    plugin=(KINDS[0],),
    kubelet=KUBELET,
)
PLUGIN, DRA = "$.Values.devicePlugin.enabled", "$.Values.draDriver.enabled"
# By the condition that holds for BASE: what is changed if it does not.
CHANGES: Mapping[str, Mapping[str, Any]] = {
    'eq $.Values.onUnknown "deny"': {"deny": False},
    "$.Values.pullSecret": {"pull_secret": None},
    "$.Values.matchConditions": {"conditions": False},
    "$.Values.events": {"events": False},
    "$.Values.allowCpu": {"options": WHERE},
}
# By the path of a value that is a list: its first two elements, and the change for the second.
LISTS: Mapping[str, tuple[tuple[str, str], Mapping[str, Any]]] = {
    "images": (IMAGES, {"names": IMAGES}),
    "excludeNamespaces": (EXCLUDED, {"excluded": EXCLUDED}),
    "where": (CONDITIONS, {"options": (*WHERE, "--where", CONDITIONS[1], CPU)}),
    "devicePlugin.by": (KINDS, {"plugin": KINDS}),
}
# They need the certificate, which is made once for both.
CERTIFIED = (("Secret", NAME), ("MutatingWebhookConfiguration", NAME))
ANNOTATION = "imagematrix.io/renew-after"
CERTIFICATE = """\
{{- /* The certificate: a given one, or that of the last release, or a new one, as from time to time. */}}
{{- $tls := dict "cert" $.Values.tls.cert "key" $.Values.tls.key "ca" $.Values.tls.ca "renew" "" }}
{{- if not $tls.cert }}
{{-   $old := lookup "v1" "Secret" $.Release.Namespace "NAME" | default dict }}
{{-   $renew := dig "metadata" "annotations" "ANNOTATION" "0" $old }}
{{-   $data := $old.data | default dict }}
{{-   $ca := index $data "ca.crt" | default "" | b64dec }}
{{-   if gt (int64 $renew) (now | unixEpoch | int64) }}
{{-     $cert := index $data "tls.crt" | b64dec }}
{{-     $tls = dict "cert" $cert "key" (index $data "tls.key" | b64dec) "ca" $ca "renew" $renew }}
{{-   else }}
{{-     $authority := genCA "imagematrix webhook authority" DAYS }}
{{-     $pair := genSignedCert "imagematrix webhook" nil (list NAMES) DAYS $authority }}
{{-     $renew = add (now | unixEpoch | int64) SECONDS | toString }}
{{-     $both := printf "%s%s" $authority.Cert $ca }}
{{-     $tls = dict "cert" $pair.Cert "key" $pair.Key "ca" $both "renew" $renew }}
{{-   end }}
{{- end }}
"""
NOTHING = """\
{{- if not $.Values.images }}
{{-   fail "images: name at least one version, such as reg.example.com/ml/training:v1" }}
{{- end }}
"""


def make_conditional_objects() -> Manifests:
    """Return the objects of all installations as they depend on values, by kind and name.

    An object may be in a When. Raises ValueError if a manifest depends on an option in another way than by
    leaving out, replacing or repeating parts.
    """
    objects = _make_objects(BASE, PLUGIN, {"plugin": None}, LISTS)
    lists = {name: change for name, change in LISTS.items() if name != "devicePlugin.by"}
    with_dra = dataclasses.replace(BASE, plugin=None, dra=True)
    for key, manifest in _make_objects(with_dra, DRA, {"dra": False}, lists).items():
        if objects.setdefault(key, manifest) != manifest:
            raise ValueError(f"{key} depends on {PLUGIN} and on {DRA}")
    objects[CERTIFIED[0]]["metadata"]["annotations"] = When(condition="$tls.renew", then={ANNOTATION: RENEW})
    return objects


def render_templates() -> dict[str, str]:
    """Return the templates by file name."""
    writer = Writer(expressions=EXPRESSIONS)
    objects = make_conditional_objects()
    certified = "".join(_render_document(writer, objects.pop(key)) for key in CERTIFIED)
    files = {"certificate.yaml": _render_certificate() + certified}
    for (kind, name), manifest in objects.items():
        start = NOTHING if kind == "Deployment" else ""
        file_name = f"{name.removeprefix('imagematrix-')}-{kind.lower()}.yaml"
        files[file_name] = start + _render_document(writer, manifest)

    # A named template has the condition that a pod uses one of the images.
    expressions = []
    for names in (IMAGES[:1], IMAGES):
        manifests = _make_manifests(dataclasses.replace(BASE, names=names))
        (hook,) = manifests["MutatingWebhookConfiguration", NAME]["webhooks"]
        expressions.append(hook["matchConditions"][0]["expression"])
    single, double = expressions
    joined = writer.render_joined(make_repeated(single, single, double, "images", IMAGES))
    helpers = f'{{{{- define "imagematrix.images" -}}}}\n{joined}\n{{{{- end }}}}\n'
    return files | {"_helpers.tpl": helpers}


def _make_objects(
    base: Installation,
    condition: str,
    without: Mapping[str, Any],
    lists: Mapping[str, tuple[tuple[str, str], Mapping[str, Any]]],
) -> Manifests:
    """Return the objects of an installation as they depend on values; a whole object may be in a When."""
    manifests = _make_manifests(base)
    objects = dict(manifests)
    for value, (texts, change) in lists.items():
        double = _make_manifests(dataclasses.replace(base, **change))
        for key, manifest in manifests.items():
            objects[key] = make_repeated(objects[key], manifest, double[key], value, texts)
    for needed, change in {**CHANGES, condition: without}.items():
        off = _make_manifests(dataclasses.replace(base, **change))
        if not off.keys() <= manifests.keys():
            raise ValueError(f"only without {needed}: {off.keys() - manifests.keys()}")
        for key, manifest in manifests.items():
            objects[key] = (
                make_conditional(objects[key], manifest, off[key], needed)
                if key in off
                else When(condition=needed, then=objects[key])
            )
    return objects


def _make_manifests(installation: Installation) -> Manifests:
    """Return the manifests by kind and name, without the namespace: that of a release exists."""
    return {
        (manifest["kind"], manifest["metadata"]["name"]): manifest
        for manifest in make_manifests(installation, TLS)
        if manifest["kind"] != "Namespace"
    }


def _render_document(writer: Writer, node: Any) -> str:
    conditions: list[str] = []
    while isinstance(node, When):
        conditions.append(node.condition)
        node = node.then
    start = "".join(f"{{{{- if {condition} }}}}\n" for condition in conditions)
    return f"{start}---\n" + "\n".join(writer.write_lines(node)) + "\n" + "{{- end }}\n" * len(conditions)


def _render_certificate() -> str:
    names = " ".join(
        f'(printf "{name.replace(NAMESPACE, "%s")}" $.Release.Namespace)'
        for name in make_service_names(NAMESPACE)
    )
    text = CERTIFICATE.replace("NAMES", names)
    for word, value in {
        "ANNOTATION": ANNOTATION,
        "NAME": NAME,
        "DAYS": str(VALID.days),
        "SECONDS": str((VALID - LEFT).days * 24 * 3600),
    }.items():
        text = text.replace(word, value)
    return text
