"""Images made of a few files: as OCI layouts, as archives of `docker save`, in a registry."""

import gzip
import hashlib
import io
import json
import tarfile
from functools import partial
from pathlib import Path

CONFIG = "application/vnd.oci.image.config.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
TIMELESS = partial(gzip.compress, mtime=0)  # with the time, equal layers would differ after a second


def digest(raw):
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"


def special(path, kind, target=""):
    """Return the entry of a link, a folder or a device."""
    info = tarfile.TarInfo(path)
    info.type, info.linkname = kind, target
    return info


def link(path, target):
    return special(path, tarfile.SYMTYPE, target)


def hardlink(path, target):
    return special(path, tarfile.LNKTYPE, target)


def tar(*members):
    """Return an archive: each member a path, a path with its bytes and perhaps its mode, or a TarInfo."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
                continue
            path, data, *mode = (member, b"") if isinstance(member, str) else member
            info = tarfile.TarInfo(path)
            info.size = len(data)
            info.mode = mode[0] if mode else info.mode
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def sparse(size, name="giant", byte=b"\x7f"):
    """Return an archive with a sparse file of this size that has one byte."""
    info = tarfile.TarInfo(name)
    info.size = 1
    info.pax_headers = {"GNU.sparse.size": str(size), "GNU.sparse.map": "0,1", "GNU.sparse.numblocks": "1"}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(info, io.BytesIO(byte))
    return buffer.getvalue()


class Parts:
    """The blobs of one image: `layers` are archives, the rest is for its configuration."""

    def __init__(self, *layers, labels=None, env=(), entrypoint=(), architecture="amd64", packed=TIMELESS):
        self.blobs = {}
        self.diffs = [digest(raw) for raw in layers]
        described = [{"mediaType": LAYER, **self._put(packed(raw))} for raw in layers]
        config = {
            "architecture": architecture,
            "os": "linux",
            "config": {"Labels": labels or {}, "Env": list(env)}
            | ({"Entrypoint": entrypoint} if entrypoint else {}),
            "rootfs": {"type": "layers", "diff_ids": self.diffs},
        }
        self.config = self._put(json.dumps(config).encode())["digest"]
        self.raw = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": {"mediaType": CONFIG, **self._described(self.config)},
                "layers": described,
            }
        ).encode()
        self.digest = digest(self.raw)
        self.blobs[self.digest] = self.raw
        self.layers = [one["digest"] for one in described]

    def _put(self, raw):
        self.blobs[digest(raw)] = raw
        return self._described(digest(raw))

    def _described(self, own):
        return {"digest": own, "size": len(self.blobs[own])}

    def entry(self, **more):
        """Return the entry of the image in an index."""
        return {"mediaType": MANIFEST, "digest": self.digest, "size": len(self.raw), **more}


def index(*entries):
    return json.dumps({"schemaVersion": 2, "manifests": list(entries)}).encode()


def layout(folder, *images, entries=None):
    """Write images as an OCI layout; return its path."""
    blobs = Path(folder) / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    for image in images:
        for own, raw in image.blobs.items():
            (blobs / own.removeprefix("sha256:")).write_bytes(raw)
    listed = entries if entries is not None else [image.entry() for image in images]
    (Path(folder) / "index.json").write_bytes(index(*listed))
    (Path(folder) / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    return str(folder)


def archived(path, *images):
    """Write images as an archive with an OCI layout, blobs first; return its path."""
    members = [
        (f"blobs/sha256/{own.removeprefix('sha256:')}", raw)
        for image in images
        for own, raw in image.blobs.items()
    ]
    members.append(("index.json", index(*(image.entry() for image in images))))
    Path(path).write_bytes(tar(*members))
    return str(path)


def saved_with_blobs(path, image, *more, layers=None, blobs=None):
    """Write an image as `docker save` does since Docker 25, with more members; return its path."""
    blobs = image.blobs if blobs is None else blobs
    names = [
        f"blobs/sha256/{own[7:]}" for own in (image.config, *(image.layers if layers is None else layers))
    ]
    listed = [{"Config": names[0], "RepoTags": None, "Layers": names[1:]}]
    members = [(f"blobs/sha256/{own[7:]}", raw) for own, raw in blobs.items()]
    Path(path).write_bytes(tar(*members, *more, ("manifest.json", json.dumps(listed).encode())))
    return str(path)


def saved(path, image, *layers, names=("t:v1",)):
    """Write an image as `docker save` did before Docker 25: a folder for each layer; return its path."""
    config = image.blobs[image.config]
    name = f"{image.config.removeprefix('sha256:')}.json"
    members = [(f"{place}/layer.tar", raw) for place, raw in enumerate(layers)]
    listed = [{"Config": name, "RepoTags": list(names), "Layers": [name for name, _ in members]}]
    Path(path).write_bytes(tar(*members, (name, config), ("manifest.json", json.dumps(listed).encode())))
    return str(path)
