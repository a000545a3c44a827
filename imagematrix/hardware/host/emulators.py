"""Emulators that the kernel starts for programs of other architectures (binfmt_misc).

Builds and containers of such images use them. Source: Documentation/admin-guide/binfmt-misc.rst of Linux.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from imagematrix.hardware.host.host import get_machine_name
from imagematrix.hardware.host.tree import Tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = "/proc/sys/fs/binfmt_misc"
NO_ENTRIES = ("register", "status")
FIELD = re.compile(r"^(interpreter|flags:|magic) (\S+)$", re.MULTILINE)
ELF = b"\x7fELF"
MACHINES = {62: "linux/amd64", 183: "linux/arm64"}  # at bytes 18 and 19 of an ELF file
# The start of programs of 64 bits, little-endian, up to their machine, and which of its bits count. Programs
# may be executable or shared, and for any ABI of the operating system.
START = ELF + b"\x02\x01\x01" + bytes(9) + b"\x02\x00"
MASK = b"\xff" * 7 + b"\x00" + b"\xff" * 8 + b"\xfe\xff\xff\xff"


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulator:
    """The entry `name` of binfmt_misc, by which `interpreter` runs programs for `platform`."""

    name: str
    platform: str
    interpreter: str
    flags: str = ""

    @property
    def arch(self) -> str:
        """The architecture of the programs, as uname names it."""
        return get_machine_name(self.platform.rpartition("/")[2])

    @property
    def works_in_containers(self) -> bool:
        """Whether its file was opened when it was registered, so that a container need not have it."""
        return "F" in self.flags

    @property
    def keeps_credentials(self) -> bool:
        """Whether it runs set-uid programs with the credentials of their owners."""
        return "C" in self.flags


def format_registration(platform: str) -> str | None:
    """Return the command that registers an emulator until the next start of the machine.

    None for a platform of no image. Its only flag is F: the kernel opens the file now, so that it may be in a
    container. The usual tools also set the flag C, which gives set-uid programs of images the credentials of
    their owners.
    """
    number = next((number for number, name in MACHINES.items() if name == platform), None)
    if number is None:
        return None
    arch = get_machine_name(platform.rpartition("/")[2])
    magic, mask = (
        "".join(f"\\x{byte:02x}" for byte in part) for part in (START + number.to_bytes(2, "little"), MASK)
    )
    script = (
        "apt-get update && apt-get install -y --no-install-recommends qemu-user && "
        f"mount -t binfmt_misc binfmt_misc {FOLDER} && "
        f'printf %s ":qemu-{arch}:M::{magic}:{mask}:/usr/bin/qemu-{arch}:F" > {FOLDER}/register'
    )
    return f"docker run --privileged --rm debian:trixie sh -c '{script}'"


def list_emulators(root: str = "/") -> tuple[Emulator, ...]:
    """Return the enabled emulators for platforms of images."""
    return tuple(_read_entries(Tree(root)))


def _read_entries(tree: Tree) -> Iterator[Emulator]:
    if (tree.read_text(f"{FOLDER}/status") or "").startswith("disabled"):  # all at once
        return
    for name in tree.list_names(FOLDER):
        text = tree.read_text(f"{FOLDER}/{name}") if name not in NO_ENTRIES else None
        if not text or not text.startswith("enabled"):
            continue
        fields = dict(FIELD.findall(text))
        try:
            magic = bytes.fromhex(fields.get("magic", ""))
        except ValueError:
            continue
        platform = MACHINES.get(int.from_bytes(magic[18:20], "little"))
        if magic.startswith(ELF) and platform:
            interpreter = fields.get("interpreter", "")
            yield Emulator(
                name=name, platform=platform, interpreter=interpreter, flags=fields.get("flags:", "")
            )
