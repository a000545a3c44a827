"""Which source a name refers to, and how a source is added."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from storing import put, variant

from imagematrix.errors import EngineError, UnknownImageError, UsageError
from imagematrix.images.catalog import sources
from imagematrix.images.catalog.sources import CatalogSource, list_catalogs, open_catalog


@pytest.fixture
def saved(shipped_catalog, tmp_path):
    path = tmp_path / "training.json"
    path.write_text(json.dumps(shipped_catalog.to_json()))
    return str(path)


def test_file_catalog_is_narrowed_to_the_requested_image(saved, shipped_catalog):
    assert open_catalog(saved) == open_catalog(saved, image="training") == shipped_catalog
    variant = shipped_catalog.variants[0]
    assert open_catalog(saved, image=variant.reference).variants == (variant,)
    with pytest.raises(UnknownImageError, match="is the catalog of training:v1, not of trainin:v1") as caught:
        open_catalog(saved, image="trainin:v1")
    assert caught.value.remedy == "did you mean 'training:v1'?"


def test_files_are_told_from_images(engine, shipped_catalog, tmp_path, monkeypatch):
    """A folder may have the name of an image, and a saved catalog any name."""
    engine.add_catalog(shipped_catalog)
    monkeypatch.chdir(tmp_path)
    Path("training").mkdir()
    document = json.dumps(shipped_catalog.to_json())
    Path("saved").write_text(document)
    names = {variant.reference for variant in shipped_catalog.variants}
    assert {variant.reference for variant in open_catalog("training").variants} == names
    for saved in ("saved", "./saved", Path("saved"), tmp_path / "saved"):
        assert open_catalog(saved) == shipped_catalog
    for absent in ("training.json", "./training:v1", Path("training:v1")):
        with pytest.raises(UsageError, match="No such file"):
            open_catalog(absent)


@pytest.mark.parametrize("name", [None, 0, True, b"training", {"schema": "imagematrix.catalog/v1"}])
def test_names_of_other_types_are_usage_errors(name):
    with pytest.raises(UsageError, match="is not the name of a catalog") as caught:
        open_catalog(name)
    assert "REGISTRY/IMAGE:VERSION" in caught.value.remedy


def test_image_without_a_registry_is_read_from_the_engine(engine, shipped_catalog):
    engine.add_catalog(shipped_catalog)
    names = {variant.reference for variant in shipped_catalog.variants}
    assert {variant.reference for variant in open_catalog("training:v1").variants} == names
    assert [one.version for one in list_catalogs("training")] == ["v1"]
    assert [one.image for one in list_catalogs()] == ["training"]
    with pytest.raises(UnknownImageError):
        list_catalogs("trainin")


@pytest.fixture
def shelf(monkeypatch, shipped_catalog):
    """An additional source, for images and catalogs whose names begin with "shelf."."""

    def load_catalog(name, _policies=()):
        if name.endswith(":v9"):
            raise UnknownImageError(f"{name} not found")
        return shipped_catalog

    module = SimpleNamespace(
        load_catalog=load_catalog,
        load_catalogs=lambda image, _policies=(): [shipped_catalog] if image else [],
    )
    monkeypatch.setitem(sys.modules, "imagematrix.images.catalog.shelf", module)

    def its(name):
        return name.startswith("shelf.")

    monkeypatch.setattr(sources, "SOURCES", (CatalogSource(name="shelf", keeps=its), *sources.SOURCES))


@pytest.mark.usefixtures("shelf", "no_engine")
def test_new_source_needs_one_entry(shipped_catalog):
    assert open_catalog("shelf.local/training:v1") == shipped_catalog
    assert open_catalog("shelf.local/x", image="training:v1") == shipped_catalog
    # A catalog has an image that it is asked for, wherever it is: nothing else is chosen from it.
    with pytest.raises(UnknownImageError, match="is the catalog of training:v1, not of other"):
        open_catalog("shelf.local/x", image="other:v1")
    assert list_catalogs("shelf.local/training") == [shipped_catalog]
    with pytest.raises(EngineError):
        open_catalog("training:v1")


@pytest.fixture
def at_site(write_site, server):
    """Call it with more lines of the site's file, which names a registry with training:v1."""
    image, name = variant()
    put(server, (image, name))

    def call(more=""):
        write_site(f'registry = "{server.address}/ml"\n{more}\n')
        return f"{server.address}/ml/training"

    return call


def notes_of(image):
    told: list[str] = []
    return sources.open_stored_catalog(image, told.append), told


def test_the_site_s_registry_has_what_the_engine_does_not(at_site, engine, shipped_catalog):
    full = at_site()
    catalog, (note,) = notes_of("training:v1")
    assert catalog.image == full
    assert note == f"the engine has no variant of training:v1: using {full}:v1"
    engine.add_catalog(shipped_catalog)
    assert notes_of("training:v1") == (sources.open_catalog("training:v1"), [])


def test_without_an_engine_the_site_s_registry_is_used(at_site):
    full = at_site()
    catalog, (note,) = notes_of("training:v1")
    assert catalog.image == full
    assert note.startswith("cannot reach the Docker engine")
    with pytest.raises(UnknownImageError, match=f"{full}"):
        notes_of("training:v2")


def test_where_no_engine_is_used_none_is_asked(at_site):
    full = at_site('engine = "oci"')
    catalog, told = notes_of("training:v1")
    assert (catalog.image, told) == (full, [])
    assert [one.image for one in list_catalogs("training")] == [full]


def test_a_site_without_a_registry_changes_nothing(write_site, engine, shipped_catalog):
    write_site('engine = "oci"')
    engine.add_catalog(shipped_catalog)
    assert notes_of("training:v1")[1] == []
