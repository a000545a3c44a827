"""Emulators for other architectures, as binfmt_misc shows them and as a user registers them."""

import re
import shlex
from pathlib import Path

import pytest

from imagematrix.hardware.host.emulators import Emulator, format_registration, list_emulators

OWN = (Path(__file__).parents[4] / "ci/emulator").read_text()  # which tests have run

QEMU = """\
enabled
interpreter /usr/bin/qemu-aarch64
flags: F
offset 0
magic 7f454c460201010000000000000000000200b700
mask ffffffffffffff00fffffffffffffffffeffffff
"""


@pytest.fixture
def registered(tmp_path):
    """Call it with the texts of entries to get the emulators."""

    def call(**entries):
        folder = tmp_path / "proc/sys/fs/binfmt_misc"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "status").write_text("enabled\n")
        for name, text in entries.items():
            (folder / name).write_text(text)
        return list_emulators(str(tmp_path))

    return call


def test_emulator_is_told_by_the_programs_it_runs(registered):
    expected = Emulator(name="any", platform="linux/arm64", interpreter="/usr/bin/qemu-aarch64", flags="F")
    assert registered(any=QEMU) == (expected,)
    assert expected.arch == "aarch64"
    assert (expected.works_in_containers, expected.keeps_credentials) == (True, False)
    (other,) = registered(any=QEMU.replace("0200b700", "02003e00").replace("flags: F", "flags: OCP"))
    assert (other.platform, other.arch) == ("linux/amd64", "x86_64")
    assert (other.works_in_containers, other.keeps_credentials) == (False, True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        QEMU.replace("enabled", "disabled"),
        QEMU.replace("b700", "f300"),  # RISC-V
        QEMU.replace("7f454c46", "cafebabe"),
        QEMU.replace("magic 7f", "magic 7"),
        "enabled\ninterpreter /usr/bin/jexec\nflags: \nextension .jar\n",
    ],
)
def test_other_entries_are_none(registered, text):
    assert registered(any=text) == ()


def test_none_works_where_all_are_disabled(registered):
    assert registered(status="disabled\n", any=QEMU) == ()


def test_without_binfmt_misc_there_is_none(tmp_path):
    assert list_emulators(str(tmp_path)) == ()


@pytest.mark.parametrize(
    ("platform", "arch", "machine"), [("linux/arm64", "aarch64", b"\xb7"), ("linux/amd64", "x86_64", b"\x3e")]
)
def test_emulator_is_registered_with_one_flag(platform, arch, machine):
    *_, script = shlex.split(format_registration(platform))
    entry = re.search(r'printf %s "(.*)" > /proc/sys/fs/binfmt_misc/register$', script)[1]
    _, name, kind, offset, magic, mask, interpreter, flags = entry.split(":")
    assert (name, kind, offset) == (f"qemu-{arch}", "M", "")
    assert (interpreter, flags) == (f"/usr/bin/qemu-{arch}", "F")
    expected = dict(re.findall("^(magic|mask)='(.*)'$", OWN, re.MULTILINE))
    assert unescaped(magic) == unescaped(expected["magic"]).replace(b"\xb7", machine)
    assert unescaped(mask) == unescaped(expected["mask"])


def test_other_platforms_have_no_emulator():
    assert format_registration("linux/riscv64") is None


def unescaped(text):
    """Return the bytes that the kernel reads."""
    return re.sub(rb"\\x(..)", lambda match: bytes.fromhex(match[1].decode()), text.encode())
