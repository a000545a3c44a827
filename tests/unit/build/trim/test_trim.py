"""Trimming files, folders and wheels: replacement, preserved attributes, and errors."""

import base64
import csv
import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from fatbins import entry, fat, library

from imagematrix.build.trim import files as trim_files
from imagematrix.build.trim.examination import TrimStatus
from imagematrix.build.trim.rules import Rules
from imagematrix.build.trim.trim import trim
from imagematrix.errors import UsageError

HOPPER = Rules(computes=("9.0",))
LARGE = os.urandom(1 << 16)
RAW = fat(entry(target=80, payload=LARGE), entry(target=90, payload=b"b" * 40))
STAYING = fat(entry(target=90, payload=b"b" * 40)).ljust(len(RAW), b"\0")
TIME = 1_500_000_000_123_456_789


def put(path, raw=RAW):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    return path


@pytest.fixture
def path(tmp_path):
    """A file with device code for two kinds of GPUs."""
    return put(tmp_path / "a.fatbin")


def be_killed_at(change, target):
    """Trim in a process that ends at once where `change` puts `die`."""
    code = (
        "import os, sys; from pathlib import Path; from imagematrix.build.trim import trim, rules\n"
        f"die = lambda *_: os._exit(9)\n{change}\n"
        "trim.trim([Path(sys.argv[1])], rules.Rules(computes=('9.0',)))"
    )
    assert subprocess.run([sys.executable, "-c", code, target], check=False).returncode == 9


def test_file_is_replaced_in_place(path, tmp_path):
    path.chmod(0o751)
    os.utime(path, ns=(TIME, TIME))
    os.setxattr(path, "user.note", b"kept")
    with path.open("rb") as opened:
        report = trim([path], HOPPER)
        assert opened.read() == RAW  # open descriptors keep the old content
    assert [result.status for result in report.results] == [TrimStatus.TRIMMED]
    assert path.read_bytes() == STAYING
    status = path.stat()
    assert (stat.S_IMODE(status.st_mode), status.st_mtime_ns) == (0o751, TIME)
    assert os.getxattr(path, "user.note") == b"kept"
    assert status.st_blocks * 512 < len(LARGE)  # zeros are stored as holes
    assert list(tmp_path.iterdir()) == [path]


def test_second_run_writes_nothing(path):
    trim([path], HOPPER)
    before = path.stat()
    report = trim([path], HOPPER)
    assert [result.status for result in report.results] == [TrimStatus.UNCHANGED]
    assert path.stat().st_ino == before.st_ino


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_owner_and_mode_are_kept(path):
    os.chown(path, 1234, 4321)
    path.chmod(0o4755)
    trim([path], HOPPER)
    status = path.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (1234, 4321, 0o4755)


def test_dry_run_measures_without_writing(path, tmp_path):
    report = trim([path], HOPPER, dry_run=True, output=tmp_path / "out", measure=lambda it: len(b"".join(it)))
    assert path.read_bytes() == RAW
    assert report.results[0].compressed == report.results[0].removed_size == len(LARGE) + 64
    assert not (tmp_path / "out").exists()


def test_hard_links_are_preserved(tmp_path):
    path = put(tmp_path / "lib" / "a.fatbin")
    other = tmp_path / "lib" / "deep" / "b.fatbin"
    other.parent.mkdir()
    other.hardlink_to(path)
    report = trim([tmp_path / "lib", path], HOPPER)
    assert len(report.results) == 1
    assert path.read_bytes() == STAYING
    assert path.samefile(other)
    assert report.linked == ()


def test_hard_link_outside_keeps_the_original(tmp_path):
    path = put(tmp_path / "env" / "a.fatbin")
    cache = tmp_path / "cache"
    cache.hardlink_to(path)
    report = trim([tmp_path / "env"], HOPPER)
    assert (path.read_bytes(), cache.read_bytes()) == (STAYING, RAW)
    assert report.linked == (str(path),)


def test_copy_of_a_file_with_a_hard_link_leaves_both_alone(path, tmp_path):
    (tmp_path / "other").hardlink_to(path)
    assert trim([path], HOPPER, output=tmp_path / "out").linked == ()


