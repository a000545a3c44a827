"""Examining one file by its bytes: a program, a library, an archive of objects, device code."""

from __future__ import annotations

from dataclasses import dataclass, replace

from imagematrix.audit.binaries import (
    archives,
    cubin,
    device_code,
    driver_file,
    elf,
    embedded_code,
    fatbin,
    hip,
    kernels,
    library_versions,
    notes,
    nvidia_names,
)
from imagematrix.audit.binaries.archives import HEAD, CopyBudget
from imagematrix.audit.binaries.device_code import NONE, DeviceCode
from imagematrix.hardware.vendors import user_mode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.audit.binaries.driver_file import DriverLibrary
    from imagematrix.audit.binaries.elf import Elf
    from imagematrix.audit.binaries.host_code import HostCode
    from imagematrix.audit.binaries.window import Window

DEEPEST = 2  # levels of nested archives, such as a wheel in a zip
SEARCHED = 64 << 20  # bytes
CODE = (".nv_fatbin", "__nv_relfatbin", ".hip_fatbin")  # sections with device code
CUDART = b"cudaErrorCudartUnloading"  # the name of an error, which only the runtime contains


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file with machine code or device code in it.

    `machine` is the number in its ELF header, None for other files. `linked` is False for objects and
    archives of objects. `inner` are the examined files inside a wheel or another zip, by path. `stated` is
    the library that it is, or that is linked into it, with the version that its bytes state; see
    `library_versions`. `static_cudart`: CUDA's runtime is linked into it. `names_cuda`: its data has the name
    of libcuda, and no device code, or it is a Python source that loads libcuda or a compiler. `isa` is the
    psABI level that its notes require. `host` is the result of decoding its instructions, None if they were
    not decoded, for example because the file is `packaged`: it belongs to a package of the distribution.
    `recorded` is its hash in the form of a RECORD, if the table of guarded files may have it.
    """

    size: int
    machine: int | None = None
    linked: bool = True
    code: DeviceCode = NONE
    driver: DriverLibrary | None = None
    soname: str | None = None
    needed: tuple[str, ...] = ()
    rpath: tuple[str, ...] = ()
    runpath: tuple[str, ...] = ()
    stated: tuple[str, str | None] | None = None
    static_cudart: bool = False
    names_cuda: bool = False
    isa: str | None = None
    host: HostCode | None = None
    packaged: bool = False
    recorded: str | None = None
    inner: tuple[tuple[str, File], ...] = ()
    damaged: bool = False


def is_interesting(path: str, head: bytes) -> bool:
    """Whether a file that begins with `head` needs to be examined."""
    if head.startswith((elf.MAGIC, archives.AR, fatbin.MAGIC)) or user_mode.parse_file_name(path):
        return True
    return path.endswith(".ptx") or (path.endswith(archives.ZIPPED) and head.startswith(archives.ZIP))


def examine_file(path: str, window: Window, headers: Elf | None) -> File | None:
    """Return the File for a window's bytes, or None if it has neither machine code nor device code.

    `headers` are those of an ELF file, as `elf.read_elf` returns them.
    """
    return _examine_file(path, window, headers, DEEPEST, CopyBudget(archives.INFLATED))


def _examine_file(
    path: str, window: Window, headers: Elf | None, levels: int, budget: CopyBudget
) -> File | None:
    """Do the same, with up to `levels` levels of nested zips, from which `budget` may be copied."""
    head = window.read_at(0, HEAD)
    if head.startswith(elf.MAGIC):
        return _examine_elf(path, window, headers)
    if head.startswith(archives.AR):
        return _examine_static_library(window)
    if head.startswith(fatbin.MAGIC):
        return File(size=window.size, code=fatbin.read_fatbins(window))
    if head.startswith(archives.ZIP) and path.endswith(archives.ZIPPED):
        return _examine_zip(window, levels, budget) if levels else None
    code = fatbin.read_ptx(window) if path.endswith(".ptx") else NONE
    driver = driver_file.identify_driver(path, None, window)
    return File(size=window.size, code=code, driver=driver) if code or driver else None


def _examine_elf(path: str, window: Window, headers: Elf | None) -> File | None:
    if headers is None:
        return File(size=window.size, damaged=True)
    code = _read_device_code(path, headers, window)
    # What a program registers with CUDA's runtime is the code that it runs; more in its data may be optional.
    is_program = headers.linked and headers.machine != elf.CUDA
    registers_none = (
        is_program and not (code and code.linked) and not nvidia_names.is_nvidia_library(path, headers.soname)
    )
    if registers_none:
        code = embedded_code.find_device_code(headers, window) or code
    return File(
        size=window.size,
        machine=headers.machine,
        linked=headers.linked or headers.machine == elf.CUDA,
        code=code,
        driver=driver_file.identify_driver(path, headers, window) if headers.linked else None,
        soname=headers.soname,
        needed=headers.needed,
        rpath=headers.rpath,
        runpath=headers.runpath,
        stated=library_versions.identify_library(path, headers, window),
        static_cudart=_has_cudart(headers, window),
        names_cuda=registers_none and not code and embedded_code.names_driver(headers, window),
        isa=notes.read_isa_level(headers, window),
        damaged=headers.damaged or code.damaged,
    )


def _read_device_code(path: str, headers: Elf, window: Window) -> DeviceCode:
    if headers.machine == elf.CUDA:
        return cubin.read_cubin(window)
    codes: list[DeviceCode] = []
    own_kernels = kernels.make_kernel_pattern(path)
    for section in headers.find_sections(*CODE):
        part = window.get_part(section.offset, section.size)
        if section.name == ".nv_fatbin":
            codes.append(fatbin.read_fatbins(part, own_kernels))
        elif section.name == "__nv_relfatbin":
            codes.append(replace(fatbin.read_fatbins(part), linked=False))
        else:
            codes.append(hip.list_bundle_targets(part))
    if not headers.sections:  # the section headers were stripped, which leaves the device code in place
        codes.append(fatbin.read_fatbins(window, own_kernels))
    return device_code.merge_device_code(codes)


def _has_cudart(headers: Elf, window: Window) -> bool:
    """Whether a program or a library has CUDA's runtime linked into it."""
    shared = any("libcudart" in name for name in headers.needed)
    if shared or (headers.soname or "").startswith("libcudart"):
        return False
    if not headers.linked or not any(headers.find_sections(library_versions.REGISTERED)):
        return False
    section = next(headers.find_sections(".rodata"), None)
    texts = window.get_part(section.offset, section.size) if section else window.get_part(0, 0)
    return any(CUDART in piece for piece in texts.list_pieces(SEARCHED, len(CUDART) - 1))


def _examine_static_library(window: Window) -> File | None:
    """Return the device code of all objects in a static library, or None if there is none."""
    members = [_examine_elf(name, part, elf.read_elf(part)) for name, part in archives.list_objects(window)]
    readable = [member for member in members if member is not None]
    code = device_code.merge_device_code(member.code for member in readable)
    if not code:
        return None
    return File(size=window.size, linked=False, code=code, damaged=any(member.damaged for member in readable))


def _examine_zip(window: Window, levels: int, budget: CopyBudget) -> File | None:
    inner: list[tuple[str, File]] = []
    try:
        for name, size, open_file in archives.list_zip_files(window):
            with open_file() as file:
                head = file.read(HEAD)
                if not is_interesting(name, head):
                    continue
                budget.spend(size)
                with archives.copy_stream(file, size, head) as part:  # zipfile yields at most `size` bytes
                    examined = _examine_file(name, part, elf.read_elf(part), levels - 1, budget)
            if examined:
                inner.append((name, examined))
    except archives.UNREADABLE:
        return File(size=window.size, damaged=True)
    return File(size=window.size, linked=False, inner=tuple(inner)) if inner else None
