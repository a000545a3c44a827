"""Images with SBOMs of their own: BuildKit's attestations in an index, and cosign's under a tag."""

import base64
import json

from images import MANIFEST, digest, index

IN_TOTO = "application/vnd.in-toto+json"
DSSE = "application/vnd.dsse.envelope.v1+json"
SPDX = "https://spdx.dev/Document"
EMPTY = b"{}"


def listed(name, version, url=None, **more):
    """Return a package of an SPDX document."""
    own = {"SPDXID": f"SPDXRef-{name}", "name": name, "versionInfo": version, **more}
    if url:
        own["externalRefs"] = [
            {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": url}
        ]
    return own


def document(*packages, **more):
    """Return an SPDX document, which describes a package of its own as scanners do."""
    return {
        "spdxVersion": "SPDX-2.3",
        "packages": [listed("sbom", "1"), *packages],
        "relationships": [
            {
                "spdxElementId": "SPDXRef-DOCUMENT",
                "relationshipType": "DESCRIBES",
                "relatedSpdxElement": "SPDXRef-sbom",
            }
        ],
        **more,
    }


def statement(subject, *packages, **more):
    """Return a statement of in-toto about the image with the digest `subject`, about none if that is None."""
    subjects = [{"name": "image", "digest": {"sha256": subject.removeprefix("sha256:")}}] if subject else []
    return json.dumps(
        {
            "_type": "https://in-toto.io/Statement/v0.1",
            "predicateType": SPDX,
            "subject": subjects,
            "predicate": document(*packages),
            **more,
        }
    ).encode()


def envelope(raw):
    """Return a statement as cosign wraps it."""
    return json.dumps(
        {"payloadType": IN_TOTO, "payload": base64.b64encode(raw).decode(), "signatures": [{"sig": ""}]}
    ).encode()


class Attestation:
    """The manifest of an attestation, and its blobs."""

    def __init__(self, raw, media_type=IN_TOTO, annotation="in-toto.io/predicate-type", predicate=SPDX):
        layer = {
            "mediaType": media_type,
            "digest": digest(raw),
            "size": len(raw),
            "annotations": {annotation: predicate},
        }
        config = {"mediaType": "application/vnd.oci.image.config.v1+json", "size": 2, "digest": digest(EMPTY)}
        self.raw = json.dumps(
            {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [layer]}
        ).encode()
        self.digest = digest(self.raw)
        self.blobs = {digest(raw): raw, digest(EMPTY): EMPTY, self.digest: self.raw}

    def entry(self, subject):
        """Return the entry of an index in which it attests the image with the digest `subject`."""
        return {
            "mediaType": MANIFEST,
            "digest": self.digest,
            "size": len(self.raw),
            "annotations": {
                "vnd.docker.reference.type": "attestation-manifest",
                "vnd.docker.reference.digest": subject,
            },
            "platform": {"os": "unknown", "architecture": "unknown"},
        }


class Attested:
    """An image with an attestation, under one index: what `layout` and `archived` of `images` write."""

    def __init__(self, image, attestation):
        raw = index(
            image.entry(platform={"os": "linux", "architecture": "amd64"}), attestation.entry(image.digest)
        )
        self.raw, self.digest = raw, digest(raw)
        self.blobs = {**image.blobs, **attestation.blobs, self.digest: raw}

    def entry(self):
        """Return the entry of the index in a layout."""
        return {
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "digest": self.digest,
            "size": len(self.raw),
        }
