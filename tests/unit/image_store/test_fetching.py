"""Bringing images into a store, from a registry in memory."""

import contextlib
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from images import layout, archived, saved, tar
from storing import LAYERS, put, variant

from imagematrix.errors import AuditError, EngineError, UnknownImageError, UsageError
from imagematrix.image_store.fetching import FetchOptions, Published, Watcher, fetch
from imagematrix.image_store.folder import ImageStore
from imagematrix.image_store.sources import ArchiveSource, LayoutSource, RegistrySource
from imagematrix.oci.layout import LayoutFolder
from imagematrix.oci.registry import Registry

CATALOG = {"schema": "imagematrix.catalog/v1", "image": "t", "version": "v1", "prefer": [], "variants": []}
PUBLISHED = Published(references=("t:v1-x",), variant={"reference": "t:v1-x"}, catalog=CATALOG)
UNPACKED = FetchOptions(unpacked=True)


def from_registry(server, repository="ml/training"):
    @contextlib.contextmanager
    def source():
        with Registry(f"{server.address}/{repository}") as registry:
            yield RegistrySource(registry)

    return source


def files(root):
    """Return the files in an unpacked image with their content."""
    found = [path for path in sorted(Path(root).rglob("*")) if path.is_file() and not path.is_symlink()]
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


@pytest.mark.parametrize("unpacked", [False, True])
def test_an_image_has_its_merged_files_and_what_its_catalog_says(server, image_store, tmp_path, unpacked):
    image, name = variant()
    put(server, (image, name))
    found = fetch(image_store, from_registry(server), image.digest, PUBLISHED, FetchOptions(unpacked=unpacked))
    root = found.root
    if not unpacked:
        root = tmp_path / "root"
        subprocess.run(
            ["unsquashfs", "-q", "-no-progress", "-d", root, found.root],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    assert files(root) == {
        "etc/os-release": b"ID=test\n",
        "bin/tool": b"#!/bin/true\n",
        "data/new": b"x" * 5000,
    }
    assert found == image_store.find(image.digest)
    assert found.references == ("t:v1-x",)
    assert found.config["architecture"] == "amd64"
    assert image_store.catalog("t", "v1") == CATALOG
    assert os.listdir(f"{image_store}/new") == os.listdir(f"{image_store}/partial") == os.listdir(f"{image_store}/locks") == []
