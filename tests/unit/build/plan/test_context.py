"""The files of a build context: their digest and their snapshot."""

import os
import shutil
import stat
import subprocess

import pytest

from imagematrix.build.plan.context import STATE, TIME, Snapshots, list_context, load_listing, record_listing
from imagematrix.common.temp_folder import HELD, make_owned_folder, make_scratch_folder
from imagematrix.errors import BuildError, UsageError


def digest(folder):
    return list_context(folder).digest


@pytest.fixture
def folder(tmp_path):
    """A context with files of all kinds."""
    made = tmp_path / "context"
    (made / "sub").mkdir(parents=True)
    (made / "empty").mkdir()
    (made / "main.c").write_text("int main;")
    (made / "sub" / "run.sh").write_text("true")
    (made / "twin").write_text("int main;")
    (made / "link").symlink_to("main.c")
    (made / "dangling").symlink_to("/nowhere/at/all")
    (made / os.fsdecode(b"\xff.bin")).write_bytes(b"\xff\x00")
    (made / "ignored.log").write_text("much")
    (made / ".dockerignore").write_text(
        "# what no Dockerfile copies\n\n  **/*.log  \nsecret\n!sub/kept.log\n"
    )
    return made


def _replace(path, new):
    path.unlink()
    new(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "main.c").write_text("int main();"),
        lambda folder: (folder / "sub" / "run.sh").chmod(0o755),
        lambda folder: (folder / "main.c").rename(folder / "other.c"),
        lambda folder: (folder / "main.c").rename(folder / "sub" / "main.c"),
        lambda folder: (folder / "new").touch(),
        lambda folder: (folder / "empty").rmdir(),
        lambda folder: _replace(folder / "link", lambda path: path.symlink_to("./main.c")),
        lambda folder: _replace(folder / "link", lambda path: path.write_text("int main;")),
        lambda folder: _replace(folder / "dangling", lambda path: path.write_text("link /nowhere/at/all")),
        lambda folder: (folder / "sub" / "kept.log").touch(),
        lambda folder: (folder / ".dockerignore").write_text("**/*.log\nsecret\n"),
    ],
)
def test_digest_covers_everything_a_build_can_copy(folder, change):
    before = digest(folder)
    change(folder)
    assert digest(folder) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "ignored.log").write_text("more"),
        lambda folder: (folder / "sub" / "x.log").mkdir(),
        lambda folder: (folder / "secret").mkdir(),
        lambda folder: os.utime(folder / "main.c", (-1, -1)),
        lambda folder: (folder / "main.c").chmod(0o664),
        lambda folder: (folder / "main.c").chmod(0o604),
        lambda folder: (folder / "sub").chmod(0o700),
        lambda folder: folder.chmod(0o775),
        lambda folder: os.mknod(folder / "socket", stat.S_IFSOCK),
        lambda folder: _replace(folder / "twin", lambda path: path.hardlink_to(folder / "main.c")),
    ],
)
def test_digest_ignores_what_a_build_cannot_copy(folder, change):
    before = digest(folder)
    change(folder)
    assert digest(folder) == before


def test_digest_does_not_depend_on_the_location(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "elsewhere", symlinks=True)
    assert digest(tmp_path / "elsewhere") == digest(folder)


@pytest.mark.parametrize("name", [".dockerignore", "Dockerfile"])
def test_dockerfile_and_dockerignore_are_treated_like_other_files(folder, name):
    (folder / ".dockerignore").write_text("*\n!main.c\n")
    (folder / "Dockerfile").write_text("FROM one\n")
    before = digest(folder)
    with (folder / name).open("a") as file:
        file.write("# changed\n")
    assert digest(folder) == before
    (folder / "main.c").write_text("another")
    assert digest(folder) != before


def test_links_to_folders_are_not_followed(folder):
    (folder / ".dockerignore").unlink()
    (folder / "sub" / "up").symlink_to("..")
    before = digest(folder)
    (folder / "sub" / "up").unlink()
    (folder / "sub" / "up").symlink_to("../sub")
    assert digest(folder) != before


def test_empty_folder_has_a_digest(tmp_path):
    (tmp_path / "empty").mkdir()
    assert digest(tmp_path / "empty").startswith("sha256:e3b0c442")


@pytest.fixture
def nobody():
    """Run as a user who cannot read root's files."""
    if os.getuid() == 0:
        os.seteuid(65534)
    yield
    os.seteuid(os.getuid())


def test_unreadable_file_is_named(folder, request):
    (folder / "main.c").chmod(0)
    request.getfixturevalue("nobody")
    with pytest.raises(UsageError, match=rf"{folder}.*: Permission denied"):
        digest(folder)


def test_special_file_is_rejected_by_name(folder):
    (folder / "sub" / "kept.log").unlink(missing_ok=True)
    os.mkfifo(folder / "pipe")
    with pytest.raises(UsageError, match=rf"{folder}/pipe is not a file") as caught:
        list_context(folder)
    assert ".dockerignore" in caught.value.remedy
    (folder / ".dockerignore").write_text("pipe\n")
    list_context(folder)


def test_folders_may_be_nested_deeper_than_the_recursion_limit(tmp_path):
    deep = tmp_path / "deep"
    subprocess.run(["mkdir", "-p", f"{deep}{'/a' * 1200}"], check=True)
    try:
        assert len(list_context(deep).entries) == 1200
    finally:
        subprocess.run(["rm", "-r", deep], check=True)


