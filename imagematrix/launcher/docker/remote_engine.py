"""The machine that the engine runs on, which a probe describes only if it is this one."""

from __future__ import annotations

from imagematrix.errors import UsageError
from imagematrix.images.engine import system


def find_engine_machine(*, described: bool) -> str | None:
    """Return the name of the engine's machine if it is not this one, else None.

    Raises EngineError, and UsageError if it is another machine and not `described` by the command line: a
    probe would describe this machine.
    """
    machine = system.get_remote_name()
    if machine and not described:
        raise UsageError(
            f"the engine runs on {machine}, but a probe would describe this machine",
            remedy=f"run `imagematrix probe --json > node.json` on {machine}, then pass --host node.json",
        )
    return machine
