"""What a node says in Slurm's configuration, and what is wrong there."""

import json
import os
import sys
from pathlib import Path

import jsonschema
import pytest

from imagematrix.cli import dispatch
from imagematrix.common import settings
from imagematrix.common.record import replace
from imagematrix.errors import ProbeError, UsageError
from imagematrix.hardware.host.host import Host
from imagematrix.integrations.slurm import checks, configuration
from imagematrix.integrations.slurm.checks import find_differences, get_release
from imagematrix.integrations.slurm.node_config import make_node_lines, render_oci_conf
from imagematrix.integrations.slurm.node_list import expand_node_list

PROGRAM = "/usr/local/bin/imagematrix"
SLURM = """\
KillOnBadExit=1
GresTypes=gpu,shard
TaskPlugin=task/affinity,task/cgroup
SlurmdSpoolDir={spool}
"""


@pytest.fixture
def host(profiles):
    return Host.load(profiles["genoa-h200"])


def test_tasks_start_in_place_of_the_shell_which_reads_nothing_of_users():
    text = render_oci_conf(PROGRAM)
    (run,) = [line for line in text.splitlines() if line.startswith("RunTimeRun=")]
    read, _, unread = run.partition("\\#")
    assert read.startswith(f'RunTimeRun="set -f; IFS=; exec {PROGRAM} oci-task --line $(')
    assert unread == ' task: %e %m %b -- %@"'
    assert "CreateEnvFile=null\n" in text
    assert "IgnoreFileConfigJson=true\n" in text


@pytest.mark.parametrize("program", ["imagematrix", "/a b", "/a;b", "/a'b", '/a"b', "/a%b", "/a\nb", ""])
def test_a_program_whose_path_a_shell_would_read_otherwise_is_refused(program):
    with pytest.raises(UsageError, match=r"cannot stand in oci\.conf"):
        render_oci_conf(program)


def test_the_lines_of_a_node(host):
    lines = make_node_lines(host, "n1", 4)
    assert lines.gres == (
        "NodeName=n1 Name=gpu Type=nvidia-h200 File=/dev/nvidia[0-7]\nNodeName=n1 Name=shard Count=32\n"
    )
    assert lines.slurm.startswith(
        "NodeName=n1 Gres=gpu:nvidia-h200:8,shard:32 Features=im-driver-550.163.01,"
    )
    assert "shard" not in make_node_lines(host, "n1").gres


@pytest.mark.parametrize(
    ("minors", "files"),
    [
        ((3,), "/dev/nvidia3"),
        ((0, 1), "/dev/nvidia[0-1]"),
        ((5, 0, 2, 1), "/dev/nvidia[0-2,5]"),
        ((0, 2, 4), "/dev/nvidia[0,2,4]"),
    ],
)
def test_device_files_are_listed_as_slurm_does(host, minors, files):
    gpus = tuple(replace(gpu, minor=minor) for gpu, minor in zip(host.gpus, minors, strict=False))
    assert make_node_lines(replace(host, gpus=gpus), "n1").gres.split("File=")[1].strip() == files
    assert [*expand_node_list(files)] == [f"/dev/nvidia{minor}" for minor in sorted(minors)]


def test_each_kind_of_gpu_has_a_line(profiles):
    lines = make_node_lines(Host.load(profiles["mixed"]), "n1")
    assert [line.split()[2] for line in lines.gres.splitlines()] == [
        "Type=nvidia-a100-pcie-40gb",
        "Type=tesla-t4",
    ]
    unnamed = replace(
        Host.load(profiles["genoa-h200"]), gpus=(replace(Host.load(profiles["mixed"]).gpus[0], name=None),)
    )
    assert make_node_lines(unnamed, "n1").slurm.startswith("NodeName=n1 Gres=gpu:1 ")


def test_gpus_that_slurm_cannot_give_out_are_left_out(profiles, host):
    mig = make_node_lines(Host.load(profiles["mig"]), "n1", 2)
    assert mig.gres.splitlines() == [
        "NodeName=n1 Name=gpu Type=nvidia-h100-80gb-hbm3 File=/dev/nvidia1",
        "NodeName=n1 Name=shard Count=2",
    ]
    lost = replace(host, gpus=tuple(replace(gpu, state="lost") for gpu in host.gpus))
    assert make_node_lines(lost, "n1", 2).gres == ""
    assert "Gres" not in make_node_lines(Host.load(profiles["laptop"]), "n1").slurm
    with pytest.raises(ProbeError, match="device minor of"):
        make_node_lines(replace(host, gpus=(replace(host.gpus[0], minor=None),)), "n1")


