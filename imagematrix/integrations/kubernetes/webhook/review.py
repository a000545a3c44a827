"""An AdmissionReview (admission.k8s.io/v1) and the answer to it, as pure functions.

See https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers.
"""

from __future__ import annotations

import base64
import copy
import json
from dataclasses import dataclass

from imagematrix.common import json_documents
from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.admission.admission import OPERATIONS, admit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any, Literal

    from imagematrix.integrations.kubernetes.admission.admission import AdmissionPolicy

    Outcome = Literal["patched", "unchanged", "undecided", "refused"]

PATH = "/mutate"  # where the API server posts reviews

API, KIND = "admission.k8s.io/v1", "AdmissionReview"
FORBIDDEN = 403


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewAnswer:
    """The AdmissionReview to send, the outcome for `pod`, and the reason if its image is undecided."""

    document: dict[str, Any]
    outcome: Outcome
    pod: str
    reason: str | None = None


def answer_review(raw: bytes, policies: Iterable[AdmissionPolicy]) -> ReviewAnswer:
    """Return the answer to a review; raise UsageError if the review is invalid.

    A pod may use the images of several policies. An undecided image that is not refused gives a warning,
    which kubectl shows.
    """
    fields = json_documents.Fields(json_documents.parse_json(raw, "review"), "review")
    if (fields.get_text("apiVersion"), fields.get_text("kind")) != (API, KIND):
        raise UsageError(f"review: expected {API} {KIND}")
    request = fields.get_object_or_none("request")
    if request is None:
        raise fields.fail("request", "is missing (expected an object)")
    response: dict[str, Any] = {"uid": request.get_text("uid"), "allowed": True}
    document = {"apiVersion": API, "kind": KIND, "response": response}
    pod = request.get_object_or_none("object")
    name = f"{request.get_text_or_none('namespace')}/{request.get_text_or_none('name')}"
    operation = request.get_text("operation")
    if pod is None or operation not in OPERATIONS.get(_get_resource(request), ()):
        return ReviewAnswer(document=document, outcome="unchanged", pod=name)
    before = request.get_object_or_none("oldObject")
    if before is None and operation != "CREATE":
        raise request.fail("oldObject", "is missing (expected an object)")
    try:
        patch, reasons, refused = _admit_pod(pod.data, before.data if before is not None else None, policies)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        # API servers send only pods that they have decoded: another client sent this one.
        raise UsageError("review: request: object: invalid pod") from error
    reason = "; ".join(reasons) or None
    if refused:
        status = {"code": FORBIDDEN, "reason": "Forbidden", "message": reason}
        response.update(allowed=False, status=status)
        return ReviewAnswer(document=document, outcome="refused", pod=name, reason=reason)
    if reasons:
        response["warnings"] = reasons
    if patch:
        text = json.dumps(patch).encode()
        response.update(patchType="JSONPatch", patch=base64.b64encode(text).decode())
    outcome: Outcome = "patched" if patch else "unchanged"
    if reasons:
        outcome = "undecided"
    return ReviewAnswer(document=document, outcome=outcome, pod=name, reason=reason)


def _get_resource(request: json_documents.Fields) -> str:
    """Return what a request is about, such as `pods/ephemeralcontainers`."""
    resource = request.get_object_or_none("resource")
    words = (resource and resource.get_text_or_none("resource"), request.get_text_or_none("subResource"))
    return "/".join(word for word in words if word)


def _admit_pod(
    pod: dict[str, Any], before: dict[str, Any] | None, policies: Iterable[AdmissionPolicy]
) -> tuple[list[Mapping[str, Any]], list[str], bool]:
    """Return the patch, the reasons and whether the pod is refused; each policy sees earlier patches."""
    patch: list[Mapping[str, Any]] = []
    reasons: list[str] = []
    refused = False
    for policy in policies:
        admission = admit(pod, policy, before=before)
        patch += admission.patch
        reasons += [admission.reason] if admission.reason else []
        refused = refused or admission.refused
        for operation in admission.patch:
            _apply_operation(pod, operation)
    return patch, reasons, refused


def _apply_operation(pod: dict[str, Any], operation: Mapping[str, Any]) -> None:
    """Apply an operation of `admit` to a pod; the keys in its paths need no escapes."""
    *parents, last = operation["path"].split("/")[1:]
    parent: Any = pod
    for key in parents:
        parent = parent[int(key)] if isinstance(parent, list) else parent[key]
    value = copy.deepcopy(operation["value"])
    if isinstance(parent, list):
        parent.append(value)  # the operations replace or add keys, and append to lists
    else:
        parent[last] = value