def test_symbolic_link_argument_is_followed_and_kept(path, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(path)
    trim([link], HOPPER)
    assert link.is_symlink()
    assert path.read_bytes() == STAYING


def test_links_in_a_folder_are_not_followed(tmp_path):
    outside = put(tmp_path / "outside" / "a.fatbin")
    env = tmp_path / "env"
    env.mkdir()
    (env / "file").symlink_to(outside)
    (env / "folder").symlink_to(outside.parent)
    (env / "itself").symlink_to(env)
    assert trim([env], HOPPER).results == ()
    assert outside.read_bytes() == RAW


def test_paths_with_the_same_name_are_rejected_for_output(tmp_path):
    """The second copy would replace the first."""
    one, other = put(tmp_path / "a" / "x.fatbin"), put(tmp_path / "b" / "x.fatbin")
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="would both become"):
        trim([one, other], HOPPER, output=out)
    assert not out.exists()
    trim([one.parent, one.parent], HOPPER, output=out)  # the same path twice counts once
    assert (out / "a" / "x.fatbin").read_bytes() == STAYING


def test_folders_may_be_deep(tmp_path):
    deepest = tmp_path
    for _ in range(1100):
        deepest /= "d"
        deepest.mkdir()
    path = put(deepest / "a.fatbin")
    trim([tmp_path], HOPPER)
    assert path.read_bytes() == STAYING
    subprocess.run(["rm", "-r", tmp_path / "d"], check=True)  # pytest cannot remove such a deep folder


def test_output_has_trimmed_files_and_copies_of_the_rest(tmp_path):
    env = tmp_path / "env"
    path = put(env / "lib" / "a.fatbin")
    put(env / "text", b"text").chmod(0o640)
    (env / "link").symlink_to("text")
    (env / "other.fatbin").hardlink_to(path)
    os.utime(env / "lib", ns=(TIME, TIME))
    single = put(tmp_path / "b.fatbin")
    out = tmp_path / "out"
    trim([env, single], HOPPER, output=out)
    assert (path.read_bytes(), single.read_bytes()) == (RAW, RAW)
    assert (out / "env" / "lib" / "a.fatbin").read_bytes() == STAYING
    assert (out / "env" / "lib" / "a.fatbin").samefile(out / "env" / "other.fatbin")
    assert (out / "b.fatbin").read_bytes() == STAYING
    assert (out / "env" / "text").read_bytes() == b"text"
    assert stat.S_IMODE((out / "env" / "text").stat().st_mode) == 0o640
    assert (out / "env" / "link").readlink().name == "text"
    assert (out / "env" / "lib").stat().st_mtime_ns == TIME


def test_existing_output_is_not_overwritten(path, tmp_path):
    put(tmp_path / "out" / "a.fatbin", b"mine")
    with pytest.raises(UsageError, match="already exists"):
        trim([path], HOPPER, output=tmp_path / "out")
    assert (tmp_path / "out" / "a.fatbin").read_bytes() == b"mine"


def test_special_files_are_skipped_in_place_but_not_copied(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert trim([tmp_path], HOPPER).results == ()
    with pytest.raises(UsageError, match="not a file, a folder or a link"):
        trim([tmp_path], HOPPER, output=tmp_path / "out")


def test_missing_path_is_rejected(tmp_path):
    (tmp_path / "circle").symlink_to("circle")
    for name in ("a", "circle"):
        with pytest.raises(UsageError, match=name):
            trim([tmp_path / name], HOPPER)


def test_file_changed_during_trimming_is_left_alone(path, tmp_path, monkeypatch):
    copystat = shutil.copystat

    def changed(source, target):
        copystat(source, target)
        with path.open("ab") as file:
            file.write(b"more")

    monkeypatch.setattr("shutil.copystat", changed)
    with pytest.raises(UsageError, match="changed while it was read"):
        trim([path], HOPPER)
    assert path.read_bytes() == RAW + b"more"
    assert list(tmp_path.iterdir()) == [path]


def test_full_disk_leaves_the_file_unchanged(path, tmp_path, monkeypatch):

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UsageError, match="No space left"):
        trim([path], HOPPER)
    assert path.read_bytes() == RAW
    assert list(tmp_path.iterdir()) == [path]


