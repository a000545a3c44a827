"""A read-only registry that answers a version with the variant for its node, and forwards everything else."""

import base64
import concurrent.futures
import contextlib
import json
import os
import socket
from pathlib import Path

import pytest
import requests
from distribution import MANIFEST, Server, digest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from publishing import put_warm
from resolving import HOPPER, Published, SimulatedNode, variant

from imagematrix.build.publish.publish import IndexSelection, publish
from imagematrix.errors import EngineError
from imagematrix.images.catalog import image_index as catalog_index
from imagematrix.images.oci.compression import DEFAULT
from imagematrix.images.oci.manifest import INDEX
from imagematrix.images.oci.registry import Registry
from imagematrix.integrations.http_service import workers
from imagematrix.integrations.http_service.connections import Limits
from imagematrix.integrations.resolver import tag_cache
from imagematrix.integrations.resolver import upstream as upstream_module

LAYER = b"cpu-v3" * 1000


def test_each_node_gets_its_fitting_variant(front, published):
    assert front("laptop").pull("v1") == published.digests["cpu-v3"]
    assert front("genoa-h200").pull("v1") == published.digests["sm90"]
    hopper = front("sapphirerapids-h100")
    assert hopper.pull("v1") == published.digests["sm90"]
    assert hopper.pull("v1-cpu") == published.digests["cpu-v3"]
    cpu = hopper.get("/explain/ml/training:v1-cpu").json()["selected"]
    assert hopper.notes == [
        f"ml/training:v1 is {hopper.get('/explain/ml/training:v1').json()['selected']} for GPUs "
        + ", ".join(gpu.uuid for gpu in SimulatedNode("sapphirerapids-h100").read_host().gpus)
        + ", the best of 1 that fit out of 3",
        f"ml/training:v1-cpu is {cpu} without a GPU, the best of 2 that fit out of 3",
    ]


def test_node_without_a_fitting_variant_gets_the_reasons(front, published):
    node = front("rome-a100")
    status, message = node.pull("v1")
    assert status == 403
    assert "none of the 3 variants" in message
    assert "8.0" in message
    (note,) = node.notes
    assert "/v2/ml/training/manifests/v1" in note
    explained = node.get("/explain/ml/training:v1").json()
    assert explained["selected"] is None
    assert len(explained["candidates"]) == len(published.digests)


DOCKER = "docker/{} go/go1.19.8 kernel/6.1 os/linux arch/amd64 UpstreamClient(Docker-Client/29.0)"


def test_docker_before_23_gets_no_layers_in_zstd(front, upstream, published):
    zipped = Published(upstream)
    zipped.publish({"cpu": variant()}, version="v2", packed=DEFAULT.media_type)
    node = front("laptop")

    def answer(version, tag="v2"):
        client = {"User-Agent": version and DOCKER.format(version)}
        return node.get(f"/v2/ml/training/manifests/{tag}", headers=client)

    for tag in ("v2", zipped.digests["cpu"]):
        refused = answer("20.10.24+dfsg1", tag)
        (error,) = refused.json()["errors"]
        assert (refused.status_code, error["code"]) == (403, "DENIED")
        assert error["message"].startswith(
            "the image has layers compressed with zstd, which Docker 20.10.24 cannot unpack"
        )
        assert error["message"].endswith("or build the image with `compression: gzip`")
    assert answer("20.10.24", "v1").status_code == 200
    assert published.digests["cpu-v3"] == digest(answer("20.10.24", "v1").content)
    for version in ("23.0.1", "29.0.0", None):
        assert answer(version).status_code == 200


def test_mixed_node_gets_a_variant_for_all_its_gpus_or_none(front, upstream):
    published = Published(upstream)
    driver = {"mode": "exact", "version": "535.261.03"}
    one = {**HOPPER, "driver": driver, "cubins": ["80"]}
    both = {**HOPPER, "driver": driver, "cubins": ["75", "80"]}
    published.publish({"sm80": variant(**one)})
    published.publish({"sm75": variant(**both)}, version="v2")
    node = front("mixed")
    assert node.pull("v1")[0] == 403
    assert node.pull("v2") == published.digests["sm75"]


