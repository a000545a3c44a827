"""URLs: what is admitted is the same for every parser on the way to a connection."""

import ipaddress
from urllib.parse import urlsplit

import pytest
import requests
from hostile_addresses import ELSEWHERE, HOME, REFUSED, written
from hypothesis import example, given
from hypothesis import strategies as st
from urllib3.util import parse_url
from yarl import URL

from imagematrix.common.host_port import parse_host_port
from imagematrix.errors import EngineError
from imagematrix.images.oci.url import Url

HERE = Url.parse("https://reg.example/v2/training/blobs/x?n=1")
PIECES = st.sampled_from(
    [
        *("http", "https", "HTTP", "ftp", ":", "/", "//", "\\", "@", "?", "#", "%", "%5c", "%2f", "%00", " "),
        *("\t", "\n", "\r", "\x00", "\x7f", "[", "]", "::1", "%25lo", ".", "..", "-", "_", "0", "00", "1"),
        *(
            "80",
            "443",
            "65536",
            "127.0.0.1",
            "0x7f",
            "0177",
            "256",
            "a",
            "a.b",
            "A",
            "xn--a",
            "é",
            "。",
            "\uff11",
        ),
        *(
            "reg.example",
            "user:pass@",
            "&",
            ";",
            "=",
            ",",
            "+",
            "~",
            "*",
            "|",
            "{",
            '"',
            "<",
            "^",
            "`",
            "'",
            "$",
        ),
    ]
)
ADDRESSES = st.lists(PIECES, max_size=8).map("".join) | st.lists(PIECES, max_size=8).map(
    lambda pieces: "http://" + "".join(pieces)
)


def place(host):
    """Return a host as a value: IPv6 can be written in many ways."""
    return ipaddress.ip_address(host.strip("[]")) if ":" in host else host


@given(ADDRESSES)
@example("http://reg.example:443/")
@example("https://[::ffff:127.0.0.1]:80")
def test_every_parser_sees_the_same_host_and_port(text):
    try:
        url = HERE.join(text)
    except EngineError:
        return
    sent = requests.Request("GET", str(url)).prepare().url
    by_urllib3, by_requests, by_python = parse_url(str(url)), parse_url(sent), urlsplit(str(url))
    by_yarl = URL(str(url), encoded=True)
    assert not any((by_urllib3.auth, by_requests.auth, by_python.username, by_yarl.raw_user))
    expected = (url.scheme, place(url.host), url.port)
    default = {"http": 80, "https": 443}[url.scheme]
    for seen in (by_urllib3, by_requests):
        assert (seen.scheme, place(seen.host), seen.port or default) == expected
    assert (by_python.scheme, place(by_python.hostname), by_python.port or default) == expected
    assert (by_yarl.scheme, place(by_yarl.raw_host), by_yarl.port) == expected
    assert Url.parse(str(url)) == url
    assert Url.parse(sent).origin == url.origin


@pytest.mark.parametrize("address", [*HOME, *ELSEWHERE])
def test_target_is_sent_as_it_is_named(address):
    url = Url.parse("http://127.0.0.1:5000/v2/").join(written(address, 5000))
    assert URL(str(url), encoded=True).raw_path_qs == url.target


@pytest.mark.parametrize("address", REFUSED)
def test_invalid_address_is_rejected(address):
    with pytest.raises(EngineError, match=r"^reg\.example returned an invalid address: ") as caught:
        HERE.join(written(address, 5000))
    assert caught.value.exit_code == 8
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("text", ["x", "/x", "//reg.example/x", "", "http://reg.example:0/"])
def test_only_whole_urls_are_parsed(text):
    with pytest.raises(ValueError, match=r"address of the web|listens"):
        Url.parse(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://A.example", "http://a.example/"),
        ("http://a.example:80?x", "http://a.example/?x"),
        ("https://a.example:80/#x", "https://a.example:80/"),
        ("https://a.example:443/a%2fb%7e", "https://a.example/a%2fb~"),
        ('http://a.example/"<>|{}', "http://a.example/%22%3C%3E%7C%7B%7D"),
        ("http://[0:0::1]:5000/", "http://[::1]:5000/"),
    ],
)
def test_canonical_form(text, shown):
    assert str(Url.parse(text)) == shown


def test_parameters_are_appended():
    assert Url.parse("http://a/x").with_query("a=b").with_query("c=d").target == "/x?a=b&c=d"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("reg.example", ("reg.example", None)),
        ("REG.Example:5000", ("reg.example", 5000)),
        ("localhost:0", ("localhost", 0)),
        ("127.0.0.1:65535", ("127.0.0.1", 65535)),
        ("[::0]:1", ("[::]", 1)),
        ("1.example", ("1.example", None)),
        ("0x7f.example", ("0x7f.example", None)),
        ("a" * 63, ("a" * 63, None)),
    ],
)
def test_hosts_and_ports(text, expected):
    assert parse_host_port(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", ":", ":1", "a:", "a:b", "a:-1", "a:٣", "a:65536", "a b", "a\n", "a/b", "a@b", "0", "0x", "a.0x1"],
)
def test_anything_else_is_no_host(text):
    with pytest.raises(ValueError, match=r"^not a (host|port)"):
        parse_host_port(text)
