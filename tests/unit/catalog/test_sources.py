"""Which source a name refers to, and how a source is added."""

import json
import sys
from types import SimpleNamespace

import pytest

from imagematrix.catalog import sources
from imagematrix.catalog.sources import Source, list_catalogs, open_catalog
from imagematrix.errors import EngineError, UnknownImageError


@pytest.fixture
def saved(shipped_catalog, tmp_path):
    path = tmp_path / "training.json"
    path.write_text(json.dumps(shipped_catalog.to_json()))
    return str(path)


def test_file_catalog_is_narrowed_to_the_requested_image(saved, shipped_catalog):
    assert open_catalog(None, saved) == open_catalog("training", saved) == shipped_catalog
    variant = shipped_catalog.variants[0]
    assert open_catalog(variant.reference, saved).variants == (variant,)
    with pytest.raises(UnknownImageError, match="is the catalog of training:v1, not of trainin:v1") as caught:
        open_catalog("trainin:v1", saved)
    assert caught.value.remedy == "did you mean 'training:v1'?"


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

    def catalog(name):
        if name.endswith(":v9"):
            raise UnknownImageError(f"{name} not found")
        return shipped_catalog

    module = SimpleNamespace(catalog=catalog, catalogs=lambda image: [shipped_catalog] if image else [])
    monkeypatch.setitem(sys.modules, "imagematrix.catalog.shelf", module)

    def its(name):
        return name.startswith("shelf.")

    monkeypatch.setattr(
        sources, "SOURCES", (Source(name="shelf", takes=its, keeps=its, own_names=True), *sources.SOURCES)
    )


@pytest.mark.usefixtures("shelf", "no_engine")
def test_new_source_needs_one_entry(shipped_catalog):
    assert open_catalog("shelf.local/training:v1") == shipped_catalog
    assert open_catalog("training:v1", "shelf.local/x") == shipped_catalog
    assert list_catalogs("shelf.local/training") == [shipped_catalog]
    with pytest.raises(EngineError):
        open_catalog("training:v1")