def test_axes_are_read_from_the_tag(front, upstream):
    published = Published(upstream)
    pythons = {f"py{minor}": variant(axes={"python": f"3.{minor}"}) for minor in (12, 13)}
    published.publish(pythons)
    node = front()
    assert node.pull("v1-python3.12") == published.digests["py12"]
    assert node.pull("v1-cpu-python3.13") == published.digests["py13"]
    status, message = node.pull("v1")
    assert status == 403
    assert "differ in python; name one in the tag, such as v1-python3.12" in message
    status, message = node.pull("v1-python3.14")
    assert status == 403
    assert "python3.12, python3.13" in message
    published.publish({"none": variant()} | pythons, version="v2")
    assert "name one in the tag, such as v2-python3.12" in node.pull("v2")[1]


def test_class_tag_gives_every_node_the_same_variant(front, published):
    classes = {"plain": SimulatedNode("laptop"), "hopper": SimulatedNode("genoa-h200")}
    node = front("sapphirerapids-h100", classes=classes)
    assert node.pull("v1-class.hopper") == published.digests["sm90"]
    status, message = node.pull("v1-class.plain")
    assert status == 403, "a node with GPUs gets a CPU-only image only for v1-cpu"
    assert "which does not fit this node" in message
    assert node.pull("v1-cpu-class.plain") == published.digests["cpu-v3"]
    status, message = node.pull("v1-class.nope")
    assert (status, "classes of this resolver: hopper, plain" in message) == (403, True)


def test_existing_upstream_tag_takes_precedence(front, published):
    own = published.repository.image("v1-cpu", {}, layer=b"another")
    node = front("genoa-h200")
    assert node.pull("v1-cpu") == own
    (tag,) = (one for one in published.repository.tags if "cpu-v2" in one)
    assert node.pull(tag) == published.digests["cpu-v2"], "a named variant is returned"


def test_images_without_variants_pass_through(front, upstream, published):
    other = upstream.repository("library/debian").image("trixie", {"a": "label"})
    node = front()
    assert node.pull("trixie", "library/debian") == other
    assert node.pull("trixie-slim", "library/debian")[0] == 404
    index = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": []}).encode()
    assert node.pull("all", "library/debian")[0] == 404
    assert upstream.repository("library/debian").put("all", index, INDEX) == node.pull(
        "all", "library/debian"
    )
    assert node.pull("v2")[0] == node.pull("v1", "nothing/here")[0] == 404
    assert node.get("/explain/library/debian:trixie").status_code == 404
    index = published.repository.tags["v1"]
    assert node.pull(index) == index, "a digest is returned unchanged"
    assert node.pull(digest(b"nothing"))[0] == 404


def test_other_endpoints_of_the_api(node, published):
    result = node.get("/v2/ml/training/manifests/v1", method="HEAD")
    assert result.headers["Docker-Content-Digest"] == published.digests["cpu-v3"]
    assert result.headers["Content-Type"] == MANIFEST
    assert not result.content
    assert node.get("/v2/").headers["Docker-Distribution-Api-Version"] == "registry/2.0"
    tags = node.get("/v2/ml/training/tags/list").json()
    assert tags["name"] == "ml/training"
    assert "v1" in tags["tags"]
    node.answer_own()
    node.pull("v1")
    text = node.get("/metrics").text
    assert 'imagematrix_resolver_choices_total{tag="ml/training:v1",variant=' in text
    assert 'imagematrix_resolver_answers_total{method="HEAD",status="200"} 1.0' in text


@pytest.mark.parametrize(
    ("accept", "status"),
    [
        (MANIFEST, 200),
        (f"{INDEX}, {MANIFEST};q=0.5", 200),
        ("application/*", 200),
        ("text/html, */*;q=0.1", 200),
        (INDEX, 404),
        ("text/html", 404),
    ],
)
def test_manifest_has_a_media_type_that_the_client_accepts(front, published, accept, status):
    answer = front().get("/v2/ml/training/manifests/v1", headers={"Accept": accept})
    assert answer.status_code == status
    assert published.digests


def test_whole_blobs_and_ranges_pass_through(node, published):
    path = f"/v2/ml/training/blobs/{digest(LAYER)}"
    assert node.get(path).content == LAYER
    assert node.get(path, method="HEAD").headers["Content-Length"] == str(len(LAYER))
    part = node.get(path, headers={"Range": "bytes=10-"})
    assert (part.status_code, part.content) == (206, LAYER[10:])
    assert node.get(f"/v2/ml/training/blobs/{digest(b'?')}").status_code == 404
    assert published.digests


