"""Which extra a missing module is of, and how one installs it."""

import shlex
import sys
import tomllib
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from imagematrix.common import extras
from imagematrix.common.extras import find_missing_extra, make_install_command

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]


@pytest.fixture
def _bare(monkeypatch):
    """Without the distributions that extras bring."""
    find = metadata.distribution

    def distribution(name):
        if name in ("aiohttp", "grpcio", "protobuf", "yarl"):
            raise PackageNotFoundError(name)
        return find(name)

    monkeypatch.setattr(metadata, "distribution", distribution)


@pytest.mark.usefixtures("_bare")
@pytest.mark.parametrize(
    ("module", "command", "extra"),
    [
        ("aiohttp", "imagematrix kubernetes webhook", "kubernetes"),
        ("aiohttp", "imagematrix resolver", "resolver"),
        ("yarl", "", "resolver"),
        ("grpc", "", "kubernetes"),
        ("google", "", "kubernetes"),
        ("google.protobuf", "", "kubernetes"),
    ],
)
def test_the_extra_is_the_smallest_that_has_the_module_or_that_of_the_command(module, command, extra):
    assert find_missing_extra(ModuleNotFoundError(name=module), command) == extra


@pytest.mark.usefixtures("_bare")
@pytest.mark.parametrize(
    "module", [None, "", "yaml", "imagematrix", "goo", "google.cloud", "aiohttp.web", "multidict"]
)
def test_other_modules_are_of_no_extra(module):
    assert find_missing_extra(ModuleNotFoundError(name=module)) is None


@pytest.mark.parametrize("module", ["aiohttp", "grpc", "google", "yarl"])
def test_a_broken_installation_is_no_missing_extra(module):
    assert find_missing_extra(ModuleNotFoundError(name=module)) is None


@pytest.mark.usefixtures("_bare")
def test_a_copy_of_our_modules_has_no_extras(monkeypatch):
    monkeypatch.setattr(extras, "PACKAGE", "imagematrix-as-a-copy")
    assert find_missing_extra(ModuleNotFoundError(name="grpc")) is None


def test_the_command_works_when_it_is_pasted(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/opt/my venv/bin/python")
    words = ["/opt/my venv/bin/python", "-m", "pip", "install", "imagematrix[resolver]"]
    assert shlex.split(make_install_command("resolver")) == words
    assert make_install_command("resolver").endswith(" 'imagematrix[resolver]'")


def test_without_pip_the_command_is_uv_s(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    words = ["uv", "pip", "install", "--python", sys.executable, "imagematrix[resolver]"]
    assert shlex.split(make_install_command("resolver")) == words


def test_modules_have_the_names_that_deptry_knows():
    known = PROJECT["tool"]["deptry"]["package_module_name_map"]
    brought = {Requirement(text).name for texts in EXTRAS.values() for text in texts}
    renamed = {name: module.partition(".")[0] for name, module in extras.MODULES.items()}
    assert renamed == {name: known[name][0] for name in brought & known.keys()}


def test_all_has_every_extra():
    (everything,) = map(Requirement, EXTRAS["all"])
    assert (everything.name, everything.extras | {"all"}) == ("imagematrix", EXTRAS.keys())


def test_import_linter_knows_who_may_import_each_module():
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    protected = {name for contract in contracts for name in contract.get("protected_modules", ())}
    brought = {Requirement(text).name for texts in EXTRAS.values() for text in texts} - {"imagematrix"}
    assert protected == {extras.MODULES.get(name, name).partition(".")[0] for name in brought}
