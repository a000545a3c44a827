"""The distribution API: retries of transient errors, redirects, and protection of credentials."""

import base64
import io
import json
import os
import socket
import time
from urllib.parse import parse_qs

import pytest
from distribution import MANIFEST, Dripping, digest, error

from imagematrix.errors import EngineError, UnknownImageError, UsageError
from imagematrix.images.oci.manifest import INDEX
from imagematrix.images.oci.registry import Registry
from imagematrix.images.oci.retry import BUSY_TRIES, TRIES

BLOB = b"blob" * 100_000
RAW = json.dumps({"mediaType": INDEX, "manifests": []}).encode()


@pytest.fixture
def registry(server):
    with Registry(f"{server.address}/ml/training") as client:
        yield client


@pytest.fixture
def repository(server):
    return server.repository("ml/training")


def push(registry, raw=BLOB):
    registry.push_blob(digest(raw), io.BytesIO(raw))


def test_pushed_content_is_read_back(registry, repository):
    assert not registry.has_blob(digest(BLOB))
    push(registry)
    assert registry.has_blob(digest(BLOB))
    assert registry.fetch_small_blob(digest(BLOB)) == repository.blobs[digest(BLOB)] == BLOB
    assert registry.list_tags() == []
    assert registry.find_manifest("v1") is None
    assert registry.digest("v1") is None
    registry.push_manifest("v1", RAW, INDEX)
    result = registry.find_manifest("v1")
    assert (result.raw, result.media_type, result.digest) == (RAW, INDEX, digest(RAW))
    assert registry.find_manifest(digest(RAW)) == result
    assert registry.digest("v1") == digest(RAW)
    assert registry.list_tags() == ["v1"]


@pytest.mark.parametrize("how", [{"status": 500}, {"status": 429}, {"status": 503}, {"drop": True}])
@pytest.mark.parametrize(
    ("method", "path", "ask", "result"),
    [
        ("HEAD", "manifests/v1", lambda registry: registry.digest("v1"), digest(RAW)),
        ("GET", "manifests/v1", lambda registry: registry.find_manifest("v1").raw, RAW),
        ("GET", "tags/list", lambda registry: registry.list_tags(), ["v1"]),
        ("HEAD", "blobs/sha256", lambda registry: registry.has_blob(digest(b"1")), True),
        ("GET", "blobs/sha256", lambda registry: registry.fetch_small_blob(digest(b"1")), b"1"),
        ("PUT", "manifests/v2", lambda registry: registry.push_manifest("v2", RAW, INDEX), None),
        ("POST", "blobs/uploads", push, None),
        ("PUT", "blobs/uploads", push, None),
    ],
)
def test_transient_errors_are_retried(server, registry, repository, method, path, ask, result, how):
    tries = BUSY_TRIES if how.get("status") == 429 else TRIES
    repository.put("v1", RAW, INDEX)
    repository.blobs[digest(b"1")] = b"1"
    server.fails(method, path, times=tries - 1, **how)
    assert ask(registry) == result
    assert server.count(method, path) == tries
    server.fails(method, path, times=tries, **how)
    with pytest.raises(EngineError) as caught:
        ask(registry)
    assert "same command continues from here" in caught.value.remedy
    assert server.count(method, path) == 2 * tries


def test_truncated_answer_is_requested_again(server, registry, repository):
    repository.put("v1", RAW, INDEX)
    server.fails("GET", "manifests", cut=True, times=TRIES - 1)
    assert registry.find_manifest("v1").raw == RAW
    assert server.count("GET") == TRIES
    server.fails("GET", "manifests", cut=True, times=TRIES)
    with pytest.raises(EngineError, match="truncates its answers: IncompleteRead"):
        registry.find_manifest("v1")


def test_interrupted_upload_restarts_from_the_beginning(server, registry, repository):
    server.fails("PUT", "uploads", drop=True)
    push(registry)
    assert repository.blobs == {digest(BLOB): BLOB}
    assert [one.method for one in server.requests] == ["POST", "PUT", "POST", "PUT"]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 413])
@pytest.mark.parametrize(("method", "path"), [("POST", "uploads"), ("PUT", "uploads")])
def test_permanent_errors_are_not_retried(server, registry, status, method, path):
    server.fails(method, path, status=status, times=TRIES)
    with pytest.raises(EngineError) as caught:
        push(registry)
    assert server.count(method, path) == 1
    if status in (401, 403):
        assert caught.value.remedy == f"`docker login {server.address}` with an account that has access"
    else:
        assert f"answered {status} for" in str(caught.value)


