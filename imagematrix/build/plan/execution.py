"""How the build of a cell would run: on machines of its platform, as a cross build, or with an emulator."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from imagematrix.hardware.host.emulators import format_registration

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


class ExecutionKind(StrEnum):
    """Whose programs a build runs.

    Those of its platform on such a machine, only those of the machine that builds, or those of its platform
    on another machine.
    """

    NATIVE = "native"
    CROSS = "cross"
    EMULATED = "emulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuilderPlatforms:
    """The platforms of the builder `name`: that of its machine, and those for which it lists an emulator.

    With `may_emulate_more`, its BuildKit may have emulators of its own, which it does not list.
    """

    name: str
    native: str
    emulated: frozenset[str] = frozenset()
    may_emulate_more: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How the build of a cell would run on `builder`, whose machine has the platform `native`.

    Of the platforms whose programs the build runs, `missing` are those that no builder can run, and
    `doubtful` those of which nothing says whether the builder can.
    """

    kind: ExecutionKind
    builder: str
    native: str
    missing: tuple[str, ...] = ()
    doubtful: tuple[str, ...] = ()

    def describe_foreign(self, *, names_builder: bool = False) -> str | None:
        """Return how the build would run in a few words, None if it is native."""
        if self.kind is ExecutionKind.NATIVE:
            return None
        where = f"{self.builder} ({self.native})" if names_builder else self.native
        return f"{self.kind}, on {where}"

    def to_json(self) -> dict[str, object]:
        """Return `execution` of a cell in the Plan document."""
        return {
            "kind": self.kind,
            "builder": self.builder,
            "native": self.native,
            "missing": list(self.missing),
            "doubtful": list(self.doubtful),
        }


def describe_missing(execution: Execution) -> str:
    """Return why the build of a cell cannot run."""
    platforms = " and ".join(execution.missing)
    return f"its build runs programs for {platforms}, and the builder {execution.builder} has no emulator"


def describe_doubt(execution: Execution) -> str:
    """Return why the build of a cell may not run."""
    platforms, builder = " and ".join(execution.doubtful), execution.builder
    return f"its build runs programs for {platforms}, and nothing says that the builder {builder} can"


def suggest_proof(execution: Execution) -> str:
    """Return what shows that the build of a cell can run."""
    named = [platform for platform in execution.doubtful if "$" not in platform]
    return suggest_emulator(named) if named else "name the platform in FROM --platform, without a variable"


def suggest_emulator(platforms: Sequence[str]) -> str:
    """Return what lets a build run programs for `platforms`."""
    commands = [command for command in map(format_registration, platforms) if command]
    ways = [
        "pass --builder with a builder on such a machine",
        "begin the stages that run programs with FROM --platform=$BUILDPLATFORM, and cross-compile",
        *(f"register an emulator: {command}" for command in commands),
    ]
    return "; or ".join(ways)