def test_killed_process_leaves_the_file_intact(path, tmp_path):
    be_killed_at("os.fsync = die", path)
    assert path.read_bytes() == RAW
    (left,) = tmp_path.glob(".imagematrix-trim-*")
    trim([tmp_path], HOPPER, dry_run=True)
    assert left.exists()
    trim([tmp_path], HOPPER)
    assert path.read_bytes() == STAYING
    assert list(tmp_path.iterdir()) == [path]


def test_file_written_by_another_process_is_kept(tmp_path):
    put(tmp_path / "a.fatbin")
    with (tmp_path / ".imagematrix-trim-x").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        trim([tmp_path], HOPPER)
        assert Path(file.name).exists()


def test_temporary_file_removed_as_stale_is_recreated(path, tmp_path, monkeypatch):
    flock = fcntl.flock
    removed: list[str] = []

    def late(file, how):
        flock(file, how)
        if not removed:
            removed.append(file.name)
            Path(file.name).unlink()

    monkeypatch.setattr("fcntl.flock", late)
    trim([path], HOPPER)
    assert removed
    assert path.read_bytes() == STAYING
    assert list(tmp_path.iterdir()) == [path]


def test_file_system_without_locks_is_supported(path, tmp_path, monkeypatch):
    other = put(tmp_path / ".imagematrix-trim-x", b"")

    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    trim([tmp_path], HOPPER)
    assert path.read_bytes() == STAYING
    assert other.exists()  # another process may be writing it


NAME = "x-1.dist-info/RECORD"


def hashed(raw):
    return f"sha256={base64.urlsafe_b64encode(hashlib.sha256(raw).digest()).decode().rstrip('=')}"


def record(contents, name):
    rows = [f"{csv_word(path)},{hashed(raw)},{len(raw)}" for path, raw in contents.items()]
    return "\r\n".join([*rows, f"{name},,", ""]).encode()


def csv_word(path):
    return f'"{path}"' if "," in path else path


def rows(raw):
    return {row[0]: row[1] for row in csv.reader(raw.decode().splitlines())}


def test_record_of_an_installed_package_is_updated(tmp_path):
    contents = {"x/a, b.fatbin": RAW, "x/__init__.py": b"", "x/gone.py": b""}
    for path, raw in contents.items():
        put(tmp_path / path, raw)
    (tmp_path / "x" / "gone.py").unlink()
    before = record(contents, NAME)
    path = put(tmp_path / NAME, before)
    other = put(tmp_path / "y-1.dist-info" / "RECORD", record({"y.py": b""}, "y-1.dist-info/RECORD"))
    inode = other.stat().st_ino
    trim([tmp_path], HOPPER)
    assert path.read_bytes() == before.replace(hashed(RAW).encode(), hashed(STAYING).encode())
    assert other.stat().st_ino == inode


@pytest.mark.parametrize("given", ["site/x/lib", "site/x/lib/a.fatbin", "site/x"])
def test_record_of_a_package_of_which_a_part_is_trimmed_is_updated(tmp_path, monkeypatch, given):
    put(tmp_path / "site" / "x" / "lib" / "a.fatbin")
    path = put(tmp_path / "site" / NAME, record({"x/lib/a.fatbin": RAW, "x/b.py": b""}, NAME))
    other = tmp_path / "site" / "y-1.dist-info" / "RECORD"
    other.parent.mkdir()
    other.symlink_to(path)
    monkeypatch.chdir(tmp_path)
    trim([Path(given)], HOPPER, dry_run=True)
    assert rows(path.read_bytes())["x/lib/a.fatbin"] == hashed(RAW)
    trim([Path(given)], HOPPER)
    assert rows(path.read_bytes()) == {
        "x/lib/a.fatbin": hashed(STAYING),
        "x/b.py": hashed(b""),
        NAME: "",
    }
    assert other.is_symlink()


