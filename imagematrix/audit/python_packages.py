"""The Python packages in an image: the files that they installed, and the CUDA releases that they state."""

from __future__ import annotations

import csv
import posixpath
import re
from dataclasses import dataclass

from imagematrix.facts import guarded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from imagematrix.audit.layer import Plain
    from imagematrix.oci.tree import ImageTree

__all__ = ["STACKS", "Package", "packages", "stack"]

# The frameworks that an audit lists.
STACKS = re.compile(
    r"torch|torchvision|torchaudio|jaxlib|jax-cuda\d+-(?:plugin|pjrt)|cupy(?:-cuda\d+\w*)?|tensorflow"
    r"|onnxruntime-gpu|bitsandbytes|triton|vllm|flash-attn|xformers|sglang|sgl-kernel|flashinfer-python"
    r"|tensorrt(?:-cu\d+)?|faiss-gpu(?:-cu\d+)?|llama-cpp-python|ctranslate2|numba-cuda|cudf-cu\d+|cuml-cu\d+"
)
RECORDS = re.compile(r"(.*)/([^/]+)\.dist-info/(METADATA|RECORD)")
HEADER = re.compile(rb"^(Name|Version):[ \t]*([^\r\n]{1,200})", re.MULTILINE)
END = re.compile(rb"\r?\n\r?\n")  # of the headers, before the description
LOCAL = re.compile(r"\+(?:\w+\.)?cu(\d{2})(\d)\b")  # 2.8.0+cu128
MAJOR = re.compile(r"(?:cuda|-cu)(\d{2})(\d)?", re.ASCII)  # cupy-cuda12x, jax-cuda12-plugin
# Files that state a package's CUDA release: the end of the path, and a pattern for the release.
STATED = (
    ("/torch/version.py", re.compile(rb"^cuda(?:: [^=\n]+)? = '(\d{1,2}\.\d{1,2})'", re.MULTILINE)),
    (
        "/tensorflow/python/platform/build_info.py",
        re.compile(rb"\('cuda_version', '(\d{1,2}\.\d{1,2})(?:\.\d+)?'\)"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package: its normalised name, its version, its folder, its files with their hashes in its RECORD."""

    name: str
    version: str
    folder: str
    files: Mapping[str, str]


def packages(tree: ImageTree[Plain]) -> Iterator[Package]:
    """Yield the packages that have the metadata that pip writes."""
    texts: dict[str, dict[str, bytes]] = {}
    for path, file in tree.files():
        match = RECORDS.fullmatch(path) if file.text is not None else None
        if match:
            texts.setdefault(posixpath.dirname(path), {})[match[3]] = file.text or b""
    for folder, own in sorted(texts.items()):
        headers = {name.decode(): value.decode("utf-8", "replace") for name, value in _header(own)}
        if {"Name", "Version"} <= headers.keys():
            yield Package(
                name=guarded.normalised(headers["Name"]),
                version=headers["Version"].strip(),
                folder=posixpath.dirname(folder),
                files=dict(_files(posixpath.dirname(folder), own.get("RECORD", b""))),
            )


def stack(package: Package, tree: ImageTree[Plain]) -> str | None:
    """Return the CUDA release that a package states it was built for ("12.8" or "12"), or None."""
    local = LOCAL.search(package.version)
    if local:
        return f"{local[1]}.{local[2]}"
    for path in sorted(package.files):
        for end, pattern in STATED:
            file = tree.find(path) if path.endswith(end) else None
            release = pattern.search(file[1].text or b"") if file else None
            if release:
                return release[1].decode()
    named = MAJOR.search(package.name)
    return ".".join(filter(None, named.groups())) if named else None


def _header(own: dict[str, bytes]) -> list[tuple[bytes, bytes]]:
    head = END.split(own.get("METADATA", b""), maxsplit=1)[0]
    return HEADER.findall(head)


def _files(folder: str, record: bytes) -> Iterator[tuple[str, str]]:
    """Yield the paths in a RECORD, which are in its first column, with the hashes in the second."""
    lines = record.decode("utf-8", "replace").splitlines()
    try:
        for row in csv.reader(lines):
            if row:
                yield posixpath.normpath(posixpath.join(folder, row[0])), "".join(row[1:2])
    except csv.Error:
        return
