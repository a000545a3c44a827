"""Suggestions for misspelt words."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["SLIP", "nearest"]

SLIP = 0.75  # a similarity that by itself suggests a misspelling


def nearest(word: str, choices: Iterable[str], *, likeness: float = 0.5) -> str | None:
    """Return "did you mean 'x'?" for the known word nearest to `word`, or None if none is near.

    `likeness` is the least similarity, from 0 to 1; use `SLIP` if nothing else suggests a misspelling.
    """
    import difflib  # needed only for errors

    matches = difflib.get_close_matches(word, list(choices), n=1, cutoff=likeness)
    return f"did you mean {matches[0]!r}?" if matches else None