def test_record_is_updated_even_if_a_later_file_fails(tmp_path, monkeypatch):
    put(tmp_path / "a.fatbin")
    put(tmp_path / "b.fatbin")
    put(tmp_path / NAME, record({"a.fatbin": RAW, "b.fatbin": RAW}, NAME))
    replace = trim_files.replace_files
    monkeypatch.setattr(
        trim_files, "replace_files", lambda names, *rest: replace(names, *rest) or _fail(names)
    )

    def _fail(names):
        if names[0].target.name == "a.fatbin":
            raise OSError(5, "Input/output error")

    with pytest.raises(UsageError, match="Input/output error"):
        trim([tmp_path], HOPPER)
    result = rows((tmp_path / NAME).read_bytes())
    assert (result["a.fatbin"], result["b.fatbin"]) == (hashed(STAYING), hashed(RAW))


@pytest.mark.parametrize(
    ("given", "listed"),
    [("env/bin/../lib", "x/a.fatbin"), ("env", "../lib64/x/a.fatbin"), ("env/lib64", "x/a.fatbin")],
)
def test_record_is_updated_if_it_names_a_file_by_another_path(tmp_path, given, listed):
    """Virtual environments have lib64 as a link to lib."""
    path = put(tmp_path / "env" / "lib" / "x" / "a.fatbin")
    (tmp_path / "env" / "bin").mkdir()
    (tmp_path / "env" / "lib64").symlink_to("lib")
    record_file = put(path.parent.parent / NAME, record({listed: RAW, "y\0/a.fatbin": RAW}, NAME))
    trim([tmp_path / given], HOPPER)
    assert path.read_bytes() == STAYING
    assert rows(record_file.read_bytes())[listed] == hashed(STAYING)


def test_record_is_updated_after_a_run_that_was_killed_before_it(tmp_path):
    put(tmp_path / "a.fatbin")
    path = put(tmp_path / NAME, record({"a.fatbin": RAW}, NAME))
    be_killed_at("trim._update_record = die", tmp_path)
    assert trim([tmp_path], HOPPER).recorded == (str(tmp_path / "a.fatbin"),)
    assert rows(path.read_bytes())["a.fatbin"] == hashed(STAYING)
    before = path.stat()
    assert trim([tmp_path], HOPPER).recorded == ()
    assert path.stat().st_ino == before.st_ino


def count_resolved_paths(folder, monkeypatch, count):
    """Return how often links are resolved while so many files are trimmed, each with its RECORD."""
    for number in range(count):
        put(folder / "x" / f"{number}.fatbin")
        put(folder / f"x{number}-1.dist-info" / "RECORD", record({f"x/{number}.fatbin": RAW}, NAME))
    calls = []
    resolve = os.path.realpath
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "realpath", lambda path, **how: calls.append(path) or resolve(path, **how))
        trim([folder], HOPPER)
    return len(calls)


def test_trimmed_files_are_resolved_once_for_all_records(tmp_path, monkeypatch):
    few, many = (count_resolved_paths(tmp_path / str(count), monkeypatch, count) for count in (4, 8))
    assert many <= 2 * few


@pytest.mark.parametrize("break_", ["\u2028", "\x85", "\x1c", "\v", "\f"])
def test_only_line_feeds_end_lines_of_a_record(tmp_path, break_):
    put(tmp_path / "a.fatbin")
    text = f"x{break_}a.fatbin,{hashed(RAW)},1\na.fatbin,{hashed(RAW)},1\n"
    path = put(tmp_path / NAME, text.encode())
    trim([tmp_path], HOPPER)
    assert path.read_bytes().decode().split("\n") == [
        f"x{break_}a.fatbin,{hashed(RAW)},1",
        f"a.fatbin,{hashed(STAYING)},1",
        "",
    ]


def test_quoted_line_feed_is_part_of_a_name(tmp_path):
    put(tmp_path / "a.fatbin")
    before = f'"x\na.fatbin,{hashed(RAW)}",,\r\n'.encode()
    path = put(tmp_path / NAME, before + f"a.fatbin,{hashed(RAW)},1\r\n".encode())
    trim([tmp_path], HOPPER)
    assert path.read_bytes() == before + f"a.fatbin,{hashed(STAYING)},1\r\n".encode()


