"""The rules for trimming a fatbin: the device code that can run on the given GPUs stays.

`VERSION` is part of the identity of images with trimmed files: raise it with every change of the bytes that
trimming writes. The tests compare hashes of trimmed files, so they fail after such a change.
"""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.audit.binaries.fatbin import CUBIN, PTX
from imagematrix.common.suggestions import require_known
from imagematrix.hardware.vendors import device_code

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from imagematrix.audit.binaries.fatbin import FatbinEntry

VERSION = "4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The entries of a fatbin that stay, and the capabilities for which they have code."""

    kept: tuple[FatbinEntry, ...]
    served: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The code to keep: code for the capabilities `computes` ("9.0").

    PTX stays if one of the capabilities needs it because no cubin in the same fatbin runs there; with
    `keep_ptx`, all PTX stays. A fatbin without code for any of the capabilities stays as it is; with
    `drop_dead`, it is emptied. With `nvidia`, NVIDIA's own libraries are trimmed, too.
    """

    computes: tuple[str, ...]
    keep_ptx: bool = False
    drop_dead: bool = False
    nvidia: bool = False

    def judge(self, entries: Sequence[FatbinEntry]) -> Verdict:
        """Return which entries of a fatbin stay."""
        code = [inner for entry in entries for inner in entry.code]
        cubins = [entry for entry in code if entry.kind == CUBIN]
        texts = [entry for entry in code if entry.kind == PTX]
        native = {compute for compute in self.computes if _has_cubin(cubins, compute)}
        without_cubin = [compute for compute in self.computes if compute not in native]
        served = native.union(compute for compute in without_cubin if _has_ptx(texts, compute))
        kept = tuple(
            entry for entry in entries if any(self._is_kept(inner, without_cubin) for inner in entry.code)
        )
        # A program with an empty fatbin would fail later, and less clearly.
        if cubins + texts and not served and not self.drop_dead:
            kept = tuple(entries)
        return Verdict(kept=kept, served=frozenset(served))

    def _is_kept(self, entry: FatbinEntry, without_cubin: Sequence[str]) -> bool:
        if entry.kind == CUBIN:
            return any(_has_cubin([entry], compute) for compute in self.computes)
        if entry.kind == PTX:
            return self.keep_ptx or any(_has_ptx([entry], compute) for compute in without_cubin)
        return True  # intermediate code for linkers, which no driver loads


def parse_capabilities(words: Iterable[str]) -> tuple[str, ...]:
    """Return the capabilities of the GPUs that run code for the targets in `words`; raise UsageError.

    For example, "9.0a" stands for 9.0, and "10.0f" for 10.0 and 10.3. The result is sorted.
    """
    gpus: set[str] = set()
    targets = device_code.list_capability_words()
    for word in words:
        require_known(word, targets, "compute capability")
        gpus.update(device_code.expand_capability(word))
    return tuple(sorted(gpus, key=targets.index))


def _has_cubin(cubins: Iterable[FatbinEntry], compute: str) -> bool:
    return any(device_code.can_run_cubin(entry.target, compute) for entry in cubins)


def _has_ptx(texts: Iterable[FatbinEntry], compute: str) -> bool:
    return any(device_code.can_compile_ptx(entry.target, compute) for entry in texts)
