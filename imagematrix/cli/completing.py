"""What a shell offers when somebody presses Tab: names of images, axes and values; quickly, or nothing."""

from __future__ import annotations

import io
import os
from contextlib import contextmanager, redirect_stdout, suppress
from threading import Thread

import typer

from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
    from typing import TypeVar

    from imagematrix.catalog.catalog import Catalog

    T = TypeVar("T")

__all__ = ["answering", "asked", "images", "only", "run_words", "where"]

SHELL = "_IMAGEMATRIX_COMPLETE"  # the variable by which a shell asks
BASH = "complete_bash"
LIMIT_S = 2.0  # that somebody waits for an engine
BREAKS = ":="  # what ends a word to bash, beside blanks (COMP_WORDBREAKS in bash(1)), and is in ours


def asked(environment: Mapping[str, str]) -> list[str]:
    """Return the words, after the program's name, of the line that a shell asks about, if it does."""
    return _line(environment)[1:] if SHELL in environment else []


@contextmanager
def answering(environment: MutableMapping[str, str]) -> Iterator[None]:
    """While typer answers a shell, put together what bash took apart, and take the answer apart for it.

    typer looks for the line in `environment`. Bash replaces no more than what it has for the last word.
    """
    if environment.get(SHELL) != BASH:
        yield
        return
    written = _rejoin(environment)
    split = max(written.rfind(mark) for mark in BREAKS) + 1
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            yield
    finally:
        for line in said.getvalue().splitlines():
            starts = (start for start in range(split + 1) if line.startswith(written[start:]))
            print(line[split - next(starts, split) :])


def _line(environment: Mapping[str, str]) -> list[str]:
    return (environment.get("COMP_WORDS") or environment.get("_TYPER_COMPLETE_ARGS") or "").split()


def _rejoin(environment: MutableMapping[str, str]) -> str:
    """Put together what bash took apart: of `training:v1` it makes three words. Return the last one."""
    parts = environment["COMP_WORDS"].split("\n")
    current = int(environment["COMP_CWORD"])
    joined: list[str] = []
    place = 0
    for number, part in enumerate(parts):
        follows = number > 1 and (part.strip(BREAKS) == "" != part or parts[number - 1].strip(BREAKS) == "")
        if follows and joined:
            joined[-1] += part
        else:
            joined.append(part)
        if number == current:
            place = len(joined) - 1
    environment["COMP_WORDS"], environment["COMP_CWORD"] = "\n".join(joined), str(place)
    return joined[place]


def images(incomplete: str) -> list[str]:
    """Return the versions that the engine has; once one is written out, its variants."""
    catalogs: list[Catalog] = _briefly(_of_the_engine, [])
    versions = [f"{one.image}:{one.version}" for one in catalogs]
    variants = [variant.reference for one in catalogs for variant in one.variants]
    return _offered(versions, incomplete) or _offered(variants, incomplete)


def where(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return conditions on the axes of the image that the line names, or of all that the engine has."""
    return _where(_image(ctx), ctx.params.get("catalog"), incomplete)


def only(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return conditions on the axes of the matrix."""
    from imagematrix.matrix.load import load

    try:
        matrix = load(ctx.params.get("file") or "matrix.yaml")
    except UsageError:
        return []
    images = {"image": [image.name for image in matrix.images]}
    return _conditions({**matrix.axes, **images}, incomplete)


def run_words(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return what may follow the words of `imagematrix run`: the image, or a condition after --where."""
    from imagematrix.launcher.options import split

    before = [str(word) for word in ctx.params.get("words") or ()]
    if before[-1:] == ["--where"]:
        return _where(None, None, incomplete)
    with suppress(UsageError):
        if split([*before, "IMAGE"]).command == ():
            return images(incomplete)
    return []


def _image(ctx: typer.Context) -> str | None:
    """Return the first argument of the line: where an option has no value yet, typer reads none."""
    valued = {
        name
        for parameter in ctx.command.params
        if not getattr(parameter, "is_flag", False)
        for name in parameter.opts
    }
    before = ""
    for word in _line(os.environ)[2:]:
        if not word.startswith("-") and before not in valued:
            return word
        before = word
    return None


def _where(image: str | None, catalog: str | None, incomplete: str) -> list[str]:
    def axes() -> Mapping[str, Sequence[str]]:
        from imagematrix.cli.choosing import catalog_of
        from imagematrix.selection.question import axes

        found = [catalog_of(image, catalog)] if image else _of_the_engine()
        return axes(variant for one in found for variant in one.variants)

    return _conditions(_briefly(axes, {}), incomplete)


def _of_the_engine() -> list[Catalog]:
    from imagematrix.catalog.sources import list_catalogs

    return list_catalogs()


def _conditions(axes: Mapping[str, Sequence[str]], incomplete: str) -> list[str]:
    before, comma, _ = incomplete.rpartition(",")
    offered = (f"{before}{comma}{axis}={value}" for axis, values in axes.items() for value in values)
    return _offered(offered, incomplete)


def _offered(candidates: Iterable[str], incomplete: str) -> list[str]:
    return [one for one in dict.fromkeys(candidates) if one.startswith(incomplete)]


def _briefly(ask: Callable[[], T], otherwise: T) -> T:
    """Return an answer, or what else will do where none comes soon; nobody who presses Tab reads errors."""
    found = [otherwise]

    def work() -> None:
        with suppress(Exception):
            found[0] = ask()

    thread = Thread(target=work, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return found[0]