def test_manifest_whose_blobs_are_not_visible_yet_is_pushed_again(server, registry, repository):
    unseen = error("DIGEST_INVALID", "MANIFEST_BLOB_UNKNOWN")
    server.fails("PUT", "manifests/v1", status=400, body=unseen, times=TRIES - 1)
    registry.push_manifest("v1", RAW, INDEX)
    assert repository.tags == {"v1": digest(RAW)}
    assert server.count("PUT") == TRIES
    server.fails("PUT", "manifests/v2", status=404, body=unseen, times=TRIES)
    server.fails("PUT", "manifests/v2", status=400, body=unseen, times=TRIES)
    for status in (404, 400):
        message = f"answered {status} .*:v2: DIGEST_INVALID, MANIFEST_BLOB_UNKNOWN"
        with pytest.raises(EngineError, match=message):
            registry.push_manifest("v2", RAW, INDEX)
    assert server.count("PUT") == 3 * TRIES


@pytest.mark.parametrize(
    ("body", "codes"),
    [
        (error("MANIFEST_INVALID"), ": MANIFEST_INVALID"),
        (error(*(f"E_{letter}" for letter in "ABCDEFG"), "E_A"), ": E_A, E_B, E_C, E_D, E_E"),
        (error("E_A", "E_A", "\x1b[2J", "A" * 41, "a b"), ": E_A"),
        (b'{"errors": [{"code": 5}]', ""),
        (b"<html>", ""),
    ],
)
def test_rejected_manifest_is_pushed_once_and_error_codes_are_named(server, registry, body, codes):
    server.fails("PUT", "manifests/v1", status=400, body=body)
    with pytest.raises(EngineError) as caught:
        registry.push_manifest("v1", RAW, INDEX)
    assert str(caught.value) == f"the registry {server.address} answered 400 for {registry.name}:v1{codes}"
    assert server.count("PUT") == 1


def test_retry_after_is_honoured(server, registry, repository, monkeypatch):
    repository.put("v1", RAW, INDEX)
    slept: list[float] = []
    monkeypatch.setattr("imagematrix.images.oci.retry.time.sleep", slept.append)
    monkeypatch.setattr("imagematrix.images.oci.retry.time.time", lambda: 1_792_567_675.5)
    for header in ("7", "Wed, 21 Oct 2026 07:28:00 GMT", "Wed, 21 Oct 2026 07:27:00 GMT", "soon", "-1"):
        server.fails("HEAD", "v1", status=429, headers={"Retry-After": header})
        assert registry.digest("v1") == digest(RAW)
    assert slept == [7, 4.5, 0, 0, 0]
    for header in ("86400", "Thu, 22 Oct 2026 07:28:00 GMT"):
        server.fails("HEAD", "v1", status=429, headers={"Retry-After": header})
        with pytest.raises(EngineError, match="answered 429"):
            registry.digest("v1")
    assert len(slept) == 5, "the wait is limited"


def test_a_registry_that_is_busy_is_asked_more_often(server, registry, repository, monkeypatch):
    """It is not broken; but a request does not wait for it without end."""
    repository.put("v1", RAW, INDEX)
    slept: list[float] = []
    monkeypatch.setattr("imagematrix.images.oci.retry.time.sleep", slept.append)
    monkeypatch.setattr("imagematrix.images.oci.retry.PAUSE", 0.3)
    server.fails("HEAD", "v1", status=429, times=BUSY_TRIES - 1)
    assert registry.digest("v1") == digest(RAW)
    assert len(slept) == BUSY_TRIES - 1
    assert [pause for pause in slept if not 0 < pause <= 15] == []
    assert len({*slept}) > 1, "the pauses are random"
    server.fails("HEAD", "v1", status=429, times=BUSY_TRIES)
    with pytest.raises(EngineError, match="answered 429"):
        registry.digest("v1")
    server.faults.clear()
    server.fails("HEAD", "v1", status=429, headers={"Retry-After": "25"}, times=BUSY_TRIES)
    before = len(slept)
    with pytest.raises(EngineError, match="answered 429"):
        registry.digest("v1")
    assert len(slept) - before == 2, "the wait is limited"