def test_changed_files_are_named(folder):
    before = list_context(folder)
    assert before.find_changed_paths(before) == ()
    (folder / "main.c").write_text("other")
    (folder / "sub" / "run.sh").chmod(0o755)
    (folder / "empty").rmdir()
    (folder / "new\x1b[31m").touch()
    assert list_context(folder).find_changed_paths(before) == (
        "empty",
        "main.c",
        "new",
        "sub/run.sh",
    )


def test_recorded_listing_is_read_back(folder, tmp_path):
    result, state = list_context(folder), tmp_path / STATE
    assert load_listing(state, result.digest) is None
    record_listing(state, result)
    record_listing(state, result)
    assert load_listing(state, result.digest) == result
    (path,) = (state / "contexts").iterdir()
    path.write_bytes(b"damaged")
    assert load_listing(state, result.digest) is None
    for name in ("", "..", "\0", "sha256:../../x"):
        assert load_listing(state, name) is None


@pytest.fixture
def snapshots(folder, tmp_path):
    (tmp_path / "scratch").mkdir()
    return Snapshots(tmp_path / "scratch", {folder: list_context(folder)}, tmp_path / STATE)


def test_snapshot_without_a_folder_is_empty(tmp_path):
    assert not list_context(None).entries
    taken = Snapshots(tmp_path, {None: list_context(None)}, tmp_path / STATE).take(None)
    assert list(taken.iterdir()) == []


def test_snapshot_contains_exactly_the_listed_files(folder, snapshots, tmp_path):
    os.utime(folder / "main.c", (-1, -1))
    (folder / "sub").chmod(0o2775)
    umask = os.umask(0o077)
    taken = snapshots.take(folder)
    os.umask(umask)
    assert snapshots.take(folder) == taken, "one snapshot for all cells"
    planned = list_context(folder)
    assert taken.name == planned.digest.removeprefix("sha256:"), "BuildKit caches by this name"
    (taken / ".dockerignore").unlink()  # otherwise it would exclude files
    everything = {str(path.relative_to(taken)): path.lstat() for path in taken.rglob("*")}
    assert everything.keys() == planned.entries.keys() - {".dockerignore"}
    assert {status.st_mtime for status in everything.values()} == {TIME}
    assert {stat.S_IMODE(one.st_mode) for one in everything.values() if stat.S_ISDIR(one.st_mode)} == {0o755}
    assert stat.S_IMODE(taken.stat().st_mode) == 0o755
    assert stat.S_IMODE(everything["main.c"].st_mode) == 0o644
    assert str((taken / "dangling").readlink()) == "/nowhere/at/all"
    assert everything["main.c"].st_ino != (folder / "main.c").stat().st_ino, "an editor may write in place"
    assert load_listing(tmp_path / STATE, planned.digest) == planned


def test_temporary_folders_may_be_in_the_context(folder, tmp_path, monkeypatch):
    planned = list_context(folder)
    monkeypatch.setenv("TMPDIR", str(folder))
    with make_scratch_folder() as within, make_owned_folder(HELD):
        taken = Snapshots(within, {folder: planned}, tmp_path / STATE).take(folder)
        assert (taken / "main.c").is_file()
    assert list_context(folder) == planned


def test_context_changed_after_the_plan_is_a_build_error(folder, snapshots):
    (folder / "main.c").write_text("other")
    with pytest.raises(BuildError, match=r"changed after the plan was made: main\.c") as caught:
        snapshots.take(folder)
    assert "build again" in caught.value.remedy
    assert not list(snapshots.folder.iterdir()), "the next cell copies all of it again"
    for number in range(7):
        (folder / f"new{number}").touch()
    with pytest.raises(BuildError, match=r"plan was made: main\.c, new0, new1, new2, new3, …"):
        snapshots.take(folder)
    for number in range(7):
        (folder / f"new{number}").unlink()
    (folder / "main.c").write_text("int main;")
    assert snapshots.take(folder)


def test_files_are_hashed_while_they_are_copied(folder, snapshots, monkeypatch):
    """The snapshot matches the digest even if a file is written while it is read."""
    real = os.fstat

    def writing(number):
        (folder / "main.c").write_text("other")
        return real(number)

    monkeypatch.setattr(os, "fstat", writing)
    with pytest.raises(BuildError, match=r"main\.c"):
        snapshots.take(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda taken: (taken / "main.c").write_text("int main;"),
        lambda taken: (taken / "sub" / "new").touch(),
        lambda taken: (taken / "empty").rmdir(),
        lambda taken: os.utime(taken / "main.c", (TIME, TIME)),
    ],
)
def test_modified_snapshot_is_detected(folder, snapshots, change):
    snapshots.require_unchanged(folder)
    change(snapshots.take(folder))
    with pytest.raises(BuildError, match="was changed while an image was built from it"):
        snapshots.require_unchanged(folder)


def test_an_ignore_file_is_a_file_of_the_context(tmp_path):
    context = tmp_path / "context"
    (context / "inner").mkdir(parents=True)
    (context / "a").touch()
    (tmp_path / "secret").write_text("a[\n")
    (context / ".dockerignore").symlink_to("../secret")
    with pytest.raises(UsageError, match=r"\.dockerignore is a link out of the context") as caught:
        list_context(context)
    assert "a[" not in str(caught.value)
    (context / ".dockerignore").unlink()
    (context / "inner" / "patterns").write_text("a\r\n.dockerignore\ninner\n")
    (context / ".dockerignore").symlink_to("inner/patterns")
    assert not list_context(context).entries
    (context / ".dockerignore").unlink()
    (context / ".dockerignore").write_text("x\n" * (1 << 16))
    with pytest.raises(UsageError, match=r"\.dockerignore exceeds 64 KiB"):
        list_context(context)
