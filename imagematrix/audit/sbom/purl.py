"""Package URLs (github.com/package-url/purl-spec): names of packages that all scanners understand."""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

from imagematrix.audit.packages.installed_package import APK, DEB, GENERIC, PYPI, RPM
from imagematrix.hardware.vendors.guarded_files import normalize_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagematrix.audit.packages.installed_package import InstalledPackage

URL = re.compile(r"pkg:/*([A-Za-z][A-Za-z0-9.+-]*)/([^?#@]+)(?:@([^?#]+))?(?:\?([^#]*))?(?:#.*)?", re.ASCII)
PRINTABLE = re.compile(r"[!-~]{1,2000}", re.ASCII)
VENDORS = {DEB: "debian", APK: "alpine"}  # of packages in images without os-release
NAMED = {"rhel": "redhat", "opensuse-leap": "opensuse", "opensuse-tumbleweed": "opensuse"}  # vendors
QUALIFIED_EPOCH = re.compile(r"(?:^|&)epoch=([1-9][0-9]*)(?=&|$)", re.ASCII)
EPOCH = re.compile(r"(?:([0-9]+):)?(.*)", re.ASCII)


def make_purl(package: InstalledPackage, distribution: tuple[str | None, str | None] = (None, None)) -> str:
    """Return the URL of a package; `distribution` is the name and the version in its image's os-release."""
    system, release = distribution
    vendor, version = None, package.version
    qualifiers: dict[str, str | None] = {"arch": package.arch}
    if package.kind in (DEB, RPM, APK):
        vendor = NAMED.get(system, system) if system else VENDORS.get(package.kind)
        qualifiers["distro"] = f"{system}-{release}" if system and release else None
        if package.source or package.source_version:
            source = package.source or package.name
            qualifiers["upstream"] = (
                f"{source}@{package.source_version}" if package.source_version else source
            )
    elif package.kind == GENERIC:
        vendor = "nvidia"
    if package.kind == RPM:
        match = EPOCH.fullmatch(version or "")
        if match:
            qualifiers["epoch"], version = match[1], match[2]
    name = package.name if package.kind in (RPM, GENERIC) else package.name.lower()
    return _format_url(package.kind, vendor, name, version, qualifiers)


def make_image_purl(name: str, repository: str, digest: str, architecture: str) -> str:
    """Return the URL of an image in a registry; `name` is the last part of its `repository`."""
    return _format_url("oci", None, name, digest, {"arch": architecture, "repository_url": repository})


def parse_purl(url: str) -> tuple[str, str, str] | None:
    """Return kind, name and version in a URL, as a package has them; None if it lacks one or is invalid."""
    match = URL.fullmatch(url) if PRINTABLE.fullmatch(url) else None
    if match is None or not match[3]:
        return None
    kind, name, version = match[1].lower(), unquote(match[2].rpartition("/")[2]), unquote(match[3])
    epoch = QUALIFIED_EPOCH.search(match[4] or "")
    if kind == RPM and epoch:
        version = f"{epoch[1]}:{version}"
    return kind, normalize_name(name) if kind == PYPI else name, version


def _format_url(
    kind: str, namespace: str | None, name: str, version: str | None, qualifiers: Mapping[str, str | None]
) -> str:
    parts = [f"pkg:{kind}", *([_quote(namespace.lower())] if namespace else []), _quote(name)]
    pairs = [f"{key}={_quote(value)}" for key, value in sorted(qualifiers.items()) if value]
    return (
        "/".join(parts)
        + (f"@{_quote(version)}" if version else "")
        + (f"?{'&'.join(pairs)}" if pairs else "")
    )


def _quote(text: str) -> str:
    return quote(text, safe=":~")
