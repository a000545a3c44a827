"""`export cdi`: the GPUs of a node as CDI devices."""

import json
import os
import stat

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.errors import ProbeError
from imagematrix.hardware.host.host import Cpu, Gpu, Host, MigDevice
from imagematrix.integrations.export.cdi import make_gpu_spec

# What the schema in CDI's repository and its SPEC.md demand of a document with nothing but device nodes.
NODE = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "pattern": "^/dev/"},
        "permissions": {"type": "string", "pattern": "^[rwm]+$"},
    },
    "required": ["path"],
    "additionalProperties": False,
}
EDITS = {
    "type": "object",
    "properties": {"deviceNodes": {"type": "array", "items": NODE, "minItems": 1}},
    "required": ["deviceNodes"],
    "additionalProperties": False,
}
DEVICE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?$"},
        "containerEdits": EDITS,
    },
    "required": ["name", "containerEdits"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "cdiVersion": {"const": "0.5.0"},
        "kind": {"const": "imagematrix.io/gpu"},
        "devices": {"type": "array", "items": DEVICE, "minItems": 1},
    },
    "required": ["cdiVersion", "kind", "devices"],
    "additionalProperties": False,
}
DEVICES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
CONTROL = [*DEVICES]
TEXTS = st.none() | st.text(max_size=12) | st.sampled_from(["GPU-1", "MIG-1", "all", "0", "GPU-", "GPU-\n"])


def host(*gpus, devices=DEVICES):
    cpu = Cpu(vendor=None, model=None, flags=frozenset(), level=None)
    return Host(arch="x86_64", cpu=cpu, gpus=gpus, devices=tuple(devices))


def paths(document):
    """Return the device nodes of each device, after a check of the document."""
    jsonschema.validate(document, SCHEMA)
    names = [device["name"] for device in document["devices"]]
    assert len(names) == len(set(names))
    return {
        device["name"]: [node["path"] for node in device["containerEdits"]["deviceNodes"]]
        for device in document["devices"]
    }


def test_devices_are_named_by_index_and_uuid_and_have_the_nodes_of_a_launch():
    document = make_gpu_spec(host(Gpu(index=0, minor=3, uuid="GPU-a"), Gpu(index=1, minor=0))).document
    assert paths(document) == {
        "0": ["/dev/nvidia3", *CONTROL],
        "GPU-a": ["/dev/nvidia3", *CONTROL],
        "1": ["/dev/nvidia0", *CONTROL],
        "all": ["/dev/nvidia3", "/dev/nvidia0", *CONTROL],
    }


def test_mig_devices_are_named_as_in_a_request_and_have_their_capabilities_only():
    parts = (
        MigDevice(uuid="MIG-a", profile=None, gpu_instance=2, compute_instance=0, capabilities=(21, 22)),
        MigDevice(uuid=None, profile=None, gpu_instance=9, compute_instance=1, capabilities=(84, 86)),
    )
    found = paths(make_gpu_spec(host(Gpu(index=0, minor=0, mig=parts))).document)
    assert [*found] == ["0", "0:2:0", "MIG-a", "0:9:1", "all"]
    first = ["/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap21", "/dev/nvidia-caps/nvidia-cap22"]
    second = ["/dev/nvidia-caps/nvidia-cap84", "/dev/nvidia-caps/nvidia-cap86"]
    assert found["0:2:0"] == found["MIG-a"] == [*first, *CONTROL]
    assert found["0:9:1"] == ["/dev/nvidia0", *second, *CONTROL]
    assert found["0"] == found["all"] == [*first, *second, *CONTROL]


def test_gpus_that_no_container_can_use_are_left_out_with_the_reason():
    unreadable = MigDevice(uuid=None, profile=None, gpu_instance=1, compute_instance=0)
    gpus = make_gpu_spec(
        host(
            Gpu(index=0, minor=0, name="H100"),
            Gpu(index=1, minor=1, name="H100", state="lost"),
            Gpu(index=2, minor=2, state="vgpu"),
            Gpu(index=3),
            Gpu(index=4, minor=4, mig=(unreadable,)),
        )
    )
    assert [*paths(gpus.document)] == ["0", "all"]
    assert gpus.paths == ("/dev/nvidia0", *DEVICES)
    assert gpus.excluded[:2] == (
        "GPU 1 (H100) is left out: its state is lost",
        "GPU 2 is left out: its state is vgpu",
    )
    assert "GPU 3 is left out: device minor of GPU 3 unknown" in gpus.excluded[2]
    assert "GPU 4 is left out: device nodes of a MIG device of GPU 4 unknown" in gpus.excluded[3]


