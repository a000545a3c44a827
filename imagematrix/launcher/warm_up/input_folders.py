"""The folders that a warm-up reads, such as weights and tokenizers: which they are, and their digests."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from imagematrix.common.text import quote_word
from imagematrix.errors import UsageError
from imagematrix.launcher.warm_up.compilers import is_compiler
from imagematrix.launcher.warm_up.warm_up_error import WarmUpError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from imagematrix.images.catalog.warm_up import WarmUp


def parse_inputs(options: Sequence[str], warm_up: WarmUp) -> dict[str, Path]:
    """Return the folder of each input of a warm-up, from NAME=DIR options; raise UsageError.

    Exactly the inputs of the warm-up are given, each once, and each is a folder of this machine.
    """
    folders: dict[str, Path] = {}
    paths = dict(warm_up.inputs)
    for option in options:
        name, equals, folder = option.partition("=")
        if not (equals and folder):
            raise UsageError(
                f"--input {option[:80]}: expected NAME=DIR", remedy="such as model=/srv/models/m"
            )
        if name in folders:
            raise UsageError(f"--input {name} is given twice", remedy="give each input once")
        if name not in paths:
            known = f"its inputs are {', '.join(paths)}" if paths else "its warm-up has no inputs"
            raise UsageError(f"the image knows no input {name[:80]}: {known}", remedy="leave it out")
        folders[name] = Path(folder).absolute()
        if not folders[name].is_dir():
            raise UsageError(f"--input {name}: {folder} is not a folder", remedy="name one of this machine")
    for name, path in paths.items():
        if name not in folders:
            remedy = f"add --input {name}=DIR, the folder that the container gets at {path}"
            raise UsageError(f"the warm-up needs the input {name}", remedy=remedy)
    return folders


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadInput:
    """The `folder` of an input, with its `digest`; see `hash_folder`.

    `files` are the sizes and times of all files in it, by path, from before they were read.
    """

    folder: Path
    digest: str
    files: Mapping[str, tuple[int, int]]


def read_inputs(folders: Mapping[str, Path]) -> dict[str, ReadInput]:
    """Return each input, read whole, by its name; raises what `hash_folder` does."""
    return {
        name: ReadInput(folder=folder, files=_describe_files(folder), digest=hash_folder(folder))
        for name, folder in folders.items()
    }


def require_unchanged(inputs: Mapping[str, ReadInput]) -> None:
    """Raise WarmUpError if a file of an input came, went or was written since it was read.

    What was compiled may then be of another content than the digest says.
    """
    for name, read in inputs.items():
        differing = {path for path, _ in read.files.items() ^ _describe_files(read.folder).items()}
        if differing:
            message = f"nothing is kept: the input {name} was changed meanwhile: {min(differing)}"
            raise WarmUpError(message, remedy="give a folder to which nothing is written, such as a copy")


def hash_folder(folder: Path) -> str:
    """Return a digest of a folder: of the paths, kinds, contents and link targets in it.

    Not of modes, which some file systems make up: the same weights would have another digest there.

    Raises UsageError if something in it cannot be read, or is a compiler: calls of one would not be seen; and
    for a link that leads out of it, as in Hugging Face's snapshots: the container has only the folder.
    """
    found = hashlib.sha256()
    try:
        for path in _list_files(folder):
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode):
                kind, content = "link", path.readlink().as_posix()
                if _leads_out(path, content, folder):
                    copy = f"cp -rL {quote_word(folder)} {quote_word(f'{folder.name}-copy')}"
                    message = f"{path} is a link to {content}, which is not in {folder}"
                    raise UsageError(message, remedy=f"give a copy that has the files themselves: {copy}")
            elif stat.S_ISREG(status.st_mode):
                if status.st_mode & 0o111 and is_compiler(path.name):
                    remedy = "compilers belong into the image; give a folder without one"
                    raise UsageError(f"{path} is a compiler, and its calls would not be seen", remedy=remedy)
                kind, content = "file", _hash_file(path)
            else:
                kind, content = "folder" if stat.S_ISDIR(status.st_mode) else "special", ""
            found.update(repr((kind, os.fsencode(path.relative_to(folder)), content)).encode())
    except OSError as error:
        raise UsageError(f"{error.filename or folder} cannot be read: {error.strerror}") from error
    return f"sha256:{found.hexdigest()}"


def _describe_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size and the time of each file below a folder, by its path; folders are there without."""
    described = {}
    try:
        for path in _list_files(folder):
            status = path.lstat()
            is_folder = stat.S_ISDIR(status.st_mode)  # its time changes with each lock in it
            described[str(path)] = (0, 0) if is_folder else (status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise UsageError(f"{error.filename or folder} cannot be read: {error.strerror}") from error
    return described


def _list_files(folder: Path) -> Iterator[Path]:
    """Yield everything below a folder, sorted in each; raises OSError. Links are not followed."""
    left = _list_backwards(folder)
    while left:
        entry = left.pop()
        yield Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            left += _list_backwards(Path(entry.path))


def _list_backwards(folder: Path) -> list[os.DirEntry[str]]:
    return sorted(os.scandir(folder), key=lambda entry: os.fsencode(entry.name), reverse=True)


def _leads_out(link: Path, target: str, folder: Path) -> bool:
    """Whether a symbolic link in a folder leads elsewhere where only the folder is there."""
    beside = Path(os.path.normpath(link.parent.relative_to(folder) / target))
    if beside.is_absolute() or ".." in beside.parts:
        return True
    return not Path(os.path.realpath(link)).is_relative_to(os.path.realpath(folder))


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
