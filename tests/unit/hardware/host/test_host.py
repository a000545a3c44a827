import json

import pytest

from imagematrix.errors import UsageError
from imagematrix.hardware.host.host import Accelerator, Cpu, Driver, Gpu, Host, MigDevice
from imagematrix.selection.selection import NothingFits
from imagematrix.selection.selector import select

FULL = Host(
    arch="x86_64",
    cpu=Cpu(vendor="AuthenticAMD", model="EPYC", flags=frozenset({"avx2", "lm"}), level="x86-64-v3"),
    driver=Driver(version="580.65.06", kind="open", source="/proc/driver/nvidia/version"),
    gpus=(
        Gpu(
            index=0,
            minor=3,
            uuid="GPU-1",
            name="NVIDIA L40S",
            pci_bus_id="0000:41:00.0",
            pci_device_id="26b9",
            compute="8.9",
            brand="nvidia",
            memory_mib=46068,
            mig=(
                MigDevice(
                    uuid=None,
                    profile="1g.10gb",
                    gpu_instance=7,
                    compute_instance=0,
                    memory_mib=9984,
                    capabilities=(66, 67),
                ),
                MigDevice(uuid=None, profile=None, gpu_instance=9, compute_instance=0),
            ),
            state="ok",
        ),
        Gpu(index=1, state="lost"),
    ),
    devices=("/dev/nvidia3",),
    accelerators=(
        Accelerator(kind="wsl", where="/dev/dxg", why="it can't be passed"),
        Accelerator(kind="x", where="y"),
    ),
    warnings=("a sentence",),
)


def spoilt(path, value):
    document = json.loads(json.dumps(FULL.to_json()))
    *parents, last = path
    place = document
    for step in parents:
        place = place[step]
    place[last] = value
    if value is ...:
        del place[last]
    return document


def test_round_trip():
    assert Host.from_json(json.loads(json.dumps(FULL.to_json()))) == FULL
    assert list(FULL.to_json()) == [
        "schema",
        "arch",
        "cpu",
        "driver",
        "gpus",
        "devices",
        "accelerators",
        "warnings",
    ]
    older = {key: value for key, value in FULL.to_json().items() if key != "accelerators"}
    assert Host.from_json(older).accelerators == ()


@pytest.mark.parametrize("missing", ["gpus", "accelerators"])
def test_a_driver_without_a_gpu_is_a_sign_of_an_accelerator(missing, make):
    document = FULL.to_json() | {"gpus": [], "accelerators": []}
    assert Host.from_json(document).accelerators == ()  # as a probe found it
    del document[missing]
    host = Host.from_json(document)
    assert [sign.where for sign in host.accelerators] == ["nvidia", "/dev/nvidia3"]
    with pytest.raises(
        NothingFits, match="would leave accelerators unused: nvidia: the document lists no GPU"
    ):
        select(host, make.catalog(make.cpu_variant()))


def test_a_minimal_document():
    host = Host.from_json({"schema": "imagematrix.host/v1", "arch": "aarch64", "cpu": {}})
    assert host == Host(arch="aarch64", cpu=Cpu(vendor=None, model=None, flags=frozenset(), level=None))


@pytest.mark.parametrize(
    ("machine", "arch"),
    [
        ("arm64", "aarch64"),
        ("ARM64", "aarch64"),
        ("aarch64", "aarch64"),
        ("amd64", "x86_64"),
        ("AMD64", "x86_64"),
        ("x86_64", "x86_64"),
        ("riscv64", "riscv64"),
        ("other", "other"),
    ],
)
def test_architectures_are_normalised(machine, arch):
    assert Host.from_json(spoilt(["arch"], machine)).arch == arch


def test_incomplete_gpus_differ_by_index():
    two = [{"index": 0, "state": "ok"}, {"index": 1, "state": "ok"}]
    assert [gpu.uuid for gpu in Host.from_json(spoilt(["gpus"], two)).gpus] == [None, None]


def test_labels():
    assert [gpu.label for gpu in FULL.gpus] == ["GPU 0 (NVIDIA L40S)", "GPU 1"]


