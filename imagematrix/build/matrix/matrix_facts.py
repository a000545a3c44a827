"""Facts that a matrix.yaml adds to the tables: CUDA releases and marches that they lack.

Every cell has the facts of its matrix. They also answer from the tables, so that there is one place to ask.
The tables take precedence: `load` rejects a fact that they already have.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from imagematrix.hardware.vendors import cuda, device_code, marches, versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedRelease:
    """A CUDA release: the compute capabilities that it has targets for, and the oldest driver that runs it.

    Facts that are not stated are empty or None.
    """

    compute: tuple[str, ...] = ()
    driver: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class March:
    """What -march or -mcpu means: an architecture, the CPU flags that code needs, and whose CPUs it is for.

    `arch` is spelled as by uname, `vendor` as by `marches.host_vendor`; None for a generic name.
    """

    arch: str
    flags: frozenset[str]
    vendor: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixFacts:
    """The CUDA releases and marches of one matrix.yaml, by name; lookups also use the tables."""

    cuda: Mapping[str, StatedRelease] = field(default_factory=dict)
    march: Mapping[str, March] = field(default_factory=dict)

    def list_capabilities(self) -> tuple[str, ...]:
        """Return the compute capabilities that any CUDA release has a target for."""
        stated = (word for release in self.cuda.values() for word in release.compute)
        return tuple(dict.fromkeys((*device_code.list_capability_words(), *stated)))

    def get_targets(self, release: str) -> frozenset[str]:
        """Return the targets of a CUDA release; empty if they are unknown."""
        known = cuda.get_release(release)
        if known:
            return known.targets
        stated = self.cuda.get(release, StatedRelease())
        return frozenset(device_code.make_target(word) for word in stated.compute)

    def find_releases(self, target: str) -> list[str]:
        """Return the CUDA releases that have `target`, oldest first."""
        names = {*cuda.load_releases(), *self.cuda}
        return sorted(
            (name for name in names if target in self.get_targets(name)), key=versions.make_sort_key
        )

    def get_oldest_driver(self, release: str | None) -> str | None:
        """Return the oldest driver for a CUDA release that the tables lack; None if it is unknown."""
        return self.cuda.get(release or "", StatedRelease()).driver

    def get_arch(self, march: str) -> str:
        """Return the architecture of `march`: "x86_64" or "aarch64"."""
        stated = self.march.get(march)
        return stated.arch if stated else marches.get_arch(march)

    def get_option(self, march: str) -> str:
        """Return the compiler option that selects `march`."""
        return marches.get_option(march, self.get_arch(march))

    def get_vendor(self, march: str) -> str | None:
        """Return the vendor of the CPUs that `march` is for; None for generic names."""
        stated = self.march.get(march)
        return stated.vendor if stated else marches.get_vendor(march)

    def get_flags(self, march: str) -> frozenset[str] | None:
        """Return the CPU flags required by a march that the tables lack; None if they are unknown."""
        stated = self.march.get(march)
        return stated.flags - marches.IGNORED[stated.arch] if stated else None

    def format_label_facts(self, axes: Mapping[str, str]) -> str | None:
        """Return, as JSON, the facts that go into the labels of the cell with these `axes`, or None."""
        facts: dict[str, object] = {}
        march = axes.get("march", "")
        flags = self.get_flags(march)
        if flags is not None:
            facts |= {"cpu_flags": sorted(flags), "vendor": self.get_vendor(march)}
        driver = self.get_oldest_driver(axes.get("cuda"))
        if driver:
            facts["oldest_driver"] = driver
        return json.dumps(facts, sort_keys=True, separators=(",", ":")) if facts else None
