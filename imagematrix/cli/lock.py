"""`imagematrix lock`: resolve the digests of base images and drivers, and keep them next to the matrix."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.shared.options import AllowContext, File, Json
from imagematrix.cli.shared.output import print_info, print_json
from imagematrix.common.text import format_count


def command(
    file: File = Path("matrix.yaml"),
    upgrade: Annotated[
        bool, typer.Option("--upgrade", "-U", help="Resolve every base image again in its registry.")
    ] = False,
    allow_context: AllowContext = None,
    json: Json = False,
) -> None:
    """Write imagematrix.lock: the digests of base images and of drivers to download.

    Builds use them until the next upgrade. Locked digests stay, except for those that no cell uses any more.
    """
    from imagematrix.build.matrix.load import load_matrix
    from imagematrix.build.plan import lock
    from imagematrix.build.plan.plan import PlanContext
    from imagematrix.build.plan.planner import plan
    from imagematrix.build.plan.remote_driver import resolve_driver
    from imagematrix.build.stores.engine import EngineStore

    matrix = load_matrix(file, contexts=allow_context or ())
    path = lock.locate_lock(file)
    locked, drivers = lock.read_lock(path)
    with ExitStack() as stack:

        @cache
        def open_engine() -> EngineStore:  # not needed if the lock has all of them
            return stack.enter_context(EngineStore())

        def resolve_base(name: str) -> str:
            return open_engine().resolve_newest(name) if upgrade else open_engine().resolve(name)

        context = PlanContext(
            resolve=resolve_base,
            locked={} if upgrade else locked,
            drivers={} if upgrade else drivers,
            resolve_driver=partial(resolve_driver, on_progress=print_info),
            on_progress=print_info,
        )
        planned = plan(matrix, context)
    for error in planned.unresolved.values():
        raise error
    bases, new_drivers = lock.renew_lock(path, locked, planned.bases, planned.drivers)
    before = {**locked, **{address: driver.file for address, driver in drivers.items()}}
    after = {**bases, **{address: driver.file for address, driver in new_drivers.items()}}
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            print_info(f"{name}: {before.get(name, 'new')} -> {after.get(name, 'removed')}")
    counts = [format_count(len(bases), "base image")]
    counts += [format_count(len(new_drivers), "driver")] if new_drivers else []
    print_info(f"{path}: {', '.join(counts)}")
    if json:
        print_json(lock.make_lock_document(bases, new_drivers))
