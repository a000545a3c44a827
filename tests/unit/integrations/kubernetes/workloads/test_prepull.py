"""Manifests that warm nodes: valid, confined, on the nodes of each class, with a program that really ends."""

import base64
import io
import json
import platform
import re
import shutil
import subprocess

import kubernetes_validate
import pytest
import yaml
from scheduling import admitted

from imagematrix.audit.binaries import elf
from imagematrix.audit.binaries.window import Window
from imagematrix.common import json_documents
from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.nodes.classes import classify_nodes
from imagematrix.integrations.kubernetes.nodes.nodes import parse_nodes
from imagematrix.integrations.kubernetes.workloads.affinity import get_required_terms
from imagematrix.integrations.kubernetes.workloads.noop_binary import MACHINES, make_noop_binary
from imagematrix.integrations.kubernetes.workloads.prepull import make_prepull_manifests
from imagematrix.selection.selection import NothingFits

DIGEST = f"sha256:{'1' * 64}"
NEW = "580.65.06"
LONG = f"reg.x/{'t' * 70}"
PAUSE = "registry.k8s.io/pause:3.10"
EMULATORS = {"amd64": "qemu-x86_64", "arm64": "qemu-aarch64"}


@pytest.fixture
def labels(cluster, make):
    hosts = {
        "old": make.host(make.gpu(0)),
        "new": make.host(make.gpu(0), driver=NEW),
        "arm": make.host(arch="aarch64"),
    }
    return {name: cluster.own(host) for name, host in hosts.items()}


@pytest.fixture
def catalog(make):
    return make.catalog(
        make.variant("r/t:v1-old", digest=DIGEST),
        make.variant("r/t:v1-new", digest=DIGEST, driver=make.umd("exact", NEW)),
        make.cpu_variant("r/t:v1-arm", digest=DIGEST, platform="linux/arm64/v8"),
    )


@pytest.fixture
def nodes(cluster, labels):
    items = [cluster.node(name, facts, arch=facts["kubernetes.io/arch"]) for name, facts in labels.items()]
    return {"kind": "List", "items": items}


@pytest.fixture
def grouped(nodes, catalog):
    return classify_nodes(parse_nodes(nodes, "x"), catalog).classes


@pytest.mark.parametrize("release", ["1.34", "1.37"])
def test_each_class_has_a_daemonset_that_runs_its_image_on_its_nodes(grouped, labels, release):
    program, *made = make_prepull_manifests("warm", grouped, pause=PAUSE)
    assert [one["kind"] for one in made] == ["DaemonSet"] * 3
    assert len({one["metadata"]["name"] for one in made}) == 3
    for one in (program, *made):
        kubernetes_validate.validate(one, release, strict=True)
        assert one["metadata"]["labels"] == {"app.kubernetes.io/name": "warm"}
    for one in made:
        spec = one["spec"]["template"]["spec"]
        assert one["spec"]["selector"]["matchLabels"] == one["spec"]["template"]["metadata"]["labels"]
        (pulled,), (stays,) = spec["initContainers"], spec["containers"]
        suffix = re.fullmatch(f"r/t:v1-([a-z]+)@{DIGEST}", pulled["image"])[1]
        terms = [term["matchExpressions"] for term in get_required_terms(spec)]
        assert [name for name in labels if admitted(terms, labels[name])] == [suffix]
        assert stays["image"] == PAUSE
        (mount,), (volume,) = pulled["volumeMounts"], spec["volumes"]
        assert volume["configMap"]["name"] == program["metadata"]["name"]
        assert volume["configMap"]["defaultMode"] & 0o111 == 0o111
        folder, _, file = pulled["command"][0].rpartition("/")
        assert (folder, file) == (mount["mountPath"], "arm64" if suffix == "arm" else "amd64")
        assert base64.b64decode(program["binaryData"][file]) == make_noop_binary(file)


