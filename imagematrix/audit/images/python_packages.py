"""The Python packages in an image: the files that they installed, and the CUDA releases that they state.

Their metadata is in a folder, NAME.dist-info or NAME.egg-info, or in a file of the latter name.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass

from imagematrix.audit.packages.installed_package import METADATA_FILES, RECORD, list_recorded_files
from imagematrix.hardware.vendors import guarded_files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagematrix.audit.images.layer import PlainFile
    from imagematrix.images.oci.tree import ImageTree

# The frameworks that an audit lists.
STACKS = re.compile(
    r"torch|torchvision|torchaudio|jaxlib|jax-cuda\d+-(?:plugin|pjrt)|cupy(?:-cuda\d+\w*)?|tensorflow"
    r"|onnxruntime-gpu|bitsandbytes|triton|vllm|flash-attn|xformers|sglang|sgl-kernel|flashinfer-python"
    r"|tensorrt(?:-cu\d+)?|faiss-gpu(?:-cu\d+)?|llama-cpp-python|ctranslate2|numba-cuda|cudf-cu\d+|cuml-cu\d+"
)
METADATA = "METADATA"
REQUIRES = "Requires-Dist"
# A license of several lines is its text, not its name.
HEADER = re.compile(
    rb"^(Name|Version|License-Expression|License(?!:.*\n[ \t])|Classifier(?=:[ \t]*License ::)|Requires-Dist)"
    rb":[ \t]*"
    rb"([^\r\n]{1,500})",
    re.MULTILINE,
)
# Names and requirements of packages that are for CUDA alone. Requirements of an extra are not always there.
FOR_CUDA = re.compile(r"(?:.+-)?cu(?:da|\d\d)\w*(?:-.+)?|nvidia-.+|py(?:cuda|optix)", re.ASCII | re.DOTALL)
REQUIRES_CUDA = re.compile(
    r"(?:cuda|nvidia[-_.](?:cuda|nv))[-_.\w]*+(?![^;]*;.*\bextra\b)", re.ASCII | re.IGNORECASE
)
MACHINES = frozenset({"x86_64", "aarch64"})
# The other variables of a requirement's marker, the same wherever an audit runs.
LINUX = {
    "os_name": "posix",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "extra": "",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "python_version": "3.12",
    "python_full_version": "3.12.0",
    "implementation_version": "3.12.0",
    "platform_release": "",
    "platform_version": "",
}
CLASSIFIER = re.compile(r"License :: (?:OSI Approved :: )?(.+)")
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
# The file of PyTorch that states its version: two packages may install it, and the last one wins.
OWN = "/torch/version.py"
VERSION = re.compile(rb"^__version__(?:: [^=\n]+)? = '([0-9A-Za-z][0-9A-Za-z.+_-]{0,63})'", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package: its normalised name, its version, its folder, its files with their hashes in its RECORD.

    `metadata` is the path of the file that states its name, and `license` what that file states. `for_cuda`:
    its name or a requirement of it shows that it is only for GPUs with CUDA.
    """

    name: str
    version: str
    folder: str
    files: Mapping[str, str]
    metadata: str
    license: str | None = None
    for_cuda: bool = False


def list_packages(tree: ImageTree[PlainFile], machine: str) -> tuple[list[Package], list[str]]:
    """Return the packages, and the paths of metadata that states no name or no version.

    `machine` is that of the image, as uname(2) names it: packages have requirements for some machines only.
    """
    texts: dict[str, dict[str, tuple[str, bytes]]] = {}
    for path, file in tree.list_files():
        if file.text is not None and METADATA_FILES.fullmatch(path):
            folder, name = posixpath.split(path)
            if name.endswith(".egg-info"):
                folder, name = path, METADATA
            texts.setdefault(folder, {})[name if name == RECORD else METADATA] = path, file.text
    packages: list[Package] = []
    damaged: list[str] = []
    for metadata_folder, files in sorted(texts.items()):
        path, text = files.get(METADATA, ("", b""))
        lines = [
            (name.decode(), value.decode("utf-8", "replace").strip())
            for name, value in HEADER.findall(END.split(text, maxsplit=1)[0])
        ]
        headers = dict(lines)
        if not {"Name", "Version"} <= headers.keys():
            damaged.append(path or metadata_folder)
            continue
        folder = posixpath.dirname(metadata_folder)
        name = guarded_files.normalize_name(headers["Name"])
        requirements = [value for header, value in lines if header == REQUIRES]
        packages.append(
            Package(
                name=name,
                version=headers["Version"],
                folder=folder,
                files=dict(list_recorded_files(folder, files.get(RECORD, ("", b""))[1])),
                metadata=path,
                license=_get_license(headers),
                for_cuda=FOR_CUDA.fullmatch(name) is not None
                or any(_requires_cuda(requirement, machine) for requirement in requirements),
            )
        )
    return packages, damaged


def _requires_cuda(requirement: str, machine: str) -> bool:
    """Whether a requirement names a package for CUDA, and is not for other machines only."""
    if not REQUIRES_CUDA.match(requirement):
        return False
    from packaging.markers import UndefinedEnvironmentName
    from packaging.requirements import Requirement

    try:
        marker = Requirement(requirement).marker
        if marker is None or marker.evaluate({**LINUX, "platform_machine": machine}):
            return True
        others = [{**LINUX, "platform_machine": other} for other in MACHINES - {machine}]
        return not any(map(marker.evaluate, others))
    except (ValueError, UndefinedEnvironmentName):  # an audit reads what pip may refuse
        return True


def get_stack_release(package: Package, tree: ImageTree[PlainFile]) -> str | None:
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
    suffix = MAJOR.search(package.name)
    return ".".join(filter(None, suffix.groups())) if suffix else None


def get_version(package: Package, tree: ImageTree[PlainFile]) -> str:
    """Return the version that a package's own files state, or else that of its metadata."""
    for path in package.files:
        file = tree.find(path) if path.endswith(OWN) else None
        if file and (match := VERSION.search(file[1].text or b"")):
            return match[1].decode()
    return package.version


def _get_license(headers: Mapping[str, str]) -> str | None:
    """Return the license: an expression, or else free text, or else the name in a classifier."""
    stated = headers.get("License-Expression") or headers.get("License")
    if stated and stated != "UNKNOWN":
        return stated
    classifier = CLASSIFIER.fullmatch(headers.get("Classifier", ""))
    return classifier[1] if classifier else None
