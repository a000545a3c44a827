"""An AdmissionReview (admission.k8s.io/v1) and the answer to it, as pure functions.

See https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass

from imagematrix.common import json_documents
from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.admission.admission import OPERATIONS, admit_by_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
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
    name = f"{request.get_text_or_none('namespace')}/{_get_pod_name(request, pod)}"
    operation = request.get_text("operation")
    if pod is None or operation not in OPERATIONS.get(_get_resource(request), ()):
        return ReviewAnswer(document=document, outcome="unchanged", pod=name)
    before = request.get_object_or_none("oldObject")
    if before is None and operation != "CREATE":
        raise request.fail("oldObject", "is missing (expected an object)")
    try:
        admissions = admit_by_all(pod.data, policies, before=None if before is None else before.data).values()
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        # API servers send only pods that they have decoded: another client sent this one.
        raise UsageError("review: request: object: invalid pod") from error
    patch = [operation for admission in admissions for operation in admission.patch]
    reasons = [admission.reason for admission in admissions if admission.reason]
    reason = "; ".join(reasons) or None
    if any(admission.refused for admission in admissions):
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


def _get_pod_name(request: json_documents.Fields, pod: json_documents.Fields | None) -> str | None:
    """Return the name of a request's pod; the API server makes that of a controller's pod only afterwards."""
    name = request.get_text_or_none("name")
    if name or pod is None:
        return name
    return pod.get_object_or_empty("metadata").get_text_or_none("generateName")


def _get_resource(request: json_documents.Fields) -> str:
    """Return what a request is about, such as `pods/ephemeralcontainers`."""
    resource = request.get_object_or_none("resource")
    words = (resource and resource.get_text_or_none("resource"), request.get_text_or_none("subResource"))
    return "/".join(word for word in words if word)