def test_upstream_logins_are_renewed(front, upstream, published, docker_login):
    docker_login(upstream.address, "ann", "secret")
    upstream.uses = 2  # requests for which a token is valid
    node = front()
    assert node.pull("v1") == published.digests["cpu-v3"]
    for _ in range(5):
        assert node.get(f"/v2/ml/training/blobs/{digest(LAYER)}").content == LAYER


@pytest.mark.usefixtures("published")
def test_a_small_blob_waits_for_none_of_the_large_ones(front, monkeypatch):
    monkeypatch.setattr(upstream_module, "TURN", 0)  # as if they had all turns
    assert front().get(f"/v2/ml/training/blobs/{digest(LAYER)}").content == LAYER


@pytest.mark.usefixtures("published")
def test_so_many_requests_for_blobs_that_more_are_refused(front, monkeypatch):
    monkeypatch.setattr(upstream_module, "OPENING", 0)
    monkeypatch.setattr(upstream_module, "OPENING_WAITING", 0)
    answer = front().get(f"/v2/ml/training/blobs/{digest(LAYER)}")
    assert answer.status_code == 502
    assert answer.json()["errors"][0]["code"] == "UNAVAILABLE"


def test_redirects_of_blobs_are_followed(front, upstream, published, docker_login, monkeypatch):
    docker_login(upstream.address, "ann", "secret")
    upstream.uses = 100
    netrc = Path(os.environ["DOCKER_CONFIG"], "netrc")
    netrc.write_text("default login eve password known\n")
    monkeypatch.setenv("NETRC", str(netrc))
    path = f"/v2/ml/training/blobs/{digest(LAYER)}"
    node = front()
    assert node.pull("v1") == published.digests["cpu-v3"]
    assert node.get(path).content == LAYER
    storage = Server()
    try:
        name = digest(LAYER).replace(":", "%3A")
        storage.repository("ml/training").blobs[name] = LAYER
        signed = f"/v2/ml/training/blobs/{name}?key=a%2Fb&signature=c%3D"
        upstream.fails(
            "GET", "/blobs/", status=307, headers={"Location": f"http://{storage.address}{signed}"}
        )
        assert node.get(path).content == LAYER
        (request,) = storage.requests
        assert (request.path, request.login) == (signed, None)
        upstream.fails("GET", "/blobs/", times=9, status=302, headers={"Location": path})
        assert node.get(path).status_code == 502
        upstream.fails("GET", "/blobs/", times=1, status=302, headers={"Location": "http://[/"})
        assert node.get(path).status_code == 502
    finally:
        storage.close()


@pytest.mark.parametrize(("variable", "scheme"), [("ALL_PROXY", "http://"), ("http_proxy", "")])
def test_blobs_are_read_through_the_configured_proxy(
    front, upstream, published, monkeypatch, variable, scheme
):
    for name in ("no_proxy", "NO_PROXY", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, f"{scheme}{upstream.address}")
    node = front(name="127.0.0.1:1")
    assert node.pull("v1") == published.digests["cpu-v3"]
    assert node.get(f"/v2/ml/training/blobs/{digest(LAYER)}").content == LAYER
    assert upstream.requests[-1].path.startswith("http://127.0.0.1:1/v2/")


@pytest.mark.parametrize(
    ("authorities", "status"), [("", 200), ("authorities", 200), ("nowhere", 502), ("authorities/file", 502)]
)
def test_certificate_authorities_are_a_file_or_a_folder(
    front, published, monkeypatch, tmp_path, authorities, status
):
    (tmp_path / "authorities").mkdir()
    (tmp_path / "authorities" / "file").write_text("no certificate")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", authorities and str(tmp_path / authorities))
    monkeypatch.delenv("CURL_CA_BUNDLE", raising=False)
    node = front()
    assert node.pull("v1") == published.digests["cpu-v3"]
    answer = node.get(f"/v2/ml/training/blobs/{digest(LAYER)}")
    assert answer.status_code == status
    if status != requests.codes.ok:
        assert (
            node.notes[-1].count(f"the certificate authorities in {tmp_path / authorities} cannot be read: ")
            == 1
        )


def test_containerd_namespace_must_match_the_upstream(front, published):
    node = front(mirrors="registry.example:5000")
    path = "/v2/ml/training/manifests/v1"
    assert node.get(f"{path}?ns=registry.example:5000").status_code == 200
    refused = node.get(f"{path}?ns=docker.io")
    assert refused.status_code == 403
    assert "serves registry.example:5000, not 'docker.io'" in refused.json()["errors"][0]["message"]
    assert published.digests


