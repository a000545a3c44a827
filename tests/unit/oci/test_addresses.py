"""Which redirections are followed, and which addresses get credentials."""

import pytest

from imagematrix.errors import EngineError
from imagematrix.oci.addresses import Way, address

HERE = "https://reg.example/v2/training/blobs/x"


@pytest.mark.parametrize(
    ("where", "trusted"),
    [
        ("/elsewhere", True),
        ("https://reg.example:443/v2", True),
        ("https://REG.example/v2", True),
        ("//reg.example/v2", True),
        ("http://reg.example/v2", False),
        ("http://reg.example:443/v2", False),
        ("https://reg.example:444/v2", False),
        ("https://reg.example.evil.example/v2", False),
        ("https://reg.example@evil.example/v2", False),
        ("https://storage.example/v2", False),
    ],
)
def test_credentials_stay_at_scheme_host_and_port(where, trusted):
    way = Way("GET", HERE)
    assert way.trusted
    assert way.goes_on(307, {"Location": where})
    assert way.trusted == trusted


def test_credentials_come_along_again_where_a_way_leads_back():
    way = Way("GET", HERE)
    assert way.goes_on(302, {"Location": "https://storage.example/v2"})
    assert way.goes_on(302, {"Location": HERE})
    assert (way.trusted, way.url) == (True, HERE)


@pytest.mark.parametrize("status", [200, 206, 300, 304, 305, 404, 500])
def test_other_answers_lead_nowhere(status):
    way = Way("GET", HERE)
    assert not way.goes_on(status, {"Location": "/elsewhere"})
    assert not way.goes_on(307, {})
    assert way.url == HERE


@pytest.mark.parametrize("where", ["http://[", "http://a:b/", "http://a:99999/"])
def test_invalid_address_is_rejected(where):
    with pytest.raises(EngineError, match=r"reg\.example names an invalid address"):
        address(HERE, where)
