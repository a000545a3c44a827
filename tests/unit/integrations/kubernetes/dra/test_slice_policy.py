"""The policy for the driver's account, in CEL: it may only change the slices of its driver and its node."""

import kubernetes_validate
import pytest
from celpy import celtypes
from celpy.adapter import json_to_cel
from scheduling import Cel

from imagematrix.integrations.kubernetes.dra.slice_policy import make_slice_policy

ACCOUNT = "system:serviceaccount:gpus:driver"
POLICY, BINDING = make_slice_policy("driver", ACCOUNT, labels={"a": "b"})
ON_NODE = {"username": ACCOUNT, "extra": {"authentication.kubernetes.io/node-name": ["n1"], "x": ["n2"]}}
OURS = "gpu.imagematrix.io"


def in_slice(driver=OURS, node="n1"):
    return {"spec": {"driver": driver, **({"nodeName": node} if node else {})}}


def allowed(user, now, before):
    """Whether an API server would accept a change of a slice by a user."""
    operation = "CREATE" if before is None else "UPDATE" if now else "DELETE"
    values = {
        "object": json_to_cel(now),
        "oldObject": json_to_cel(before),
        "request": json_to_cel({"userInfo": user, "operation": operation}),
    }
    cel, spec = Cel(), POLICY["spec"]
    if not all(cel(one["expression"], **values) for one in spec["matchConditions"]):
        return True
    found = values["variables"] = celtypes.MapType()
    for one in spec["variables"]:
        found[celtypes.StringType(one["name"])] = cel(one["expression"], **values)
    return all(cel(one["expression"], **values) for one in spec["validations"])


@pytest.mark.parametrize(
    ("user", "now", "before", "answer"),
    [
        (ON_NODE, in_slice(), None, True),
        (ON_NODE, in_slice(), in_slice(), True),
        (ON_NODE, None, in_slice(), True),
        (ON_NODE, in_slice(node="n2"), None, False),
        (ON_NODE, in_slice(node=None), None, False),
        (ON_NODE, in_slice(driver="gpu.example.com"), None, False),
        (ON_NODE, in_slice(), in_slice(driver="gpu.example.com"), False),
        (ON_NODE, None, in_slice(node="n2"), False),
        (ON_NODE, None, in_slice(driver="gpu.example.com"), False),
        ({"username": ACCOUNT}, in_slice(node=""), None, False),
        ({"username": ACCOUNT, "extra": {"x": ["n1"]}}, in_slice(), None, False),
        ({"username": "system:node:n1"}, in_slice(driver="gpu.example.com"), None, True),
    ],
)
def test_only_the_slices_of_its_driver_and_node(user, now, before, answer):
    assert allowed(user, now, before) is answer


@pytest.mark.parametrize("release", ["1.34", "1.37"])
def test_the_objects_are_valid(release):
    for one in (POLICY, BINDING):
        kubernetes_validate.validate(one, release, strict=True)
        assert one["metadata"] == {"name": "driver", "labels": {"a": "b"}}
    assert BINDING["spec"]["policyName"] == POLICY["metadata"]["name"]
