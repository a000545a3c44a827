"""Audits of images that tests write."""

import pytest
from images import Parts, layout, tar

from imagematrix.audit.images.layers import Layers
from imagematrix.audit.images.sources import read_images
from imagematrix.audit.report import audit_image


@pytest.fixture
def audited_layers(tmp_path):
    """Call it with layers, each the members of a tar, and more for Parts, to get the audit of their image."""

    def call(*layers, **settings):
        image = Parts(*(tar(*members) for members in layers), **settings)
        path = tmp_path / image.digest[7:19]
        if not path.exists():
            layout(path, image)
        (found,) = read_images(str(path), "linux/amd64", Layers())
        return audit_image(found)

    return call


@pytest.fixture
def audited(audited_layers):
    """Call it with the members of a layer to get the audit of an image with it."""
    return lambda *members, **settings: audited_layers(members, **settings)
