"""What `adopt` and `select` say about the official wheels of frameworks, beside what the projects document.

Each image of frameworks.toml has the files of its wheels where pip installs them, and nothing else. The
wheels are downloaded by their hashes, one image at a time. Each writes its row of the table in PAGE.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from wheel_lock import PLATFORMS

import imagematrix as im
from imagematrix.hardware.vendors import guarded_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

ROOT = Path(__file__).resolve().parent.parent
IMAGES = Path(__file__).with_suffix(".toml")
PAGE = ROOT / "docs/reference/frameworks.md"
# By machine, a host with GPUs, and the architecture of images.
HOSTS = {
    machine: ROOT / f"tests/hosts/{name}.json"
    for machine, name in (("x86_64", "genoa-h200"), ("aarch64", "grace-hopper"))
}
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
MARKED = re.compile(r"(?<=<!-- frameworks -->\n).*?(?=<!-- end -->)", re.DOTALL)
SITE = "usr/lib/python3/site-packages"
SCHEMES = {"purelib": SITE, "platlib": SITE, "data": "usr", "scripts": "usr/bin"}  # of NAME.data folders
PYTHON = "3.12"
DRIVER = "580.95.05"  # of the hosts, unless an image states another one
GPUS = {
    "6.0": "Tesla P100-PCIE-16GB",
    "7.0": "Tesla V100-SXM2-32GB",
    "7.5": "Tesla T4",
    "8.0": "NVIDIA A100-SXM4-80GB",
    "8.6": "NVIDIA A10",
    "8.9": "NVIDIA L40S",
    "9.0": "NVIDIA H200",
    "10.0": "NVIDIA B200",
    "10.3": "NVIDIA B300 SXM6 AC",
    "12.0": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
}
CLOSED = ("6.0", "7.0")  # GPUs that the open kernel modules do not drive
YES, PTX, JIT, NO = "yes", "PTX", "JIT", "no"


def compare(names: Sequence[str] = ()) -> bool:
    """Audit images, all of them or those of these names; write their rows; return whether all is as expected.

    It is as expected if each difference from the documented capabilities has an explanation, and if the
    sources of the packages contain the guards that the shipped table names.
    """
    right = True
    for image in images():
        if names and image["name"] not in names:
            continue
        started = time.monotonic()
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            machine = image.get("machine", "x86_64")
            wheels = downloaded(Path(folder) / "wheels", image["wheels"], machine)
            wrong = [text for wheel in wheels for text in _unguarded(wheel)]
            catalog = adopted(Path(folder), wheels, ARCHITECTURES[machine])
        driver, host = image.get("driver", DRIVER), HOSTS[machine]
        answers = {compute: _answer(catalog, compute, driver, host) for compute in GPUS}
        other = differing(image, answers)
        if bool(other) != ("why" in image):
            wrong.append(f"differs from its documentation on {', '.join(other) or 'no GPU'}")
        seconds = time.monotonic() - started
        print(f"{image['name']}: {' '.join(f'{key}:{value}' for key, value in answers.items())}", end="")
        print(f" ({seconds:.0f} s)", *wrong, sep="\n  ", flush=True)
        _write(image["name"], row(image, answers, time.strftime("%Y-%m-%d", time.gmtime())))
        right &= not wrong
    return right


def images() -> list[dict[str, Any]]:
    """Return the images of frameworks.toml."""
    listed: list[dict[str, Any]] = tomllib.loads(IMAGES.read_text())["image"]
    return listed


def differing(image: dict[str, Any], answers: dict[str, str]) -> list[str]:
    """Return the capabilities for which the answers and the documentation differ."""
    documented = image.get("documented")
    return [
        compute
        for compute, answer in answers.items()
        if documented is not None and (answer != NO) != (compute in documented)
    ]


def row(image: dict[str, Any], answers: dict[str, str], date: str) -> list[str]:
    """Return the cells of an image in the table."""
    other = differing(image, answers)
    cells = [f"**{answer}**" if compute in other else answer for compute, answer in answers.items()]
    says = f"[{image['says']}]({image['source']})" if "documented" in image else "nothing"
    return [image["name"], *cells, says, image.get("why", ""), date]


def _write(name: str, cells: list[str]) -> None:
    """Write the row of an image into the page; the rows are in the order of frameworks.toml."""
    page = PAGE.read_text()
    lines = dict(re.findall(r"^(\| (.*?) \|.*\n)", (MARKED.search(page) or [""])[0], re.MULTILINE))
    rows = {title: line for line, title in lines.items()} | {name: f"| {' | '.join(cells)} |\n"}
    head = ["Image", *GPUS, "Documented", "Difference", "Date"]
    table = f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n"
    table += "".join(rows[image["name"]] for image in images() if image["name"] in rows)
    PAGE.write_text(MARKED.sub(lambda _: f"\n{table}\n", page))


def downloaded(
    folder: Path, requirements: Iterable[str], machine: str = "x86_64", python: str = PYTHON
) -> list[Path]:
    """Return the wheels that pip downloads to a new folder for requirements with hashes."""
    folder.mkdir()
    (folder / "wheels.txt").write_text("\n".join(requirements))
    words = ["-q", "--no-deps", "--require-hashes", *foreign_options(machine, python)]
    pip = [sys.executable, "-m", "pip", "download", *words, "-d", str(folder)]
    subprocess.run([*pip, "-r", str(folder / "wheels.txt")], check=True)
    return sorted(folder.glob("*.whl"))


def foreign_options(machine: str, python: str) -> list[str]:
    """Return the options with which pip takes wheels for another machine and another Python than its own."""
    platforms = (f"--platform={platform}" for platform in PLATFORMS[machine])
    return ["--only-binary=:all:", f"--python-version={python}", *platforms]


def _unguarded(wheel: Path) -> Iterator[str]:
    """Yield the guards of the shipped table that the sources in a wheel lack."""
    name, version = wheel.name.split("-")[:2]
    with zipfile.ZipFile(wheel) as archive:
        members = set(archive.namelist())
        for row in guarded_files.find_rows(guarded_files.normalize_name(name), version):
            source = archive.read(row.source).decode() if row.source in members else ""
            if row.text not in source:
                yield f"{row.source} lacks {row.text!r}"
            if row.path not in members:
                yield f"no file {row.path}"
            module = row.path.rpartition("/")[2].partition(".")[0]
            for other in sorted(members - {row.source}) if row.only_importer else ():
                if other.endswith(".py") and module.encode() in archive.read(other):
                    yield f"{other} names {module}, too"


def adopted(folder: Path, wheels: Iterable[Path], architecture: str = "amd64") -> im.Catalog:
    """Return the catalog of an image with the files of wheels, which it removes: a layout with one layer."""
    blobs = folder / "layout/blobs/sha256"
    blobs.mkdir(parents=True)
    layer = blobs / "layer"
    with layer.open("wb") as file:
        hashed = _Hashed(file)
        with tarfile.open(fileobj=cast("IO[bytes]", hashed), mode="w|") as archive, ExitStack() as stack:
            for wheel in wheels:
                _add(archive, stack.enter_context(zipfile.ZipFile(wheel)))
                wheel.unlink()
    own = hashed.digest
    layer.rename(blobs / own)
    described = {"digest": f"sha256:{own}", "size": (blobs / own).stat().st_size}
    kind = "application/vnd.oci.image"
    system = {"os": "linux", "architecture": architecture}
    config = {**system, "rootfs": {"type": "layers", "diff_ids": [f"sha256:{own}"]}}
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{kind}.manifest.v1+json",
        "config": {"mediaType": f"{kind}.config.v1+json", **_put(blobs, config)},
        "layers": [{"mediaType": f"{kind}.layer.v1.tar", **described}],
    }
    index = {"schemaVersion": 2, "manifests": [{"mediaType": manifest["mediaType"], **_put(blobs, manifest)}]}
    (folder / "layout/index.json").write_text(json.dumps(index))
    (folder / "layout/oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    output = folder / "catalog.json"
    words = [
        sys.executable,
        "-m",
        "imagematrix",
        "adopt",
        str(folder / "layout"),
        "--as",
        "it:v1",
        "-o",
        str(output),
    ]
    environment = {"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(folder)}
    subprocess.run(words, check=True, cwd=ROOT, env=environment)
    return im.open_catalog(output)


def _add(archive: tarfile.TarFile, wheel: zipfile.ZipFile) -> None:
    """Add the files of a wheel to an image, where pip installs them."""
    for member in wheel.infolist():
        if member.is_dir():
            continue
        top, _, rest = member.filename.partition("/")
        scheme, _, below = rest.partition("/")
        path = f"{SCHEMES[scheme]}/{below}" if top.endswith(".data") and scheme in SCHEMES else ""
        info = tarfile.TarInfo(path or f"{SITE}/{member.filename}")
        info.size = member.file_size
        with wheel.open(member) as file:
            archive.addfile(info, file)


def _put(blobs: Path, document: object) -> dict[str, object]:
    raw = json.dumps(document).encode()
    own = hashlib.sha256(raw).hexdigest()
    (blobs / own).write_bytes(raw)
    return {"digest": f"sha256:{own}", "size": len(raw)}


class _Hashed:
    """A file to write, with the digest of what was written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def write(self, piece: bytes) -> int:
        self._hash.update(piece)
        return self._file.write(piece)


def _answer(catalog: im.Catalog, compute: str, driver: str, path: Path) -> str:
    """Return whether `select` takes the image for a host with one such GPU, and what code runs there."""
    host = json.loads(path.read_text())
    gpu = host["gpus"][0] | {"compute": compute, "name": GPUS[compute], "pci_device_id": None}
    kind = "proprietary" if compute in CLOSED else "open"
    module = host["driver"] | {"version": driver, "user_mode": driver, "kind": kind}
    host |= {"gpus": [gpu], "driver": module}
    selection = im.explain(im.Host.from_json(host), catalog)
    if selection.variant is None:
        failing = selection.miss.rules if selection.miss else ()
        print(*(f"  {compute}: {one.rule}: {one.why}" for one in failing), sep="\n")
        return NO
    from imagematrix.selection.rules.device_code import CUBIN, rate_code

    matched = rate_code(selection.variant, selection.chosen_gpus[0], driver)
    if matched is None:
        return JIT
    return YES if matched[0] == CUBIN else PTX
