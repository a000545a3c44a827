"""No value from outside is a command to the CI system in whose log a command's output stands.

Each test puts hostile text into one string of valid input at a time, runs the commands that read it, and
counts the values that reached the output.
"""

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from distribution import Fault
from hostile_text import MARK, TEXT, hostile, obeyed
from images import Parts, layout, tar
from publishing import labels_of

REACHED = {  # for each test, how many values reach the output at least
    "test_hosts": 8,
    "test_dumps_of_nvidia_smi": 1,
    "test_captured_trees": 4,
    "test_catalogs": 20,
    "test_matrices": 50,
    "test_builds": 20,
    "test_nodes_and_pods": 9,
    "test_published_labels": 5,
    "test_errors_of_registries": 0,  # messages say what a registry answered in words of their own
    "test_images_with_files_and_packages": 4,
    "test_names_of_files": 14,
    "test_words_of_the_command_line": 0,  # some are refused without being shown
}
pytestmark = pytest.mark.many
HEADERS = ("Location", "WWW-Authenticate", "Content-Type", "Docker-Content-Digest", "Retry-After", "Link")
UNIT = Path(__file__).parents[1]


@pytest.fixture
def outcome(cli, request):
    """Runs commands on input with hostile text in one place, "" for none, and counts those that reach us."""

    class Outcome:
        def __init__(self):
            self.reached = set()

        def run(self, place, *words):
            result = cli(*words)
            output = f"{result.out}\n{result.err}"
            assert not obeyed(output), (place, words)
            assert "Traceback" not in output, (place, words)
            assert place or result.code not in (1, 2), (words, output)  # without it, the input is valid
            if MARK in output:
                self.reached.add(place)

    made = Outcome()
    yield made
    assert len(made.reached) >= REACHED[request.node.originalname], sorted(made.reached)


def test_many_values_reach_the_output():
    assert sum(REACHED.values()) >= 100


GPU = {
    "index": 0,
    "minor": 3,
    "uuid": "GPU-8f5a5c27",
    "name": "NVIDIA L40S",
    "pci_bus_id": "0000:41:00.0",
    "pci_device_id": "26b9",
    "compute": "8.9",
    "brand": "nvidia",
    "memory_mib": 46068,
    "mig": [],
    "state": "ok",
}
PART = {"uuid": "MIG-1", "profile": "3g.40gb", "gpu_instance": 1, "compute_instance": 0, "memory_mib": 1}
HOST: dict[str, Any] = {
    "schema": "imagematrix.host/v1",
    "arch": "x86_64",
    "cpu": {
        "vendor": "AuthenticAMD",
        "model": "AMD EPYC 9654",
        "flags": ["avx2"],
        "level": "x86-64-v2",
    },
    "driver": {
        "version": "550.163.01",
        "kind": "open",
        "user_mode": "550.163.01",
        "source": "/proc/driver/nvidia/version",
    },
    "gpus": [GPU],
    "devices": ["/dev/nvidia3", "/dev/nvidiactl"],
    "warnings": ["something looks wrong"],
}
HOSTS = {
    "partitioned": HOST | {"gpus": [GPU | {"mig": [PART | {"capabilities": [1, 2]}]}]},
    "lost": HOST | {"gpus": [GPU | {"state": "lost"}], "driver": HOST["driver"] | {"user_mode": "535.1.2"}},
    "foreign": HOST | {"gpus": [], "accelerators": [{"kind": "pci", "where": "0000:41:00.0", "why": "old"}]},
}


