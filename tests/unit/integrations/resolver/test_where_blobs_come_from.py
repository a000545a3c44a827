"""Where the resolver connects for a blob, and what it sends there, for addresses that the registry names."""

import pytest
from distribution import digest
from hostile_addresses import ELSEWHERE, HOME, OTHER, REFUSED, NamingRegistry, observed
from resolving import Front, SimulatedNode

BLOB = f"/v2/ml/training/blobs/{digest(b'blob')}"


@pytest.fixture
def asked(hostile):
    """Call it with the address that the registry names for a blob; it returns a status and `Seen`."""

    def call(address, name="127.0.0.1"):
        status = []

        def ask(registry):
            front = Front(registry.replace("127.0.0.1", name), SimulatedNode("laptop"))
            status.append(front.get(BLOB).status_code)
            own.add(f"127.0.0.1 port {front.address.rpartition(':')[2]}")
            front.close()

        own: set[str] = set()
        seen = hostile("blob", address, ask)
        return status[0], seen._replace(elsewhere=seen.elsewhere - own)

    return call


@pytest.mark.parametrize("address", REFUSED)
def test_refused_address_opens_no_connection(asked, address):
    status, seen = asked(address)
    assert (status, seen.elsewhere, seen.said) == (502, set(), b"")


@pytest.mark.parametrize(("address", "host"), ELSEWHERE.items())
def test_another_origin_gets_no_credentials(asked, address, host):
    _, seen = asked(address)
    assert seen.elsewhere == {host}
    assert not any(word in seen.said for word in (b"authorization", b"cookie", b"secret"))


@pytest.mark.parametrize("address", HOME)
def test_the_registry_itself_gets_them(asked, address):
    _, seen = asked(address)
    assert not seen.elsewhere
    logins = [login for path, login in seen.asked]
    assert logins.count(NamingRegistry.LOGIN) >= 3  # HEAD and GET of the blob, and where it is


def test_a_cookie_stays_nowhere(asked):
    """It would go to every port of its host."""
    _, seen = asked("http://localhost:{port}/x", name="localhost")
    assert len(seen.asked) > 3
    _, seen = asked("http://localhost:{other_port}/x", name="localhost")
    assert seen.elsewhere == {OTHER}
    assert b"cookie" not in seen.said


def test_tls_is_not_left(over_tls):
    registry, other = over_tls
    registry.place = "blob"
    front = Front(registry.name, SimulatedNode("laptop"))
    try:
        registry.address = f"https://{other.name}/x"
        assert front.get(BLOB).status_code == 404
        assert [login for _, login in other.requests] == [None]
        for host in (registry.name, other.name, f"127.0.0.2:{registry.port}"):
            registry.address = f"http://{host}/x"
            with observed() as network:
                answer = front.get(BLOB)
            assert (answer.status_code, "without TLS" in answer.text) == (502, True)
            ports = {port for _, port in network.connected} - {int(front.address.rpartition(":")[2])}
            assert ports <= {registry.port}
        assert len(other.requests) == 1
    finally:
        front.close()
