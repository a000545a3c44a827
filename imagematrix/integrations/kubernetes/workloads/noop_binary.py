"""A program that ends at once, for containers whose image is only pulled: an image may have no program.

It is a static executable of less than 200 bytes, which calls exit(0). Sources: elf(5), syscall(2).
"""

from __future__ import annotations

import struct

from imagematrix.errors import UsageError

BASE = 0x400000  # the address of the file in memory; a multiple of every size of a page
PAGE = 0x10000  # the largest size of a page, which arm64 may have
LOAD, STACK = 1, 0x6474E551  # the types PT_LOAD and PT_GNU_STACK of a segment
READ, WRITE, EXECUTE = 4, 2, 1
HEADER, SEGMENT = 64, 56  # bytes
SEGMENTS = 2
# By the architecture of an image's platform: the machine in ELF headers, and the instructions.
MACHINES = {
    "amd64": (62, bytes.fromhex("31ff b83c000000 0f05")),  # xor edi, edi; mov eax, 60; syscall
    "arm64": (183, bytes.fromhex("000080d2 a80b80d2 010000d4")),  # mov x0, 0; mov x8, 93; svc 0
}


def make_noop_binary(arch: str) -> bytes:
    """Return the program for an architecture, such as amd64; raise UsageError if there is none for it."""
    if arch not in MACHINES:
        raise UsageError(f"no program for the architecture {arch}", remedy=f"one of {', '.join(MACHINES)}")
    machine, code = MACHINES[arch]
    start = HEADER + SEGMENTS * SEGMENT
    size = start + len(code)
    # 64 bits, little-endian, version 1, for any operating system with System V's calls.
    identity = b"\x7fELF" + bytes((2, 1, 1, 0)).ljust(12, b"\0")
    header = struct.pack(
        "<HHIQQQIHHHHHH", 2, machine, 1, BASE + start, HEADER, 0, 0, HEADER, SEGMENT, SEGMENTS, 0, 0, 0
    )
    load = struct.pack("<IIQQQQQQ", LOAD, READ | EXECUTE, 0, BASE, BASE, size, size, PAGE)
    # Without it, some kernels make the stack executable, which policies forbid.
    stack = struct.pack("<IIQQQQQQ", STACK, READ | WRITE, 0, 0, 0, 0, 0, 16)
    return identity + header + load + stack + code
