"""What releases of Docker cannot do. tests/engine/test_engines.py has an engine on each side of a row."""

import pytest

from imagematrix.images.engine.releases import BUILDS, OVERLAYS_WITH_GPUS, ZSTD_LAYERS


@pytest.mark.parametrize(
    ("version", "builds", "zstd_layers", "overlays"),
    [
        ("19.03.15", False, False, True),
        ("20.9.99", False, False, True),
        ("20.10.0", False, False, False),
        ("20.10.24+dfsg1", False, False, False),
        ("20.10", False, False, False),
        ("22.99.1", False, False, False),
        ("23.0.0", True, True, False),
        ("23", True, True, False),
        ("25.0.13", True, True, False),
        ("26.0.0", True, True, True),
        ("26.1.5+dfsg1", True, True, True),
        ("29.0.0-rc.1", True, True, True),
        ("29", True, True, True),
        ("100.1", True, True, True),
    ],
)
def test_a_capability_begins_and_ends_with_a_release(version, builds, zstd_layers, overlays):
    found = (BUILDS.is_in(version), ZSTD_LAYERS.is_in(version), OVERLAYS_WITH_GPUS.is_in(version))
    assert found == (builds, zstd_layers, overlays)


@pytest.mark.parametrize("version", [None, "", "dev", "library-import", "9" * 40, "\u0661\u0669.1"])
def test_what_is_no_release_of_docker_is_taken_for_new(version):
    assert BUILDS.is_in(version)
    assert ZSTD_LAYERS.is_in(version)
    assert OVERLAYS_WITH_GPUS.is_in(version)


def test_a_capability_is_named_by_its_first_release():
    assert [str(each) for each in (BUILDS, ZSTD_LAYERS, OVERLAYS_WITH_GPUS)] == [
        "Docker 23",
        "Docker 23",
        "Docker 26",
    ]
