"""Attach a specification of NFD's image compatibility to an image: attach.py IMAGE TAG < SPEC

As `oras attach` does for a registry without the referrers API, it lists the artifact in the index whose tag
follows from the digest ("Referrers Tag Schema" of github.com/opencontainers/distribution-spec).
"""

import hashlib
import io
import json
import sys

from imagematrix.images.oci.registry import Registry

ARTIFACT = "application/vnd.nfd.image-compatibility.v1alpha1"
SPEC = "application/vnd.nfd.image-compatibility.spec.v1alpha1+yaml"
EMPTY = "application/vnd.oci.empty.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"


def descriptor(media_type, raw):
    """Return the descriptor of a blob or manifest."""
    return {
        "mediaType": media_type,
        "digest": f"sha256:{hashlib.sha256(raw).hexdigest()}",
        "size": len(raw),
    }


def main(image, tag, spec):
    """Attach the specification to an image in a registry."""
    with Registry(image) as registry:
        subject = registry.find_manifest(tag)
        assert subject is not None
        for raw in (b"{}", spec):
            registry.push_blob(descriptor("", raw)["digest"], io.BytesIO(raw))
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "artifactType": ARTIFACT,
            "config": descriptor(EMPTY, b"{}"),
            "layers": [descriptor(SPEC, spec)],
            "subject": descriptor(subject.media_type, subject.raw),
        }
        raw = json.dumps(manifest).encode()
        artifact = descriptor(MANIFEST, raw)
        registry.push_manifest(artifact["digest"], raw, MANIFEST)
        index = {
            "schemaVersion": 2,
            "mediaType": INDEX,
            "manifests": [artifact | {"artifactType": ARTIFACT}],
        }
        registry.push_manifest(subject.digest.replace(":", "-"), json.dumps(index).encode(), INDEX)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.stdin.buffer.read())
