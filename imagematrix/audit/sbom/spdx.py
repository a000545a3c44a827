"""Writing the components of an image as a document of SPDX 2.3 in JSON (spdx.github.io/spdx-spec/v2.3).

The same image, name and components always give the same document.
"""

from __future__ import annotations

import hashlib
import json
import re
from datetime import UTC, datetime

from imagematrix.audit.sbom import purl
from imagematrix.audit.sbom.components import SBOM
from imagematrix.common.image_reference import DIGEST, Reference, names_registry
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from imagematrix.audit.images.image import AuditedImage
    from imagematrix.audit.report import Audit
    from imagematrix.audit.sbom.components import Component

NAMESPACE = "https://imagematrix.io/spdx"  # the beginning of the documents' names
IMAGE_ID = "SPDXRef-Image"
UNSTATED = "NOASSERTION"
UNSAFE = re.compile(r"[^A-Za-z0-9.]+", re.ASCII)  # in the ID of an element
LICENSE_REF = re.compile(r"LicenseRef-", re.IGNORECASE)
EPOCH_TEXT = re.compile(r"[0-9]{1,11}", re.ASCII)  # to the year 5138


def make_document(audit: Audit, components: Sequence[Component], tool: str, time: str) -> dict[str, object]:
    """Return the document about an image, made at `time` by a `tool`: a program's name and version."""
    image = audit.image
    texts = sorted({component.package.license for component in components if component.package.license})
    licenses = {text: _express_license(text) for text in texts}
    packages = [
        _describe_image(image),
        *_describe_system(*audit.contents.distribution),
        *(_describe_package(component, licenses) for component in components),
    ]
    relations = [("SPDXRef-DOCUMENT", "DESCRIBES", IMAGE_ID)]
    relations += [(IMAGE_ID, "CONTAINS", str(package["SPDXID"])) for package in packages[1:]]
    content: dict[str, object] = {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": image.reference,
        "creationInfo": {"created": time, "creators": [f"Tool: {tool}"]},
        "packages": packages,
        "hasExtractedLicensingInfos": [
            {"licenseId": name, "extractedText": text, "name": text}
            for text, name in licenses.items()
            if LICENSE_REF.match(name)
        ],
        "relationships": [
            {"spdxElementId": element, "relationshipType": kind, "relatedSpdxElement": related}
            for element, kind, related in relations
        ],
    }
    # Documents with different content must have different names.
    checksum = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return content | {"documentNamespace": f"{NAMESPACE}/{image.digest.replace(':', '-')}/{checksum[:32]}"}


def get_creation_time(image: AuditedImage, epoch: str | None) -> str:
    """Return the time for a document: `epoch`, or else when the image was made, or else 1970.

    `epoch` is the value of SOURCE_DATE_EPOCH; raises UsageError if it is no number of seconds.
    """
    if epoch is not None:
        if not EPOCH_TEXT.fullmatch(epoch):
            raise UsageError(f"SOURCE_DATE_EPOCH={epoch[:40]!r} is not a number of seconds since 1970")
        return _format_time(datetime.fromtimestamp(int(epoch), UTC))
    try:
        return _format_time(datetime.fromisoformat(image.created or "").astimezone(UTC))
    except (ValueError, OverflowError):
        return _format_time(datetime.fromtimestamp(0, UTC))


def _format_time(time: datetime) -> str:
    return time.replace(tzinfo=None).isoformat(timespec="seconds") + "Z"


def _describe_image(image: AuditedImage) -> dict[str, object]:
    algorithm, _, digest = image.digest.partition(":")
    return {
        "SPDXID": IMAGE_ID,
        "name": image.reference,
        "versionInfo": image.digest,
        "primaryPackagePurpose": "CONTAINER",
        "checksums": [{"algorithm": algorithm.upper(), "checksumValue": digest}],
        **_make_common_fields(UNSTATED),
        **_make_reference(_make_image_url(image)),
    }


def _describe_system(name: str | None, release: str | None) -> Iterator[dict[str, object]]:
    """Yield the distribution, by which scanners choose their advisories."""
    if name:
        yield {
            "SPDXID": "SPDXRef-OperatingSystem",
            "name": name,
            **({"versionInfo": release} if release else {}),
            "primaryPackagePurpose": "OPERATING_SYSTEM",
            "sourceInfo": "found in os-release",
            **_make_common_fields(UNSTATED),
        }


def _make_image_url(image: AuditedImage) -> str | None:
    """Return the package URL of an image in a registry; None for any other."""
    if not names_registry(image.reference) or not DIGEST.fullmatch(image.digest):
        return None
    try:
        name = Reference.parse(image.reference).name
    except UsageError:  # the path of a layout
        return None
    architecture = image.platform.split("/")[1:2]
    return purl.make_image_purl(name.rpartition("/")[2], name, image.digest, "".join(architecture))


def _describe_package(component: Component, licenses: Mapping[str, str]) -> dict[str, object]:
    """Return a package; `licenses` are expressions of SPDX by the texts of licenses."""
    package = component.package
    parts = (package.kind, package.name, package.version, package.arch, package.path, component.url)
    checksum = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    origin = (
        "named by the image's own SBOM, not found in its files"
        if component.source == SBOM
        else f"found in {package.path}"
    )
    source = " ".join(filter(None, (package.source or package.name, package.source_version)))
    built = f"; built from the source package {source}" if package.source or package.source_version else ""
    return {
        "SPDXID": f"SPDXRef-{UNSAFE.sub('-', f'{package.kind}-{package.name}')[:80]}-{checksum[:16]}",
        "name": package.name,
        **({"versionInfo": package.version} if package.version else {}),
        "sourceInfo": f"{origin}{built}",
        **_make_common_fields(licenses[package.license] if package.license else UNSTATED),
        **_make_reference(component.url),
    }


def _make_common_fields(declared: str) -> dict[str, object]:
    return {
        "downloadLocation": UNSTATED,
        "filesAnalyzed": False,
        "supplier": UNSTATED,
        "licenseConcluded": UNSTATED,
        "licenseDeclared": declared,
        "copyrightText": UNSTATED,
    }


def _make_reference(url: str | None) -> Mapping[str, object]:
    if url is None:
        return {}
    reference = {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": url}
    return {"externalRefs": [reference]}


def _express_license(text: str) -> str:
    """Return an expression of SPDX's licenses; for any other text, a name LicenseRef-… that is made of it."""
    from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

    if not LICENSE_REF.search(text):  # which another document defines
        try:
            return canonicalize_license_expression(text)
        except InvalidLicenseExpression:
            pass
    return f"LicenseRef-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
