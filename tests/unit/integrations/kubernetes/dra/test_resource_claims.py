"""What a claim allocates, and claims that are not what they should be."""

import pytest

from imagematrix.common.json_documents import Fields
from imagematrix.errors import ImagematrixError
from imagematrix.integrations.kubernetes.dra.resource_claims import (
    AllocatedDevice,
    ClaimError,
    list_allocated_devices,
)
from imagematrix.integrations.kubernetes.dra.slices import DRIVER


def test_the_devices_of_this_driver_are_allocated(claims):
    claim = claims.document(1, ("a", "x"), ("b/small", "y"), ("b/small", "z"))
    results = claim["status"]["allocation"]["devices"]["results"]
    results.append({"request": "net", "driver": "net.example.com", "pool": "p", "device": "eth0"})
    results[0]["shareID"] = "s"
    assert list_allocated_devices(Fields(claim, "claim"), claims.reference(1), "n1") == (
        AllocatedDevice(name="x", request="a", share="s"),
        AllocatedDevice(name="y", request="b"),
        AllocatedDevice(name="z", request="b"),
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pool": "n2"}, "allocated on another node: 'n2'"),
        ({"pool": "../../etc"}, "allocated on another node"),
        ({"driver": "gpu.nvidia.com"}, f"no device of {DRIVER}"),
        ({"adminAccess": True}, "admin access is not offered"),
        ({"request": "../x"}, "invalid request '..'"),
        ({"config": [{"source": "FromClaim", "opaque": {"driver": DRIVER, "parameters": {}}}]}, "parameters"),
        ({"adminAccess": "yes"}, "adminAccess"),
        ({"request": 7}, "request"),
    ],
)
def test_a_claim_that_cannot_be_prepared_says_why(claims, changes, why):
    with pytest.raises(ImagematrixError, match=why):
        list_allocated_devices(claims.fields(1, "x", **changes), claims.reference(1), "n1")


def test_parameters_for_another_driver_are_not_ours(claims):
    config = [{"source": "FromClaim", "opaque": {"driver": "net.example.com", "parameters": {}}}, {}]
    (one,) = list_allocated_devices(claims.fields(1, "x", config=config), claims.reference(1), "n1")
    assert one.name == "x"


@pytest.mark.parametrize("without", ["metadata", "status", "allocation", "devices", "results"])
def test_a_claim_that_lacks_a_part_is_not_prepared(claims, without):
    claim = claims.document(1, "x")
    part = claim
    for key in ("status", "allocation", "devices", "results"):
        if without in part:
            part[without] = None if without == "metadata" else {} if without != "results" else []
            break
        part = part[key]
    with pytest.raises(ClaimError):
        list_allocated_devices(Fields(claim, "claim"), claims.reference(1), "n1")


def test_a_claim_that_was_made_anew_is_another_one(claims):
    with pytest.raises(ClaimError, match="was replaced"):
        list_allocated_devices(claims.fields(2, "x"), claims.reference(1), "n1")


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("uid", "../../etc/passwd"),
        ("uid", ""),
        ("uid", "00000000-0000-0000-0000-000000000001\n"),
        ("uid", "00000000-0000-0000-0000-00000000000G"),
        ("namespace", "../x"),
        ("namespace", ""),
        ("name", "a/b"),
        ("name", ".."),
        ("name", "a?x=1"),
        ("name", "a%2e"),
    ],
)
def test_names_that_no_api_server_gives_are_invalid(claims, field, text):
    assert not claims.reference(1, **{field: text}).is_valid


def test_the_name_of_a_claim_may_have_dots(claims):
    reference = claims.reference(1, name="job-0.train.example")
    assert reference.is_valid
    expected = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/job-0.train.example"
    assert reference.path == expected