def test_token_is_required(front, published):
    login = "any:päss"
    node = front(token=login.partition(":")[2])
    assert node.pull("v1")[0] == 401
    assert node.get("/v2/").headers["WWW-Authenticate"].startswith("Basic ")
    for wrong in ("Basic ???", "Bearer x", "Basic " + base64.b64encode(b"any:wrong").decode()):
        assert node.get("/v2/", headers={"Authorization": wrong}).status_code == 401
    right = "Basic " + base64.b64encode(login.encode()).decode()
    answer = node.get("/v2/ml/training/manifests/v1", headers={"Authorization": right})
    assert answer.headers["Docker-Content-Digest"] == published.digests["cpu-v3"]
    assert node.get("/metrics").status_code == 401


def test_manifests_are_kept_within_a_limit_in_bytes(front, upstream, monkeypatch):
    monkeypatch.setattr(tag_cache, "MANIFESTS", 6 << 20)
    monkeypatch.setattr(tag_cache, "VERSIONS", 3 * tag_cache.PARSED << 20)
    node = front()
    repository = upstream.repository("ml/large")
    filled = {"schemaVersion": 2, "config": {}, "layers": [], "annotations": {"x": "y" * (1 << 20)}}
    raws = [json.dumps({**filled, "number": number}).encode() for number in range(8)]
    digests = [repository.put(f"v{number}", raw, MANIFEST) for number, raw in enumerate(raws)]
    for _ in range(2):
        for number, expected in enumerate(digests):
            assert node.pull(f"v{number}", "ml/large") == expected
            assert node.pull(expected, "ml/large") == expected
    asked = [path for _, path, *_ in upstream.requests if digests[0] in path]
    assert len(asked) == 2, "it was dropped for the others, and read again"
    kept = node.kept()
    assert 2 <= len(kept) <= 4, kept


def test_last_catalog_is_served_while_the_upstream_is_down(front, upstream, published, monkeypatch):
    monkeypatch.setattr(tag_cache, "FRESH_S", 0)
    node = front()
    assert node.pull("v1") == published.digests["cpu-v3"]
    upstream.fails("GET|HEAD", "/manifests/v1$", times=1000, status=503)
    assert node.pull("v1") == published.digests["cpu-v3"]
    assert "is answered from the last known state" in node.notes[-1]
    assert "imagematrix_resolver_stale_answers_total 1.0" in node.get("/metrics").text
    upstream.fails("GET|HEAD", "/manifests/v1-cpu$", times=1000, status=503)
    upstream.fails("GET|HEAD", "/manifests/v1-cpu-v2-", times=1000, status=503)
    (tag,) = (one for one in published.repository.tags if "cpu-v2" in one)
    assert node.pull(tag) == published.digests["cpu-v2"], "the index has the tags of all variants"
    assert node.pull("v1-cpu") == published.digests["cpu-v3"], "this tag was not requested before"
    upstream.fails("GET", "/manifests/v2$", times=1000, status=503)
    assert node.pull("v2")[0] == 502, "this version is not cached"


def test_unchanged_version_is_not_transferred_again(front, upstream, published, monkeypatch):
    monkeypatch.setattr(tag_cache, "FRESH_S", 0)
    node = front()
    for _ in range(3):
        assert node.pull("v1") == published.digests["cpu-v3"]
    assert (upstream.count("GET", "/manifests/v1$"), upstream.count("HEAD", "/manifests/v1$")) == (1, 2)


@pytest.mark.usefixtures("published")
def test_blob_takes_no_more_of_the_memory_for_answers_than_its_size(front):
    node = front(limits=Limits(answers=len(LAYER)))
    assert node.get(f"/v2/ml/training/blobs/{digest(LAYER)}").content == LAYER
    node = front(limits=Limits(answers=len(LAYER) - 1))
    assert node.get(f"/v2/ml/training/blobs/{digest(LAYER)}").status_code == 429


