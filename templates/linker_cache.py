"""Writes the dynamic linker's cache for the files of an image, without running a program of the image.

    linker_cache.py ARCH ROOT [FOLDER…] > ld.so.cache

It does what glibc's ldconfig does, which refuses files of other architectures. Each FOLDER comes before
those of /etc/ld.so.conf. The format is the new one of glibc's dl-cache.h, with the entries of ldconfig in its
order. Libraries for some CPUs only, in folders named glibc-hwcaps, have no entry: those for all CPUs are
loaded. Unlike ldconfig it makes no links: a library has an entry if the link with its name is there.
"""

import mmap
import os
import re
import struct
import sys
from pathlib import Path

# The machine in the header of ELF files, and what dl-cache.h calls FLAG_*_LIB64 | FLAG_ELF_LIBC6.
ARCHES = {"x86_64": (62, 0x303), "aarch64": (183, 0xA03)}
LIBRARY = re.compile(r"(lib|ld-).*\.so")
HEADER = struct.Struct("<20sIIB3xI12x")
ENTRY = struct.Struct("<iIIIQ")
LITTLE_ENDIAN = 2
SHARED, LOAD, DYNAMIC = 3, 1, 2  # a type of ELF files, and types of segments
STRTAB, SONAME = 5, 14  # tags of a dynamic segment


def main() -> None:
    """Write the cache to stdout."""
    arch, root, *folders = sys.argv[1:]
    os.chroot(root)  # so that absolute links lead where they do in a container
    os.chdir("/")
    folders += [*read_configuration(Path("/etc/ld.so.conf")), *list_standard_folders(arch)]
    sys.stdout.buffer.write(format_cache(list_entries(arch, folders), ARCHES[arch][1]))


def list_standard_folders(arch: str) -> list[str]:
    """Return the folders that the linker searches by itself: Debian's, or those of other distributions."""
    inner = f"lib/{arch}-linux-gnu" if Path(f"/usr/lib/{arch}-linux-gnu").is_dir() else "lib64"
    return [f"/{inner}", f"/usr/{inner}", "/lib", "/usr/lib"]


def read_configuration(path: Path) -> list[str]:
    """Return the folders that a file like ld.so.conf names."""
    folders = []
    for line in path.read_text("utf-8", "surrogateescape").splitlines() if path.is_file() else ():
        text = line.partition("#")[0].strip()
        word, *patterns = text.split() or [""]
        if word == "include":
            for pattern in patterns:
                whole = (path.parent / pattern).relative_to("/")
                for found in sorted(Path("/").glob(str(whole))):
                    folders += read_configuration(found)
        elif word and word != "hwcap":
            folders.append(text)
    return folders


def list_entries(arch: str, folders: list[str]) -> list[tuple[str, str]]:
    """Return the names and paths of libraries in the order of the cache, in which the linker searches."""
    entries = []
    seen = set()
    for folder in map(Path, folders):
        if not folder.is_dir():
            continue
        status = folder.stat()
        if (status.st_dev, status.st_ino) not in seen:  # /lib is a link to /usr/lib in most images
            seen.add((status.st_dev, status.st_ino))
            names = {name for path in folder.iterdir() if (name := find_name(path, ARCHES[arch][0]))}
            entries += [(name, f"{folder}/{name}") for name in sorted(names)]
    return sorted(entries, key=lambda entry: make_key(entry[0]), reverse=True)


def find_name(path: Path, machine: int) -> "str | None":
    """Return the name by which programs find a library, None if it is no library or they cannot find it."""
    if not LIBRARY.match(path.name) or not path.is_file():
        return None
    name = read_soname(path, machine)
    if name is None:
        return None
    # A link for the linker that builds programs, such as libz.so to libz.so.1, has an entry of its own.
    if not name or (path.is_symlink() and path.suffix == ".so" and name.startswith(path.name)):
        return path.name
    return name if path.with_name(name).exists() else None


def read_soname(path: Path, machine: int) -> "str | None":
    """Return the name that a library has in its header, "" without one, None if it is no library."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
            if raw[:6] != b"\x7fELF\2\1" or struct.unpack_from("<HH", raw, 16) != (SHARED, machine):
                return None
            (table,), (size, count) = struct.unpack_from("<Q", raw, 32), struct.unpack_from("<HH", raw, 54)
            segments = [struct.unpack_from("<IIQQQQ", raw, table + n * size) for n in range(count)]
            tags = {}
            for kind, _, offset, _, _, length in segments:
                if kind == DYNAMIC:
                    tags = dict(struct.iter_unpack("<qQ", raw[offset : offset + length // 16 * 16]))
            if SONAME not in tags:
                return "" if tags else None
            for kind, _, offset, address, _, length in segments:
                if kind == LOAD and address <= tags[STRTAB] < address + length:
                    start = tags[STRTAB] - address + offset + tags[SONAME]
                    return os.fsdecode(raw[start : raw.find(b"\0", start)])
    except (struct.error, ValueError, KeyError):  # it is empty or damaged
        pass
    return None


def make_key(name: str) -> list[tuple[bool, int]]:
    """Return what orders names in the cache: digits come after all else, and by their number."""
    parts = re.findall(rb"\d+|\D", os.fsencode(name))
    return [(True, int(part)) if part.isdigit() else (False, part[0]) for part in parts]


def format_cache(entries: list[tuple[str, str]], flags: int) -> bytes:
    """Return the bytes of a cache: each path, which ends with its library's name, is in it once."""
    rows, texts = [], b""
    start = HEADER.size + len(entries) * ENTRY.size
    for name, path in entries:
        place, text = start + len(texts), os.fsencode(path)
        rows.append(ENTRY.pack(flags, place + len(text) - len(os.fsencode(name)), place, 0, 0))
        texts += text + b"\0"
    head = HEADER.pack(b"glibc-ld.so.cache1.1", len(entries), len(texts), LITTLE_ENDIAN, 0)
    return head + b"".join(rows) + texts


if __name__ == "__main__":
    main()
