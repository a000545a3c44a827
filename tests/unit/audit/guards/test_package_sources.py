"""Which Python sources of a layer are kept for the reading of guards."""

import io
import time
from pathlib import Path

import pytest
from counting import counted

import imagematrix
from imagematrix.audit.guards import package_sources
from imagematrix.audit.guards.package_sources import PackageSources

PACKAGE = Path(imagematrix.__file__).parent
SITE = "/usr/lib/python3/site-packages/"


def needed(texts, coded=("pkg/_a_C.so", "pkg/_b_C.so")):
    """Return the names of the modules that are kept of a package with these files."""
    sources = PackageSources(io.BytesIO())
    for name, text in texts.items():
        sources.keep(f"{SITE}pkg/{name}.py", text)
    listed = [f"{SITE}pkg/{name}.py" for name in texts]
    found = sources.choose_sources([(listed, [SITE + path for path in coded])])
    return [path.rpartition("/")[2].removesuffix(".py") for path, _ in found]


def test_modules_that_name_a_file_answer_or_carry_it_are_kept():
    texts = {
        "loads": b"from pkg import _a_C\nfrom pkg.arch import is_new\nget_device_capability()\n",
        "arch": b"def is_new():\n    return get_device_capability() > (9, 0)\n",
        "utils": b"import pkg._b_C\n",
        "imports": b"from pkg.utils import run\n",
        "other": b"import utils\nx = 'a'\n",
    }
    assert sorted(needed(texts)) == ["arch", "imports", "loads", "utils"]


@pytest.mark.parametrize(
    "text",
    [
        b"from .utils import run\n",
        b"from . import utils\n",
        b"from.import utils as tools\n",
        b"from . import (  # (all)\n    other,\n    utils,\n)\n",
        b"try: from . import other, \\\n    utils\n",
        b"import a, pkg.utils as tools\n",
        b"import_module('pkg.utils')\n",
    ],
)
def test_modules_that_import_one_that_asks_nothing_are_kept(text):
    assert needed({"utils": b"import pkg._b_C\n", "imports": text}) == ["utils", "imports"]


@pytest.mark.parametrize("text", [b"import os, pkg._b_C\n", b"from pkg._b_C import (\n    run)\n"])
def test_of_modules_that_import_one_that_asks_nothing_one_is_enough(text):
    texts = {"utils": text} | dict.fromkeys("ab", b"import pkg.utils\n")
    assert needed(texts) == ["utils", "a"]
    assert needed(texts | {"utils": text + b"get_device_capability()\n"}) == ["utils"]


def test_long_words_are_read_in_time_that_grows_with_them():
    started = time.process_time()
    assert needed({"utils": b"import pkg._b_C\n", "long": b"a" * 300_000 + b"\nfrom " + b"b" * 200_000}) == [
        "utils"
    ]
    assert time.process_time() - started < 10


def test_file_with_other_characters_in_its_name_is_found_by_a_word_of_it():
    texts = {"loads": b"CDLL(f'{HERE}/lib-kernels-90.so')\n", "other": b"import lib\n"}
    assert needed(texts, ("pkg/lib-kernels-90.so", "pkg/_b_C.so")) == ["loads"]


def test_work_of_choosing_sources_grows_with_the_files_only():
    """Not with the files times the sources."""

    def count(number):
        sources = PackageSources(io.BytesIO())
        sources.keep(f"{SITE}pkg/it.py", b"a " * 100_000)
        coded = [f"{SITE}pkg/a{n:x}_C.so" for n in range(number)]
        chosen = sources.choose_sources([([f"{SITE}pkg/it.py"], coded)])
        return counted(lambda: [*chosen], PACKAGE).total()

    assert count(1000) < 5.5 * count(200)


def test_word_that_is_also_a_modules_name_keeps_nothing():
    """With hundreds of such modules, the steps for all packages would not suffice."""
    texts = {"utils": b"import pkg._b_C\n"} | {f"m{n}": b"from .other import utils\n" for n in range(50)}
    assert needed(texts) == ["utils"]


def test_package_with_one_such_file_has_no_other_to_use_instead():
    assert needed({"loads": b"from pkg import _a_C\n"}, ("pkg/_a_C.so",)) == []


def test_only_modules_of_installed_packages_are_kept():
    text = b"from pkg import _a_C\n"
    coded = [f"{SITE}pkg/_a_C.so", f"{SITE}pkg/_b_C.so"]
    sources = PackageSources(io.BytesIO())
    paths = [f"{SITE}pkg/it.py", "/app/it.py", f"{SITE}pkg/it.so"]
    for path in paths:
        sources.keep(path, text)
    assert [*sources.choose_sources([(paths, coded)])] == [(paths[0], text)]


def test_a_source_for_which_there_is_no_room_is_not_kept(monkeypatch):
    monkeypatch.setattr(package_sources, "WHOLE", 30)
    path, coded = f"{SITE}pkg/it.py", [f"{SITE}pkg/_a_C.so", f"{SITE}pkg/_b_C.so"]
    sources = PackageSources(io.BytesIO())
    sources.keep(path, b"from pkg import _a_C\n")
    sources.keep(path, b"from pkg import _b_C\n")  # a later entry of the same path
    assert [*sources.choose_sources([([path], coded)])] == []


def test_package_with_very_many_files_asks_for_none_by_its_name(monkeypatch):
    monkeypatch.setattr(package_sources, "MOST_FILES", 2)
    texts = {"loads": b"from pkg import _a_C\n"}
    assert needed(texts) == ["loads"]
    assert needed(texts, ("pkg/_a_C.so", "pkg/_b_C.so", "pkg/_c_C.so")) == []


def test_of_a_package_with_too_much_text_no_source_is_kept_and_of_the_next_one_all(monkeypatch):
    monkeypatch.setattr(package_sources, "MOST_TEXT", 30)
    text = b"from pkg import _a_C\n"
    sources = PackageSources(io.BytesIO())
    large = [f"{SITE}large/{name}.py" for name in "ab"]
    small = [f"{SITE}pkg/it.py"]
    for path in (*large, *small):
        sources.keep(path, text)
    packages = [
        (paths, [f"{SITE}{package}/_a_C.so", f"{SITE}{package}/_b_C.so"])
        for package, paths in (("large", large), ("pkg", small))
    ]
    assert [*sources.choose_sources(packages)] == [(small[0], text)]
