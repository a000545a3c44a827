"""Opening NaCl's secretbox (XSalsa20-Poly1305), with which cosign encrypts private keys.

The package cryptography has Poly1305, but not Salsa20 (cr.yp.to/snuffle/spec.pdf; the construction is that of
cr.yp.to/snuffle/xsalsa-20110204.pdf). Keys have a few hundred bytes, so speed does not matter.
"""

from __future__ import annotations

import struct

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.poly1305 import Poly1305

__all__ = ["KEY", "NONCE", "unseal"]

KEY, NONCE, TAG, BLOCK = 32, 24, 16, 64  # bytes
CONSTANT = struct.unpack("<4I", b"expand 32-byte k")
MASK = 0xFFFFFFFF
# The quarters of a double round: columns, then rows.
QUARTERS = (
    (0, 4, 8, 12), (5, 9, 13, 1), (10, 14, 2, 6), (15, 3, 7, 11),
    (0, 1, 2, 3), (5, 6, 7, 4), (10, 11, 8, 9), (15, 12, 13, 14),
)  # fmt: skip


def unseal(box: bytes, nonce: bytes, key: bytes) -> bytes | None:
    """Return the content of a box; None if its key is another, or it is damaged."""
    words = _state(key, nonce[:16])
    mixed = _rounds(words)
    # HSalsa20: the subkey is what the attacker cannot derive from the output of Salsa20.
    subkey = struct.pack("<8I", *(mixed[index] for index in (0, 5, 10, 15, 6, 7, 8, 9)))
    tag, sealed = box[:TAG], box[TAG:]
    stream = b"".join(
        _block(subkey, nonce[16:] + struct.pack("<Q", number))
        for number in range((KEY + len(sealed)) // BLOCK + 1)
    )
    try:
        Poly1305.verify_tag(stream[:KEY], sealed, tag)
    except InvalidSignature:
        return None
    return bytes(left ^ right for left, right in zip(sealed, stream[KEY:], strict=False))


def _state(key: bytes, block: bytes) -> list[int]:
    first, second = struct.unpack("<4I", key[:16]), struct.unpack("<4I", key[16:])
    middle = struct.unpack("<4I", block)
    a, b, c, d = CONSTANT
    return [a, *first, b, *middle, c, *second, d]


def _rounds(words: list[int]) -> list[int]:
    mixed = list(words)
    for _ in range(10):
        for a, b, c, d in QUARTERS:
            for to, one, other, turn in ((b, a, d, 7), (c, b, a, 9), (d, c, b, 13), (a, d, c, 18)):
                total = (mixed[one] + mixed[other]) & MASK
                mixed[to] ^= ((total << turn) | (total >> (32 - turn))) & MASK
    return mixed


def _block(key: bytes, counter: bytes) -> bytes:
    words = _state(key, counter)
    return struct.pack("<16I", *((one + two) & MASK for one, two in zip(words, _rounds(words), strict=True)))
