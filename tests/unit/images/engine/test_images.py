"""Images of the engine."""

import pytest

from imagematrix.errors import EngineError
from imagematrix.images.engine import images

LABEL = "io.imagematrix.image"

pytestmark = pytest.mark.usefixtures("docker_host")


def test_images_take_one_request_without_a_library(engine):
    engine.add_image({LABEL: "training"})
    engine.add_image({"other": "label"})
    engine.add_image(None)
    assert images.list_labelled(LABEL) == engine.images[:1]
    assert images.list_labelled(f"{LABEL}=training") == engine.images[:1]
    assert images.list_labelled(f"{LABEL}=é &#") == []
    assert len(engine.requests) == 3


def test_images_of_a_remote_engine_are_listed(remote_engine):
    remote_engine.add_image({LABEL: "training"})
    assert images.list_labelled(LABEL) == remote_engine.images
    assert remote_engine.requests[0] == "/version"


def test_an_exported_image_is_read_in_pieces(engine):
    engine.responses["GET", "/images/t:v1/get"] = 200, b"0123456789"
    with images.ExportedImage("t:v1") as saved:
        assert [saved.read(4) for _ in range(4)] == [b"0123", b"4567", b"89", b""]
    engine.responses["GET", "/images/t:v1/get"] = 404, b'{"message": "no such image"}'
    with images.ExportedImage("t:v1") as saved, pytest.raises(EngineError, match="aborted the export: 404"):
        saved.read(4)
