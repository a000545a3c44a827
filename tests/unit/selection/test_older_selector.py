"""A selector from before there were warm images: it does not see them, and chooses the same variant.

It is the last commit without them, from the history of this repository.
"""

import json
import os
import subprocess
import sys
import tarfile
from io import BytesIO
from itertools import product
from pathlib import Path

import pytest
from publishing import put_warm

from imagematrix.build.publish.publish import IndexSelection, publish
from imagematrix.images.catalog.catalog import Catalog
from imagematrix.images.catalog.sources import open_catalog
from imagematrix.images.catalog.warm_image import WarmImage, WarmMatch
from imagematrix.selection.selector import explain

ROOT = Path(__file__).parents[3]
ADDED = "imagematrix/images/catalog/warm_image.py"  # by the first commit with warm images


def git(*words):
    done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else b""


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """Call it with a command of the older program to get its exit code and its answer."""
    is_whole = git("rev-parse", "--is-shallow-repository").strip() == b"false"
    added = git("log", "--format=%H", "--diff-filter=A", "--", ADDED).decode().split() if is_whole else ()
    archive = git("archive", f"{added[-1]}^", "imagematrix") if added else b""
    if not archive:
        pytest.skip("there is no history of this repository: git clone without --depth has it")
    folder = tmp_path_factory.mktemp("older")
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")

    def call(*words):
        done = subprocess.run(
            [sys.executable, "-m", "imagematrix", *map(str, words)],
            cwd=folder,
            env={"PATH": os.environ["PATH"], "HOME": str(folder), "DOCKER_CONFIG": str(folder)},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout and json.loads(done.stdout)

    return call


@pytest.fixture
def choose(older, make, tmp_path):
    """Call it with a catalog, and where it is, to get today's choice for a host; the older is equal."""
    host = make.host(make.gpu(memory_mib=46068))
    (tmp_path / "host.json").write_text(json.dumps(host.to_json()))

    def call(catalog, *words):
        today = explain(host, catalog)
        code, answer = older("select", *words, "--host", tmp_path / "host.json", "--json")
        assert code == 0
        assert "warm" not in answer
        assert (answer["selected"], answer["digest"]) == (today.selected, today.digest)
        return today

    return call


def test_of_a_catalog(choose, make, tmp_path):
    """Of which each variant has a warm image for all hosts, and one for none."""
    variants = [
        make.variant(f"t:v1-{cubin}", cubins=(cubin,), digest=f"sha256:{cubin * 32}")
        for cubin in ("80", "89")
    ]
    warm = [
        WarmImage(
            base=variant.digest,
            reference=f"{variant.reference}-warm",
            digest=f"sha256:{number:064x}",
            match=WarmMatch.from_json(match),
            schema=1,
        )
        for number, (variant, match) in enumerate(product(variants, ({}, {"cpu": {"vendor": "of no CPU"}})))
    ]
    catalog = Catalog(image="t", version="v1", variants=tuple(variants), warm=tuple(warm))
    (tmp_path / "catalog.json").write_text(json.dumps(catalog.to_json()))
    today = choose(catalog, "t:v1", "--catalog", tmp_path / "catalog.json")
    assert (today.selected, today.warm) == ("t:v1-89", warm[2])


def test_of_an_index(choose, older, registry, repository, image, add_variant, variant, tmp_path):
    base = add_variant("a", VARIANT=variant("x86-64-v2", cuda="12.4"))
    warm = put_warm(repository, base, match={})
    publish(registry, "v1", selection=IndexSelection(warm=[warm]))
    name = f"{image}:v1"
    assert choose(open_catalog(name), name).warm.digest == warm.digest
    code, listed = older("ls", name, "--json")
    assert (code, [one["digest"] for one in listed["variants"]]) == (0, [base])
    host = ("--host", tmp_path / "host.json")
    assert older("select", f"{image}@{warm.digest}", *host)[0] == 4  # it is no variant
