"""The dynamic linker's cache that cross builds write, compared with that of this machine's ldconfig."""

import platform
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from compiling import compiled

PROGRAM = Path(__file__).parents[3] / "templates/linker_cache.py"
LDCONFIG = Path("/sbin/ldconfig")
ARCH = "x86_64"


@pytest.fixture(scope="module")
def program():
    return SimpleNamespace(**runpy.run_path(str(PROGRAM)))


@pytest.fixture
def configuration(tmp_path):
    """A file like ld.so.conf, with two folders of libraries."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        compiled(folder / "libone.so.1.2", "int f;", "-shared", "-Wl,-soname,libone.so.1")
        (folder / "libone.so.1").symlink_to("libone.so.1.2")
    (first / "libone.so").symlink_to(first / "libone.so.1")
    compiled(first / "libplain.so", "int f;", "-shared")
    for number in (9, 10):
        compiled(second / f"libmany.so.{number}", "int f;", "-shared", f"-Wl,-soname,libmany.so.{number}")
    (second / "libmany.so").symlink_to("libmany.so.10")
    (second / "libother-name.so.3").symlink_to("libmany.so.9")
    (second / "liblink.so").symlink_to("nowhere")
    (second / "libtext.so").write_text("INPUT(libone.so.1)")
    (second / "libempty.so").touch()
    (second / "libdamaged.so").write_bytes((first / "libplain.so").read_bytes()[:100])
    (second / "one.so").write_bytes((first / "libplain.so").read_bytes())
    (second / "libfolder.so").mkdir()
    (tmp_path / "more").mkdir()
    (tmp_path / "more/b.conf").write_text(f"# more\n{second}/  # with a comment\n\n{first}\n")
    (tmp_path / "main.conf").write_text(f"{first}\ninclude more/*.conf\nhwcap 0 nosegneg\n/nowhere\n")
    return tmp_path / "main.conf"


def listed(cache):
    """Return the entries of a cache as ldconfig reads them, but those of folders glibc-hwcaps."""
    text = subprocess.run(
        [LDCONFIG, "-p", "-C", cache], capture_output=True, text=True, check=True, env={"LC_ALL": "C"}
    ).stdout
    return [line for line in text.splitlines() if "=>" in line and "hwcap" not in line]


@pytest.mark.skipif(
    platform.machine() != ARCH or not LDCONFIG.exists(),
    reason="there is no ldconfig for x86-64 to compare with",
)
def test_entries_are_those_of_ldconfig(program, configuration, tmp_path):
    subprocess.run(
        [LDCONFIG, "-X", "-f", configuration, "-C", tmp_path / "theirs"], capture_output=True, check=True
    )
    folders = [*program.read_configuration(configuration), *program.list_standard_folders(ARCH)]
    entries = program.list_entries(ARCH, folders)
    (tmp_path / "ours").write_bytes(program.format_cache(entries, program.ARCHES[ARCH][1]))
    entries = listed(tmp_path / "ours")
    assert entries == listed(tmp_path / "theirs")
    own = [line.split()[-1].removeprefix(f"{tmp_path}/") for line in entries if str(tmp_path) in line]
    assert own == [
        "first/libplain.so",
        "first/libone.so.1",
        "second/libone.so.1",
        "first/libone.so",
        "second/libmany.so.10",
        "second/libmany.so.9",
        "second/libmany.so",
    ]


def test_a_library_without_the_link_of_its_name_has_no_entry(program, tmp_path):
    """Nothing makes the link in the image: the linker would look for a file that is not there."""
    compiled(tmp_path / "liblost.so.1.2", "int f;", "-shared", "-Wl,-soname,liblost.so.1")
    assert program.list_entries(ARCH, [str(tmp_path)]) == []


def test_libraries_of_other_architectures_have_no_entry(program, configuration):
    assert program.list_entries("aarch64", program.read_configuration(configuration)) == []
