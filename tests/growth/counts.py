"""Count what each operation does for n and for four times n of what it grows with.

    PYTHONHASHSEED=0 python tests/growth/counts.py [--write] [--only WORD]

It prints for each operation both counts, by function, as JSON. With --write, the counts for n are also
written to counts.json beside this file, with which later ones are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.append(str(Path(__file__).parents[1] / "doubles"))

from counting import counted
from growing import InProcess
from operations import OPERATIONS, TIMES

import imagematrix
from imagematrix.build.dockerfile import render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeVar, TypeVarTuple

    from operations import Operation

    T = TypeVar("T")
    Numbers = TypeVarTuple("Numbers")

PACKAGE = Path(imagematrix.__file__).parent
KEPT = Path(__file__).with_name("counts.json")
FEW = 1  # of what an operation grows with, before it is counted: modules are loaded, and tables read
FORK = get_context("fork")


def main() -> None:
    """Count the operations that the command line names."""
    parser = argparse.ArgumentParser(description="Count what operations do, and how it grows.")
    parser.add_argument("--write", action="store_true", help="write the counts for n to counts.json")
    parser.add_argument("--only", default="", metavar="WORD", help="operations with WORD in the name")
    asked = parser.parse_args()
    made = {one.name: apart(both, one) for one in OPERATIONS if asked.only in one.name}
    sys.stdout.write(json.dumps(made))
    if asked.write:
        kept = json.loads(KEPT.read_text()) if asked.only and KEPT.exists() else {}
        kept |= {name: sum(counts[0].values()) for name, counts in made.items()}
        KEPT.write_text(f"{json.dumps(kept, indent=2)}\n")


def both(operation: Operation) -> list[dict[str, int]]:
    """Return the counts of an operation for n and for TIMES n, by function, each in a process of its own."""
    of(operation, FEW)
    return [apart(of, operation, number) for number in (operation.n, TIMES * operation.n)]


def of(operation: Operation, number: int) -> dict[str, int]:
    """Return the counts of an operation for a number of what it grows with, by function."""
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = f"{name}/cache"
        folder = Path(name, "work")
        folder.mkdir()
        run = operation.prepare(number, folder)
        gc.disable()
        with quiet():
            return dict(counted(run, PACKAGE))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what is written to stdout and stderr, and show it only if there is an error."""
    own = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile("w+") as written:
        for stream in (1, 2):
            os.dup2(written.fileno(), stream)
        try:
            yield
        except BaseException as error:
            written.seek(0)
            error.add_note(written.read())
            raise
        finally:
            sys.stdout.flush()
            for stream, kept in enumerate(own, 1):
                os.dup2(kept, stream)


def apart(function: Callable[[Operation, *Numbers], T], operation: Operation, *numbers: *Numbers) -> T:
    """Return what a function returns in a process of its own, which begins with what this one has loaded."""
    receiving, sending = FORK.Pipe(duplex=False)

    def work() -> None:
        sending.send(function(operation, *numbers))

    process = FORK.Process(target=work)
    process.start()
    sending.close()
    try:
        result: T = receiving.recv()
    except EOFError:
        raise SystemExit(f"{operation.name} failed") from None
    finally:
        process.join()
    return result


if __name__ == "__main__":
    os.environ["DOCKER_HOST"] = "unix:///nowhere/docker.sock"
    vars(render)["subprocess"] = InProcess  # templates are rendered in this process
    main()
