"""Tests of the lookup of the node's programs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from imagematrix.common import programs
from imagematrix.common.programs import find_program

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


search_path = programs._get_path


@pytest.fixture(autouse=True)
def _ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_get_path", search_path)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


def program(path: Path, mode: int = 0o755) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(mode)
    return path


def test_it_is_the_first_in_an_absolute_folder_of_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    program(here / "tool")
    program(here / "relative/tool")
    monkeypatch.chdir(here)
    (tmp_path / "folder/tool").mkdir(parents=True)
    program(tmp_path / "data/tool", 0o644)
    found = program(tmp_path / "bin/tool")
    program(tmp_path / "later/tool")
    folders = ["", ".", "relative", *(tmp_path / name for name in ("none", "folder", "data", "bin", "later"))]
    monkeypatch.setenv("PATH", ":".join(map(str, folders)))

    assert find_program("tool") == str(found)
    assert find_program("other", "tool") == str(found)
    assert find_program("other") is None
    monkeypatch.setenv("PATH", ":.:relative:")
    assert find_program("tool") is None


def test_root_does_not_use_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    program(tmp_path / "bin/tool")
    system = program(tmp_path / "system/tool")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert find_program("tool") is None
    monkeypatch.setattr(programs, "SYSTEM_PATH", str(tmp_path / "system"))
    assert find_program("tool") == str(system)


@pytest.mark.parametrize("user", [0, 1000])
def test_the_site_adds_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, write_site: Callable[[str], Path], user: int
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    found = program(tmp_path / "opt/tool")
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_program("tool") is None
    write_site(f'program_folders = ["{tmp_path / "opt"}"]\n')
    assert find_program("tool") == str(found)
