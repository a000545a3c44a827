"""The components of an image: the packages in its files, and those that only its own SBOM names."""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.audit.sbom.purl import make_purl
from imagematrix.audit.sbom.sbom_reader import read_packages
from imagematrix.common.text import format_count, shorten_words
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.audit.images.contents import Contents
    from imagematrix.audit.packages.installed_package import InstalledPackage
    from imagematrix.audit.report import Audit

FILES, SBOM = "files", "sbom"  # sources of components
SHOWN = 5  # databases that a warning names


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A package in an image, with its package URL; `source` is FILES, or SBOM if only an SBOM names it."""

    package: InstalledPackage
    url: str | None
    source: str

    def to_json(self) -> dict[str, object]:
        """Return one element of the `packages` of an image."""
        package = self.package
        return {
            "type": package.kind,
            "name": package.name,
            "version": package.version,
            "arch": package.arch,
            "source_package": package.source,
            "license": package.license,
            "path": package.path,
            "purl": self.url,
            "source": self.source,
        }


def list_components(audit: Audit) -> tuple[tuple[Component, ...], tuple[str, ...]]:
    """Return the components of an audited image, and a text for each SBOM of its own that is not used.

    An SBOM only adds: what the files show stays, whatever it says.
    """
    components = [
        Component(package=package, url=make_purl(package, audit.contents.distribution), source=FILES)
        for package in audit.contents.packages
    ]
    known = {_make_identity(package) for package in audit.contents.packages}
    # An SBOM that states no URL may mean a package of any kind.
    known_of_any_kind = {identity[1:] for identity in known}
    problems: list[str] = []
    for statement in audit.image.sboms:
        try:
            listed = read_packages(statement, audit.image.digest)
        except UsageError as error:
            problems.append(f"its own SBOM is not used: {error}")
            continue
        for attested in listed:
            identity = _make_identity(attested.package)
            if identity not in known and (attested.url or identity[1:] not in known_of_any_kind):
                known.add(identity)
                known_of_any_kind.add(identity[1:])
                components.append(Component(package=attested.package, url=attested.url, source=SBOM))
    components.sort(
        key=lambda component: (
            *(component.package.kind, component.package.name, component.package.version or ""),
            *(component.package.arch or "", component.package.path or "", component.url or ""),
        )
    )
    return tuple(components), tuple(problems)


def warn_of_unread(contents: Contents) -> Iterator[str]:
    """Yield a warning if entries of databases could not be read."""
    if contents.unread:
        listed = shorten_words([f"{path} ({number})" for path, number in contents.unread], SHOWN)
        entries = format_count(sum(number for _, number in contents.unread), "entry", "entries")
        yield f"{entries} in lists of packages cannot be read: {listed}"


def _make_identity(package: InstalledPackage) -> tuple[str, str, str]:
    return package.kind, package.name.lower(), package.version or ""