@pytest.mark.parametrize("name", ["", "a b", "a,b", "n[1-2]", "-n", "a=b", "n\n"])
def test_a_node_has_a_name_that_slurm_can_read(host, name):
    with pytest.raises(UsageError, match="is not the name of a node"):
        make_node_lines(host, name)


@pytest.fixture
def folder(tmp_path, host):
    """A folder with files that say what they should of the node n1; its spool folder is beside it."""
    made = tmp_path / "slurm"
    made.mkdir()
    (tmp_path / "spool").mkdir()
    lines = make_node_lines(host, "n1")
    (made / "oci.conf").write_text(render_oci_conf(PROGRAM))
    (made / "gres.conf").write_text(lines.gres)
    (made / "cgroup.conf").write_text("ConstrainDevices=yes\n")
    (made / "slurm.conf").write_text(
        SLURM.format(spool=tmp_path / "spool") + f"{lines.slurm.strip()},rack7 CPUs=2\n"
    )
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.geteuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o001)
    return made


def found(folder, host, *, version=(24, 11), shards=False):
    lines = make_node_lines(host, "n1", 4 if shards else 0)
    return find_differences(folder, "n1", render_oci_conf(PROGRAM), lines, shards=shards, version=version)


def test_files_that_say_what_they_should_have_no_findings(folder, host):
    assert found(folder, host) == []


@pytest.mark.parametrize(
    ("file", "before", "after", "what", "remedy"),
    [
        ("slurm.conf", "KillOnBadExit=1", "KillOnBadExit=0", "leaves the others", "KillOnBadExit=1"),
        ("slurm.conf", "task/affinity,task/cgroup", "task/affinity", "no task plugin", "task/cgroup"),
        ("slurm.conf", "gpu,shard", "shard", "GresTypes lacks gpu", "add gpu"),
        ("slurm.conf", "NodeName=n1", "NodeName=n2", "does not name n1", "add NodeName=n1 Gres=gpu"),
        (
            "slurm.conf",
            "550.163.01",
            "535.261.03",
            "im-driver-535.261.03, im-driver-550.163.01",
            "Features=im-dr",
        ),
        ("slurm.conf", ",im-compute-9.0", "", "im-compute-9.0", "Features=im-driver"),
        ("slurm.conf", "gpu:nvidia-h200:8", "gpu:8", "n1 has Gres=gpu:8", "Gres=gpu:nvidia-h200:8"),
        ("slurm.conf", "/spool", "/spool.%n", "differs between nodes", "/var/spool/slurmd"),
        ("slurm.conf", "/spool", "/missing", "missing: No such file", "start it"),
        (
            "cgroup.conf",
            "ConstrainDevices=yes",
            "ConstrainDevices=no",
            "GPUs of others",
            "ConstrainDevices=yes",
        ),
        ("gres.conf", "[0-7]", "[0-6]", "lacks GPUs of this node", "File=/dev/nvidia[0-7]"),
        ("oci.conf", "=null", "=newline", "oci.conf differs", "CreateEnvFile=null"),
        ("oci.conf", "\\# task", "task", "oci.conf differs", "# task: %e %m %b -- %@"),
        ("oci.conf", "CreateEnvFile", 'RunTimeStart="x"\nCreateEnvFile', "sets runtimestart", "remove"),
    ],
)
def test_what_differs_is_told_with_its_remedy(folder, host, file, before, after, what, remedy):
    path = folder / file
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    (finding,) = found(folder, host)
    assert what in finding.what
    assert remedy in finding.remedy


def test_a_file_that_is_missing_is_told(folder, host):
    (folder / "oci.conf").unlink()
    (folder / "cgroup.conf").unlink()
    assert [finding.what.rpartition("/")[2] for finding in found(folder, host)] == [
        "oci.conf not found",
        "jobs can open GPUs of others: the variables alone say which are theirs",
    ]


def test_lines_for_all_nodes_and_detected_gpus_are_enough(folder, host):
    (folder / "gres.conf").write_text("Name=gpu Type=nvidia-h200 File=/dev/nvidia[0-7]\n")
    assert found(folder, host) == []
    (folder / "gres.conf").write_text("AutoDetect=nvml\n")
    assert found(folder, host) == []
    (folder / "gres.conf").write_text("AutoDetect=off\n")
    assert [finding.what.endswith("lacks GPUs of this node") for finding in found(folder, host)] == [True]


