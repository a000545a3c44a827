"""Catalogs in a store, from which a node without a network chooses."""

from pathlib import Path

import pytest
from storing import NEEDS_SQUASHFS, put, variant

from imagematrix.errors import UnknownImageError
from imagematrix.hardware.host.host import Host
from imagematrix.images.catalog.sources import open_catalog
from imagematrix.images.catalog.store import UNNAMED, list_present, open_stored
from imagematrix.launcher.docker.fetch import fetch_selected
from imagematrix.selection.selector import select

pytestmark = NEEDS_SQUASHFS

NODE = Path(__file__).parents[3] / "hosts" / "broadwell-m60.json"


@pytest.fixture
def pull(image_store):
    """Call it with the name of an image in the registry to bring it into the store."""

    def call(name, *, part=False):
        host = Host(arch="x86_64", cpu=Host.load(NODE).cpu)
        catalog = open_catalog(name, image=name)
        return fetch_selected(select(host, catalog, gpus="none"), image_store, part=part)

    return call


def test_it_is_the_one_of_the_registry(server, image_store, pull):
    name = put(server, variant("one"), variant("two"))
    pull(name)
    assert open_stored(name, image_store) == open_catalog(name)
    assert open_stored(name.removesuffix(":v1"), image_store) == open_catalog(name)


def test_a_variant_may_be_named(server, image_store, pull):
    name = put(server, variant("one"), variant("two"))
    pull(name)
    image = name.removesuffix(":v1")
    for wanted in (f"{image}:{variant('two')[1]}", f"{image}@{variant('two')[0].digest}"):
        assert [one.digest for one in open_stored(wanted, image_store).variants] == [variant("two")[0].digest]


def test_of_several_versions_one_has_to_be_named(server, image_store, pull):
    first, second = put(server, variant("one")), put(server, variant("one", version="v2"), version="v2")
    pull(first)
    pull(second)
    assert open_stored(second, image_store).version == "v2"
    with pytest.raises(UnknownImageError, match="has several versions in the store") as caught:
        open_stored(first.removesuffix(":v1"), image_store)
    assert caught.value.remedy == f"name one of {first}, {second}"


def test_what_was_never_pulled_is_unknown(server, image_store, pull):
    with pytest.raises(UnknownImageError, match="has no variant of t:v1") as caught:
        open_stored("t:v1", image_store)
    assert caught.value.remedy == UNNAMED
    name = put(server, variant("one"))
    pull(name)
    with pytest.raises(UnknownImageError) as caught:
        open_stored(name.replace("v1", "v9"), image_store)
    assert name in caught.value.remedy


def test_of_variants_that_were_pulled_by_name_these_are_listed(server, image_store, pull):
    name = put(server, variant("one"), variant("two"))
    pull(f"{name.removesuffix(':v1')}:{variant('two')[1]}", part=True)
    assert [one.digest for one in open_stored(name, image_store).variants] == [variant("two")[0].digest]


def test_what_is_present_is_listed_by_version(server, image_store, pull):
    assert list_present(image_store) == []
    first = put(server, variant("one"), variant("two"))
    second = put(server, variant("one", version="v2"), version="v2")
    pull(first)
    pull(second)
    assert [(catalog.version, len(catalog.variants)) for catalog in list_present(image_store)] == [
        ("v1", 1),
        ("v2", 1),
    ]
    image = first.removesuffix(":v1")
    assert [catalog.version for catalog in list_present(image_store, image)] == ["v1", "v2"]
    assert [catalog.version for catalog in list_present(image_store, second)] == ["v2"]
    for unknown in ("t", f"{image}:v3"):
        with pytest.raises(UnknownImageError, match=f"has no variant of {unknown}"):
            list_present(image_store, unknown)