def test_cached_catalog_is_served_while_the_upstream_hangs(front, upstream, published, monkeypatch):
    monkeypatch.setattr(tag_cache, "FRESH_S", 0)
    monkeypatch.setattr(tag_cache, "PATIENCE_S", 0.1)
    node = front()
    assert node.pull("v1") == published.digests["cpu-v3"]
    upstream.fails("GET|HEAD", "/manifests/v1$", then=lambda: __import__("time").sleep(2))
    assert node.pull("v1") == published.digests["cpu-v3"]
    assert "the upstream does not answer" in node.notes[-1]
    upstream.fails("GET|HEAD", "/manifests/v1(-cpu)?$", times=2, then=lambda: __import__("time").sleep(2))
    assert node.pull("v1-cpu") == published.digests["cpu-v3"]


def test_changed_version_or_node_changes_the_answer(front, published, monkeypatch):
    monkeypatch.setattr(tag_cache, "FRESH_S", 0)
    machine = SimulatedNode("laptop")
    node = front(node=machine)
    assert node.pull("v1") == published.digests["cpu-v3"]
    published.publish({"cpu-v2": variant(), "adl": variant("alderlake", ["sse4_2", "avx2", "fma"])})
    assert node.pull("v1") == published.digests["adl"]
    machine.name = "genoa-h200"
    assert node.pull("v1")[0] == 403
    machine.name = "nowhere"
    with pytest.raises(EngineError, match="the node cannot be read"):
        node.answer_own()


def test_without_processes_for_choices_it_has_no_answer_of_its_own(node, published, monkeypatch):
    """Not even before the first request: it would seem ready, and refuse each version."""
    monkeypatch.setattr(workers, "make_child_command", lambda _: ["false"])
    for _ in range(2):
        with pytest.raises(EngineError, match="the work took more than"):
            node.answer_own()
        assert node.pull("v1")[0] == 502
    assert published.digests


def test_damaged_catalog_is_rejected(front, published, upstream):
    own = published.repository.manifests[published.repository.tags["v1"]][1]
    broken = catalog_index.parse_index(own.replace(b"sse4_2", b"sse4_2\\\\"), "v3")
    published.repository.put("v3", catalog_index.write_index(broken, "ml/training", "v3"), INDEX)
    status, message = front().pull("v3")
    assert (status, "v3" in message) == (403, True)
    assert upstream.requests


def test_index_that_another_tool_changed_is_refused(front, published):
    """Its tag has moved; whoever pulls by platform would get the added image."""
    index = json.loads(published.repository.manifests[published.repository.tags["v1"]][1])
    platform = {"os": "linux", "architecture": "amd64"}
    index["manifests"].append({"digest": digest(b"x"), "size": 1, "platform": platform})
    published.repository.put("v1", json.dumps(index).encode(), INDEX)
    status, message = front().pull("v1")
    assert (status, "is not as imagematrix published it" in message) == (403, True)


def test_missing_upstream_image_answers_502(front, published):
    del published.repository.manifests[published.digests["cpu-v3"]]
    assert front().pull("v1")[0] == 502


def test_concurrent_requests_query_the_upstream_once(front, upstream, published, monkeypatch):
    monkeypatch.setattr(tag_cache, "FRESH_S", 1000)
    node = front()
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        answers = set(pool.map(node.pull, ["v1"] * 64))
    assert answers == {published.digests["cpu-v3"]}
    assert upstream.count("GET", "/manifests/v1$") == 1


@pytest.mark.parametrize(
    "repository",
    [
        *("ml/training:x", "ml/training%3Ax", "ml/training:v1", f"ml/training@{digest(b'x')}"),
        *("ml/training%40" + digest(b"x"), "ml//training", "/ml/training", "ml/training/", "ml/./training"),
        *("ml/%2e%2e/ml/training", "ml/training%2F", "ml/training%3F", "ml/training%23", "ml/training%20"),
        *("ml/training%0A", "%0Aml/training", "ML/training", "ml/tr%C3%A4ining", "ml/a..b", "ml/a___b"),
        *("ml/-training", "ml/training-", "ml\\training", "ml/training%5C", "127.0.0.1:1/ml/training"),
    ],
)
def test_repository_has_to_be_valid_as_a_whole(node, upstream, published, repository):
    """No other name leads to an image, or leaves an entry in the metrics or a request at the upstream."""
    sent = requests.Request("GET", f"http://{node.address}/").prepare()
    for resource in (
        "manifests/v1",
        f"manifests/{published.digests['cpu-v3']}",
        f"blobs/{digest(LAYER)}",
        "tags/list",
    ):
        sent.url = f"http://{node.address}/v2/{repository}/{resource}"  # as it is
        answer = node.session.send(sent, timeout=30)
        assert (answer.status_code, len(answer.json()["errors"])) in ((400, 1), (404, 1)), resource
    assert "ml/" not in node.get("/metrics").text
    assert not upstream.requests


