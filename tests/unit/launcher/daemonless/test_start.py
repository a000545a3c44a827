"""The choice of a runtime, and what is refused before one starts."""

import os
from pathlib import Path

import pytest

from imagematrix.common.record import replace
from imagematrix.common.settings import RUNTIMES
from imagematrix.errors import EngineError, UnknownImageError, UsageError
from imagematrix.images.local_store.folder import ImageStore, Lease
from imagematrix.images.local_store.holder import Holder
from imagematrix.launcher.daemonless import start
from imagematrix.launcher.daemonless.oci import OciRuntime
from imagematrix.launcher.daemonless.runtime import require_text


@pytest.mark.parametrize(
    ("installed", "hybrid", "found"),
    [
        (RUNTIMES, False, "runc"),
        (("crun", "bwrap"), False, "crun"),
        (("crun", "bwrap"), True, "bwrap"),
    ],
)
def test_the_first_runtime_that_works_is_taken(programs, monkeypatch, tmp_path, installed, hybrid, found):
    programs(**dict.fromkeys((name.replace("-", "_") for name in installed), ""))
    monkeypatch.setattr(start, "HYBRID", str(tmp_path if hybrid else tmp_path / "none"))
    assert start.choose_runtime("oci", None).name == found
    assert start.choose_runtime("oci", "crun").name == "crun"


@pytest.mark.parametrize(
    ("installed", "found", "root"),
    [
        (("runc", "ch-run", "bwrap"), "bwrap", False),
        (("runc", "ch-run"), "ch-run", False),
        (("runc",), "runc", True),
    ],
)
def test_a_process_keeps_its_user_s_number_where_a_runtime_lets_it(programs, installed, found, root):
    programs(**dict.fromkeys((name.replace("-", "_") for name in installed), ""))
    runtime = start.choose_runtime("oci", None, of_user=True)
    assert (runtime.name, runtime.as_root) == (found, root)
    assert Path(runtime.program).name == found
    assert start.choose_runtime("oci", "runc", of_user=True).name == "runc"
    assert start.choose_runtime("oci", None).name == "runc"


@pytest.mark.parametrize(
    ("engine", "wanted", "missing", "package"),
    [
        ("oci", None, "runc, crun, bwrap", "runc"),
        ("oci", "bwrap", "bwrap", "bubblewrap"),
        ("oci", "crun", "crun", "crun"),
        ("charliecloud", None, "ch-run", "charliecloud-runtime"),
    ],
)
def test_a_missing_runtime_has_a_remedy(programs, engine, wanted, missing, package):
    programs()
    with pytest.raises(EngineError, match=f"{missing} not found") as caught:
        start.choose_runtime(engine, wanted)
    assert f"`apt install {package}`" in caught.value.remedy


class Store(ImageStore):
    """A store that has no image, and grants a lease on it."""

    def __init__(self, path="/store"):
        super().__init__(path)
        self.released = []

    def take_lease(self, *_):
        return Lease(path=self.path if Path(self.path).is_file() else None, holder=Holder.from_pid())

    def find(self, _):
        return None


RUNC = OciRuntime("runc", "/usr/bin/runc")


def test_a_terminal_needs_one(bare, stored, monkeypatch):
    monkeypatch.setattr(os, "isatty", lambda _: False)
    with pytest.raises(UsageError, match="--tty: the input is no terminal"):
        start.run_container(replace(bare, terminal=True), stored("/image"), RUNC, Store())


@pytest.mark.parametrize("kind", ["folder", "squashfs"])
def test_an_image_that_was_removed_meanwhile_is_an_error(bare, stored, tmp_path, kind):
    lease = tmp_path / "lease"
    lease.touch()
    with pytest.raises(UnknownImageError, match="was removed from /"):
        start.run_container(bare, stored("/image", kind), RUNC, Store(lease))
    assert not lease.exists()


def test_a_store_that_cannot_be_written_to_is_told(bare, stored):
    told: list[str] = []
    with pytest.raises(UnknownImageError):
        start.run_container(bare, stored("/image"), RUNC, Store(), warn=told.append)
    assert told == [
        (
            "/store cannot be written to, so nothing protects the image there while the container runs; "
            "whoever owns it changes this with `install -d -m 1777 /store/leases`"
        )
    ]


@pytest.mark.parametrize("changes", [{"folder": "/a\0b"}, {"args": ("a\0",)}, {"environment": {"A": "\0"}}])
def test_a_null_byte_is_an_error(bare, stored, changes):
    with pytest.raises(UsageError, match="a null byte in "):
        start.run_container(replace(bare, **changes), stored("/image"), RUNC, Store())


def test_a_variable_without_a_name_is_an_error(bare):
    require_text(bare)
    with pytest.raises(UsageError, match="empty name"):
        require_text(replace(bare, environment={"": "x"}))
