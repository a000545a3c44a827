"""`imagematrix gpus`: each GPU of the node, free or used, and by what."""

import json
import os
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from imagematrix.errors import ProbeError
from imagematrix.hardware.host import accelerator_hints, probe
from imagematrix.hardware.host.host import Host
from imagematrix.launcher.gpu_claims.locks import Locks, release_locks


@pytest.fixture(autouse=True)
def locks(monkeypatch, tmp_path):
    """The lock folder of this test, which does not exist yet."""
    monkeypatch.setenv("IMAGEMATRIX_LOCKS", str(tmp_path / "locks"))
    return str(tmp_path / "locks")


def container(name, *paths):
    devices = [{"PathOnHost": path} for path in paths]
    return {"Id": name, "Name": f"/{name}", "Config": {"Image": "[x]:1"}, "HostConfig": {"Devices": devices}}


def test_free_and_used_gpus_are_listed(show_gpus, profiles, engine, locks, conforms):
    host = json.loads(profiles["rome-a100"].read_text())
    first, second, third = (gpu["minor"] for gpu in host["gpus"][:3])
    engine.containers = [container("web", f"/dev/nvidia{first}", "/dev/nvidiactl")]
    with Locks(locks) as held:
        lease = held.take(f"nvidia{second}", f"nvidia{first}")
    result = show_gpus(profiles["rome-a100"], "--json")
    table = show_gpus(profiles["rome-a100"])
    release_locks(lease)
    assert (result.code, result.err) == (0, "")
    document = conforms(json.loads(result.out))
    gpus = document["gpus"]
    assert [use["kind"] for use in gpus[0]["used_by"]] == ["lease", "container"]
    assert gpus[0]["used_by"][1]["name"] == "web ([x]:1)"
    assert [(use["kind"], use["pid"]) for use in gpus[1]["used_by"]] == [("lease", os.getpid())]
    assert [gpu["free"] for gpu in gpus] == [False, False, *[True] * 6]
    assert gpus[2]["minor"] == third
    assert "container web ([x]:1)" in table.out
    assert table.out.count(" free ") == 6


def test_shares_are_listed_with_their_memory(show_gpus, profiles, engine, locks, conforms):
    """One GPU has a foreground launch and a container, the next one is used whole."""
    host = json.loads(profiles["icelake-l40s"].read_text())
    minor, other = (gpu["minor"] for gpu in host["gpus"][:2])
    memory = host["gpus"][0]["memory_mib"]
    job, web, whole = (container(name, f"/dev/nvidia{minor}") for name in ("job", "web", "whole"))
    job["Config"]["Labels"] = {"io.imagematrix.vram": "4096", "io.imagematrix.lease": "share-1"}
    web["Config"]["Labels"] = {"io.imagematrix.vram": "1024"}
    whole["HostConfig"]["Devices"] = [{"PathOnHost": f"/dev/nvidia{other}"}]
    engine.add_image({"io.imagematrix.vram": "1"})
    engine.containers = [one | {"Image": engine.images[0]["Id"]} for one in (job, web, whole)]
    # A label of the image does not declare a share.
    whole["Config"]["Labels"] = {"io.imagematrix.vram": "1"}
    with Locks(locks) as held:
        lease = held.hold("share-1", f"4096 nvidia{minor}")
    document = json.loads(show_gpus(profiles["icelake-l40s"], "--json").out)
    table = show_gpus(profiles["icelake-l40s"]).out
    release_locks(lease)
    conforms(document)
    shared, used, free = document["gpus"][:3]
    assert [use["vram_mib"] for use in shared["used_by"]] == [4096, 4096, 1024]
    assert (shared["free"], shared["vram_free_mib"]) == (False, memory - 4096 - 1024)
    assert (used["free"], used["vram_free_mib"]) == (False, None)
    assert (free["free"], free["vram_free_mib"]) == (True, memory)
    assert f"shared, {memory - 5120} MiB free" in table
    assert "share of 1024 MiB" in table


@pytest.fixture
def busy(profiles, configure_nvml, monkeypatch):
    """A GPU and a second one's MIG device that this process uses, as the profile has the two GPUs."""
    host = json.loads(profiles["mig"].read_text())
    whole, parted = sorted(host["gpus"], key=lambda gpu: gpu["mig"] is not None)
    device = parted["mig"][1]
    process = f"{os.getpid()}:{device['gpu_instance']}:{device['compute_instance']}"
    configure_nvml(
        gpus=f"minor={whole['minor']},used=1024,util=97,temp=61,procs={os.getpid()};"
        f"minor={parted['minor']},util=-1,procs={process}"
    )
    monkeypatch.setattr(accelerator_hints.AcceleratorHints, "has_driver", True)
    return whole, parted


