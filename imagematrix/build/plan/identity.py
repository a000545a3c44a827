"""The identity of an image: a digest of everything that decides its bytes, and the tag that has it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property

from imagematrix.build.trim import rules
from imagematrix.errors import UsageError
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.catalog import CLAIM
from imagematrix.images.catalog.warm_up import write_warm_up
from imagematrix.images.oci.manifest import compute_digest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagematrix.build.matrix.matrix import Cell
    from imagematrix.build.plan.build_inputs import BuildInputs

SCHEMA = "3"  # of this list of components, and of how each is hashed
EPOCH = "0"  # SOURCE_DATE_EPOCH: times are not inputs, so the image has none
TRIM = "trim"  # the component of builds that trim device code
TAG_LIMIT = 128  # characters, of the distribution specification


@dataclass(frozen=True, kw_only=True)  # without slots, to cache the digest
class Identity:
    """Everything that decides an image's bytes: each component by name with its digest or value."""

    components: Mapping[str, str]

    @cached_property
    def digest(self) -> str:
        """The input digest, `sha256:` and 64 hexadecimal digits."""
        text = json.dumps(dict(self.components), sort_keys=True, separators=(",", ":"))
        return compute_digest(text.encode())

    def find_changed_components(self, other: Mapping[str, str]) -> tuple[str, ...]:
        """Return the names of the components that differ from those of `other`, or that only one has."""
        names = sorted({*self.components, *other})
        return tuple(name for name in names if self.components.get(name) != other.get(name))


def identify(
    cell: Cell,
    dockerfile: str,
    bases: Mapping[str, str],
    context: str,
    build_inputs: BuildInputs | None = None,
    *,
    trims: bool = False,
    driver: str | None = None,
) -> Identity:
    """Return the identity of the image built from `dockerfile`.

    `bases` are its base images with their digests, `context` is the digest of the files it can copy,
    `build_inputs` are the inputs from the command line. With `trims`, its build trims device code. `driver`
    is the digest of the driver that it takes from a folder, or None.
    """
    facts = cell.facts.format_label_facts(cell.axes)
    return Identity(
        components={
            "schema": SCHEMA,
            "dockerfile": compute_digest(dockerfile.encode()),
            "context": context,
            "platform": cell.platform,
            "epoch": EPOCH,
            "compression": str(cell.image.compression),
            # Visible only in labels: the axes by name, the facts of the matrix and, if the template has no
            # compiler stage, the compiler whose CPU flags they list.
            **({"axes": ",".join(map("=".join, cell.own_axes))} if cell.own_axes else {}),
            **({"facts": facts} if facts else {}),
            **({"compiler": cell.properties["compiler"]} if "compiler" in cell.properties else {}),
            **({"cpu code": CLAIM} if cell.claims_flags else {}),
            **({"device code": CLAIM} if cell.claims_code else {}),
            **({"memory": f"{cell.gpu_memory_mib} MiB"} if cell.gpu_memory_mib else {}),
            **({"optional device code": json.dumps(list(cell.optional_code))} if cell.optional_code else {}),
            **({"warm_up": compute_digest(write_warm_up(cell.warm_up).encode())} if cell.warm_up else {}),
            # These decide which image of a version each node gets, so a version cannot change them.
            **({"prefer": ",".join(cell.image.prefer)} if cell.image.prefer else {}),
            **({"defaults": ",".join(map("=".join, cell.image.defaults))} if cell.image.defaults else {}),
            **({"default order": json.dumps(cell.image.default_order)} if cell.image.default_order else {}),
            **(build_inputs.list_components(cell.image) if build_inputs else {}),
            # The version of the trim rules, because they decide the bytes; the program's release does not.
            **({TRIM: rules.VERSION} if trims else {}),
            **({"driver": driver} if driver else {}),
            **{f"base {name}": digest for name, digest in bases.items()},
        }
    )


def format_tag(cell: Cell, identity: Identity) -> str:
    """Return the tag of the cell's image; raise UsageError if it is too long."""
    text = labels.make_tag(cell.image.version, cell.id, identity.digest)
    if len(text) > TAG_LIMIT:
        remedy = "shorten the version or the values of its axes"
        raise UsageError(f"the tag {text} is longer than the {TAG_LIMIT} characters of a tag", remedy=remedy)
    return text
