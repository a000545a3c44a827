"""Which redirects are followed, and which addresses get credentials."""

import pytest

from imagematrix.errors import EngineError
from imagematrix.oci.addresses import Redirects, address

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
    redirects = Redirects("GET", HERE)
    assert redirects.trusted
    assert redirects.follow(307, {"Location": where})
    assert redirects.trusted == trusted


def test_credentials_are_sent_again_after_a_redirect_back():
    redirects = Redirects("GET", HERE)
    assert redirects.follow(302, {"Location": "https://storage.example/v2"})
    assert redirects.follow(302, {"Location": HERE})
    assert (redirects.trusted, redirects.url) == (True, HERE)


@pytest.mark.parametrize("status", [200, 206, 300, 304, 305, 404, 500])
def test_other_answers_are_not_followed(status):
    redirects = Redirects("GET", HERE)
    assert not redirects.follow(status, {"Location": "/elsewhere"})
    assert not redirects.follow(307, {})
    assert redirects.url == HERE


@pytest.mark.parametrize("where", ["http://[", "http://a:b/", "http://a:99999/"])
def test_invalid_address_is_rejected(where):
    with pytest.raises(EngineError, match=r"reg\.example returned an invalid address"):
        address(HERE, where)
