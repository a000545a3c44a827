"""`imagematrix lock`: find out the digests of the base images, and keep them beside the matrix."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.options import File, Json
from imagematrix.cli.output import answer, counted, say

__all__ = ["command"]


def command(
    file: File = Path("matrix.yaml"),
    upgrade: Annotated[
        bool, typer.Option("--upgrade", "-U", help="Ask the registries for every base image anew.")
    ] = False,
    json: Json = False,
) -> None:
    """Write imagematrix.lock: the digest of every base image, which builds then use until you lock anew.

    What the lock has stays, and what no cell uses any more goes.
    """
    from imagematrix.matrix.load import load
    from imagematrix.planning import lock
    from imagematrix.planning.planner import Against, plan
    from imagematrix.stores.engine import Engine

    path = lock.beside(file)
    known = lock.read(path)
    matrix = load(file)
    with ExitStack() as stack:

        @cache
        def engine() -> Engine:  # where the lock has all of them, none is needed
            return stack.enter_context(Engine())

        def resolve(name: str) -> str:
            return engine().newest(name) if upgrade else engine().resolve(name)

        bases = dict(plan(matrix, Against(resolve=resolve, locked={} if upgrade else known)).bases)
    bases = lock.renew(path, known, bases)
    for name in sorted({*bases, *known}):
        if bases.get(name) != known.get(name):
            say(f"{name}: {known.get(name, 'new')} -> {bases.get(name, 'gone')}")
    say(f"{path}: {counted(len(bases), 'base image')}")
    if json:
        answer(lock.document(bases))