@pytest.mark.usefixtures("engine")
def test_current_readings_of_nvml(show_gpus, profiles, busy, conforms):
    whole, parted = busy
    document = conforms(json.loads(show_gpus(profiles["mig"], "--json").out))
    result = {gpu["minor"]: gpu for gpu in document["gpus"]}
    one, other = result[whole["minor"]], result[parted["minor"]]
    assert (one["utilization_percent"], one["memory_used_mib"], one["temperature_c"]) == (97, 1024, 61)
    assert (one["free"], [use["pid"] for use in one["used_by"]]) == (False, [os.getpid()])
    assert [part["free"] for part in other["mig"]] == [True, False, True]
    memories = [part["memory_mib"] for part in parted["mig"]]
    assert [part["vram_free_mib"] for part in other["mig"]] == [memories[0], None, memories[2]]
    assert other["vram_free_mib"] is None
    assert (other["free"], other["utilization_percent"]) == (False, None)
    table = show_gpus(profiles["mig"]).out
    assert "97 %" in table
    assert "61 °C" in table
    assert f"1024 of {whole['memory_mib']} MiB" in table
    assert f" {parted['mig'][1]['profile']} " in table


def test_gpus_are_listed_without_an_engine(show_gpus, profiles, no_engine, conforms):  # noqa: ARG001
    result = show_gpus(profiles["driver-mismatch"], "--json")
    assert result.code == 0
    document = conforms(json.loads(result.out))
    assert document["warnings"][-1].startswith("cannot reach the Docker engine at ")
    assert "GPU usage by containers unknown" in result.err
    assert {(gpu["free"], gpu["vram_free_mib"]) for gpu in document["gpus"]} == {(None, None)}
    table = show_gpus(profiles["driver-mismatch"]).out
    assert " unknown " in table
    assert " free " not in table


def test_unusable_gpu_is_not_free(show_gpus, profiles, engine, tmp_path):
    assert engine.containers == []
    host = json.loads(profiles["rome-a100"].read_text())
    host["gpus"][0] |= {"state": "lost", "minor": None}
    path = tmp_path / "host.json"
    path.write_text(json.dumps(host))
    first = json.loads(show_gpus(path, "--json").out)["gpus"][0]
    assert (first["free"], first["used_by"]) == (False, [])
    assert " lost " in show_gpus(path).out


def test_node_without_gpus_is_reported(show_gpus, profiles, engine):
    assert engine.containers == []
    assert show_gpus(profiles["laptop"]) == (0, "this node has no GPU\n", "")


