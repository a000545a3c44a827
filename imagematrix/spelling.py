"""What somebody may have meant by a word that nothing is called."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["SLIP", "nearest"]

SLIP = 0.75  # the likeness of two words that says that one of them was meant to be the other


def nearest(word: str, known: Iterable[str], *, likeness: float = 0.5) -> str | None:
    """Return "did you mean 'x'?" for the known word nearest to `word`, or None where none is near.

    `likeness` is how near, from 0 to 1: where nothing else speaks for a slip, it had better be `SLIP`.
    """
    import difflib  # of use only where something went wrong

    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)
    return f"did you mean {matches[0]!r}?" if matches else None
