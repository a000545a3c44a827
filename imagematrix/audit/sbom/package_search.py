"""Which variants of a version contain a package, in which version, and which hosts get them."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from imagematrix.audit.packages.installed_package import PYPI
from imagematrix.common.record import describe_fields
from imagematrix.hardware.vendors.guarded_files import normalize_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from imagematrix.audit.sbom.components import Component
    from imagematrix.images.catalog.catalog import Catalog

SCHEMA = "imagematrix.packages/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantPackages:
    """A variant with the packages in it that were asked for.

    `hosts` are those that get it, None if no hosts were given; `warnings` say what could not be read.
    """

    reference: str
    digest: str | None
    packages: tuple[Component, ...]
    warnings: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageSearch:
    """The variants of a version with the packages that match `pattern`.

    `unserved` are the hosts that get no variant, None if no hosts were given.
    """

    catalog: Catalog
    pattern: str
    variants: tuple[VariantPackages, ...]
    unserved: tuple[str, ...] | None = None

    def to_json(self) -> dict[str, object]:
        """Return the Packages document."""
        return {
            "schema": SCHEMA,
            "image": self.catalog.image,
            "version": self.catalog.version,
            "package": self.pattern,
            "variants": [describe_fields(variant) for variant in self.variants],
            "unserved": None if self.unserved is None else list(self.unserved),
        }


def match_components(pattern: str, components: Iterable[Component]) -> Sequence[Component]:
    """Return the components whose names match a glob, or the names of the packages of their sources.

    Advisories name the sources: openssl for libssl3. Case does not matter, nor how names of Python are spelt.
    """
    plain = pattern.lower()
    of_python = plain if "[" in plain else normalize_name(plain)  # brackets may contain a range
    return [
        component
        for component in components
        if fnmatch.fnmatchcase(component.package.name.lower(), plain)
        or fnmatch.fnmatchcase((component.package.source or "").lower(), plain)
        or (component.package.kind == PYPI and fnmatch.fnmatchcase(component.package.name, of_python))
    ]
