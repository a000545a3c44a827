"""What a ResourceClaim allocates of this node: pure functions of the claim as the API server has it.

Everything in a claim is checked, though the API server has checked it too: paths and devices derive from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from imagematrix.errors import ImagematrixError
from imagematrix.integrations.kubernetes.client.objects import DNS_LABEL
from imagematrix.integrations.kubernetes.dra.slices import API, DRIVER
from imagematrix.integrations.kubernetes.nodes.dra_usage import get_allocation

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.common.json_documents import Fields

UID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
NAME = re.compile(rf"{DNS_LABEL.pattern}(?:\.{DNS_LABEL.pattern})*", re.ASCII)


class ClaimError(ImagematrixError):
    """A claim cannot be prepared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimReference:
    """A claim as kubelet names it."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def is_valid(self) -> bool:
        """Whether the names are what an API server gives: they become parts of paths."""
        return bool(
            DNS_LABEL.fullmatch(self.namespace) and NAME.fullmatch(self.name) and UID.fullmatch(self.uid)
        )

    @property
    def path(self) -> str:
        """The path of the claim at the API server."""
        return f"/apis/{API}/namespaces/{self.namespace}/resourceclaims/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatedDevice:
    """A device that a claim allocates: its name in the node's pool, and the request that it is for."""

    name: str
    request: str
    share: str | None = None


def list_allocated_devices(
    claim: Fields, reference: ClaimReference, node: str
) -> tuple[AllocatedDevice, ...]:
    """Return the devices of this driver and node that a claim allocates, in the order of its requests.

    Raises ClaimError if the claim is another one of the same name, allocates no such device, or asks for what
    this driver does not offer; UsageError if it is no claim.
    """
    if claim.get_object_or_empty("metadata").get_text_or_none("uid") != reference.uid:
        raise ClaimError("the claim was replaced by another of its name")
    allocation = get_allocation(claim)
    results = [result for result in allocation.list_objects("results") if result.get_text("driver") == DRIVER]
    if not results:
        raise ClaimError(f"the claim has no device of {DRIVER} allocated")
    for result in results:
        if result.get_text("pool") != node:
            raise ClaimError(f"the claim is allocated on another node: {result.get_text('pool')[:253]!r}")
        if result.get_boolean("adminAccess"):
            raise ClaimError(
                "admin access is not offered: a GPU is given to one claim",
                remedy="remove adminAccess from the claim; `imagematrix gpus` shows the use of each GPU",
            )
    parameters = (entry.get_object_or_empty("opaque") for entry in allocation.list_objects("config"))
    if any(opaque.get_text_or_none("driver") == DRIVER for opaque in parameters):
        raise ClaimError(
            f"the claim or its class has parameters for {DRIVER}, which has none", remedy="remove them"
        )
    devices = []
    for result in results:
        name = result.get_text("device")
        request = result.get_text("request").partition("/")[0]  # an alternative is REQUEST/ALTERNATIVE
        if not DNS_LABEL.fullmatch(request):
            raise ClaimError(f"invalid request {request[:80]!r}")
        devices.append(AllocatedDevice(name=name, request=request, share=result.get_text_or_none("shareID")))
    return tuple(devices)