@pytest.mark.parametrize("code", ["BLOB_UPLOAD_UNKNOWN", "BLOB_UPLOAD_INVALID"])
def test_upload_with_a_lost_session_restarts(server, registry, repository, code):
    server.fails("PUT", "uploads", status=404, body=error(code), times=TRIES - 1)
    push(registry)
    assert repository.blobs == {digest(BLOB): BLOB}
    assert server.count("POST", "uploads") == server.count("PUT", "uploads") == TRIES
    server.fails("PUT", "uploads", status=404, body=error(code), times=TRIES)
    with pytest.raises(EngineError, match=f"answered 404 for .*: {code}"):
        push(registry)


def test_push_to_a_missing_repository_is_reported_as_the_registry_s_error(server, registry):
    server.fails("POST", "uploads", status=404, body=error("NAME_UNKNOWN"))
    with pytest.raises(EngineError, match=r"answered 404 for .*/ml/training:sha256:.*: NAME_UNKNOWN"):
        push(registry)
    assert server.count("POST") == 1


def test_missing_digest_header_is_computed(server, registry, repository):
    repository.put("v1", RAW, INDEX)
    server.silent = True
    assert registry.digest("v1") == digest(RAW)
    server.fails("HEAD", "v1", status=200, headers={"Docker-Content-Digest": "../../etc"})
    assert registry.digest("v1") == digest(RAW)
    server.fails("HEAD", "v1", status=200, then=repository.tags.clear)
    assert registry.digest("v1") is None, "the tag was deleted between the two requests"


def test_content_with_a_wrong_digest_is_rejected(registry, repository):
    repository.blobs[digest(BLOB)] = b"something else"
    with pytest.raises(EngineError, match="answered with content that does not match sha256:"):
        registry.fetch_small_blob(digest(BLOB))
    with pytest.raises(EngineError, match="answered 400 for"):
        registry.push_blob(digest(b"promised"), io.BytesIO(b"sent"))


@pytest.mark.parametrize("pages", ["http://another.example/v2/{name}/tags/list", "/v2/{name}/tags/list", ""])
def test_all_pages_of_tags_are_read(server, registry, repository, pages):
    # The link may name another host, as behind a proxy that does not forward the host name, or only a query.
    server.pages = pages
    for number in range(25):
        repository.put(f"v{number:02}", RAW, INDEX)
    server.page = 10
    assert registry.list_tags() == [f"v{number:02}" for number in range(25)]
    assert server.count("GET") == 3
    server.fails("GET", "tags", status=404, after=1)
    with pytest.raises(UnknownImageError):
        registry.list_tags()


def test_endless_pages_of_tags_are_rejected(server, registry, repository, monkeypatch):
    monkeypatch.setattr("imagematrix.images.oci.registry.PAGES", 3)
    for number in range(5):
        repository.put(f"v{number}", RAW, INDEX)
    server.page = 1
    with pytest.raises(EngineError, match="lists more than 3 pages"):
        registry.list_tags()


def test_pages_of_tags_have_a_size_together(server, registry, repository, monkeypatch):
    """A page has a limit of its own, and many of them would take all memory."""
    for number in range(8):
        repository.put(f"v{number}", RAW, INDEX)
    server.page = 2
    monkeypatch.setattr("imagematrix.images.oci.registry.TAG_BYTES", 200)
    assert len(registry.list_tags()) == 8
    monkeypatch.setattr("imagematrix.images.oci.registry.TAG_BYTES", 100)
    before = server.count("GET")
    with pytest.raises(EngineError, match="MiB of tags"):
        registry.list_tags()
    assert server.count("GET") - before == 3, "no page is read after the one that is too much"


def test_credentials_are_sent_after_a_challenge(server, registry, log_in):
    server.basic = log_in(server.address)
    push(registry)
    assert [one.login for one in server.requests] == [None, server.basic, server.basic]


@pytest.fixture
def helper(tmp_path, monkeypatch):
    """Call it with a user and a secret that docker's credential helper then returns for every registry."""

    def call(user, secret):
        program = tmp_path / "bin" / "docker-credential-test"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\necho '{json.dumps({'Username': user, 'Secret': secret})}'\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        (tmp_path / "docker-config").mkdir(exist_ok=True)
        (tmp_path / "docker-config" / "config.json").write_text('{"credsStore": "test"}')

    return call


def test_credentials_of_a_helper_are_sent(server, registry, log_in, helper):
    server.basic = log_in(server.address)
    helper("me", "secret")
    push(registry)
    assert [one.login for one in server.requests] == [None, server.basic, server.basic]


