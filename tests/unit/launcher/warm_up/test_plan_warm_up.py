"""What the selected variant says of its warm-up."""

import pytest
from choosing import Make

from imagematrix.errors import UsageError
from imagematrix.images.catalog.labels import WARM_UP
from imagematrix.images.catalog.warm_up import WarmUp, write_warm_up
from imagematrix.launcher.warm_up.plan_warm_up import require_warm_up

VARIANT = Make.variant("r.example/training:v1-gpu")
STATED = WarmUp(command=("train",))


def describe(key, *volumes):
    """An image with the warm-up and volumes, with its configuration under a key."""
    labels = {WARM_UP: write_warm_up(STATED)}
    return {key: {"Labels": labels, "Volumes": {path: {} for path in volumes} or None}}


@pytest.mark.parametrize("key", ["config", "Config"])  # in a store, and as an engine tells it
@pytest.mark.parametrize("volumes", [(), ("/data", "/var/cache/warmer", "/var/lib")])
def test_the_warm_up_is_that_of_the_label(key, volumes):
    assert require_warm_up(describe(key, *volumes), VARIANT) == STATED


def test_an_image_without_a_warm_up_is_refused():
    with pytest.raises(UsageError, match="has no warm-up") as raised:
        require_warm_up({"config": {}}, VARIANT)
    assert raised.value.remedy


@pytest.mark.parametrize("key", ["config", "Config"])
@pytest.mark.parametrize("volume", ["/var", "/var/cache/warm", "/var/cache/warm/", "/var/cache/warm/triton"])
def test_a_volume_in_the_place_of_caches_is_refused(key, volume):
    with pytest.raises(UsageError, match=f"the volume {volume}, from which no caches are kept") as raised:
        require_warm_up(describe(key, "/data", volume), VARIANT)
    assert raised.value.remedy
