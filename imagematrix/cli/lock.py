"""`imagematrix lock`: resolve the digests of the base images, and keep them next to the matrix."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.options import AllowContext, File, Json
from imagematrix.cli.output import counted, info, print_json

__all__ = ["command"]


def command(
    file: File = Path("matrix.yaml"),
    upgrade: Annotated[
        bool, typer.Option("--upgrade", "-U", help="Resolve every base image again in its registry.")
    ] = False,
    allow_context: AllowContext = None,
    json: Json = False,
) -> None:
    """Write imagematrix.lock: the digest of every base image, which builds use until the next upgrade.

    Locked digests stay, except for images that no cell uses any more.
    """
    from imagematrix.matrix.load import load
    from imagematrix.planning import lock
    from imagematrix.planning.planner import Against, plan
    from imagematrix.stores.engine import EngineStore

    path = lock.beside(file)
    locked = lock.read(path)
    matrix = load(file, contexts=allow_context or ())
    with ExitStack() as stack:

        @cache
        def engine() -> EngineStore:  # not needed if the lock has all of them
            return stack.enter_context(EngineStore())

        def resolve(name: str) -> str:
            return engine().newest(name) if upgrade else engine().resolve(name)

        planned = plan(matrix, Against(resolve=resolve, locked={} if upgrade else locked, note=info))
    for error in planned.unresolved.values():
        raise error
    bases = lock.renew(path, locked, planned.bases)
    for name in sorted({*bases, *locked}):
        if bases.get(name) != locked.get(name):
            info(f"{name}: {locked.get(name, 'new')} -> {bases.get(name, 'removed')}")
    info(f"{path}: {counted(len(bases), 'base image')}")
    if json:
        print_json(lock.document(bases))
