"""Reading an image's own SBOM: a statement of in-toto with a document of SPDX 2, perhaps in an envelope.

Anybody may have written it, so it only adds to what was found in the image's files.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass

from imagematrix.audit.packages.attested_sboms import PREDICATE
from imagematrix.audit.packages.installed_package import GENERIC, InstalledPackage
from imagematrix.audit.sbom import purl
from imagematrix.common import json_documents
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.audit.packages.attested_sboms import Statement
    from imagematrix.common.json_documents import Fields

VERSIONS = re.compile(r"SPDX-2\.\d")
TEXT = re.compile(r"[!-~]{1,200}", re.ASCII)  # a name or a version
LICENSE = re.compile(r"[ -~]{1,500}", re.ASCII)
UNSTATED = ("NOASSERTION", "NONE")
MOST = 50_000  # packages
DOCUMENT = "SPDXRef-DOCUMENT"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttestedPackage:
    """A package that an SBOM names, and its package URL, if the SBOM has one."""

    package: InstalledPackage
    url: str | None


def read_packages(statement: Statement, image: str) -> list[AttestedPackage]:
    """Return the packages in a statement about the image with the digest `image`; raise UsageError."""
    if statement.problem:
        raise UsageError(statement.problem)
    fields = json_documents.Fields(
        json_documents.parse_json(statement.raw, statement.digest), statement.digest
    )
    if fields.has("payload"):  # an envelope, DSSE
        try:
            payload = base64.b64decode(fields.get_text("payload"), validate=True)
        except ValueError as error:  # binascii's is one
            raise fields.fail("payload", "is not in base64") from error
        fields = json_documents.Fields(json_documents.parse_json(payload, statement.digest), statement.digest)
    if fields.get_text("predicateType") != PREDICATE:
        raise fields.fail("predicateType", f"is not {PREDICATE}")
    digests = (subject.get_object_or_empty("digest") for subject in fields.list_objects("subject"))
    subjects = {digest.get_text_or_none("sha256") for digest in digests}
    # BuildKit states no subject for an image that it exports without a name: the index names the image.
    if subjects and image.removeprefix("sha256:") not in subjects:
        raise fields.fail("subject", f"is not {image}")
    return list(_list_packages(fields.get_object_or_empty("predicate")))


def _list_packages(document: Fields) -> Iterator[AttestedPackage]:
    version = document.get_text("spdxVersion")
    if not VERSIONS.fullmatch(version):
        raise document.fail("spdxVersion", f"{version[:40]!r} is not supported")
    described = {*document.get_texts("documentDescribes")} if document.has("documentDescribes") else set()
    for relation in document.list_objects("relationships"):
        if relation.get_text_or_none("relationshipType") == "DESCRIBES":
            described.add(relation.get_text_or_none("relatedSpdxElement") or "")
    for number, listed in enumerate(document.list_objects("packages")):
        if number >= MOST:
            raise document.fail("packages", f"has more than {MOST}")
        # What the document describes is the image itself.
        if listed.get_text_or_none("SPDXID") not in described and (package := _read_package(listed)):
            yield package


def _read_package(fields: Fields) -> AttestedPackage | None:
    """Return a package; None if it has no name, or no version, and so may be anything."""
    name, version = fields.get_text_or_none("name") or "", fields.get_text_or_none("versionInfo") or ""
    urls = (
        reference.get_text_or_none("referenceLocator") or ""
        for reference in fields.list_objects("externalRefs")
        if reference.get_text_or_none("referenceType") == "purl"
    )
    url, parts = next(((url, parts) for url in urls if (parts := purl.parse_purl(url))), (None, None))
    kind, name, version = parts or (GENERIC, name, version)
    if not (TEXT.fullmatch(name) and TEXT.fullmatch(version)):
        return None
    stated = fields.get_text_or_none("licenseDeclared") or ""
    license_name = stated if stated not in UNSTATED and LICENSE.fullmatch(stated) else None
    return AttestedPackage(
        package=InstalledPackage(kind=kind, name=name, version=version, license=license_name), url=url
    )
