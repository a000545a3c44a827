"""Names of images: registry, repository, and tag or digest."""

from __future__ import annotations

import re

from imagematrix.common.host_port import parse_host_port
from imagematrix.common.record import Record
from imagematrix.errors import UsageError

DOCKER_HUB = "registry-1.docker.io"
HUB_NAMES = ("docker.io", "index.docker.io")  # its hosts in names of images; they do not serve its API
LAYOUT = "oci:"  # before the path of an OCI layout
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.zst")  # ends of the paths of archives of images
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", re.ASCII)
COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"  # of a name (OCI distribution specification)
# A reference of any kind, as on command lines: it has no leading dash and no blanks.
REFERENCE = re.compile(r"[a-z0-9][A-Za-z0-9._/:@-]{0,511}", re.ASCII)
REPOSITORY = re.compile(rf"{COMPONENT}(?:/{COMPONENT})*")


class Reference(Record):
    """A parsed reference: "reg:5000/ml/training:v1" is registry, repository and tag (or digest)."""

    registry: str
    repository: str
    tag: str
    name: str  # everything before the tag, as written

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Return the parts of `text`, with docker's defaults for omitted ones; raise UsageError."""
        name, at, digest = text.partition("@")
        tag = digest
        if not at:
            head, colon, last = name.rpartition(":")
            name, tag = (head, last) if colon and "/" not in last else (name, "latest")
        registry, _, repository = name.partition("/") if names_registry(name) else (DOCKER_HUB, "/", name)
        if registry in (DOCKER_HUB, *HUB_NAMES):
            registry = DOCKER_HUB
            repository = repository if "/" in repository else f"library/{repository}"
        form = DIGEST if at else TAG
        is_valid = _is_registry(registry) and REPOSITORY.fullmatch(repository)
        if not is_valid or not form.fullmatch(tag):
            raise UsageError(
                f"invalid image reference {text!r}: expected a name such as registry:5000/ml/training:v1"
            )
        return cls(registry=registry, repository=repository, tag=tag, name=name)

    @property
    def url(self) -> str:
        """The registry's address; without TLS for a registry on this machine, as docker does."""
        host, _ = parse_host_port(self.registry)
        return f"{'http' if host in LOOPBACK else 'https'}://{self.registry}"


def _is_registry(text: str) -> bool:
    try:
        _, port = parse_host_port(text)
    except ValueError:
        return False
    return port != 0


def split_version(name: str) -> tuple[str, str | None]:
    """Return image and version of `training:v1` or `registry:5000/ml/training:v1`.

    Instead of a version, the name may have a variant's tag or a digest.
    """
    tagged, at, digest = name.partition("@")
    image, colon, version = tagged.rpartition(":")
    if not colon or "/" in version:
        image, version = tagged, ""
    if not image or (at and not digest) or (image != tagged and not version):
        raise UsageError(f"invalid image name {name!r}: expected a name such as training:v1")
    return image, digest or version or None


def split_published_version(name: str) -> tuple[str, str]:
    """Return image and version of a name that has both a version and a registry; raise UsageError."""
    image, version = split_version(name)
    if version is None or "@" in name or not names_registry(image):
        example = suggest_registry("training") if names_registry(image) else suggest_registry(image)
        message = f"{name} is not an image with a registry and a version"
        raise UsageError(message, remedy=f"such as {example}:{version or 'v1'}")
    return image, version


def suggest_registry(image: str) -> str:
    """Return an image's name with a registry before it; a folder without one is an account of Docker Hub."""
    return f"docker.io/{image}" if "/" in image else f"registry.example.com/ml/{image}"


def make_tag_word(value: str) -> str:
    """Return the value of an axis as it stands in tags, which have neither slashes nor plus signs."""
    return value.replace("/", "-").replace("+", "_")


def names_registry(name: str) -> bool:
    """Whether the name of an image starts with a registry, by docker's rule."""
    first, slash, _ = name.partition("/")
    return bool(slash) and ("." in first or ":" in first or first == "localhost")


def is_saved(name: str) -> bool:
    """Whether `name` is that of an OCI layout or of an archive of images, as for --catalog."""
    return name.startswith(LAYOUT) or name.endswith(ARCHIVES)


def shorten_name(name: str) -> str:
    """Return the name of an image as an engine lists it: without docker.io, and without its library."""
    registry, slash, rest = name.partition("/")
    short = rest if slash and registry in HUB_NAMES else name
    library, _, last = short.partition("/")
    return last if library == "library" and "/" not in last else short
