"""A registry with TLS: where its answers send requests, and where credentials go."""

import contextlib
import io

import pytest
from distribution import digest
from hostile_addresses import REGISTRY, NamingRegistry, observed

from imagematrix.errors import EngineError
from imagematrix.images.oci.registry import Registry

DIGEST = digest(b"blob")
LOGIN = NamingRegistry.LOGIN
ACTS = {
    "redirect": lambda registry: registry.find_manifest("v1"),
    "upload": lambda registry: registry.push_blob(DIGEST, io.BytesIO(b"blob")),
    "realm": lambda registry: registry.find_manifest("v1"),
    "token": lambda registry: registry.find_manifest("v1"),
}


@pytest.mark.parametrize(
    "host", ["reg.example:{port}", "reg.example", "auth.example:{other}", "127.0.0.2:{port}"]
)
@pytest.mark.parametrize("place", ACTS)
def test_nothing_is_sent_without_tls(over_tls, place, host):
    registry, other = over_tls
    registry.place = place
    registry.address = "http://" + host.format(port=registry.port, other=other.port) + "/x"
    with (
        observed() as network,
        Registry(f"{registry.name}/ml/training") as client,
        pytest.raises(EngineError, match=r" http://.*, without TLS"),
    ):
        ACTS[place](client)
    assert {*network.connected} == {(REGISTRY, registry.port)}
    assert not other.requests


@pytest.mark.parametrize("place", ["redirect", "upload"])
def test_another_host_gets_requests_without_credentials(over_tls, place):
    registry, other = over_tls
    registry.place, registry.address = place, f"https://{other.name}/x"
    with Registry(f"{registry.name}/ml/training") as client, contextlib.suppress(EngineError):
        ACTS[place](client)
    assert [login for _, login in other.requests] == [None]
    assert registry.requests[-1][1] == LOGIN


@pytest.mark.parametrize(
    "onward", ["https://auth.example:{other}/x", "https://reg.example:{port}/x", "/x", "http://127.0.0.2:1/x"]
)
def test_the_realm_gets_the_login_and_its_redirects_do_not(over_tls, onward):
    """Also not if the token service sends them on to the registry itself."""
    registry, other = over_tls
    registry.place, registry.address = "realm", f"https://{other.name}/token"
    other.place, other.address = "token", onward.format(port=registry.port, other=other.port)
    with (
        observed() as network,
        Registry(f"{registry.name}/ml/training") as client,
        pytest.raises(EngineError),
    ):
        client.find_manifest("v1")
    assert {*network.connected} == {(REGISTRY, registry.port), (REGISTRY, other.port)}
    here = [login for _, login in other.requests]
    assert here == ([LOGIN, LOGIN] if onward in ("/x", "https://auth.example:{other}/x") else [LOGIN])
    assert {login for _, login in registry.requests} == {None}


def test_the_next_page_is_asked_for_with_tls(over_tls):
    registry, _ = over_tls
    registry.place, registry.address = "next", f"http://{registry.name}/v2/ml/other"
    with observed() as network, Registry(f"{registry.name}/ml/training") as client:
        assert client.list_tags() == []
    assert registry.requests[-1] == ("/v2/ml/other", LOGIN)
    assert {*network.connected} == {(REGISTRY, registry.port)}
