"""Counting what a function does: a clock tells of the machine, a count of the code.

Each executed line of the files in a folder counts as one. A call from there into C counts as the length of
the container whose method it is, because a method such as `list.count` walks over all of it, or as a part of
the length of a text, whose characters take less time than a line. If the method does not walk, it counts as
one.

Some work in C does not show, however long it takes. It has to be looked for by reading the code: `in` on a
list, comparisons and slices, constructors (`set(names)` in a loop), what a function walks over that is an
argument (`sorted`, `sum` and `any` of a list, `join`, `set.update`), `list.pop(0)`, unpacking (`[*names,
name]`), `+=` on text, and modules in C such as `re` and `json`. Generators and the keys of sorts are lines,
and do count.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import CodeType, FrameType
    from typing import Any

# What methods walk over, and how much of it takes the time of a line.
WALKED: dict[type, int] = {
    str: 64,
    bytes: 64,
    bytearray: 64,
    list: 1,
    tuple: 1,
    dict: 1,
    set: 1,
    frozenset: 1,
    deque: 1,
}
# Methods that take the same time however long what they belong to is.
CONSTANT: dict[type, set[str]] = {
    str: {"startswith", "endswith", "join"},
    bytes: {"startswith", "endswith", "join"},
    list: {"append", "extend", "pop"},
    deque: {"append", "appendleft", "extend", "pop", "popleft"},
    dict: {"get", "setdefault", "pop", "popitem", "update", "keys", "values", "items"},
    set: {"add", "discard", "remove", "pop", "update", "isdisjoint", "issuperset"},
    frozenset: {"isdisjoint", "issuperset"},
}


def counted(function: Callable[[], object], folder: Path) -> Counter[str]:
    """Return the lines and the walks of a call, in all threads, by function: PATH in the folder, and name."""
    own = f"{folder}/"
    counts: Counter[CodeType] = Counter()

    def entered(frame: FrameType, _event: str, _argument: Any) -> Callable[..., Any] | None:
        return stepped if frame.f_code.co_filename.startswith(own) else None

    def stepped(frame: FrameType, event: str, _argument: Any) -> Callable[..., Any]:
        if event == "line":
            counts[frame.f_code] += 1
        return stepped

    def called(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and frame.f_code.co_filename.startswith(own):
            counts[frame.f_code] += _walk(argument)

    before = sys.gettrace(), sys.getprofile()  # a debugger's, or those of coverage
    threading.settrace(entered)
    threading.setprofile(called)
    sys.setprofile(called)
    sys.settrace(entered)
    try:
        function()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
        threading.settrace(before[0])
        threading.setprofile(before[1])
    named: Counter[str] = Counter()
    for code, count in counts.items():
        named[f"{code.co_filename.removeprefix(own)}:{code.co_qualname}"] += count
    return named


def _walk(function: Any) -> int:
    """Return what a call of a function in C counts as."""
    owner = function.__self__
    kind: type | None = next((kind for kind in WALKED if isinstance(owner, kind)), None)
    if kind is None or function.__name__ in CONSTANT.get(kind, ()):
        return 1
    return max(1, len(owner) // WALKED[kind])
