"""The notes of cuda-compat and of the CPU's level."""

import struct
import subprocess

import pytest
from compiling import compiled

from imagematrix.audit.binaries import elf, notes
from imagematrix.audit.binaries.notes import Compat
from imagematrix.audit.binaries.window import Window

SOURCE = "int it(void) { return 1; }"
REAL = '{"format":1,"CUDA version":"12.9","driver":[535,550,575],"device":[1,2,7]}'


def with_note(folder, text, claimed=None):
    """Return a library with the ELF note of cuda-compat, optionally with a wrong length."""
    raw = text.encode() if isinstance(text, str) else text
    size = len(raw) if claimed is None else claimed
    (folder / "note").write_bytes(struct.pack("<III", 19, size, 1) + b"NVIDIA Corporation\0\0" + raw)
    path = compiled(folder / "it", SOURCE, "-shared", "-fPIC")
    section = f".note.cuda.fwd_compatibility={folder / 'note'}"
    subprocess.run(["objcopy", "--add-section", section, path], check=True)
    return path


def read(path, ask):
    with path.open("rb") as file:
        window = Window(file, 0, path.stat().st_size)
        return ask(elf.read_elf(window), window)


def test_compat_note_is_read(tmp_path):
    result = read(with_note(tmp_path, REAL), notes.read_compat)
    assert result == Compat(cuda="12.9", branches=(535, 550, 575), brands=(1, 2, 7))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"format":1,"cuda VERSION":"13.2"}\0\0', Compat(cuda="13.2")),
        ('{"CUDA version":"newest","driver":["535",true,535]}', Compat(branches=(535,))),
        ("{not json}", Compat()),
        ("[" * 5000, Compat()),
        (b"\xff\xfe", Compat()),
        ("", Compat()),
    ],
)
def test_malformed_compat_notes_are_tolerated(tmp_path, text, expected):
    assert read(with_note(tmp_path, text, claimed=4096), notes.read_compat) == expected


@pytest.mark.parametrize("level", ["x86-64-v2", "x86-64-v3", "x86-64-v4"])
def test_isa_level_of_the_linker_is_read(tmp_path, level):
    assert (
        read(compiled(tmp_path / "it", SOURCE, "-shared", "-fPIC", f"-Wl,-z,{level}"), notes.read_isa_level)
        == level
    )


def test_files_without_notes_give_none(tmp_path):
    path = compiled(tmp_path / "it", SOURCE, "-c")
    assert read(path, notes.read_compat) is None
    assert read(path, notes.read_isa_level) is None