def test_load(tmp_path):
    path = tmp_path / "node.json"
    path.write_text(json.dumps(FULL.to_json()))
    assert Host.load(path) == FULL
    assert Host.load(str(path)) == FULL
    path.write_text("{")
    with pytest.raises(UsageError, match=r"node\.json:1:"):
        Host.load(path)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["schema"], "imagematrix.host/v2", "unsupported schema"),
        (["schema"], "imagematrix.catalog/v1", "expected 'imagematrix.host/v1'"),
        (["arch"], None, "arch: expected a string"),
        (["arch"], "", "arch: '' is not an architecture such as x86_64"),
        (["arch"], "x State=DOWN", "arch: 'x State=DOWN' is not an architecture"),
        (["cpu"], None, "cpu: is missing"),
        (["cpu", "level"], "x\nProlog=/tmp/x", r"cpu: level: 'x\\nProlog=/tmp/x' is not a level such as"),
        (["cpu", "flags"], "avx2", "flags: expected a list"),
        (["cpu", "flags"], ["a", 1], r"cpu: flags\[1\]: expected a string, found a number"),
        (["driver"], {}, r"driver: version is missing \(expected a string\)"),
        (["driver", "version"], "550; x", r"invalid driver version .* \(expected one such as 550.163.01\)"),
        (["driver", "version"], "550.163.01\n", "invalid driver version"),
        (["gpus", 0, "state"], None, "state: expected a string, found null"),
        (["gpus", 0, "state"], "", "state: is empty"),
        (["gpus", 0, "state"], ..., "state is missing"),
        (["gpus", 0, "pci_bus_id"], "41:00", "invalid PCI address '41:00'"),
        (["gpus", 0, "compute"], "89", "invalid compute capability"),
        (["gpus", 0, "compute"], 9.0, "compute: expected a string, found a number"),
        (["gpus", 0, "minor"], -1, "minor: -1 is negative"),
        (["gpus", 0, "minor"], "3", "minor: expected an integer"),
        (["gpus", 0, "index"], -1, "index: -1 is negative"),
        (["gpus", 1, "index"], "1", r"gpus\[1\]: index: expected an integer, found a string"),
        (["gpus", 0, "memory_mib"], True, "memory_mib: expected an integer"),
        (["gpus", 0, "mig", 0, "gpu_instance"], -7, r"mig\[0\]: gpu_instance: -7 is negative"),
        (["gpus", 0, "mig", 0, "capabilities"], [66, -1], r"mig\[0\]: capabilities: -1 is negative"),
        (["gpus", 0, "mig", 0, "capabilities"], 66, r"capabilities: expected a list"),
        (["gpus", 0, "mig", 0, "compute_instance"], ..., r"mig\[0\]: compute_instance is missing"),
        (["devices"], [None], r"devices\[0\]: expected a string, found null"),
        (["warnings"], "none", "warnings: expected a list, found a string"),
    ],
)
def test_invalid_documents(path, value, message):
    with pytest.raises(UsageError, match=f"^node.json: .*{message}"):
        Host.from_json(spoilt(path, value), "node.json")


def twice(**changes):
    """Return a document with the first GPU twice, of which the second differs in these fields."""
    data = json.loads(json.dumps(FULL.to_json()))
    gpu = data["gpus"][0]
    own = {"index": 7, "minor": 7, "uuid": "GPU-7", "pci_bus_id": "0000:07:00.0", "mig": None}
    data["gpus"] = [gpu, gpu | own | changes]
    return data


def test_one_gpu_twice_in_any_spelling():
    gpu = FULL.gpus[0]
    assert len(Host.from_json(twice()).gpus) == 2
    for name, value in (
        ("pci_bus_id", gpu.pci_bus_id),
        ("pci_bus_id", f"0000{gpu.pci_bus_id}"),
        ("pci_bus_id", gpu.pci_bus_id.upper()),
        ("uuid", gpu.uuid.upper()),
        ("minor", gpu.minor),
        ("index", gpu.index),
    ):
        with pytest.raises(UsageError, match=f"gpus: duplicate {name} "):
            Host.from_json(twice(**{name: value}))
    assert Host.from_json(twice(pci_bus_id="00000000:07:00.0")).gpus[1].pci_bus_id == "0000:07:00.0"


def test_one_mig_device_twice():
    data = json.loads(json.dumps(FULL.to_json()))
    mig = data["gpus"][0]["mig"]
    mig[0]["uuid"] = "MIG-1"
    mig.append(mig[0] | {"uuid": None})
    with pytest.raises(UsageError, match="duplicate GPU instance and compute instance of GPU 0"):
        Host.from_json(data)
    mig[-1] = mig[0] | {"gpu_instance": 77}
    with pytest.raises(UsageError, match="duplicate uuid mig-"):
        Host.from_json(data)


def test_one_key_twice(tmp_path):
    path = tmp_path / "node.json"
    path.write_text(json.dumps(FULL.to_json()).replace('"gpus":', '"gpus": [], "gpus":', 1))
    with pytest.raises(UsageError, match=r"node\.json: duplicate key 'gpus'"):
        Host.load(path)