@pytest.mark.parametrize("kept", ["helper", "file"])
def test_identity_token_is_exchanged_for_another(server, registry, tmp_path, helper, kept):
    """As the token service of Azure's registries requires."""
    server.uses = 9
    helper("<token>", "its 1&2")
    if kept == "file":
        entry = {"auth": "bm9ib2R5Og==", "identitytoken": "its 1&2"}
        config = {"auths": {server.address: entry}}
        (tmp_path / "docker-config" / "config.json").write_text(json.dumps(config))
    push(registry)
    assert parse_qs(server.forms.pop()) == {
        "grant_type": ["refresh_token"],
        "refresh_token": ["its 1&2"],
        "client_id": ["imagematrix"],
        "service": ["s"],
    }
    assert {one.login for one in server.requests} == {None, "Bearer t0"}


def test_identity_token_goes_only_to_the_token_service(start_server, server, registry, helper):
    other = start_server()
    server.uses = 9
    helper("<token>", "secret")
    server.fails("POST", "/token", status=307, headers={"Location": f"http://{other.address}/token"})
    with pytest.raises(EngineError, match="answered 307"):
        registry.digest("v1")
    assert not other.requests


@pytest.mark.parametrize(
    ("kind", "entry"),
    [("auths", {"auth": "!!!"}), ("auths", {"auth": "YQ=="}), ("credHelpers", "that-is-not-installed")],
)
def test_unreadable_credentials_are_reported(server, registry, tmp_path, kind, entry):
    server.basic = "Basic"
    (tmp_path / "docker-config").mkdir(exist_ok=True)
    (tmp_path / "docker-config" / "config.json").write_text(json.dumps({kind: {server.address: entry}}))
    with pytest.raises(EngineError, match=r"docker's credentials for .* cannot be read"):
        registry.digest("v1")


def test_the_site_s_credentials_are_for_users_without_their_own(server, registry, tmp_path, write_site):
    login = base64.b64encode(b"shared:secret").decode()
    server.basic = f"Basic {login}"
    (tmp_path / "shared.json").write_text(json.dumps({"auths": {server.address: {"auth": login}}}))
    write_site(f'credentials = "{tmp_path}/shared.json"')
    assert registry.digest("v1") is None
    assert server.requests[-1].login == server.basic


def test_token_is_fetched_from_the_challenge_s_realm_with_the_login(server, registry, log_in):
    realm = f'Bearer realm="http://{server.address}/token",service="s",scope="repository:ml/training:pull"'
    basic = log_in(server.address)
    server.fails("HEAD", "v1", status=401, headers={"WWW-Authenticate": realm})
    server.uses = 1
    assert registry.digest("v1") is None
    _, asked, again = server.requests
    assert (asked.path, asked.login) == ("/token?service=s&scope=repository%3Aml%2Ftraining%3Apull", basic)
    assert again.login == "Bearer t0"
    server.fails("GET", "/token", status=403)
    with pytest.raises(EngineError, match="denies access"):
        registry.digest("v1")


def test_wrong_credentials_are_sent_once(server, registry, log_in):
    log_in(server.address)
    server.basic = "Basic of somebody else"
    for count in (2, 3):
        with pytest.raises(EngineError, match="denies access"):
            registry.digest("v1")
        assert len(server.requests) == count


@pytest.mark.parametrize("uses", [1, 2, 3])
def test_expired_token_is_renewed(server, registry, repository, uses):
    server.uses = uses
    for raw in (b"1", b"2", b"3"):
        push(registry, raw)
    registry.push_manifest("v1", RAW, INDEX)
    assert repository.blobs.keys() == {digest(b"1"), digest(b"2"), digest(b"3")}
    assert registry.digest("v1") == digest(RAW)
    assert server.count("GET", "/token") == -(-8 // uses)


def test_transient_errors_of_the_token_server_are_retried(server, registry, repository):
    repository.put("v1", RAW, INDEX)
    server.uses = 9
    server.fails("GET", "/token", status=503, times=2)
    assert registry.digest("v1") == digest(RAW)
    assert server.count("HEAD") == 2
    server.basic, server.uses = "nobody's", None
    with pytest.raises(EngineError, match="denies access"):
        registry.digest("v1")


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (b'{"token": "a\\nb"}', "is not a token"),
        (b'{"token": "\\u2713"}', "is not a token"),
        (b"{}", "access_token is missing"),
        (b"<html>", "not JSON"),
    ],
)
def test_invalid_token_is_rejected(server, registry, monkeypatch, token, message):
    server.uses = 1
    monkeypatch.setattr(server, "token", lambda: token)
    with pytest.raises(EngineError, match=message):
        registry.digest("v1")


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"tags": 3, "manifests": [3]}', b"\xff"])
def test_an_answer_that_is_no_list_is_the_fault_of_the_registry(server, registry, repository, body):
    repository.put("v1", RAW, INDEX)
    server.fails("GET", "tags/list|referrers", status=200, body=body, times=2)
    for ask in (registry.list_tags, lambda: registry.list_referrers(digest(RAW))):
        with pytest.raises(
            EngineError, match=f"the registry {server.address} does not answer as one: http://"
        ):
            ask()