@pytest.mark.parametrize(
    ("nodes", "more", "lacks"),
    [
        ("NodeName=n[1-4]", "", False),
        ("NodeName=m1,n[01-04],n1", "Cores=0-63", False),
        ("", "Cores=0-63 Flags=nvidia_gpu_env", False),
        ("NodeName=n[2-4]", "", True),
        ("NodeName=n[01-04]", "", True),
    ],
)
def test_lines_for_several_nodes_that_say_more_are_enough(folder, host, nodes, more, lacks):
    (folder / "gres.conf").write_text(f"{nodes} Name=gpu Type=nvidia-h200 File=/dev/nvidia[0-7] {more}\n")
    assert [finding.what.endswith("lacks GPUs of this node") for finding in found(folder, host)] == (
        [True] if lacks else []
    )


def test_gpus_may_be_on_several_lines(folder, host):
    lines = [
        f"Name=gpu Type=nvidia-h200 File=/dev/nvidia{part}\n" for part in ("[0-3] Cores=0", "[4-6]", "7")
    ]
    (folder / "gres.conf").write_text("".join(lines))
    assert found(folder, host) == []
    (folder / "gres.conf").write_text("".join(lines[:2]))
    assert [finding.what.endswith("lacks GPUs of this node") for finding in found(folder, host)] == [True]


def test_shards_are_a_type_of_their_own(folder, host):
    (folder / "slurm.conf").write_text((folder / "slurm.conf").read_text().replace("gpu,shard", "gpu"))
    assert any(finding.what == "GresTypes lacks shard" for finding in found(folder, host, shards=True))


@pytest.mark.parametrize(
    "gres",
    [
        "gpu:nvidia-h200:8,nvme:1",
        "nvme:1,gpu:NVIDIA-H200:8",
        "gpu:nvidia-h200:8,shard:32",
        "gpu:1g.18gb:7,gpu:nvidia-h200:8",
    ],
)
def test_more_gres_than_whole_gpus_are_right(folder, host, gres):
    path = folder / "slurm.conf"
    path.write_text(path.read_text().replace("gpu:nvidia-h200:8", gres))
    assert found(folder, host) == []


def test_a_node_without_gpus_needs_no_settings_for_them(folder, profiles):
    host = replace(Host.load(profiles["laptop"]), gpus=())
    (folder / "cgroup.conf").unlink()
    (folder / "slurm.conf").write_text(
        f"KillOnBadExit=1 SlurmdSpoolDir={folder.parent}/spool\n{make_node_lines(host, 'n1').slurm}"
    )
    assert found(folder, host) == []


def test_users_must_reach_the_spool_folder(folder, host):
    spool = folder.parent / "spool"
    spool.chmod(0o750)
    (finding,) = found(folder, host)
    assert finding.remedy == f"chmod o+x {spool}"
    spool.chmod(0o751)
    assert found(folder, host) == []