def test_error_before_a_record_is_copied_is_the_reported_error(tmp_path, monkeypatch):
    put(tmp_path / "env" / "a.fatbin")
    put(tmp_path / "env" / "b.fatbin")
    put(tmp_path / "env" / "x-1.dist-info" / "RECORD")
    replace = trim_files.replace_files

    def fail(names, *rest):
        if names[0].target.name == "b.fatbin":
            raise OSError(5, "Input/output error")
        replace(names, *rest)

    monkeypatch.setattr(trim_files, "replace_files", fail)
    with pytest.raises(UsageError, match="Input/output error"):
        trim([tmp_path / "env"], HOPPER, output=tmp_path / "out")


def wheel(path, contents, *, name=NAME, extra=()):
    """Write a wheel as a build tool would, with RECORD in the middle."""
    with zipfile.ZipFile(path, "w") as archive:
        members = list(contents.items())
        for at, (member, raw) in enumerate(
            [*members[:1], (name, record(contents, name)), *members[1:], *extra]
        ):
            info = zipfile.ZipInfo(member, (2020, 1, 1, at, 0, 0))
            info.external_attr = (0o100755 if at % 2 else 0o100644) << 16
            info.compress_type = zipfile.ZIP_STORED if at % 3 == 2 else zipfile.ZIP_DEFLATED
            archive.writestr(info, raw)
    return path


def move_header(path, name, place):
    """Let the directory of a zip name another place for a file."""
    raw = bytearray(path.read_bytes())
    at = raw.rfind(name.encode()) - 4  # the name follows the place
    raw[at : at + 4] = place.to_bytes(4, "little")
    path.write_bytes(raw)


LONG = f"x/a.fatbin,{'0' * (1 << 18)},\n"  # more than Python's csv takes


def wheel_with_record(path, text):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/a.fatbin", RAW)
        archive.writestr(NAME, text)


def test_record_of_an_installed_package_with_a_long_line_is_an_error(tmp_path):
    put(tmp_path / "x" / "a.fatbin")
    put(tmp_path / NAME, LONG.encode())
    with pytest.raises(UsageError, match=r"/x-1.dist-info: its RECORD cannot be read: field larger than"):
        trim([tmp_path], HOPPER)


def contents(path):
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture
def made(tmp_path):
    lib = library(tmp_path / "libx.so", fat(entry(target=80, payload=LARGE), entry(target=90)))
    files = {"x/libx.so": lib.read_bytes(), "x/é.fatbin": RAW, "x/__init__.py": b"pass\n", "x/empty.py": b""}
    lib.unlink()
    return wheel(tmp_path / "x-1-py3-none-any.whl", files)


def test_trimmed_wheel_is_valid(made, tmp_path):
    before = contents(made)
    report = trim([made], HOPPER, output=tmp_path / "out")
    after = contents(tmp_path / "out" / made.name)
    assert [result.path for result in report.results] == [f"{made}!/x/libx.so", f"{made}!/x/é.fatbin"]
    assert list(after)[-1] == NAME
    assert after["x/é.fatbin"] == STAYING
    assert len(after["x/libx.so"]) == len(before["x/libx.so"])
    assert after["x/libx.so"] != before["x/libx.so"]
    assert after["x/__init__.py"] == before["x/__init__.py"]
    listed = rows(after.pop(NAME))
    assert {name: hashed(raw) for name, raw in after.items()} == {name: listed[name] for name in after}
    assert (tmp_path / "out" / made.name).stat().st_size < made.stat().st_size - 2 * len(LARGE) + 1000
    with zipfile.ZipFile(made) as one, zipfile.ZipFile(tmp_path / "out" / made.name) as other:
        for info in one.infolist():
            now = other.getinfo(info.filename)
            assert (now.date_time, now.external_attr) == (info.date_time, info.external_attr)
            assert now.compress_type == (zipfile.ZIP_DEFLATED if now.file_size > 1000 else info.compress_type)


def test_trimmed_wheel_installs_with_pip(made, tmp_path):
    trim([made], HOPPER)
    into = ["--target", str(tmp_path / "into"), "--no-index", "--no-deps", "-q"]
    metadata = {
        "x-1.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "x-1.dist-info/METADATA": b"Metadata-Version: 2.1\nName: x\nVersion: 1\n",
    }
    wheel(made, {"x/a.fatbin": RAW, **metadata})
    trim([made], HOPPER)
    subprocess.run([sys.executable, "-m", "pip", "install", *into, made], check=True)
    assert (tmp_path / "into" / "x" / "a.fatbin").read_bytes() == STAYING