@pytest.mark.parametrize("status", [404, 400, 410, 500])
def test_token_server_error_does_not_mean_unknown_image(server, registry, repository, status):
    repository.put("v1", RAW, INDEX)
    server.uses = 1
    server.fails("GET", "/token", status=status, times=TRIES)
    with pytest.raises(
        EngineError, match=f"did not issue a token: http://{server.address}/token answered {status}"
    ):
        registry.find_manifest("v1")


@pytest.mark.parametrize(
    ("challenge", "message"),
    [
        ("Bearer", "a token without a realm"),
        ("Bearer realm", "an unsupported login method"),
        ("Bearer realm=", "an unsupported login method"),
        ('Bearer realm="http://["', "an invalid address"),
        ('Bearer realm="ftp://x/"', "an invalid address"),
        ('Bearer realm="http://localhost/"', "at http://localhost/, without TLS"),
        ('Bearer realm="/token"', "answered 404"),
    ],
)
def test_invalid_challenge_is_rejected(server, registry, challenge, message):
    server.fails("HEAD", "v1", status=401, headers={"WWW-Authenticate": challenge})
    server.fails("GET", "/token", status=404)
    with pytest.raises(EngineError, match=message):
        registry.digest("v1")


def test_upload_to_another_host_sends_no_credentials(start_server, server, registry, log_in):
    other = start_server()
    server.basic = log_in(server.address)
    server.elsewhere = f"http://{other.address}"
    push(registry)
    assert [one.login for one in server.requests] == [None, server.basic]
    assert [one.login for one in other.requests] == [None]
    assert other.repository("ml/training").blobs.keys() == {digest(BLOB)}


@pytest.mark.parametrize("redirect", [False, True])
def test_challenge_from_another_host_is_refused(start_server, server, registry, log_in, redirect):
    other = start_server()
    other.uses = 9  # it requires a token from itself
    server.basic = log_in(server.address)
    server.elsewhere = f"http://{other.address}"
    if redirect:
        server.fails("GET", "blobs", status=307, headers={"Location": f"http://{other.address}/v2/a/blobs/b"})
    with pytest.raises(EngineError, match="denies access"):
        registry.fetch_small_blob(digest(BLOB)) if redirect else push(registry)
    assert [(one.path.partition("?")[0][:4], one.login) for one in other.requests] == [("/v2/", None)]


def test_netrc_is_ignored(server, registry, repository, tmp_path, monkeypatch):
    repository.put("v1", RAW, INDEX)
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert registry.digest("v1") == digest(RAW)
    assert {one.login for one in server.requests} == {None}


def test_unreachable_host_is_named(server, registry):
    server.elsewhere = "http://127.0.0.1:1"
    with pytest.raises(EngineError) as caught:
        push(registry)
    place = f"the registry {server.address} cannot be reached (at 127.0.0.1:1): Connection refused"
    assert str(caught.value) == place
    assert caught.value.exit_code == 8


def test_error_that_the_caller_handles_is_not_the_cause(server, registry, tmp_path):
    server.elsewhere = "http://127.0.0.1:1"
    try:
        (tmp_path / "absent").stat()
    except FileNotFoundError:
        with pytest.raises(EngineError, match="Connection refused"):
            push(registry)


def test_registry_without_tls_must_be_on_loopback(server, monkeypatch):
    # The name of another host that resolves to this one.
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda _, *words, **more: real("127.0.0.1", *words, **more))
    port = server.address.rpartition(":")[2]
    with Registry(f"reg.example:{port}/training") as registry, pytest.raises(EngineError) as caught:
        registry.digest("v1")
    assert "only on loopback" in caught.value.remedy
    assert not server.requests


