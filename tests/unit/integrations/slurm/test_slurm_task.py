"""Tasks of Slurm: their variables, folders and GPUs, and the names of their images."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.hardware.gpu_request.visible import NO_GPU
from imagematrix.hardware.host import device
from imagematrix.hardware.host.host import Cpu, Driver, Gpu, Host
from imagematrix.integrations.slurm import task as slurm_task
from imagematrix.integrations.slurm.task import (
    SlurmTask,
    find_task_gpus,
    parse_command_line,
    parse_image,
    read_environment,
)

HOST = Host(
    arch="x86_64",
    cpu=Cpu(vendor=None, model=None, flags=frozenset(), level=None),
    driver=Driver(version="550.163.01", kind=None, source="test"),
    gpus=tuple(Gpu(index=index, minor=index, compute="8.0") for index in range(4)),
)


@pytest.fixture
def openable(monkeypatch):
    """Let a process open only these GPUs' nodes; none means that it may open all."""

    def set_to(*minors):
        monkeypatch.setattr(device, "list_permitted_minors", lambda _: minors)

    set_to()
    return set_to


def task(environment=None, program=("train",), spool=""):
    return SlurmTask(program=program, environment=environment or {}, spool=spool)


@pytest.mark.parametrize(
    "name",
    [
        *("training:v1", "reg:5000/ml/training:v1", "docker.io/library/debian", "a/b_c-d.e:V1_2.x-y"),
        f"reg:5000/ml/training@sha256:{'0' * 64}",
    ],
)
def test_names_of_images_are_taken(name):
    assert parse_image(name) == name


@pytest.mark.parametrize(
    "name",
    [
        *("", "/srv/bundle", "../x", "a b", "a;b", "$(x)", "`x`", "a|b", "a&&b", "a>b", "'", '"'),
        *("%e", "*", "a\nb", "--help", "-v", "~", "a\\b", "training:v1\0", "training:v1\n"),
        *("training:", "training@sha256:0", "Ä:v1"),
    ],
)
def test_other_names_are_refused_on_one_line(name):
    with pytest.raises(UsageError, match="not the name of an image") as caught:
        parse_image(name)
    assert str(caught.value).isprintable()


@given(st.text(max_size=40))
def test_a_name_that_is_taken_has_no_characters_of_a_shell(name):
    try:
        parse_image(name)
    except UsageError:
        return
    assert name.isascii()
    assert not set(name) - {*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-:/@[]"}


TOO_MANY, RIGHT = "'\"'\"''", "'\"'\"'"  # how Slurm writes a quote, and how a shell reads it


def line(*program, image="training:v1", quote=TOO_MANY):
    """Return the command line of the shell of a task, as Slurm writes it."""
    written = " ".join("'" + word.replace("'", quote) + "'" for word in program)
    return f"/bin/sh-cset -f; exec x --line $(xargs) # task: /s/environment /s {image} -- {written}"


@given(st.lists(st.text(st.characters(exclude_characters="\0"), max_size=12), min_size=1, max_size=4))
def test_arguments_are_those_of_the_user(program):
    assert parse_command_line(line(*program)) == ["training:v1", "/s/environment", "/s", *program]


@pytest.mark.parametrize(
    "program", [("a 'b' c", "x'"), ("'",), ("''", '"'), ("print('\\n')", "# task: ", " -- ")]
)
def test_a_release_that_quotes_as_a_shell_does_is_read_too(program):
    assert parse_command_line(line(*program, quote=RIGHT))[3:] == [*program]


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "# task: ", "# task: a b", "# task: a b t:v1 -- ", "# task: a b t:v1 -- x"),
        *("# task: a b t:v1 -- 'x", "# task: a b t:v1 -- 'x''y'", "a b t:v1 -- 'x'"),
    ],
)
def test_a_line_of_another_form_is_refused(text):
    with pytest.raises(UsageError, match="cannot be read"):
        parse_command_line(text)


@pytest.mark.parametrize("image", ["a b", "$(touch x)", "x\ny", "'", "t:v1 -- 'sh' 'x", "", "t:v1 --"])
def test_a_name_does_not_take_the_line_apart(image):
    with pytest.raises(UsageError):
        parse_image(parse_command_line(line("train", image=image))[0])


def test_variables_are_read_as_they_are(tmp_path):
    path = tmp_path / "environment"
    path.write_bytes(b"A=1\0B=two\nlines\0C==\0D=\0=E\0noise\0BAD=\xff\0")
    assert read_environment(str(path)) == {
        "A": "1",
        "B": "two\nlines",
        "C": "=",
        "D": "",
        "BAD": os.fsdecode(b"\xff"),
    }
    path.write_bytes(b"")
    assert read_environment(str(path)) == {}


