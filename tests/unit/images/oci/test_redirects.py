"""Which redirects are followed, and where credentials may go along."""

import pytest

from imagematrix.errors import EngineError
from imagematrix.images.oci.redirects import Redirects
from imagematrix.images.oci.url import Url

HERE = "https://reg.example/v2/training/blobs/x"


def from_here(method="GET"):
    return Redirects(method, Url.parse(HERE))


@pytest.mark.parametrize(
    ("where", "trusted"),
    [
        ("/elsewhere", True),
        ("https://reg.example:443/v2", True),
        ("https://REG.example/v2", True),
        ("//reg.example/v2", True),
        ("https://reg.example:444/v2", False),
        ("https://reg.example.evil.example/v2", False),
        ("https://storage.example/v2", False),
    ],
)
def test_credentials_stay_at_scheme_host_and_port(where, trusted):
    redirects = from_here()
    assert redirects.trusted
    assert redirects.follow(307, {"Location": where})
    assert redirects.trusted == trusted


def test_credentials_do_not_come_back():
    """Another host would decide what is done with them."""
    redirects = from_here("DELETE")
    assert redirects.follow(307, {"Location": "https://storage.example/v2"})
    assert redirects.follow(307, {"Location": "https://reg.example/v2/another/manifests/v1"})
    assert (redirects.trusted, redirects.url.host) == (False, "reg.example")


@pytest.mark.parametrize(
    "where", ["http://reg.example/v2", "http://reg.example:443/v2", "http://storage.example"]
)
def test_request_never_leaves_tls(where):
    for first in ("/here", "https://storage.example/"):
        redirects = from_here()
        assert redirects.follow(307, {"Location": first})
        with pytest.raises(EngineError, match=r"sends requests on to http://.*, without TLS"):
            redirects.follow(307, {"Location": where})


def test_request_may_get_tls():
    redirects = Redirects("GET", Url.parse("http://127.0.0.1:5000/v2/"))
    assert redirects.follow(307, {"Location": "https://127.0.0.1:5000/v2/"})
    assert not redirects.trusted


@pytest.mark.parametrize("status", [200, 206, 300, 304, 305, 404, 500])
def test_other_answers_are_not_followed(status):
    redirects = from_here()
    assert not redirects.follow(status, {"Location": "/elsewhere"})
    assert not redirects.follow(307, {})
    assert str(redirects.url) == HERE
    assert not from_here("PUT").follow(303, {"Location": "/elsewhere"})
