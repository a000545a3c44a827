"""The machine code of a file, function by function."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from imagematrix.audit.cpu import functions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from imagematrix.audit.elf import Elf, Section
    from imagematrix.audit.window import Window

__all__ = ["Body", "Text"]

LONGEST = 2 << 20  # bytes to decode at a time
PADDING = b"\x00\x90\xcc"


@dataclass(frozen=True, slots=True)
class Body:
    """The code from an address on.

    `bounded`: it is a function, not bytes between two functions. `goes_on`: the function continues after it
    under another name.
    """

    start: int
    size: int
    bounded: bool
    goes_on: bool = False


class Text:
    """The code in some sections of a file."""

    def __init__(self, elf: Elf, window: Window, sections: Sequence[Section]) -> None:
        self._window = window
        self._sections = sorted(sections, key=lambda one: one.address)
        self._starts, self._sizes = functions.functions(elf, window)

    def bodies(self) -> Iterator[Body]:
        """Yield all code, sorted by address. Bytes between functions are bodies that are not `bounded`."""
        for section in self._sections:
            end = section.address + section.size
            first, last = bisect_right(self._starts, section.address - 1), bisect_right(self._starts, end - 1)
            here = section.address
            for place in range(first, last):
                yield from self._between(here, self._starts[place])
                body = self._body(place, end)
                yield body
                here = body.start + body.size
            yield from self._between(here, end)

    def body(self, address: int) -> Body | None:
        """Return the function that contains an address, or None if none is known."""
        place = bisect_right(self._starts, address) - 1
        section = self._section(address)
        if place < 0 or section is None:
            return None
        body = self._body(place, section.address + section.size)
        return body if body.start <= address < body.start + body.size else None

    def read(self, body: Body) -> bytes:
        """Return the bytes of a body."""
        section = self._section(body.start)
        if section is None:
            return b""
        offset = body.start - section.address
        return self._window.at(section.offset + offset, min(body.size, section.size - offset))

    @property
    def known(self) -> bool:
        """Whether the file tells where any function begins."""
        return bool(self._starts)

    def _body(self, place: int, end: int) -> Body:
        start, size = self._starts[place], self._sizes[place]
        following = self._starts[place + 1] if place + 1 < len(self._starts) else end
        # A function that begins inside another one is a part of it with its own name.
        stop = min(start + size if size else following, following, end, start + LONGEST)
        return Body(start, stop - start, bounded=size > 0, goes_on=stop == following < start + size)

    def _between(self, start: int, end: int) -> Iterator[Body]:
        for here in range(start, end, LONGEST):
            piece = Body(here, min(LONGEST, end - here), bounded=False)
            raw = self.read(piece)
            code = raw.lstrip(PADDING)
            if code:
                yield Body(here + len(raw) - len(code), len(code), bounded=False)

    def _section(self, address: int) -> Section | None:
        place = bisect_right(self._sections, address, key=lambda one: one.address) - 1
        section = self._sections[place] if place >= 0 else None
        return section if section and address < section.address + section.size else None