def test_tags_that_request_the_same_are_one_series(front, upstream):
    published = Published(upstream)
    published.publish({"a": variant(axes={"python": "3.13", "torch": "2+1"})})
    node = front()
    for tag in ("v1-torch2_1-cpu-python3.13", "v1-python3.13-cpu-torch2_1", "v1-cpu-python3.13-torch2_1"):
        assert node.pull(tag) == published.digests["a"]
    series = [line for line in node.get("/metrics").text.splitlines() if "choices_total{" in line]
    assert len(series) == len(node.notes) == 1
    assert 'tag="ml/training:v1-python3.13-torch2_1-cpu"' in series[0]
    assert node.pull("v1-python3.13-torch2_1-cpu") == published.digests["a"]


@pytest.mark.parametrize(
    "path",
    ["/v2/ML/manifests/v1", "/v2/../../etc/passwd", "/v2/a/manifests/sha256:short", "/v2/a/blobs/x", "/v3/",
     "/v2/a/manifests/%00", "/v2/a//b/manifests/v1", "/v2/a/tags/all", "/v2/a/uploads/", "/explain/", "/"],
)  # fmt: skip
def test_invalid_paths_are_rejected(front, path):
    answer = front().get(path)
    assert answer.status_code in (400, 403, 404)
    assert answer.json()["errors"]


@pytest.mark.parametrize("method", ["PUT", "POST", "PATCH", "DELETE"])
def test_writes_are_rejected(front, method):
    answer = front().get("/v2/ml/training/manifests/v1", method=method, data=b"{}")
    assert answer.status_code == 405
    assert answer.json()["errors"][0]["code"] == "UNSUPPORTED"


def answer_to(address, raw, *, end=False):
    """Send bytes to a server and return the first bytes of its answer."""
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(raw)
        if end:
            with contextlib.suppress(OSError):  # not connected: the server has closed
                connection.shutdown(socket.SHUT_WR)
        answer = b""
        while len(answer) < len("HTTP/1.1 400 ") and (part := connection.recv(64)):
            answer += part
        return answer


def test_tls_handshake_gets_an_http_answer(front):
    # docker tries TLS first, and plain HTTP only if the answer begins with HTTP/.
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2
    assert answer_to(front().address, hello)[:13] in (b"HTTP/1.0 400 ", b"HTTP/1.1 400 ")


def test_junk_closes_only_its_own_connection(node, published):

    @settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.binary(max_size=300), st.sampled_from([b"", b"GET /v2/ HTTP/1.1\r\n", b"GET /v2/ml/training/"]))
    def junk(raw, start):
        answer = b""
        with contextlib.suppress(ConnectionError):  # it may close with bytes unread
            answer = answer_to(node.address, start + raw, end=True)
        assert not answer or answer.startswith(b"HTTP/1.")

    junk()
    assert node.pull("v1") == published.digests["cpu-v3"]


def test_a_node_gets_the_warm_image_that_fits_it_and_a_class_its_variant(
    front, published, upstream, monkeypatch, tmp_path
):
    base, vendor = published.digests["cpu-v3"], SimulatedNode("laptop").read_host().cpu.vendor
    other = put_warm(published.repository, base, digest(b"other"), match={"cpu": {"vendor": "another"}})
    fitting = put_warm(published.repository, base, match={"cpu": {"vendor": vendor}})
    with Registry(f"{upstream.address}/ml/training") as registry:
        publish(registry, "v1", selection=IndexSelection(warm=[other, fitting]))
    node = front(classes={"plain": SimulatedNode("laptop")})
    assert node.pull("v1") == fitting.digest
    assert node.pull("v1-class.plain") == base
    assert [", as its warm image " in line for line in node.notes] == [True, False]
    with monkeypatch.context() as patched:
        (tmp_path / "site.toml").write_text("warm = false")
        patched.setenv("IMAGEMATRIX_SITE", str(tmp_path / "site.toml"))
        assert front().pull("v1") == base
    del published.repository.manifests[fitting.digest]
    later = front()
    assert later.pull("v1") == base
    assert "-warm-" in later.notes[-1]
    assert "cannot be had, so its variant is the answer" in later.notes[-1]
