"""Suggestions for misspelt words."""

from __future__ import annotations

from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

SLIP = 0.75  # a similarity that by itself suggests a misspelling


def suggest_nearest(word: str, choices: Iterable[str], *, likeness: float = 0.5) -> str | None:
    """Return "did you mean 'x'?" for the known word nearest to `word`, or None if none is near.

    `likeness` is the least similarity, from 0 to 1; use `SLIP` if nothing else suggests a misspelling.
    """
    import difflib  # needed only for errors

    matches = difflib.get_close_matches(word, list(choices), n=1, cutoff=likeness)
    return f"did you mean {matches[0]!r}?" if matches else None


def require_known(word: str, choices: Collection[str], what: str) -> None:
    """Raise UsageError, with the nearest of the choices or all of them, if a word is not among them."""
    if word not in choices:
        remedy = suggest_nearest(word, choices) or f"one of {', '.join(choices)}"
        raise UsageError(f"invalid {what}: {word!r}", remedy=remedy)