def test_trimming_a_wheel_is_reproducible_and_idempotent(made, tmp_path):
    trim([made], HOPPER, output=tmp_path / "one")
    trim([made], HOPPER)
    assert (tmp_path / "one" / made.name).read_bytes() == made.read_bytes()
    inode = made.stat().st_ino
    assert {result.status for result in trim([made], HOPPER).results} == {TrimStatus.UNCHANGED}
    assert made.stat().st_ino == inode


def test_wheel_that_vendors_an_installed_package_is_trimmed(made):
    vendored = "x/_vendor/y-2.dist-info/RECORD"
    wheel(made, {"x/a.fatbin": RAW, vendored: b"y.py,,\n"})
    trim([made], HOPPER)
    after = contents(made)
    assert (after["x/a.fatbin"], after[vendored]) == (STAYING, b"y.py,,\n")
    assert rows(after[NAME])["x/a.fatbin"] == hashed(STAYING)


def test_signed_wheel_is_rejected(made):
    wheel(made, {"x/a.fatbin": RAW}, extra=[("x-1.dist-info/RECORD.jws", b"{}")])
    before = made.read_bytes()
    with pytest.raises(UsageError, match="the wheel is signed"):
        trim([made], HOPPER)
    assert made.read_bytes() == before


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-30]), "File is not a zip file"),
        (lambda path: wheel(path, {"x/a.fatbin": RAW}, name="x/RECORD"), "it has no single RECORD"),
        (
            lambda path: wheel(path, {"x/a.fatbin": RAW}, extra=[("y-1.dist-info/RECORD", b"")]),
            "it has no single RECORD",
        ),
        (lambda path: move_header(path, "x/empty.py", 10**6), "it ends before its x/empty.py"),
        (
            lambda path: move_header(path, "x/empty.py", path.stat().st_size - 12),
            "it ends before its x/empty.py",
        ),
        (
            lambda path: wheel(path, {"x/a.fatbin": RAW}, extra=[("x/unlisted.fatbin", RAW)]),
            "its RECORD does not list x/unlisted.fatbin",
        ),
        (
            lambda path: wheel(path, {"x/b.py": b"", "x/a.fatbin": RAW}, extra=[("x/b.py", b"")]),
            "it has x/b.py twice",
        ),
        (
            lambda path: wheel_with_record(path, LONG),
            "its RECORD cannot be read: field larger than field limit (131072)",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_damaged_wheel_is_left_alone(made, spoil, why):
    spoil(made)
    before = made.read_bytes()
    report = trim([made], HOPPER)
    assert [(result.status, result.why) for result in report.results] == [(TrimStatus.DAMAGED, why)]
    assert made.read_bytes() == before


def test_wheel_with_a_large_record_is_left_alone(made, monkeypatch):
    monkeypatch.setattr("imagematrix.build.trim.records.LIMIT", 20)
    (result,) = trim([made], HOPPER).results
    assert result.status is TrimStatus.DAMAGED
    assert result.why.endswith("bytes, more than 20")


def test_copies_of_files_in_a_wheel_are_there_one_at_a_time(made, monkeypatch):
    copies: list[Any] = []
    make = tempfile.TemporaryFile

    def make_next(**options):
        assert all(copy.closed for copy in copies)
        copies.append(make(**options))
        return copies[-1]

    monkeypatch.setattr("imagematrix.audit.binaries.archives.tempfile.TemporaryFile", make_next)
    monkeypatch.setattr("imagematrix.audit.binaries.archives.IN_MEMORY", 10)
    trim([made], HOPPER)
    assert len(copies) == 4  # of two files, to examine and to write them


def test_file_misnamed_as_a_wheel_is_trimmed(tmp_path):
    path = put(tmp_path / "a.whl")
    trim([path], HOPPER)
    assert path.read_bytes() == STAYING


def test_full_disk_is_not_reported_as_a_damaged_wheel(made, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("imagematrix.audit.binaries.archives.tempfile.TemporaryFile", full)
    monkeypatch.setattr("imagematrix.audit.binaries.archives.IN_MEMORY", 10)
    with pytest.raises(UsageError, match="No space left"):
        trim([made], HOPPER)
