"""How a start is seen to compile: a stub stands in for each compiler of the image.

A stub runs the real compiler, which it keeps beside itself, and records the call, unless that only asks for a
version: Triton asks ptxas at every start. Ninja needs none: what it builds, it builds with compilers.
"""

from __future__ import annotations

import io
import posixpath
import re
import shlex
import tarfile
from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import IO

FOLDER = "/.imagematrix-warm"  # in the container, for the record; every user may write to the file in it
RECORD = f"{FOLDER}/calls"
TEST_CALL = "--imagematrix-test-call"  # a stub records this call, and runs nothing
TEST_CALL_S = 60.0  # after which a test call is ended: the shell of an image may be anything
REAL = ".imagematrix-real-"  # prefix of a real compiler beside its stub
MOST_CALLS = 1000
LONGEST = 300  # letters of a call that are kept
# Compilers, assemblers and linkers, perhaps with the machine they work for and their version:
# x86_64-linux-gnu-ld.bfd, clang-19, ptxas-blackwell. Drivers such as gcc start one of them.
COMPILER = re.compile(
    r"(?:[\w.]+-)*(?:cc1(?:plus|obj|objplus)?|clang(?:\+\+|-cl|-cpp)?|as|ld(?:64)?(?:\.(?:bfd|gold|lld|mold))?"
    r"|lld(?:-link)?|gold|mold|ptxas|nvcc|cicc|nvlink)(?:-(?:\d[\d.]*|blackwell))?",
    re.ASCII,
)
PACKAGE = re.compile(r"/([\w.]{1,100})-([\w.+!]{1,100})\.dist-info/METADATA$", re.ASCII)
STUB = """\
#!/bin/sh
case $1 in {test}) echo "$1" >> {record}; exit;; esac
asks=
for word do
  case $word in
    --version|-version|-V|-v|-dumpversion|-dumpfullversion|-dumpmachine|-print-*|--print-*) asks=1;;
    *) asks=; break;;
  esac
done
[ "$asks" ] || printf '%s\\n' {path}" $*" >> {record} || exit 125
exec {real} "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePrograms:
    """The absolute paths of an image's `compilers`, sorted, and the versions of its Python packages."""

    compilers: tuple[str, ...]
    packages: Mapping[str, str]


def is_compiler(name: str) -> bool:
    """Whether a file with this name is a compiler, an assembler or a linker."""
    return COMPILER.fullmatch(name) is not None


def list_programs(members: Iterable[tarfile.TarInfo]) -> ImagePrograms:
    """Return what an image has of compilers, and of packages that may use them.

    Compilers are executables with such names; links to them need no stub.
    """
    compilers, packages = set(), {}
    for member in members:
        path = posixpath.normpath(f"/{member.name}")
        name = posixpath.basename(path)
        if (member.isreg() or member.islnk()) and member.mode & 0o111 and is_compiler(name):
            compilers.add(path)
        if found := PACKAGE.search(path):
            packages[found[1].lower().replace("_", "-")] = found[2]
    return ImagePrograms(compilers=tuple(sorted(compilers)), packages=packages)


def write_stubs(compilers: Iterable[str], to: IO[bytes], root: str | None = None) -> None:
    """Write the tar that puts a stub in the place of each compiler, and makes the record.

    It is unpacked at the root of the image's files. The real compiler stays, under a second name; with the
    folder `root` of the image's files, the tar has its content, for a layer of its own.
    """
    with tarfile.open(fileobj=to, mode="w", format=tarfile.PAX_FORMAT) as archive:
        _add_member(archive, FOLDER, tarfile.DIRTYPE, 0o755)
        _add_member(archive, RECORD, tarfile.REGTYPE, 0o666)
        for path in compilers:
            real = posixpath.join(posixpath.dirname(path), f"{REAL}{posixpath.basename(path)}")
            if root is None:
                _add_member(archive, real, tarfile.LNKTYPE, 0o755, linked=path)
            else:
                archive.add(f"{root}{path}", real.lstrip("/"))
            text = STUB.format(test=TEST_CALL, record=RECORD, path=shlex.quote(path), real=shlex.quote(real))
            _add_member(archive, path, tarfile.REGTYPE, 0o755, text.encode())


def parse_calls(record: bytes) -> tuple[str, ...]:
    """Return the calls of compilers in a record, each shortened to one line, without test calls."""
    lines = record.decode(errors="replace").splitlines()[:MOST_CALLS]
    return tuple(line[:LONGEST] for line in lines if line and line != TEST_CALL)


def _add_member(
    archive: tarfile.TarFile, path: str, kind: bytes, mode: int, content: bytes = b"", linked: str = ""
) -> None:
    member = tarfile.TarInfo(path.lstrip("/"))
    member.type, member.mode, member.size, member.linkname = kind, mode, len(content), linked.lstrip("/")
    archive.addfile(member, io.BytesIO(content))