def test_ranks_of_mpi_need_a_runtime_of_their_own(folder, host, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert found(folder, host) == []
    with (folder / "slurm.conf").open("a") as file:
        file.write("MpiDefault=pmix_v5\n")
    (finding,) = found(folder, host)
    assert "MpiDefault is PMIx" in finding.what
    (tmp_path / "bwrap").write_text("")
    (tmp_path / "bwrap").chmod(0o755)
    assert found(folder, host) == []


def test_the_spool_folder_is_the_node_s_own(folder, host, tmp_path, monkeypatch):
    table = tmp_path / "mounts"
    table.write_text(f"disk / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n")
    monkeypatch.setattr(checks, "MOUNTS", str(table))
    (finding,) = found(folder, host)
    assert "is on nfs4" in finding.what
    table.write_text(f"server:/x / nfs4 rw 0 0\ndisk {tmp_path} ext4 rw 0 0\nodd\n")
    assert found(folder, host) == []
    table.unlink()
    assert found(folder, host) == []


@pytest.mark.parametrize(
    ("output", "expected"), [("slurm-wlm 24.11.5", (24, 11)), ("slurm 22.05.8", (22, 5)), ("?", None)]
)
def test_the_release_of_slurmd_is_read(write_site, tmp_path, monkeypatch, output, expected):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    program = tmp_path / "opt" / "slurmd"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{output}'\n")
    program.chmod(0o755)
    write_site(f'program_folders = ["{program.parent}"]\n')
    assert get_release() == expected


def test_a_node_without_slurmd_has_no_release(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert get_release() is None


@pytest.mark.parametrize(("version", "expected"), [((23, 2), []), ((22, 5), ["slurmd is 22.05"]), (None, [])])
def test_slurm_must_be_new_enough(folder, host, version, expected):
    assert [finding.what.partition(",")[0] for finding in found(folder, host, version=version)] == expected


@pytest.fixture
def node_config(monkeypatch, profiles, folder, capfd):
    """Call it with options; it returns the exit code, stdout and stderr."""
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    monkeypatch.setattr(settings, "FILE", str(folder / "site.toml"))

    def call(*words, profile="genoa-h200"):
        options = ("--host", str(profiles[profile]), "--node", "n1", "--program", PROGRAM)
        code = dispatch.run_command(["slurm", "node-config", *options, *map(str, words)])
        return code, *capfd.readouterr()

    return call


def test_oci_conf_needs_a_program_that_can_be_started(profiles, tmp_path, monkeypatch, capfd):
    """With `python -m imagematrix`, the command is a module, and Slurm would start it as a program."""
    module = tmp_path / "__main__.py"
    module.touch(0o644)
    monkeypatch.setattr(sys, "argv", [str(module)])
    words = ["slurm", "node-config", "--host", str(profiles["genoa-h200"])]
    assert dispatch.run_command(words) == 2
    error = capfd.readouterr().err
    assert f"{module} is not a program" in error
    assert "--program PATH" in error
    module.chmod(0o755)
    assert dispatch.run_command(words) == 0
    assert f" {module} " in capfd.readouterr().out


def test_the_command_prints_the_three_files(node_config):
    code, out, error = node_config()
    assert (code, error) == (0, "")
    assert [line for line in out.splitlines() if line.startswith("# ") and line.endswith(".conf")] == [
        *("# oci.conf", "# gres.conf", "# slurm.conf")
    ]


def test_the_command_tells_what_differs(node_config, folder):
    (folder / "cgroup.conf").unlink()
    _, _, error = node_config()
    assert "jobs can open GPUs of others" in error
    _, out, error = node_config("--json")
    document = json.loads(out)
    schema = json.loads((Path(settings.__file__).parents[1] / "schemas/slurm-node.json").read_text())
    jsonschema.validate(document, schema)
    assert [one["remedy"] for one in document["findings"]] == [
        f"set ConstrainDevices=yes in {folder}/cgroup.conf"
    ]
    assert error == ""


def test_the_command_writes_files_and_prints_the_rest(node_config, tmp_path):
    code, out, _ = node_config("--to", tmp_path / "new")
    assert code == 0
    assert out.startswith("NodeName=n1 Gres=")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["gres.n1.conf", "oci.conf"]
    (tmp_path / "file").touch()
    code, _, error = node_config("--to", tmp_path / "file/x")
    assert code == 2
    assert "cannot be written" in error


def test_the_command_saves_the_host_where_the_site_says(node_config, folder, tmp_path, profiles):
    code, _, error = node_config("--save")
    assert code == 2
    assert "set hosts in" in error
    (folder / "site.toml").write_text(f'hosts = "{tmp_path}/hosts"\n')
    code, _, error = node_config("--save")
    assert code == 2
    assert f"{tmp_path}/hosts is not there" in error
    # As for a mount that is broken, the kernel has an error of its own for this.
    (folder / "site.toml").write_text(f'hosts = "{tmp_path}/{"x" * 300}"\n')
    code, _, error = node_config("--save")
    assert code == 2
    assert "is not there" in error
    (folder / "site.toml").write_text(f'hosts = "{tmp_path}/hosts"\n')
    (tmp_path / "hosts").mkdir()
    assert node_config("--save")[0] == 0
    assert Host.load(tmp_path / "hosts/n1.json") == Host.load(profiles["genoa-h200"])


def test_the_command_saves_the_host_though_files_cannot_be_compared(node_config, folder, tmp_path):
    (folder / "site.toml").write_text(f'hosts = "{tmp_path}/hosts"\n')
    (tmp_path / "hosts").mkdir()
    (folder / "slurm.conf").write_text("Include missing.conf\n")
    code, _, error = node_config("--save")
    assert code == 2
    assert "missing.conf cannot be read" in error
    assert (tmp_path / "hosts/n1.json").exists()


def test_the_command_says_that_nothing_was_compared(node_config, monkeypatch):
    monkeypatch.delenv("SLURM_CONF")
    monkeypatch.setattr(configuration, "PLACES", ())
    code, _, error = node_config(profile="mig")
    assert code == 0
    assert "nothing was compared" in error
    assert "left out: 1 GPU in MIG mode" in error
