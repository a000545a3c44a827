"""Shell completion of image names, axes and values; nothing is suggested if that takes too long."""

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

    from imagematrix.images.catalog.catalog import Catalog

    T = TypeVar("T")

SHELL = "_IMAGEMATRIX_COMPLETE"  # the variable with which a shell requests completion
BASH = "complete_bash"
LIMIT_S = 2.0  # to wait for an engine
BREAKS = ":="  # characters in our words at which bash splits, besides blanks (COMP_WORDBREAKS in bash(1))


def split_line(environment: Mapping[str, str]) -> list[str]:
    """Return the words of the line that a shell completes, without the program's name; else none."""
    return _parse_line(environment)[1:] if SHELL in environment else []


@contextmanager
def enable_bash_completion(environment: MutableMapping[str, str]) -> Iterator[None]:
    """While typer completes for bash, join the words that bash split, and shorten the candidates again.

    typer reads the line from `environment`. Bash replaces only its own last word.
    """
    if environment.get(SHELL) != BASH:
        yield
        return
    typed = _rejoin_words(environment)
    split = max(typed.rfind(mark) for mark in BREAKS) + 1
    output = io.StringIO()
    try:
        with redirect_stdout(output):
            yield
    finally:
        for line in output.getvalue().splitlines():
            starts = (start for start in range(split + 1) if line.startswith(typed[start:]))
            print(line[split - next(starts, split) :])


def _parse_line(environment: Mapping[str, str]) -> list[str]:
    return (environment.get("COMP_WORDS") or environment.get("_TYPER_COMPLETE_ARGS") or "").split()


def _rejoin_words(environment: MutableMapping[str, str]) -> str:
    """Join the words that bash split, such as the three of `training:v1`; return the current one."""
    parts = environment["COMP_WORDS"].split("\n")
    current = int(environment["COMP_CWORD"])
    joined: list[str] = []
    position = 0
    for index, part in enumerate(parts):
        follows = index > 1 and (part.strip(BREAKS) == "" != part or parts[index - 1].strip(BREAKS) == "")
        if follows and joined:
            joined[-1] += part
        else:
            joined.append(part)
        if index == current:
            position = len(joined) - 1
    environment["COMP_WORDS"], environment["COMP_CWORD"] = "\n".join(joined), str(position)
    return joined[position]


def complete_images(incomplete: str) -> list[str]:
    """Return the versions in the engine; once one is complete, its variants."""
    catalogs: list[Catalog] = _query_with_timeout(_read_engine_catalogs, [])
    versions = [f"{catalog.image}:{catalog.version}" for catalog in catalogs]
    variants = [variant.reference for catalog in catalogs for variant in catalog.variants]
    return _filter_matching(versions, incomplete) or _filter_matching(variants, incomplete)


def complete_names(incomplete: str) -> list[str]:
    """Return the names of the images in the engine, without versions."""
    catalogs: list[Catalog] = _query_with_timeout(_read_engine_catalogs, [])
    return _filter_matching([catalog.image for catalog in catalogs], incomplete)


def complete_where(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return conditions on the axes of the image in the line, or of all images in the engine."""
    # The image is the first argument, which typer does not parse while an option lacks its value.
    valued = {
        name
        for parameter in ctx.command.params
        if not getattr(parameter, "is_flag", False)
        for name in parameter.opts
    }
    image, before = None, ""
    for word in _parse_line(os.environ)[len(ctx.command_path.split()) :]:
        if not word.startswith("-") and before not in valued:
            image = word
            break
        before = word
    return _complete_conditions(image, ctx.params.get("catalog"), incomplete)


def complete_engine_where(incomplete: str) -> list[str]:
    """Return conditions on the axes of all images in the engine."""
    return _complete_conditions(None, None, incomplete)


def complete_only(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return conditions on the axes of the matrix."""
    from imagematrix.build.matrix.load import load_matrix

    try:
        matrix = load_matrix(ctx.params.get("file") or "matrix.yaml", contexts=None)
    except UsageError:
        return []
    images = {"image": [image.name for image in matrix.images]}
    return _list_conditions({**matrix.axes, **images}, incomplete)


def complete_run_words(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return candidates for the next word of `imagematrix run`: an image, or the value of an option."""
    from imagematrix.common.settings import ENGINES
    from imagematrix.launcher.docker.options import parse_run_args

    before = [str(word) for word in ctx.params.get("words") or ()]
    if before[-1:] == ["--where"]:
        return complete_engine_where(incomplete)
    if before[-1:] == ["--engine"]:
        return _filter_matching(ENGINES, incomplete)
    with suppress(UsageError):
        if parse_run_args([*before, "IMAGE"]).command == ():
            return complete_images(incomplete)
    return []


def _complete_conditions(image: str | None, catalog: str | None, incomplete: str) -> list[str]:
    def collect_catalog_axes() -> Mapping[str, Sequence[str]]:
        from imagematrix.images.catalog.sources import open_catalog, open_stored_catalog
        from imagematrix.selection.query import collect_axes

        if catalog is not None:
            catalogs = [open_catalog(catalog, image=image)]
        else:  # a note would be written into the line that is completed
            catalogs = [open_stored_catalog(image, lambda _: None)] if image else _read_engine_catalogs()
        return collect_axes(variant for item in catalogs for variant in item.variants)

    return _list_conditions(_query_with_timeout(collect_catalog_axes, {}), incomplete)


def _read_engine_catalogs() -> list[Catalog]:
    from imagematrix.images.catalog.sources import list_catalogs

    return list_catalogs()


def _list_conditions(axes: Mapping[str, Sequence[str]], incomplete: str) -> list[str]:
    before, comma, _ = incomplete.rpartition(",")
    candidates = (f"{before}{comma}{axis}={value}" for axis, values in axes.items() for value in values)
    return _filter_matching(candidates, incomplete)


def _filter_matching(candidates: Iterable[str], incomplete: str) -> list[str]:
    return [candidate for candidate in dict.fromkeys(candidates) if candidate.startswith(incomplete)]


def _query_with_timeout(query: Callable[[], T], default: T) -> T:
    """Return the result of a query, or the default after a timeout or an error, which is not shown."""
    result = [default]

    def run_query() -> None:
        with suppress(Exception):
            result[0] = query()

    thread = Thread(target=run_query, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return result[0]
