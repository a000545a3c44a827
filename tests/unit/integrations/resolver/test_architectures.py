"""A version for two architectures: a resolver answers with images of its node's own."""

import pytest
from resolving import HOPPER, variant

ARM = {"platform": "linux/arm64"}


def test_each_node_gets_its_architecture(published, front):
    published.publish(
        {
            "cpu-x86": variant(),
            "cpu-arm": variant("armv8-a", [], **ARM),
            "sm90-x86": variant("x86-64-v3", ["avx2"], **HOPPER),
            "sm90-arm": variant("neoverse-v2", ["sve2"], **HOPPER, **ARM),
        },
        version="v2",
    )
    for host, suffix in (("grace-hopper", "arm"), ("genoa-h200", "x86")):
        node = front(host)
        assert node.pull("v2") == published.digests[f"sm90-{suffix}"]
        assert node.pull("v2-cpu") == published.digests[f"cpu-{suffix}"]


@pytest.mark.usefixtures("published")
def test_a_node_of_an_architecture_without_images_is_refused(front):
    status, message = front("grace-hopper").pull("v1")
    assert status >= 400
    assert "linux/arm64" in message