def test_the_pods_take_nothing_from_others_and_run_on_tainted_nodes(grouped):
    _, one, *_ = make_prepull_manifests("warm", grouped, pause="reg/pause:1", pull_secret="logins")  # noqa: S106
    spec = one["spec"]["template"]["spec"]
    assert spec["tolerations"] == [{"operator": "Exists"}]
    assert spec["imagePullSecrets"] == [{"name": "logins"}]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    for container in (*spec["initContainers"], *spec["containers"]):
        assert container["resources"] == {"requests": {"cpu": "1m", "memory": "8Mi"}}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
    assert spec["containers"][0]["image"] == "reg/pause:1"
    assert (
        "imagePullSecrets"
        not in make_prepull_manifests("warm", grouped, pause=PAUSE)[1]["spec"]["template"]["spec"]
    )


def test_a_new_version_is_pulled_by_some_nodes_at_a_time(grouped):
    for at_once, expected in ((None, "100%"), (5, 5)):
        _, *daemonsets = make_prepull_manifests("warm", grouped, pause=PAUSE, at_once=at_once)
        strategies = [one["spec"]["updateStrategy"] for one in daemonsets]
        update = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": expected}}
        assert strategies == [update] * len(daemonsets)


def test_only_the_programs_that_the_images_need_are_written(grouped):
    arm = [one for one in grouped if one.nodes[0].name == "arm"]
    program, daemonset = make_prepull_manifests("warm", arm, pause=PAUSE)
    assert list(program["binaryData"]) == ["arm64"]
    assert daemonset["metadata"]["name"] == "warm"


@pytest.mark.parametrize("arch", MACHINES)
def test_the_program_ends_without_an_error_and_without_libraries(arch, tmp_path):
    path = tmp_path / "program"
    path.write_bytes(make_noop_binary(arch))
    path.chmod(0o555)
    emulator = EMULATORS[arch]
    native = platform.machine() == {"amd64": "x86_64", "arm64": "aarch64"}[arch]
    if not native and not shutil.which(emulator):
        pytest.skip(f"needs {emulator}")
    command = [path] if native else [shutil.which(emulator), path]
    assert subprocess.run(command, check=False, env={}, capture_output=True).returncode == 0
    read = elf.read_elf(Window(io.BytesIO(make_noop_binary(arch)), 0, len(make_noop_binary(arch))))
    assert read.machine == MACHINES[arch][0]
    assert not read.needed


def test_an_architecture_without_a_program_is_an_error(cluster, make):
    hosts = {"a": cluster.own(make.host(arch="riscv64"))}
    items = [cluster.node(name, facts, arch="riscv64") for name, facts in hosts.items()]
    catalog = make.catalog(make.cpu_variant("r/t:v1-x", digest=DIGEST, platform="linux/riscv64"))
    some = classify_nodes(parse_nodes({"kind": "List", "items": items}, "x"), catalog).classes
    with pytest.raises(UsageError, match="no program for the architecture riscv64"):
        make_prepull_manifests("warm", some, pause=PAUSE)


def test_no_class_that_gets_an_image_is_an_error(make, nodes):
    none = classify_nodes(parse_nodes(nodes, "x"), make.catalog(make.variant("t", cubins=("100",)))).classes
    with pytest.raises(NothingFits):
        make_prepull_manifests("warm", none, pause=PAUSE)


@pytest.fixture
def saved(tmp_path, monkeypatch, catalog, nodes):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.json").write_text(json_documents.dump_json(replace(catalog, image=LONG).to_json()))
    (tmp_path / "nodes.json").write_text(json.dumps(nodes))


@pytest.mark.usefixtures("saved")
def test_the_command(cli):
    words = ("kubernetes", "render", "prepull", f"{LONG}:v1", "--nodes", "nodes.json", "--catalog", "t.json")
    result = cli(*words)
    assert (result.code, result.err) == (0, "")
    program, *made = yaml.safe_load_all(result.out)
    assert program["metadata"]["name"] == f"{'t' * 55}-prepull"
    assert len(made) == 3
    assert max(len(one["metadata"]["name"]) for one in made) <= 63
    cli(*words, "--class", "x").fails(2, "class 'x' not found")
    chosen = list(yaml.safe_load_all(cli(*words, "--name", "warm", "--pause", "reg/pause:1").out))
    assert chosen[0]["metadata"]["name"] == "warm"
    assert chosen[1]["spec"]["template"]["spec"]["containers"][0]["image"] == "reg/pause:1"
    cli(*words, "--name", "Warm").fails(2, "invalid name 'Warm'")
