"""What keeps the driver to its own ResourceSlices, on the node of its pod: a ValidatingAdmissionPolicy.

Its role cannot: RBAC knows neither drivers nor nodes, so with the rights of one node's driver, the devices of
all nodes and drivers could be removed or made up. The token of a pod names the pod's node
(https://kubernetes.io/docs/reference/access-authn-authz/service-accounts-admin, 1.32 and newer).
"""

from __future__ import annotations

import json

from imagematrix.integrations.kubernetes.client.objects import make_manifest
from imagematrix.integrations.kubernetes.dra.slices import API, DRIVER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.integrations.kubernetes.client.objects import Manifest

ADMISSION = "admissionregistration.k8s.io/v1"
NODE = json.dumps("authentication.kubernetes.io/node-name")
EXTRA = "request.userInfo.extra"
# The slice as it is, and as it was.
CHANGED = (
    "request.operation == 'CREATE' ? [object] : request.operation == 'DELETE' ? [oldObject] : "
    "[object, oldObject]"
)


def make_slice_policy(name: str, account: str, **metadata: object) -> Iterator[Manifest]:
    """Yield the policy for a service account's user name, and its binding, both with a name and metadata."""
    group, _, version = API.partition("/")
    slices = {"apiGroups": [group], "apiVersions": [version], "resources": ["resourceslices"]}
    is_ours = f"s.spec.driver == {json.dumps(DRIVER)}"
    is_of_node = f"{is_ours} && has(s.spec.nodeName) && s.spec.nodeName == variables.node"
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [{**slices, "operations": ["CREATE", "UPDATE", "DELETE"]}]},
        "matchConditions": [
            {"name": "is-the-driver", "expression": f"request.userInfo.username == {json.dumps(account)}"}
        ],
        "variables": [
            {"name": "node", "expression": f"has({EXTRA}) && {NODE} in {EXTRA} ? {EXTRA}[{NODE}][0] : ''"},
            {"name": "slices", "expression": CHANGED},
        ],
        "validations": [
            {
                "expression": f"variables.node != '' && variables.slices.all(s, {is_of_node})",
                "message": f"{account} may only change ResourceSlices of {DRIVER} on the node of its pod",
            }
        ],
    }
    yield make_manifest(ADMISSION, "ValidatingAdmissionPolicy", name, **metadata, spec=spec)
    binding = {"policyName": name, "validationActions": ["Deny"]}
    yield make_manifest(ADMISSION, "ValidatingAdmissionPolicyBinding", name, **metadata, spec=binding)
