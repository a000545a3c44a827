"""The layers of an image with their sizes, and the instructions that made them."""

from __future__ import annotations

from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

MAKING = ("RUN ", "COPY ", "ADD ", "WORKDIR ")  # instructions that always make a layer, even an empty one


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedLayer:
    """A layer: its digest, its size in bytes, and the instruction that made it, or "" if unknown."""

    digest: str
    size: int
    made_by: str = ""


def read_config_layers(
    layers: Iterable[tuple[str, int]], config: Mapping[str, Any]
) -> tuple[SizedLayer, ...]:
    """Return layers, given as digest and size, with the instructions in a configuration's history."""
    layer_list = list(layers)
    history = [entry for entry in config.get("history") or [] if isinstance(entry, dict)]
    made_by = [
        _strip_decoration(entry.get("created_by")) for entry in history if not entry.get("empty_layer")
    ]
    if len(made_by) != len(layer_list):  # the history is optional
        made_by = [""] * len(layer_list)
    return tuple(
        SizedLayer(digest=digest, size=size, made_by=words)
        for (digest, size), words in zip(layer_list, made_by, strict=True)
    )


def read_history_layers(
    diff_ids: Sequence[str], history: Iterable[Mapping[str, Any]]
) -> tuple[SizedLayer, ...] | None:
    """Return the layers that an engine's `docker history` lists, the newest first, with uncompressed sizes.

    The list does not mark which entries are layers: None if that is ambiguous.
    """
    entries = [(_strip_decoration(entry.get("CreatedBy")), int(entry.get("Size") or 0)) for entry in history][
        ::-1
    ]
    for empty in (MAKING, ()):
        layers = [(words, size) for words, size in entries if size or words.startswith(empty)]
        if len(layers) == len(diff_ids):
            return tuple(
                SizedLayer(digest=digest, size=size, made_by=words)
                for digest, (words, size) in zip(diff_ids, layers, strict=True)
            )
    return None


def _strip_decoration(made_by: object) -> str:
    """Return an instruction without the decoration that builders add."""
    words = str(made_by or "").removesuffix("# buildkit").removeprefix("/bin/sh -c #(nop) ")
    return " ".join(words.replace("RUN /bin/sh -c ", "RUN ").split())