@pytest.mark.parametrize(
    "rest", [":v1", f"@{digest(b'')}", f":v1@{digest(b'')}", "/", "/..", "/a__", "//b", " "]
)
def test_repository_has_no_tag_and_no_digest(rest):
    with pytest.raises(UsageError, match="invalid"):
        Registry(f"reg.example/training{rest}")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "..",
        "../../other/manifests/v1",
        "v1/../v2",
        "v1?x",
        "v1#x",
        "v1\\x",
        "v1%2f",
        "v1 ",
        "a:b",
        "sha256:x",
    ],
)
def test_invalid_tag_or_digest_is_not_asked_for(server, registry, name):
    asks = (
        registry.find_manifest,
        registry.digest,
        registry.make_blob_url,
        registry.has_blob,
        registry.delete,
        registry.list_referrers,
    )
    for ask in asks:
        with pytest.raises(UsageError, match="can have no tag or digest"):
            ask(name)
    assert not server.requests


@pytest.mark.parametrize(
    "content_type",
    ["{}", "{}; charset=utf-8", "{} ; charset=utf-8", "Application/Vnd.OCI.image.index.v1+JSON"],
)
def test_media_type_is_normalized(registry, repository, content_type):
    repository.put("v1", RAW, content_type.format(INDEX))
    assert registry.find_manifest("v1").media_type == INDEX


def test_manifest_is_pushed_with_its_media_type(registry, repository):
    repository.blobs |= {digest(b"{}"): b"{}"}
    raw = json.dumps({"mediaType": MANIFEST, "config": {"digest": digest(b"{}")}, "layers": []}).encode()
    registry.push_manifest("v1", raw, MANIFEST)
    assert repository.manifests == {digest(raw): (MANIFEST, raw)}


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"


@pytest.mark.parametrize(
    "begin",
    [b"", HEAD, HEAD + b"\r\n", HEAD + b"Content-Length: 999999\r\n\r\n"],
    ids=["status", "headers", "body", "length"],
)
@pytest.mark.usefixtures("no_pause")
def test_slow_answers_time_out(begin, monkeypatch):
    monkeypatch.setattr("imagematrix.images.oci.transfer.TIMEOUT", 0.6)
    with Dripping(begin) as dripping, Registry(f"{dripping.address}/ml/training") as registry:
        with pytest.raises(EngineError) as caught:
            registry.find_manifest("v1")
        assert dripping.connections == TRIES
    assert caught.value.exit_code == 8
    assert "it is too slow: " in str(caught.value)


def test_large_upload_gets_a_longer_timeout(server, registry, repository, monkeypatch):
    monkeypatch.setattr("imagematrix.images.oci.transfer.TIMEOUT", 1)
    monkeypatch.setattr("imagematrix.images.oci.transfer.STORED", len(BLOB) / 60)
    server.fails("PUT", "uploads", then=lambda: time.sleep(1.5))
    push(registry)
    assert repository.blobs == {digest(BLOB): BLOB}
    assert server.count("PUT", "uploads") == 1


@pytest.mark.parametrize("kind", ["manifests/v1", "blobs/x", "tags"])
def test_oversized_answers_are_rejected(server, registry, monkeypatch, kind):
    monkeypatch.setattr("imagematrix.images.oci.transfer.LIMIT", 1000)
    for status in (200, 307, 401, 404):
        server.fails("GET", kind, status=status, headers={"Location": "/x"}, body=b" " * 1_000_000)
    asks = {
        "m": lambda: registry.find_manifest("v1"),
        "b": lambda: registry.fetch_small_blob("x"),
        "t": registry.list_tags,
    }
    for _ in range(4):
        with pytest.raises(EngineError, match=f"the answer of .*{server.address}.* exceeds"):
            asks[kind[0]]()


@pytest.mark.parametrize("where", ["/v2/ml/training/manifests/v1", "http://[", "http://a..b/"])
def test_endless_or_invalid_redirect_is_rejected(server, registry, where):
    server.fails("GET", "manifests", status=307, headers={"Location": where}, times=99)
    with pytest.raises(EngineError, match=r"redirects more than 5 times|an invalid address"):
        registry.find_manifest("v1")