@pytest.mark.parametrize("gpus", [(), (Gpu(index=0, minor=0, state="lost"), Gpu(index=1))])
def test_a_node_without_usable_gpus_has_no_spec_because_engines_refuse_empty_ones(gpus):
    with pytest.raises(ProbeError, match="no GPU of this node can be passed to a container") as error:
        make_gpu_spec(host(*gpus))
    assert all(f"GPU {gpu.index}" in str(error.value) for gpu in gpus)


@given(
    st.lists(
        st.tuples(TEXTS, TEXTS, st.integers(0, 99)), min_size=1, max_size=4, unique_by=lambda row: row[2]
    )
)
def test_whatever_uuids_say_names_are_valid_and_mean_the_gpu_that_has_them(rows):
    gpus = [
        Gpu(
            index=index,
            minor=minor,
            uuid=uuid,
            mig=(
                MigDevice(
                    uuid=part, profile=None, gpu_instance=1, compute_instance=0, capabilities=(minor, 999)
                ),
            ),
        )
        for index, (uuid, part, minor) in enumerate(rows)
    ]
    found = paths(make_gpu_spec(host(*gpus)).document)
    for gpu in gpus:
        assert found[str(gpu.index)][0] == f"/dev/nvidia{gpu.minor}"
    for name, nodes in found.items():
        whole = [node for node in nodes if node.removeprefix("/dev/nvidia").isdigit()]
        assert len(whole) == (len(gpus) if name == "all" else 1)


def test_the_spec_goes_to_stdout_or_to_a_file_that_engines_find(cli, tmp_path):
    words = ("export", "cdi", "--host", "tests/hosts/mig.json")
    printed = cli(*words)
    assert (printed.code, printed.err) == (0, "")
    assert {"0", "1", "0:2:0", "all"} <= paths(json.loads(printed.out)).keys()
    for output, path in (
        (tmp_path / "cdi", tmp_path / "cdi/imagematrix.json"),
        (tmp_path / "a/gpus.json", tmp_path / "a/gpus.json"),
        (tmp_path / "cdi", tmp_path / "cdi/imagematrix.json"),
    ):
        written = cli(*words, "-o", output)
        assert (written.code, written.out, written.err) == (0, "", f"wrote 11 devices to {path}\n")
        assert path.read_text() == printed.out
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
        assert [*path.parent.iterdir()] == [path]


def test_engines_never_see_a_draft(cli, tmp_path, monkeypatch):
    def full(*_):
        assert [path.suffix for path in tmp_path.iterdir()] == [".draft"]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    cli("export", "cdi", "--host", "tests/hosts/mig.json", "-o", tmp_path).refuses(
        2, "No space left on device"
    )
    assert not [*tmp_path.iterdir()]


def test_missing_device_nodes_and_unusable_gpus_are_told_with_their_remedies(cli, tmp_path):
    gpus = (Gpu(index=0, minor=0), Gpu(index=1, minor=1, state="no-node"))
    saved = tmp_path / "node.json"
    saved.write_text(json.dumps(host(*gpus, devices=["/dev/nvidia0", "/dev/nvidiactl"]).to_json()))
    result = cli("export", "cdi", "--host", saved)
    assert result.code == 0
    assert paths(json.loads(result.out))["0"] == ["/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"]
    assert "GPU 1 is left out: its state is no-node" in result.err
    assert "/dev/nvidia-uvm: not found" in result.err
    assert "nvidia-modprobe -u -c 0" in result.err


def test_a_node_without_gpus_leaves_an_earlier_spec_as_it_is(cli, tmp_path):
    (tmp_path / "imagematrix.json").write_text("before")
    cli("export", "cdi", "--host", "tests/hosts/laptop.json", "-o", tmp_path).refuses(
        5, "no GPU of this node can be passed to a container"
    )
    assert (tmp_path / "imagematrix.json").read_text() == "before"


@pytest.mark.parametrize(
    ("words", "option", "whose"),
    [
        (("cdi", "-f", "matrix.yaml"), "--file", "a node, not a matrix"),
        (("cdi", "--jobs", "2"), "--jobs", "a node, not a matrix"),
        (("bake", "--host", "x.json"), "--host", "a matrix, not a node"),
        (("github", "--root", "x"), "--root", "a matrix, not a node"),
    ],
)
def test_options_of_other_targets_are_refused(cli, words, option, whose):
    cli("export", *words).refuses(
        2, f"`imagematrix export {words[0]}` does not have the option {option}", whose
    )


def test_an_invalid_host_is_an_error(cli, tmp_path):
    (tmp_path / "x.json").write_text("[")
    assert cli("export", "cdi", "--host", tmp_path / "x.json").code == 2
    assert cli("export", "cdi", "--host", tmp_path / "x.json", "--root", tmp_path).code == 2