@pytest.mark.parametrize("kind", HOSTS)
def test_hosts(outcome, catalog_file, project, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(
        "imagematrix.integrations.swarm.program.make_program", lambda _: b""
    )  # which has no text of a host
    file, daemon = tmp_path / "host.json", tmp_path / "daemon.json"
    chosen = ("--catalog", catalog_file, "--host", file)
    matrix = project()
    (tmp_path / ".dockerignore").write_text("*\n")
    for place, made in hostile(HOSTS[kind]):
        file.write_text(json.dumps(made))
        outcome.run(place, "explain", "training:v1", *chosen)
        if place.startswith("key "):  # which all commands read in the same way
            continue
        outcome.run(place, "explain", "training:v1", *chosen, "--json")
        outcome.run(place, "run", "--dry-run", *chosen, "training:v1")
        outcome.run(place, "coverage", "--catalog", catalog_file, file)
        outcome.run(place, "select", "training:v1", "--catalog", catalog_file, "--gang", file)
        outcome.run(place, "doctor", "--host", file)
        if kind in ("lost", "foreign"):
            continue
        outcome.run(place, "gpus", "--host", file)
        outcome.run(place, "gpus", "--host", file, "--metrics")
        outcome.run(place, "export", "cdi", "--host", file)
        outcome.run(place, "kubernetes", "labels", "--host", file)
        outcome.run(place, "kubernetes", "labels", "--host", file, "--format", "kubectl", "--node", "n")
        outcome.run(place, "kubernetes", "dra-driver", "--dry-run", "--node-name", "n", "--host", file)
        outcome.run(place, "slurm", "node-config", "--host", file, "--program", "/usr/local/bin/imagematrix")
        outcome.run(place, "swarm", "node-config", "--dry-run", "--host", file, "--file", daemon)
        outcome.run(place, "plan", "-f", matrix, "--for", file)
        outcome.run(place, "init", "--from", file, tmp_path / place.replace("/", "-")[:40])


def test_dumps_of_nvidia_smi(outcome, catalog_file, tmp_path):
    tree = ET.parse(UNIT / "hardware" / "host" / "dumps" / "470-a100-mig.xml")  # noqa: S314 - a file of ours
    file = tmp_path / "dump.xml"
    seen = set()
    for element in tree.iter():
        if element.tag in seen or not (element.text or "").strip():
            continue
        seen.add(element.tag)
        before = element.text
        for text in (TEXT, f"{before}{TEXT}"):
            element.text = text
            tree.write(file)
            outcome.run(element.tag, "probe", "--nvidia-smi", file)
            outcome.run(
                element.tag, "explain", "training:v1", "--catalog", catalog_file, "--nvidia-smi", file
            )
            outcome.run(element.tag, "kubernetes", "labels", "--nvidia-smi", file)
        element.text = before


def test_captured_trees(outcome, catalog_file, tmp_path):
    bus = "0000:41:00.0"
    files = {
        "proc/cpuinfo": "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD\nflags\t\t: fpu lm\n\n",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Kernel Module  550.163.01  Release\n",
        f"proc/driver/nvidia/gpus/{bus}/information": (
            f"Model: \t\t NVIDIA L40S\nGPU UUID: \t GPU-1\nBus Location: \t {bus}\nDevice Minor: \t 3\n"
        ),
        f"sys/bus/pci/devices/{bus}/vendor": "0x10de\n",
        f"sys/bus/pci/devices/{bus}/class": "0x030200\n",
        f"sys/bus/pci/devices/{bus}/device": "0x26b9\n",
        "proc/modules": "nvidia 1 0 - Live 0x0\n",
        "dev/nvidia3": "",
    }
    line = TEXT.replace("\n", "\r")
    cases = [
        (f"{path}:{number}", {**files, path: "\n".join([*lines[:number], changed, *lines[number + 1 :]])})
        for path, content in files.items()
        for lines in [content.split("\n")]
        for number in range(len(lines))
        for changed in (lines[number] + line, lines[number] + TEXT, TEXT)
    ]
    cases += [
        (f"name of {path}", {p.replace(bus, name.replace("/", "")): c for p, c in files.items()})
        for path in ("bus",)
        for name in (TEXT, bus + TEXT)
    ]
    for number, (place, contents) in enumerate(cases):
        root = tmp_path / str(number)
        for path, content in contents.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(content)
        outcome.run(place, "probe", "--root", root)
        outcome.run(place, "probe", "--root", root, "--json")
        outcome.run(place, "explain", "training:v1", "--catalog", catalog_file, "--root", root)


def test_catalogs(outcome, profiles, catalog_file, tmp_path):
    document = json.loads(catalog_file.read_text())
    fits = next(one for one in document["variants"] if one["cuda"])
    more = {
        "axes": {"python": "3.13"},
        "device_code": [
            {"files": 1, "name": "lib.so", "cubins": ["89"], "ptx": [{"target": "89", "isa": "8.4"}]}
        ],
        "libraries": {"nccl": "2.27.3"},
        "digest": f"sha256:{'a' * 64}",
    }
    others = [one for one in document["variants"] if one["reference"] != fits["reference"]]
    document = document | {"variants": [fits | more, *others[:3]], "defaults": {"python": "3.13"}}
    file = tmp_path / "catalog.json"
    host = profiles["icelake-l40s"]
    for place, made in hostile(document):
        file.write_text(json.dumps(made))
        source = ("--catalog", file)
        outcome.run(place, "select", "training:v1", *source, "--host", host)
        outcome.run(place, "select", "training:v1", *source, "--host", host, "--format", "classad")
        outcome.run(place, "explain", "training:v1", *source, "--host", host)
        outcome.run(place, "explain", "training:v1", *source, "--host", profiles["laptop"], "--json")
        outcome.run(place, "run", "--dry-run", *source, "--host", host, "training:v1")
        outcome.run(place, "ls", *source)
        outcome.run(place, "coverage", *source, host)
        outcome.run(place, "kubernetes", "needs", "training:v1", *source)


WHY = "march=znver4,cuda=12.4,compute=8.9,python=3.13"  # one cell of the matrix
MATRIX = {
    "schema": "imagematrix.matrix/v1",
    "images": {
        "training": {
            "version": "v1",
            "template": "training.j2",
            "context": ".",
            "budget": "2GB",
            "plain_pull": {"cuda": "none", "march": "x86-64-v3", "python": "3.13"},
            "optional_device_code": ["*.so"],
            "compression": "gzip",
            "prefer": ["cpu-vendor"],
            "secrets": ["token"],
            "build_args": {"PROXY": "none"},
            "defaults": {"python": "3.13"},
        }
    },
    "axes": {
        "cuda": ["12.4", "none"],
        "compute": ["8.9"],
        "driver": ["550.163.01"],
        "march": ["znver4", "x86-64-v3"],
        "python": ["3.13", "3.12"],
    },
    "properties": {
        "cuda": {
            "none": {"base": "debian:trixie", "compiler": "gcc-14"},
            "12.4": {"base": "debian:trixie", "compiler": "gcc-14"},
        },
        "python": {"3.13": {"note": "new"}, "3.12": {"note": "old"}},
    },
    "exclude": [{"cuda": "12.4", "march": "x86-64-v3", "why": "they have the newer toolkit"}],
    "include": [
        {"cuda": "12.4", "compute": "9.0", "driver": "550.163.01", "march": "znver4", "python": "3.12"}
    ],
}


def test_matrices(outcome, matrix, tmp_path):
    (tmp_path / "templates" / "training.j2").write_text(
        "FROM {{ base }}\nLABEL a={{ note }}\nENV A={{ note }} B={{ python }}\n"
        "RUN echo {{ note }}\n# {{ python }}\n"
    )
    for place, made in hostile(MATRIX):
        matrix.write_text(json.dumps(made))
        outcome.run(place, "validate", "-f", matrix)
        outcome.run(place, "plan", "-f", matrix)
        outcome.run(place, "plan", "-f", matrix, "--json")
        outcome.run(place, "plan", "-f", matrix, "--why", WHY)
        outcome.run(place, "render", "-f", matrix, "--only", WHY)
        for target in ("bake", "github", "gitlab"):
            outcome.run(place, "export", target, "-f", matrix)
        outcome.run(place, "build", "-f", matrix, "--secret", "id=token,env=PATH")


def test_builds(outcome, tmp_path, monkeypatch):
    cell = {
        "image": "training",
        "version": "v1",
        "cell": "cpu-znver4",
        "axes": {"cuda": "none", "march": "znver4"},
        "platform": "linux/amd64",
        "status": "failed",
        "reference": "training:v1-cpu-znver4-0123456789ab",
        "input": f"sha256:{'a' * 64}",
        "why": "no store",
        "rule": None,
        "seconds": 1.0,
        "digest": None,
        "reproducible": None,
        "compression": "zstd",
        "libzstd": None,
        "log": "build.log",
        "error": "it failed",
        "warnings": ["it is large"],
    }
    document = {
        "schema": "imagematrix.build/v1",
        "shard": "1/2",
        "error": "all ended",
        "for": None,
        "cells": [cell, cell | {"cell": "cpu-x86-64-v3", "status": "built", "error": None}],
    }
    file = tmp_path / "build.json"
    for place, made in hostile(document):
        file.write_text(json.dumps(made))
        outcome.run(place, "report", file)
        outcome.run(place, "report", "--json", file)
        with monkeypatch.context() as github:
            github.setattr("imagematrix.cli.shared.ci.find_ci_system", lambda: "github")
            outcome.run(place, "report", file)


def test_nodes_and_pods(outcome, cli, catalog_file, tmp_path):
    own = tmp_path / "host.json"
    own.write_text(json.dumps(HOST))
    given = json.loads(cli("kubernetes", "labels", "--host", own, "--json").out)["labels"]
    node = {
        "kind": "Node",
        "metadata": {"name": "n1", "labels": {"kubernetes.io/arch": "amd64", **given}},
        "spec": {"taints": [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}]},
        "status": {
            "nodeInfo": {"architecture": "amd64"},
            "capacity": {"imagematrix.io/gpu": "8"},
            "allocatable": {"imagematrix.io/gpu": "8"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
    limits = {"limits": {"imagematrix.io/gpu": "1"}}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": "n", "uid": "u", "labels": {"app": "a"}},
        "spec": {
            "nodeSelector": {"zone": "a"},
            "containers": [{"name": "c", "image": "training:v1", "resources": limits}],
        },
        "status": {"phase": "Pending"},
    }
    nodes, pods, one = (tmp_path / name for name in ("nodes.json", "all.json", "pod.json"))
    chosen = ("--nodes", nodes, "--catalog", catalog_file)
    pullable = tmp_path / "pullable.json"
    catalog = json.loads(catalog_file.read_text())
    pullable.write_text(json.dumps(catalog | {"image": "reg.example/ml/training"}))
    running = ("reg.example/ml/training:v1", "--nodes", nodes, "--catalog", pullable)
    one.write_text(json.dumps(pod))
    for place, made in hostile(node):
        nodes.write_text(json.dumps({"kind": "List", "items": [made]}))
        outcome.run(place, "kubernetes", "classes", *chosen)
        outcome.run(place, "kubernetes", "explain", one, *chosen, "--as", "training:v1")
        pods.write_text(json.dumps({"kind": "List", "items": [made, pod]}))
        outcome.run(place, "kubernetes", "gpus", "--nodes", pods)
        outcome.run(place, "kubernetes", "render", "policy", "training:v1", *chosen)
        outcome.run(place, "kubernetes", "render", "job", *running)
    nodes.write_text(json.dumps({"kind": "List", "items": [node]}))
    for place, made in hostile(pod):
        one.write_text(json.dumps(made))
        outcome.run(
            f"pod/{place}" if place else "", "kubernetes", "explain", one, *chosen, "--as", "training:v1"
        )
        pods.write_text(json.dumps({"kind": "List", "items": [node, made]}))
        outcome.run(f"pod/{place}", "kubernetes", "gpus", "--nodes", pods)


def test_published_labels(outcome, image, add_variant, profiles):
    variant = {
        "platform": "linux/amd64",
        "march": "x86-64-v2",
        "cpu_flags": ["avx2"],
        "axes": {"python": "3.13"},
        "facts": {"cpu_flags": "bytes"},
    }
    own = {
        "VARIANT": json.dumps(variant),
        "DEFAULTS": '{"python":"3.13"}',
        "IMAGE": "training",
        "CELL": "cpu",
        "INPUT": f"sha256:{'a' * 64}",
        "INPUTS": '{"dockerfile":"a"}',
    }
    cases = [(place, made) for place, made in hostile(own) if made.keys() == own.keys()]
    cases += [(f"VARIANT/{place}", own | {"VARIANT": json.dumps(made)}) for place, made in hostile(variant)]
    for number, (place, made) in enumerate(cases):
        version = f"v{number}"
        add_variant("cpu", version=version, **made)
        outcome.run(place, "publish", f"{image}:{version}")
        outcome.run(place, "ls", f"{image}:{version}")
        outcome.run(place, "select", f"{image}:{version}", "--host", profiles["laptop"])
        outcome.run(place, "explain", f"{image}:{version}", "--host", profiles["laptop"])
        outcome.run(place, "retire", image, "--keep", "1")


@pytest.mark.parametrize("status", [200, 302, 400, 401, 403, 429])
def test_errors_of_registries(outcome, server, image, add_variant, no_pause, status):  # noqa: ARG001
    add_variant("cpu", VARIANT='{"platform":"linux/amd64","march":"x86-64-v2","cpu_flags":[]}')
    body = {"errors": [{"code": "DENIED", "message": "as it says", "detail": "more"}]}
    challenge = f'Bearer realm="http://{server.address}/{" ".join(TEXT.split())}"'
    cases: list[Any] = [(place, {}, json.dumps(made).encode()) for place, made in hostile(body)]
    cases += [(f"header {name}", {name: challenge}, TEXT.encode()) for name in HEADERS]
    for place, headers, raw in cases:
        for words in (
            ("ls", image),
            ("ls", f"{image}:v1"),
            ("publish", f"{image}:v1"),
            ("verify", f"{image}:v1-cpu-6b86b273ff34"),
        ):
            server.faults[:] = [
                Fault("GET", "", times=99, status=status, headers=headers, body=raw),
                Fault("HEAD", "", times=99, status=status, headers=headers, body=raw),
            ]
            outcome.run(f"{status} {place}", *words)


def test_images_with_files_and_packages(outcome, tmp_path):
    files = {
        "opt/k.cubin": (UNIT / "audit" / "data" / "80.cubin").read_bytes(),
        "usr/lib/libcuda.so.550.163.01": b"x",
        "usr/lib/libcudart.so.12.4.127": b"\x7fELF",
        "usr/lib/python3/torch-2.8.0.dist-info/METADATA": b"Name: torch\nVersion: 2.8.0\n",
        "usr/lib/python3/torch-2.8.0.dist-info/RECORD": b"torch/version.py,,\n",
        "usr/lib/python3/torch/version.py": b"cuda = '12.8'\n__version__ = '2.8.0'\n",
        "var/lib/dpkg/status": b"Package: openssl\nStatus: install ok installed\nVersion: 3\nSource: ssl\n\n",
    }
    text = TEXT.replace("/", "")
    cases = [("", files)]
    for path, content in files.items():
        folder, _, name = path.rpartition("/")
        stem, dot, ending = name.partition(".")
        changed = (
            f"{folder}/{text}{name}",
            f"{folder}{text}/{name}",
            f"{folder}/{stem}{text}{dot}{ending}",
        )
        cases += [
            (f"name of {path}", {other if one == path else one: raw for one, raw in files.items()})
            for other in changed
        ]
        if content.isascii() and b"\n" in content:
            for number, line in enumerate(content.split(b"\n")):
                lines = content.split(b"\n")
                lines[number] = line + TEXT.replace("\n", "\r").encode()
                cases.append((f"{path}:{number}", files | {path: b"\n".join(lines)}))
    for number, (place, contents) in enumerate(cases):
        made = layout(tmp_path / str(number), Parts(tar(*contents.items()), labels=labels_of("cpu")))
        outcome.run(place, "verify", made)
        outcome.run(place, "verify", "--json", made)
        outcome.run(place, "verify", "--sbom", "-", made)
        outcome.run(place, "adopt", made, "--as", "training:v1", "-o", tmp_path / "adopted.json")


def test_names_of_files(outcome, profiles, catalog_file, tmp_path):
    name = TEXT.replace("/", "")
    chosen = ("--catalog", catalog_file)
    good = profiles["laptop"].read_text()
    for ending in (".json", ".yaml", ".ndjson", ""):
        for content in (None, good, "{", "\0", '{"schema": "other/v1"}'):
            path = tmp_path / f"{name}{ending}"
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_text(content)
            for words in (
                ("explain", "training:v1", *chosen, "--host", path),
                ("select", "training:v1", "--catalog", path, "--host", profiles["laptop"]),
                ("select", "training:v1", *chosen, "--gang", path),
                ("coverage", *chosen, path),
                ("coverage", *chosen, tmp_path),
                ("probe", "--root", path),
                ("probe", "--nvidia-smi", path),
                ("validate", "-f", path),
                ("plan", "-f", path),
                ("lock", "-f", path),
                ("bump", "-f", path),
                ("report", path),
                ("trim", "--compute", "9.0", path),
                ("trim", "--compute", "9.0", tmp_path),
                ("verify", path),
                ("adopt", path, "--as", "a:v1"),
                ("kubernetes", "gpus", "--nodes", path),
                ("select", "training:v1", *chosen, "--host", profiles["laptop"], "--policy", path),
            ):
                outcome.run(" ".join(map(str, words[:2])).replace(str(path), ""), *words)


@pytest.mark.parametrize(
    "words",
    [
        ("verify", f"--{TEXT}"),
        ("ls", "a", TEXT),
        (TEXT,),
        ("kubernetes", TEXT),
        ("kubernetes", "labels", TEXT),
        ("plan", "--shard", TEXT),
        ("build", "--jobs", TEXT),
        ("select", "a", "--gpus", TEXT),
        ("explain", "a", "--where", TEXT),
        ("export", TEXT),
        ("run", f"--{TEXT}", "a"),
        ("run", "--gpus", TEXT, "a"),
    ],
)
def test_words_of_the_command_line(outcome, words):
    outcome.run(str(words), *words)
