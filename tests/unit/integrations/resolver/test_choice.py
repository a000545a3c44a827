"""The warm image that answers a tag: that for all GPUs of the node, and for any number of CPUs."""

import json

import pytest
from choosing import make  # noqa: F401

from imagematrix.common.record import replace
from imagematrix.images.catalog.warm_image import WarmImage, WarmMatch
from imagematrix.integrations.resolver.choice import explain_tag, resolve_tag
from imagematrix.integrations.resolver.node import HostSources

BASE = f"sha256:{'a' * 64}"


class Node:
    """A node with a host."""

    def __init__(self, host):
        self.host = host

    def read_host(self):
        return self.host


@pytest.mark.parametrize(
    ("match", "expected"),
    [
        ({"gpus": {"count": 2}}, True),
        ({"gpus": {"count": 1}}, False),
        ({"gpus": {"count": 2, "compute": "8.9"}, "cpu": {"vendor": "GenuineIntel"}}, True),
        ({"cpus": 8}, False),
        ({}, True),
    ],
)
def test_it_is_for_all_gpus_of_the_node_and_for_any_number_of_cpus(make, match, expected):  # noqa: F811
    host = make.host(make.gpu(0), make.gpu(1))
    nodes = HostSources(this_node=Node(replace(host, cpu=replace(host.cpu, usable=8))), classes={})
    image = WarmImage(
        base=BASE, reference="t:v1-warm-a-b", digest=f"sha256:{'b' * 64}", match=WarmMatch.from_json(match)
    )
    catalog = replace(make.catalog(make.variant("t:v1-gpu", digest=BASE)), warm=(image,))
    assert (resolve_tag(nodes, "v1", catalog).warm is image) is expected
    document = json.loads(explain_tag(nodes, "v1", catalog))
    assert (document["warm"] == image.digest) is expected
