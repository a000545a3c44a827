"""What a system that chooses machines knows of them: some facts, and nothing of the others.

A fact has a word, such as `driver` or `gpu-state`. A system may also know what follows from a fact, such as
`cuda` (the release that the driver supports) or `cpu-level`; and from `gpu-name`, the table of products tells
other facts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from imagematrix.common.suggestions import require_known
from imagematrix.hardware.vendors import device_code, gpus, versions
from imagematrix.selection.needs.partial_scales import (
    AlikeDriverScale,
    AlikeScale,
    AssumedScale,
    BoundedScale,
    GivenScale,
    ReleaseScale,
)
from imagematrix.selection.needs.verdicts import VERSION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from imagematrix.hardware.vendors.gpus import Product
    from imagematrix.selection.needs.equivalence import Scale, Vocabulary

ARCH, CPU_FLAGS, CPU_LEVEL = "arch", "cpu-flags", "cpu-level"
CUDA, DRIVER, GPU_NAME, GPU_COMPUTE = "cuda", "driver", "gpu-name", "gpu-compute"
COMPUTE, LAST_BRANCH = "gpus.compute", "gpus.last_branch"
BRAND, DATA_CENTRE = "gpus.brand", "gpus.data_centre"
# Facts that a system need not know, by the value that all nodes with GPUs in use have. A rule that compares
# another fact which the system does not know has to hold for all of its values.
ASSUMED: Mapping[str, tuple[Hashable, str]] = {
    "driver.kind": (
        None,
        "the loaded kernel modules are of the kind, open or proprietary, that drives the node's GPUs",
    ),
    "driver.user_mode_differs": (
        False,
        "the node's own user-mode driver has the version of its kernel modules",
    ),
    "accelerators": (False, "the node has no accelerators besides its GPUs"),
    "gpus.state": (
        "ok",
        "every GPU works, whole or as a MIG device: none is virtual, or in MIG mode without a MIG device",
    ),
}


@dataclass(frozen=True, kw_only=True)
class GpuKind:
    """GPUs that rules do not tell apart, as far as their names or capabilities tell: `names` or `compute`.

    `values` are the values of facts, of which a GPU has one each. `last_branch` is the last driver branch
    that supports any of them, None if the newest does.
    """

    names: tuple[str, ...] = ()
    compute: str | None = None
    values: tuple[tuple[str, tuple[Hashable, ...]], ...] = ()
    last_branch: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Knowledge:
    """The facts that a system knows, by their `words`; all facts are in the `vocabulary` of nodes.

    `gpu_names` are the names that the system has for GPUs, and may ask for; empty for those in the table.
    """

    vocabulary: Vocabulary
    words: frozenset[str]
    gpu_names: tuple[str, ...] = ()

    @property
    def names_gpus(self) -> bool:
        """Whether the system knows the names of GPUs."""
        return GPU_NAME in self.words

    @cached_property
    def gpu_kinds(self) -> tuple[GpuKind, ...]:
        """The GPUs that there are, as far as the system tells them apart."""
        if self.names_gpus:
            return _group_names(self.gpu_names)
        if GPU_COMPUTE in self.words:
            return _group_computes()
        return (_make_kind(_list_products()),)

    @lru_cache(maxsize=256)  # noqa: B019 - a command has few
    def make_vocabulary(self, kind: GpuKind | None) -> Vocabulary:
        """Return what the system knows of nodes with one kind of GPUs; None for nodes without GPUs."""
        values = dict(kind.values) if kind else {}
        scales = {
            fact: self._make_scale(fact, scale, values.get(fact))
            for fact, scale in self.vocabulary.scales.items()
        }
        if kind and kind.last_branch is not None:
            scales[VERSION] = BoundedScale(scale=scales[VERSION], branch=kind.last_branch)
        return replace(self.vocabulary, carrier=f"the facts {', '.join(sorted(self.words))}", scales=scales)

    def _make_scale(self, fact: str, scale: Scale, values: tuple[Hashable, ...] | None) -> Scale:
        if fact == VERSION:
            if DRIVER in self.words:
                return scale
            return (ReleaseScale if CUDA in self.words else AlikeDriverScale)(scale=scale)
        if values is not None:
            return GivenScale(scale=scale, values=values)
        if make_word(fact) in self.words:
            return scale
        if fact in ASSUMED:
            return AssumedScale(scale=scale, shown=ASSUMED[fact][0])
        return AlikeScale(scale=scale)


def make_word(fact: str) -> str:
    """Return the word of a fact: "gpu-state" for gpus.state, "driver" for driver.version."""
    if fact == VERSION:
        return DRIVER
    return fact.replace("gpus.", "gpu-").replace(".", "-").replace("_", "-")


def list_words(vocabulary: Vocabulary) -> tuple[str, ...]:
    """Return the words of all facts that a system may know, those first without which there is no answer."""
    needed = (CUDA, DRIVER, GPU_NAME, GPU_COMPUTE)
    others = {ARCH, CPU_FLAGS, CPU_LEVEL, *map(make_word, vocabulary.scales)}
    return (*needed, *sorted(others.difference(needed)))


def parse_words(text: str, vocabulary: Vocabulary) -> frozenset[str]:
    """Return the words in a list with commas; raise UsageError if one is unknown."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        require_known(word, list_words(vocabulary), "fact")
    return frozenset(words)


def _list_products() -> tuple[Product, ...]:
    """Return the products without those of Tegra, whose drivers are in no order with others."""
    tegra = device_code.list_tegra_capabilities()
    return tuple(product for product in gpus.list_products() if product.compute not in tegra)


def _group_names(names: tuple[str, ...]) -> tuple[GpuKind, ...]:
    """Return the kinds of GPUs with these names, or with those in the table, without unknown names."""
    by_name: dict[str, list[Product]] = {name: [*gpus.find_products(name)] for name in names}
    if not names:
        for product in _list_products():
            by_name.setdefault(product.name, []).append(product)
    kinds: dict[GpuKind, list[str]] = {}
    for name, products in by_name.items():
        if products:
            kinds.setdefault(_make_kind(products, name), []).append(name)
    return tuple(replace(kind, names=tuple(sorted(same))) for kind, same in kinds.items())


def _group_computes() -> tuple[GpuKind, ...]:
    by_compute: dict[str, list[Product]] = {}
    for product in _list_products():
        by_compute.setdefault(str(product.compute), []).append(product)
    return tuple(
        replace(_make_kind(by_compute[compute]), compute=compute)
        for compute in sorted(by_compute, key=versions.make_sort_key)
    )


def _make_kind(products: Iterable[Product], name: str | None = None) -> GpuKind:
    """Return what is known of GPUs that are one of these products, and have the same name if there is one."""
    computes = tuple(sorted({product.compute for product in products if product.compute}))
    branches = {product.last_branch for product in products}
    ends = sorted(branch for branch in branches if branch is not None)
    newest: tuple[int | None, ...] = (None,) if None in branches else ()
    values: dict[str, tuple[Hashable, ...]] = {COMPUTE: computes, LAST_BRANCH: (*ends, *newest)}
    if gpus.get_brand(name):
        # Drivers report one of these for data-centre parts. Of others, the name does not tell the brand.
        values |= {BRAND: tuple(sorted(gpus.DATA_CENTRE_BRANDS)), DATA_CENTRE: (True,)}
    return GpuKind(values=tuple(values.items()), last_branch=None if newest else ends[-1])
