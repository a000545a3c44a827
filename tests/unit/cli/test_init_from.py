"""`init --from HOSTS`: what is written, what is kept, and what is refused."""

from __future__ import annotations

import json

import pytest
from choosing import Make

from imagematrix.build.proposal.matrix_text import DRIVERS
from imagematrix.common import json_documents

pytestmark = pytest.mark.usefixtures("no_engine")


@pytest.fixture
def hosts(tmp_path):
    """A folder with a host that has a GPU, one that has none, and one that nothing serves."""
    folder = tmp_path / "hosts"
    folder.mkdir()
    fleet = {
        "gpu": Make.host(Make.gpu(), march="znver4"),
        "cpu": Make.host(driver=None, march="x86-64-v3"),
        "lost": Make.host(Make.gpu(compute=None)),
    }
    for name, host in fleet.items():
        (folder / f"{name}.json").write_text(json_documents.dump_json(host.to_json()))
    return folder


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_written_files_plan_for_the_same_hosts(cli, hosts, workdir):
    result = cli("init", "new", "--from", hosts)
    assert (result.code, result.out) == (0, "")
    command = f"imagematrix plan -f new/matrix.yaml --for {hosts}"
    assert result.err.splitlines() == [
        "wrote new/matrix.yaml: 2 cells for 2 of 3 hosts",
        f"no cell can serve {hosts}/lost: no CUDA release of the tables has code for its GPUs",
        f"next: write new/templates/app/Dockerfile.j2, then `{command}`",
    ]
    text = (workdir / "new" / "matrix.yaml").read_text()
    assert f"# No cell can serve {hosts}/lost: no CUDA release" in text
    plan = cli("plan", "-f", "new/matrix.yaml", "--for", hosts, "--json")
    cells = json.loads(plan.out)["cells"]
    assert [cell["status"] for cell in cells if cell["status"] != "excluded"] == ["build", "failed"]
    assert f"{DRIVERS.format(arch='x86_64', version='550.163.01')} of the driver 550.163.01 not found" in str(
        cells
    )


def test_options_name_installers_and_releases(cli, hosts, workdir):
    pattern = "https://example.com/NVIDIA-Linux-{arch}-{version}.run"
    assert cli("init", "--from", hosts, "--drivers", pattern, "--cuda", "12.4").code == 0
    text = (workdir / "matrix.yaml").read_text()
    assert f'driver_from: "{pattern}"' in text
    assert '    - "12.4"  # 1 node: as asked for\n' in text
    assert cli("validate").code == 2  # the address is not locked
    assert "imagematrix lock" in cli("validate").err


def test_existing_files_are_not_overwritten(cli, hosts, workdir):
    template = workdir / "templates" / "app" / "Dockerfile.j2"
    template.parent.mkdir(parents=True)
    template.write_text("FROM scratch\n")
    assert cli("init", "--from", hosts).code == 0
    assert template.read_text() == "FROM scratch\n"
    assert (workdir / "templates" / "macros.j2").exists()
    before = (workdir / "matrix.yaml").read_text()
    cli("init", "--from", hosts).refuses(2, "matrix.yaml already exists")
    assert (workdir / "matrix.yaml").read_text() == before


def test_nothing_is_written_if_no_host_can_be_served(cli, hosts, workdir):
    cli("init", "new", "--from", hosts / "lost.json").refuses(3, "no cell can serve any of these hosts:\n")
    assert not (workdir / "new").exists()


@pytest.mark.usefixtures("workdir")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--from", "{hosts}", "--template", "cpu"], "--from and --template exclude each other"),
        (["--cuda", "12.4"], "--drivers and --cuda need the hosts of a fleet"),
        (["--drivers", "d/{version}"], "--drivers and --cuda need the hosts of a fleet"),
        (["--from", "{hosts}", "--cuda", "12.44"], "unknown CUDA release '12.44'"),
        (["--from", "{hosts}", "--drivers", "a\nb"], "is not allowed in driver_from"),
        (["--from", "nowhere"], "nowhere: No such file"),
    ],
)
def test_invalid_options_are_rejected(cli, hosts, options, message):
    cli("init", *(option.replace("{hosts}", str(hosts)) for option in options)).refuses(2, message)
