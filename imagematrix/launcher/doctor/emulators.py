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


def list_emulators(root: str = "/") -> tuple[Emulator, ...]:
    """Return the enabled emulators for platforms of images."""
    return tuple(_read_entries(Tree(root)))


def _read_entries(tree: Tree) -> Iterator[Emulator]:
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