def test_redirect_is_followed(server, registry, repository):
    repository.put("v1", RAW, INDEX)
    for status in (301, 302, 303, 307, 308):
        server.fails("GET", "manifests/v2", status=status, headers={"Location": "v1"})
        assert registry.find_manifest("v2").raw == RAW
    server.fails("PUT", "manifests/v3", status=308, headers={"Location": "v4"})
    registry.push_manifest("v3", RAW, INDEX)
    assert repository.tags.keys() == {"v1", "v4"}
    server.fails("PUT", "manifests/v5", status=303, headers={"Location": "v6"})
    with pytest.raises(EngineError, match="answered 303"):  # the content there is not what was pushed
        registry.push_manifest("v5", RAW, INDEX)


def test_five_redirects_are_followed(server, registry, repository):
    repository.put("v1", RAW, INDEX)
    server.fails("GET", "manifests", times=5, status=307, headers={"Location": "v1"})
    assert registry.find_manifest("v1").raw == RAW
    server.fails("GET", "manifests", times=6, status=307, headers={"Location": "v1"})
    with pytest.raises(EngineError, match="redirects more than 5 times"):
        registry.find_manifest("v1")


@pytest.mark.parametrize(
    ("method", "path", "name"), [("GET", "tags", "Link"), ("POST", "uploads", "Location")]
)
def test_invalid_address_is_rejected(server, registry, method, path, name):
    headers = {name: '<http://[>; rel="next"' if name == "Link" else "http://["}
    server.fails(method, path, status=202 if method == "POST" else 200, headers=headers)
    with pytest.raises(EngineError, match="an invalid address"):
        registry.list_tags() if method == "GET" else push(registry)


def test_proxy_variables_apply_per_host(start_server, server, registry, repository, monkeypatch):
    other = start_server()
    monkeypatch.setenv("http_proxy", f"http://{other.address}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    repository.put("v1", RAW, INDEX)
    assert registry.digest("v1") == registry.digest("v1") == digest(RAW)
    assert not other.requests
    server.elsewhere = "http://reg.example"
    push(registry)
    assert {one.path.partition("?")[0] for one in other.requests} == {
        "http://reg.example/v2/ml/training/blobs/uploads/1"
    }


def whole(registry):
    parts = []
    with registry.open(digest(BLOB)) as stream:
        while part := stream.read(70_000):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("fault", [{"cut": True}, {"cut": True, "times": 2}, {"drop": True}])
def test_interrupted_blob_transfer_is_resumed(server, registry, repository, ranges, fault):
    server.ranges = ranges
    repository.blobs[digest(BLOB)] = BLOB
    server.fails("GET", "blobs", **fault)
    assert whole(registry) == BLOB
    assert server.count("GET", "blobs") == fault.get("times", 1) + 1


@pytest.mark.parametrize("status", [429, 500, 503])
def test_temporarily_refused_blob_transfer_is_retried(server, registry, repository, status):
    tries = BUSY_TRIES if status == 429 else TRIES
    repository.blobs[digest(BLOB)] = BLOB
    server.fails("GET", "blobs", status=status, times=tries - 1)
    assert whole(registry) == BLOB
    assert server.count("GET", "blobs") == tries
    server.fails("GET", "blobs", status=status, times=tries)
    with pytest.raises(EngineError, match=f"answered {status} for"):
        whole(registry)
    assert server.count("GET", "blobs") == 2 * tries


def test_blob_request_waits_for_retry_after(server, registry, repository, monkeypatch):
    repository.blobs[digest(BLOB)] = BLOB
    slept: list[float] = []
    monkeypatch.setattr("imagematrix.images.oci.retry.time.sleep", slept.append)
    server.fails("GET", "blobs", status=429, headers={"Retry-After": "7"})
    assert whole(registry) == BLOB
    assert slept == [7]
    server.fails("GET", "blobs", status=429, headers={"Retry-After": "86400"}, body=error("TOOMANYREQUESTS"))
    with pytest.raises(EngineError, match=r"answered 429 for .*: TOOMANYREQUESTS"):
        whole(registry)
    assert slept == [7]


def test_transfer_without_progress_ends(server, registry, repository):
    repository.blobs[digest(BLOB)] = BLOB
    server.fails("GET", "blobs", drop=True, times=TRIES)
    with pytest.raises(EngineError, match="cannot be reached"):
        whole(registry)
    assert server.count("GET", "blobs") == TRIES
    server.fails("GET", "blobs", cut=True)
    server.fails("HEAD", "blobs", after=1, status=404)
    with pytest.raises(UnknownImageError, match="has no"):
        whole(registry)
