"""Images that an engine cannot unpack are refused before the pull, with the remedy."""

import json

import pytest
from distribution import MANIFEST, digest

from imagematrix.errors import EngineError
from imagematrix.images.oci.compression import DEFAULT
from imagematrix.launcher.docker.zstd_check import require_unpackable


@pytest.fixture
def reference(server):
    """Call it with the media type of a layer to get the name of an image in a registry, by its digest."""

    def call(kind):
        document = {"config": {"digest": digest(b"x")}, "layers": [{"mediaType": kind}]}
        raw = json.dumps(document).encode()
        repository = server.repository("ml/training")
        return f"{server.address}/ml/training:v1-a@{repository.put('v1-a', raw, MANIFEST)}"

    return call


ZSTD, GZIP = DEFAULT.media_type, "application/vnd.oci.image.layer.v1.tar+gzip"


def test_docker_before_23_cannot_unpack_zstd(engine, server, reference):
    engine.version = {"Version": "20.10.24+dfsg1", "Components": [{"Name": "Engine"}]}
    name = reference(ZSTD)
    with pytest.raises(EngineError) as caught:
        require_unpackable(name)
    assert str(caught.value) == (
        f"{name} has layers compressed with zstd, which Docker 20.10.24+dfsg1 cannot unpack"
    )
    assert "Docker 23 or newer, or build the image with `compression: gzip`" in caught.value.remedy
    for other in (name.partition("@")[0], name.replace(":v1-a@", "@")):
        with pytest.raises(EngineError, match="cannot unpack"):
            require_unpackable(other)
    require_unpackable(reference(GZIP))
    require_unpackable(f"{server.address}/ml/none@{digest(b'none')}")
    require_unpackable("127.0.0.1:1/ml/training:v1")


@pytest.mark.parametrize(
    "version",
    [
        {"Version": "23.0.0"},
        {"Version": "28.5.2"},
        {"Version": "4.3.1", "Components": [{"Name": "Podman Engine"}]},
        {"Version": "dev"},
        {},
    ],
)
def test_other_engines_are_not_asked_about_the_image(engine, server, reference, version):
    engine.version = version
    require_unpackable(reference(ZSTD))
    assert not server.requests