def samples(text):
    """Return the samples of Prometheus' text by metric and GPU, as its own parser reads them."""
    families = list(text_string_to_metric_families(text))
    assert all(family.type == "gauge" and family.documentation for family in families)
    return {
        (sample.name.removeprefix("imagematrix_gpu_"), sample.labels["gpu"]): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics_of_shared_used_and_broken_gpus(show_gpus, profiles, engine, tmp_path):
    host = json.loads(profiles["icelake-l40s"].read_text())
    minor, other = (gpu["minor"] for gpu in host["gpus"][:2])
    memory = host["gpus"][0]["memory_mib"] * 1024**2
    host["gpus"][2] |= {"state": "lost", "minor": None, "name": 'a "name"\\'}
    path = tmp_path / "host.json"
    path.write_text(json.dumps(host))
    shared, whole = container("shared", f"/dev/nvidia{minor}"), container("whole", f"/dev/nvidia{other}")
    shared["Config"]["Labels"] = {"io.imagematrix.vram": "4096"}
    engine.add_image({})
    engine.containers = [one | {"Image": engine.images[0]["Id"]} for one in (shared, whole)]

    result = show_gpus(path, "--metrics")

    found = samples(result.out)
    assert result.code == 0
    assert [found["users", gpu] for gpu in "012"] == [1, 1, 0]
    assert [found["shares", gpu] for gpu in "012"] == [1, 0, 0]
    assert [found["usable", gpu] for gpu in "012"] == [1, 1, 0]
    assert [found["free", gpu] for gpu in "0123"] == [0, 0, 0, 1]
    assert found["memory_bytes", "0"] == memory
    assert found["memory_shareable_bytes", "0"] == memory - 4096 * 1024**2
    assert ("memory_shareable_bytes", "1") not in found
    assert ("utilization_ratio", "0") not in found
    assert 'name="a \\"name\\"\\\\"' in result.out


@pytest.mark.usefixtures("engine")
def test_metrics_of_mig_devices_and_of_the_load(show_gpus, profiles, busy):
    whole, parted = busy
    text = show_gpus(profiles["mig"], "--metrics").out

    found = samples(text)
    gpu, parent = str(whole["index"]), str(parted["index"])
    parts = [f"{parent}:{part['gpu_instance']}:{part['compute_instance']}" for part in parted["mig"]]
    assert found["memory_used_bytes", gpu] == 1024**3
    assert (found["utilization_ratio", gpu], found["temperature_celsius", gpu]) == (0.97, 61)
    assert [found["free", part] for part in parts] == [1, 0, 1]
    assert found["memory_bytes", parts[0]] == parted["mig"][0]["memory_mib"] * 1024**2
    assert ("free", parent) not in found
    assert ("utilization_ratio", parent) not in found
    assert f'profile="{parted["mig"][1]["profile"]}"' in text


def test_metrics_have_no_usage_where_it_is_unknown(show_gpus, profiles, no_engine):  # noqa: ARG001
    result = show_gpus(profiles["driver-mismatch"], "--metrics")

    found = samples(result.out)
    assert {name for name, _ in found}.isdisjoint({"free", "users", "shares", "memory_shareable_bytes"})
    assert ("usable", "0") in found
    assert "GPU usage by containers unknown" in result.err


def test_metrics_are_not_json(cli):
    cli("gpus", "--json", "--metrics").refuses(2, "--json and --metrics are mutually exclusive")


def test_the_gpus_of_a_killed_launch_are_used_while_its_container_starts(show_gpus, profiles, engine, locks):
    host = json.loads(profiles["rome-a100"].read_text())
    (first, second) = host["gpus"][:2]
    engine.add_image(None)
    image = engine.images[0]["Id"]
    for name, gpu in (("killed", first), ("alive", second)):
        labels = {"io.imagematrix.selected": "x:1", "io.imagematrix.gpus": gpu["uuid"]}
        engine.created.append({"Id": name, "Created": time.time(), "ImageID": image, "Labels": labels})
        engine.starting.append(
            container(name, f"/dev/nvidia{gpu['minor']}") | {"State": {"Status": "created"}}
        )
    with Locks(locks) as held:
        lease = held.take(f"nvidia{second['minor']}")
    result = show_gpus(profiles["rome-a100"], "--json")
    release_locks(lease)
    gpus = json.loads(result.out)["gpus"]
    assert [[use["kind"] for use in gpu["used_by"]] for gpu in gpus[:3]] == [["container"], ["lease"], []]


@pytest.mark.parametrize("saved", [True, False])
def test_an_engine_of_another_machine_says_nothing_about_this_one(
    cli, profiles, engine, monkeypatch, conforms, saved
):
    node = Host.load(profiles["rome-a100"])
    minor = node.gpus[0].minor
    engine.info["Name"] = "node7"
    engine.containers = [container("far", f"/dev/nvidia{minor}")]
    monkeypatch.setattr(probe, "assemble_host", lambda *_, **__: node)
    result = cli("gpus", "--json", *(["--host", profiles["rome-a100"]] if saved else []))
    gpus = conforms(json.loads(result.out))["gpus"]
    assert "the engine runs on node7: GPU usage by " in result.err
    used, *others = [gpu["free"] for gpu in gpus]
    assert set(others) == {None}
    assert used is (False if saved else None)


def test_nothing_of_this_node_is_said_of_a_saved_host(cli, profiles, engine, busy, locks, conforms):
    whole, _ = busy
    engine.containers = [container("near", f"/dev/nvidia{whole['minor']}")]
    with Locks(locks) as held:
        lease = held.take(f"nvidia{whole['minor']}")
    result = cli("gpus", "--host", profiles["mig"], "--json")
    release_locks(lease)
    document = conforms(json.loads(result.out))
    for gpu in document["gpus"]:
        assert (gpu["free"], gpu["used_by"], gpu["vram_free_mib"]) == (None, [], None)
        assert (gpu["utilization_percent"], gpu["memory_used_mib"], gpu["temperature_c"]) == (None,) * 3
    assert document["warnings"][-1] in result.err
    assert document["warnings"][-1].startswith("GPU usage of a saved host unknown")


@pytest.mark.usefixtures("engine")
def test_leases_elsewhere_are_unknown(show_gpus, profiles, monkeypatch):
    def fail(_):
        raise ProbeError("the GPU locks are not those of this machine")

    monkeypatch.setattr("imagematrix.launcher.gpu_claims.lock_folder.require_shared", fail)
    result = show_gpus(profiles["rome-a100"], "--json")
    assert {gpu["free"] for gpu in json.loads(result.out)["gpus"]} == {None}
    assert "not those of this machine: GPU usage by leases unknown" in result.err