def test_a_file_without_null_bytes_names_the_setting(tmp_path):
    path = tmp_path / "environment"
    path.write_text("A=1\nB=2\n")
    with pytest.raises(UsageError, match="null byte") as caught:
        read_environment(str(path))
    assert "CreateEnvFile=null" in str(caught.value.remedy)


@pytest.mark.parametrize("path", ["missing", "", "nul\0byte"])
def test_a_file_that_cannot_be_read_is_a_usage_error(path, tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        read_environment(path and str(tmp_path / path))


def test_the_size_of_the_variables_is_bounded(tmp_path, monkeypatch):
    path = tmp_path / "environment"
    path.write_bytes(b"A=12\0")
    monkeypatch.setattr(slurm_task, "LIMIT", 5)
    assert read_environment(str(path)) == {"A": "12"}
    monkeypatch.setattr(slurm_task, "LIMIT", 4)
    with pytest.raises(UsageError, match="too large"):
        read_environment(str(path))


def test_the_batch_system_s_variables_win_over_the_image_s_and_others_do_not():
    own = dict.fromkeys(("SLURM_PROCID", "PMIX_RANK", "PMI_RANK", "OMPI_MCA_x", "SLURMD_NODENAME"), "1")
    others = {"LR": "0.1", "PMIXED": "no", "USER": "me", "ENVIRONMENT": "BATCH"}
    made = task(own | others)
    assert (made.scheduler_variables, made.job_variables) == (own, others)


@pytest.mark.parametrize(
    "name",
    [
        *("PATH", "HOME", "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR", "PWD"),
        *("XDG_RUNTIME_DIR", "_"),
        *("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK"),
        *("SLURM_CONF", "BASH_FUNC_module%%", "BASH_FUNC_x()", "with space", "1st", "A\nB"),
    ],
)
def test_variables_of_the_node_do_not_reach_the_container(name):
    made = task({name: "x"})
    assert (made.scheduler_variables, made.job_variables) == ({}, {})


def test_the_folders_of_the_step_and_the_script_are_mounted(tmp_path):
    for name in ("step/task-0", "job00001"):
        (tmp_path / name).mkdir(parents=True)
    made = task({}, (f"{tmp_path}/job00001/slurm_script", "a"), f"{tmp_path}/step/task-0")
    assert made.folders == (f"{tmp_path}/step/task-0", f"{tmp_path}/job00001")
    assert task({}, (f"{tmp_path}/job00001/other",), f"{tmp_path}/missing").folders == ()
    assert task({}, ("slurm_script",), ".").folders == ()


@pytest.mark.parametrize(
    ("spool", "server", "expected"),
    [
        ("step/task-0", "step//pmix.1.0/", "step"),
        ("step", "step/pmix.1.0", "step"),  # from Slurm 25.05 on
        ("step/task-0", "pmix.1.0", "step/task-0"),
        ("step/task-0", "", "step/task-0"),
    ],
)
def test_a_rank_gets_the_folder_of_the_step_in_which_the_server_of_pmix_has_its_own(
    tmp_path, spool, server, expected
):
    (tmp_path / "step/task-0").mkdir(parents=True)
    variables = {"PMIX_SERVER_TMPDIR": f"{tmp_path}/{server}"} if server else {}
    assert task(variables, ("train",), f"{tmp_path}/{spool}").folders == (f"{tmp_path}/{expected}",)
    assert task(variables | {"PMIX_NAMESPACE": "slurm.pmix.1.0"}, ("train",), "/").is_pmix_rank
    assert not task(variables, ("train",), "/").is_pmix_rank


def test_the_gpus_of_a_task_are_those_that_it_may_open(openable):
    openable(2)
    environment = {"SLURM_STEP_GPUS": "0", "CUDA_VISIBLE_DEVICES": "0"}
    assert find_task_gpus(HOST, environment)[1] == "device=2"


def test_where_all_can_be_opened_the_variables_tell(openable):
    openable()
    assert find_task_gpus(HOST, {"SLURM_STEP_GPUS": "1,3", "CUDA_VISIBLE_DEVICES": "1,3"})[1] == "device=1,3"


@pytest.mark.parametrize(
    "environment", [{}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}]
)
def test_a_job_without_gpus_leaves_a_sign_on_a_node_that_has_some(openable, environment):
    openable()
    host, wanted = find_task_gpus(HOST, {"SLURM_JOB_ID": "1", **environment})
    assert (host.gpus, wanted) == ((), None)
    assert host.accelerators[-1].label == f"the job: {NO_GPU}"


def test_a_node_without_gpus_stays_as_it_is(openable):
    openable()
    bare = replace(HOST, gpus=(), driver=None)
    assert find_task_gpus(bare, {"SLURM_JOB_ID": "1"}) == (bare, None)
