"""The catalog entries that cells promise before anything is built, as far as the shipped tables know."""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.build.matrix.axis_values import COMPAT_DRIVER
from imagematrix.build.matrix.expand import find_plain_pull_cells
from imagematrix.build.matrix.feasibility import find_infeasibility, find_march_flags
from imagematrix.common.record import replace
from imagematrix.hardware.vendors import device_code, marches
from imagematrix.images.catalog.catalog import CLAIM, UNKNOWN, Catalog, Variant

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagematrix.build.matrix.expand import Expansion
    from imagematrix.build.matrix.matrix import Cell, Image, Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The variants of one image that hosts choose from: what its cells promise.

    References are those of `make_reference`. `plain_pull` has those, by platform, that the matrix names.
    """

    catalog: Catalog
    plain_pull: Mapping[str, str]

    def with_facts(self, facts: Mapping[str, Variant]) -> Candidates:
        """Return them with `facts`, by reference, in place of what their cells promise."""
        variants = tuple([facts.get(variant.reference, variant) for variant in self.catalog.variants])
        return Candidates(catalog=replace(self.catalog, variants=variants), plain_pull=self.plain_pull)


def make_reference(image: str, version: str, cell: str) -> str:
    """Return the reference of a cell's image without an input digest, which is the same for every build."""
    return f"{image}:{version}-{cell}"


def make_variant(cell: Cell, flags: frozenset[str], reference: str) -> Variant:
    """Return the catalog entry that `cell` promises; `flags` are the CPU flags its code needs.

    Its only facts are claims: of device code, without which an audit wants to see some, and of CPU flags,
    without which it adds those that code probably needs.
    """
    claims = {"cpu_flags": cell.claims_flags, "cubins": cell.claims_code}
    march, compute = cell.axes.get("march"), cell.axes.get("compute")
    return Variant(
        reference=reference,
        digest=None,
        platform=cell.platform,
        cuda=cell.cuda,
        cubins=(device_code.make_target(compute),) if compute else (),
        driver=cell.user_mode_driver,
        march=march,
        cpu_flags=flags,
        signed_returns=flags >= marches.SIGNING,
        vendor=cell.facts.get_vendor(march) if march else None,
        oldest_driver=cell.facts.get_oldest_driver(cell.cuda),
        axes=cell.own_axes,
        gpu_memory_mib=cell.gpu_memory_mib,
        facts=tuple((fact, CLAIM) for fact, claimed in claims.items() if claimed),
    )


def promise_variant(cell: Cell) -> Variant:
    """Return what `cell` promises; its reference is that of `make_reference`.

    CPU flags are those of the table for its compiler, or for GCC if only the image has one. What no table
    knows is unknown, as is the device code of a cell for GPUs that names no compute capability.
    """
    march = cell.axes.get("march")
    flags = find_march_flags(cell, march) if march else frozenset()
    reference = make_reference(cell.image.name, cell.image.version, cell.id)
    promised = make_variant(cell, flags or frozenset(), reference)
    unknown = {"cpu_flags": UNKNOWN} if flags is None else {}
    if cell.cuda and "compute" not in cell.axes and not cell.claims_code:
        unknown["cubins"] = UNKNOWN
    return replace(promised, facts=tuple(sorted({**dict(promised.facts), **unknown}.items())))


def list_candidates(matrix: Matrix, expansion: Expansion, image: Image) -> Candidates:
    """Return the candidates that the feasible cells of an image are.

    Cells whose cuda-compat was not read are none: nothing tells which hosts they fit.
    """
    cells = [
        cell
        for cell in expansion.cells
        if cell.image.name == image.name
        and not find_infeasibility(cell)
        and not (cell.driver == COMPAT_DRIVER and cell.compat is None)
    ]
    plain_pull = find_plain_pull_cells(matrix, expansion, image)
    return Candidates(
        catalog=Catalog(
            image=image.name,
            version=image.version,
            variants=tuple(map(promise_variant, cells)),
            prefer=image.prefer,
            defaults=image.defaults,
            default_order=image.default_order,
        ),
        plain_pull={
            platform: make_reference(image.name, image.version, cell) for platform, cell in plain_pull.items()
        },
    )
