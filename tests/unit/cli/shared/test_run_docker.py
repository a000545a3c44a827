"""`imagematrix run` from its arguments to the start of a container, without docker's command."""

import pytest

from imagematrix.cli.shared import run_docker
from imagematrix.common.record import replace
from imagematrix.errors import SignatureError
from imagematrix.hardware.host.host import Cpu, Driver, Gpu, Host
from imagematrix.images.catalog.catalog import Catalog, UserModeDriver, Variant
from imagematrix.images.catalog.warm_image import WarmImage, WarmMatch
from imagematrix.launcher.docker.options import parse_run_args
from imagematrix.launcher.docker.plan import plan_launch
from imagematrix.launcher.docker.request import make_request
from imagematrix.launcher.gpu_claims.usage import Consumer
from imagematrix.selection.selector import select

WEB = Consumer(kind="container", name="web")
OLD, NEW = "535.261.03", "550.163.01"
DIGEST = f"sha256:{'1' * 64}"
HOST = Host(
    arch="x86_64",
    cpu=Cpu(vendor=None, model=None, flags=frozenset(), level=None),
    driver=Driver(version=OLD, kind=None, source="test"),
    gpus=(Gpu(index=0, minor=0, uuid="GPU-a", name="NVIDIA A100", compute="8.0", brand="nvidia"),),
)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Call it with a command line and the driver after a wait to get the image that is started."""

    def variant(version):
        driver = UserModeDriver(mode="exact", version=version)
        return Variant(
            reference=f"training:v1-{version}",
            digest=None,
            platform="linux/amd64",
            cuda="12.2",
            cubins=("80",),
            driver=driver,
        )

    def start(line, upgraded, hosts=None, usages=None):
        hosts = iter(hosts or [HOST, replace(HOST, driver=replace(HOST.driver, version=upgraded))])
        usages = iter(usages or [{"nvidia0": (WEB,)}, {}])
        latest: list[Host] = []

        def node_of(*words):
            latest.append(next(hosts, latest[-1] if latest else HOST))
            return latest[-1], words[-1]

        catalog = Catalog(image="training", version="v1", variants=(variant(OLD), variant(NEW)))
        started = []
        monkeypatch.setenv("IMAGEMATRIX_LOCKS", str(tmp_path / "locks"))
        monkeypatch.setattr("imagematrix.images.engine.system.get_remote_name", lambda: None)
        monkeypatch.setattr("imagematrix.images.engine.system.get_info", dict)
        monkeypatch.setattr("imagematrix.images.engine.system.get_architecture", str)
        monkeypatch.setattr("imagematrix.images.engine.images.inspect_image", lambda _: None)
        monkeypatch.setattr("imagematrix.launcher.docker.request.require_device_nodes", lambda _: None)
        monkeypatch.setattr("imagematrix.launcher.gpu_claims.survey.survey_usage", lambda *_: next(usages))
        monkeypatch.setattr("imagematrix.launcher.gpu_claims.gpu_claim.POLL_S", 0.01)
        monkeypatch.setattr("imagematrix.cli.shared.inputs.load_node", node_of)
        monkeypatch.setattr(run_docker, "find_catalog", lambda *_: catalog)
        monkeypatch.setattr(
            run_docker.DockerCommand,
            "_run_command",
            lambda _self, _, launch: started.append(launch.reference) or 0,
        )
        run_docker.run_with_docker(parse_run_args(line.split()), "training:v1")
        return started

    return start


def test_the_node_is_read_again_after_a_wait(run, capsys):
    assert run("--wait 10s training:v1", NEW) == [f"training:v1-{NEW}"]
    assert "waiting: requested 1 GPU, 0 free" in capsys.readouterr().err


def test_a_gpu_that_is_lost_during_the_wait_is_left_out(run, monkeypatch):
    """It is free then, because its container has ended."""
    (first,) = HOST.gpus
    second = replace(first, index=1, minor=1, uuid="GPU-1", pci_bus_id=None)
    lost = replace(HOST, gpus=(replace(first, state="lost"), second))
    nodes = []
    monkeypatch.setattr(
        "imagematrix.launcher.docker.plan.list_device_nodes", lambda _, gpus: nodes.append(gpus) or ()
    )
    hosts = [replace(HOST, gpus=(first, second)), lost]
    used: dict[str, tuple[Consumer, ...]] = dict.fromkeys(("nvidia0", "nvidia1"), (WEB,))
    assert run("--gpus 1 --wait 10s training:v1", OLD, hosts, [used, {"nvidia1": (WEB,)}, {}])
    assert nodes[-1] == (second,)


def test_a_saved_host_is_not_read_again(run):
    assert run("--host node.json --wait 10s training:v1", NEW) == [f"training:v1-{OLD}"]


@pytest.mark.parametrize(("upgraded", "checked"), [(OLD, [OLD]), (NEW, [OLD, NEW])])
def test_another_choice_after_a_wait_is_checked_again(run, monkeypatch, upgraded, checked):
    """A policy requires signatures, and docker's command gets the digest that is signed."""
    asked = []

    def require_signed(variant, policy, *, version):
        assert version == "v1"
        asked.append((variant.driver.version, str(policy)))
        return DIGEST

    monkeypatch.setattr("imagematrix.launcher.launch_session.require_signed", require_signed)
    line = "--policy mine.json --pull never --wait 10s training:v1"
    assert run(line, upgraded) == [f"training:v1-{upgraded}@{DIGEST}"]
    assert list(dict.fromkeys(asked)) == [(version, "mine.json") for version in checked]


def test_nothing_unsigned_is_started(run, tmp_path):
    file = tmp_path / "policy.json"
    file.write_text('{"schema": "imagematrix.policy/v1", "otherwise": "deny"}')
    with pytest.raises(SignatureError, match="the policy allows no images of training"):
        run(f"--policy {file} training:v1", OLD)


def test_under_a_policy_the_warm_image_is_started_by_its_own_digest(monkeypatch):
    warm = WarmImage(
        base=f"sha256:{'2' * 64}",
        reference="r:5/t:v1-warm-a-b",
        digest=f"sha256:{'3' * 64}",
        match=WarmMatch(),
    )
    variant = Variant(reference="r:5/t:v1-x", digest=warm.base, platform="linux/amd64")
    catalog = Catalog(image="r:5/t", version="v1", variants=(variant,), warm=(warm,))
    selection = select(replace(HOST, gpus=(), driver=None), catalog)
    monkeypatch.setattr("imagematrix.launcher.launch_session.require_signed", lambda *_, **__: warm.base)
    request = make_request(parse_run_args(["--gpus", "none", "t"]), HOST, catalog, "none", None)
    command = run_docker.DockerCommand(request)
    for chosen, name in ((selection, warm), (selection.keep_to_variant("why"), variant)):
        launch = command.verify(chosen, plan_launch(chosen))
        assert launch.reference == f"{name.reference}@{name.digest}"
