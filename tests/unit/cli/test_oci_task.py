"""`imagematrix oci-task` from Slurm's files to the container that is started, without a runtime."""

import os
from pathlib import Path
from unittest.mock import Mock

import daemonless_starts
import pytest
from daemonless_starts import DIGESTS, HOST

from imagematrix.cli import app
from imagematrix.cli.shared import slurm_task
from imagematrix.common import json_documents, settings
from imagematrix.common.record import replace
from imagematrix.errors import EngineError
from imagematrix.hardware.host import device
from imagematrix.images.catalog.warm_image import WarmImage, WarmMatch
from imagematrix.integrations.slurm import configuration
from imagematrix.integrations.slurm.features import make_features
from imagematrix.integrations.slurm.step_catalog import prepare_folder
from imagematrix.launcher.gpu_claims.locks import Locks

IMAGE = "reg:5000/training:v1"
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[1-2]"}


@pytest.fixture
def run(started, tmp_path, monkeypatch, filled_store):
    """Call it with a job's variables and program; it returns the exit code and the calls of the runtime."""
    monkeypatch.setattr("imagematrix.hardware.host.probe.probe_hardware", lambda: HOST)
    monkeypatch.setattr(device, "list_permitted_minors", lambda _: (1,))
    monkeypatch.setattr(configuration, "PLACES", (str(tmp_path / "slurm.conf"),))
    monkeypatch.chdir(tmp_path)
    spool = tmp_path / "spool"
    spool.mkdir()
    before = dict(os.environ)
    kept = {"IMAGEMATRIX_STORE": filled_store.path, "IMAGEMATRIX_LOCKS": os.environ["IMAGEMATRIX_LOCKS"]}

    def call(environment, *program, image=IMAGE, variants=None):
        os.environ.clear()
        monkeypatch.setenv("HOME", "/root")
        variables = (
            kept | {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "SLURM_STEP_GPUS": "0"} | environment
        )
        path = tmp_path / "environment"
        path.write_bytes(b"".join(f"{name}={value}\0".encode() for name, value in variables.items()))
        return started(
            "oci-task", image, str(path), str(spool), "--", *(program or ("train", "-x")), variants=variants
        )

    yield call
    os.environ.clear()
    os.environ.update(before)


def test_a_warm_image_is_for_a_step_on_one_node(run, filled_store, capfd):
    """The store has the image with the digest of `host`, which stands for a warm image of `cpu` here."""
    run({"IMAGEMATRIX_ALLOW_CPU": "1"}, variants=("cpu",))
    (document,) = filled_store.load_catalogs()
    warm = WarmImage(
        base=DIGESTS["cpu"],
        reference="reg:5000/training:v1-warm-a-b",
        digest=DIGESTS["host"],
        match=WarmMatch(),
    )
    filled_store.put_catalog({**document, "warm": [warm.to_json()]})
    alone = {"IMAGEMATRIX_ALLOW_CPU": "1"}
    for variables, started_image in ((alone, "host"), (alone | STEP | {"IMAGEMATRIX_GANG": "off"}, "cpu")):
        code, ((_, image, *_),) = run(variables)
        assert (code, image.digest) == (7, DIGESTS[started_image]), capfd.readouterr().err
    Path(settings.FILE).write_text("warm = false\n")
    _, ((_, image, *_),) = run(alone)
    assert image.digest == DIGESTS["cpu"]


def test_the_task_gets_the_gpus_that_it_may_open_and_the_job_s_variables(run, tmp_path, capfd):
    code, ((container, image, runtime, _, leases),) = run(
        {
            "LR": "0.1",
            "SLURM_PROCID": "3",
            "PATH": "/own/bin",
            "HOME": "/home/me",
            "CUDA_VISIBLE_DEVICES": "0",
        }
    )
    assert (code, image.digest, runtime) == (7, DIGESTS["gpu"], "oci")
    assert container.args == ("train", "-x")
    assert [path for path in container.devices if path[-1].isdigit()] == ["/dev/nvidia1"]
    assert {
        "LR": "0.1",
        "SLURM_PROCID": "3",
        "PATH": "/bin",
        "HOME": "/root",
    }.items() <= container.environment.items()
    assert not {"CUDA_VISIBLE_DEVICES", "IMAGEMATRIX_X"} & {*container.environment}
    assert (f"{tmp_path}/spool",) * 2 in [(bind.source, bind.target) for bind in container.binds]
    assert container.interactive
    assert not container.terminal
    assert not container.own_processes
    assert len(leases) == 1
    assert os.environ["HOME"] == "/home/me"
    assert os.environ["PATH"] == "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert "the image's user app is ignored" in capfd.readouterr().err


def test_the_image_s_variables_win_over_the_job_s_and_slurm_s_over_both(run, filled_store):
    from daemonless_starts import put

    Path(filled_store.get_folder(DIGESTS["gpu"]), "root").rmdir()
    put(filled_store, "gpu", {"config": {"Env": ["LR=image", "SLURM_PROCID=9"], "Entrypoint": ["entry"]}})
    _, ((container, *_),) = run({"LR": "job", "SLURM_PROCID": "1"})
    assert container.environment["LR"] == "image"
    assert container.environment["SLURM_PROCID"] == "1"
    assert container.args == ("train", "-x")


def test_the_job_s_folder_is_the_container_s_where_it_is_mounted(run, tmp_path, monkeypatch):
    Path(settings.FILE).write_text(f'mounts = ["{tmp_path}"]\nruntime = "crun"\n')
    _, ((container, _, runtime, *_),) = run({})
    assert (container.folder, runtime) == (str(tmp_path), "crun")
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    _, ((container, *_),) = run({})
    assert container.folder == "/"
    monkeypatch.chdir("/")
    _, ((container, *_),) = run({})
    assert container.folder == "/"
    Path(settings.FILE).write_text(f'mounts = ["{tmp_path}/spool"]\n')
    monkeypatch.chdir(tmp_path)
    _, ((container, *_),) = run({})
    assert container.folder == "/"


@pytest.mark.parametrize(
    ("engine", "expected"), [("docker", "oci"), ("oci", "oci"), ("charliecloud", "charliecloud")]
)
def test_the_site_s_engine_starts_tasks_unless_it_needs_a_daemon(run, engine, expected):
    Path(settings.FILE).write_text(f'engine = "{engine}"\n')
    assert run({})[1][0][2] == expected


def test_a_rank_keeps_the_number_of_its_user(run, capfd):
    """For the server of PMIx, which compares it."""
    rank = {"PMIX_NAMESPACE": "slurm.pmix.7.0"}
    assert run({})[1][0][2] == "oci"
    assert run(rank)[1][0][2] == "bwrap"
    assert "PMIx" not in capfd.readouterr().err
    Path(settings.FILE).write_text('runtime = "runc"\n')
    assert run(rank)[1][0][2] == "runc"
    assert "MPI_Init waiting, if the program uses it; install bubblewrap" in capfd.readouterr().err


@pytest.mark.parametrize(("libraries", "code"), [({"pmix": "5.0.7"}, 8), ({"mpi": None}, 8), ({}, 7)])
def test_a_rank_that_uses_mpi_is_refused_where_it_would_be_root(run, monkeypatch, capfd, libraries, code):
    Path(settings.FILE).write_text('runtime = "runc"\n')
    own = replace(daemonless_starts.variant("gpu"), libraries=tuple(libraries.items()))
    monkeypatch.setattr(daemonless_starts, "variant", lambda _: own)
    assert run({"PMIX_NAMESPACE": "slurm.pmix.7.0"}, variants=("gpu",))[0] == code
    assert ("leaves MPI_Init waiting\n" in capfd.readouterr().err) == (code != 7)
    assert run({}, variants=("gpu",))[0] == 7


@pytest.mark.parametrize("constrained", [True, False])
def test_a_job_without_gpus_gets_a_cpu_only_image_only_if_it_says_so(
    run, monkeypatch, constrained, starts_nothing
):
    monkeypatch.setattr(device, "list_permitted_minors", lambda _: ())
    monkeypatch.setattr(device, "is_withheld", lambda _: constrained)
    starts_nothing(run({"SLURM_STEP_GPUS": ""}), 3, "Slurm gave it none of the GPUs of this node")
    code, ((container, image, *_, leases),) = run({"SLURM_STEP_GPUS": "", "IMAGEMATRIX_ALLOW_CPU": "1"})
    assert (code, image.digest, container.devices, leases) == (7, DIGESTS["cpu"], (), ())
    assert run({"SLURM_STEP_GPUS": "", "IMAGEMATRIX_ALLOW_CPU": "0"})[0] == 3


def test_conditions_on_axes_come_from_a_variable(run, starts_nothing):
    starts_nothing(run({"IMAGEMATRIX_WHERE": "cuda=none"}), 3, "cuda")
    assert run({"IMAGEMATRIX_WHERE": "cuda=="})[0] == 2


def test_tasks_of_a_job_have_a_gpu_together_and_other_launches_do_not(run, tmp_path, capfd):
    with Locks(str(tmp_path / "locks")) as locks:
        first = locks.take("nvidia1", shared=True)
        assert run({})[0] == 7
        os.close(first[0])
        alone = locks.take("nvidia1")
        assert run({}) == (10, [])
        os.close(alone[0])
    assert "Slurm gave this job GPUs that others use: " in capfd.readouterr().err


@pytest.mark.parametrize("name", ["$(touch x)", "a;b", "/srv/bundle", "--help", ""])
def test_other_names_than_images_are_refused_before_anything_is_read(run, name, starts_nothing):
    starts_nothing(run({}, image=name), 2, "not the name of an image")


@pytest.mark.parametrize("words", [[], [IMAGE], [IMAGE, "a", "b", "--"], [IMAGE, "a", "b", "c", "d"]])
def test_a_call_that_is_not_slurm_s_says_how_to_use_it(started, words, starts_nothing):
    starts_nothing(
        started("oci-task", *words), 2, "usage: imagematrix oci-task IMAGE ENVFILE SPOOL -- COMMAND..."
    )


def test_slurm_s_line_is_the_same_call(run, tmp_path, started):
    run({}, "true")
    text = f"# task: {tmp_path}/environment {tmp_path}/spool {IMAGE} -- 'sh' '-c' 'echo $X # y'"
    _, ((container, *_),) = started("oci-task", "--line", text)
    assert container.args == ("sh", "-c", "echo $X # y")


def test_the_help_starts_nothing(started, capfd):
    assert started("oci-task", "--help") == (0, [])
    assert "Start a task of Slurm" in capfd.readouterr().out


def test_the_command_of_the_application_is_the_same(monkeypatch):
    calls = []
    monkeypatch.setattr(slurm_task, "run_slurm_task", lambda words: calls.append(words) or 7)
    with pytest.raises(SystemExit) as ended:
        app.make_app(["oci-task"])(["oci-task", "a", "b", "c", "--", "d", "-e"], standalone_mode=False)
    assert (ended.value.code, calls) == (7, [["a", "b", "c", "--", "d", "-e"]])


class TestANodeThatChanged:
    """slurm.conf says otherwise of the node."""

    @pytest.fixture(autouse=True)
    def told(self, tmp_path):
        before = ",".join(make_features(replace(HOST, gpus=HOST.gpus[:1])))
        (tmp_path / "slurm.conf").write_text(f"NodeName=n[1-2] Features=rack7,{before}\n")

    @pytest.fixture(autouse=True)
    def requeued(self, monkeypatch):
        jobs = []
        monkeypatch.setattr(
            "imagematrix.integrations.slurm.requeue.requeue_job",
            lambda told: jobs.append(told["SLURM_JOB_ID"]) or jobs[-1],
        )
        return jobs

    def test_is_exit_code_5_with_both_lines(self, run, requeued, capfd):
        assert run({}) == (5, [])
        error = capfd.readouterr().err
        assert "node n1 is not what Slurm says: Features=im-driver-550.163.01" in error
        assert "im-gpus-2" in error
        assert requeued == []

    def test_requeues_a_batch_job_once(self, run, requeued, capfd):
        assert run({"ENVIRONMENT": "BATCH"}) == (5, [])
        assert run({"ENVIRONMENT": "BATCH", "SLURM_RESTART_COUNT": "1"}) == (5, [])
        assert requeued == ["7"]
        assert "imagematrix: job 7 was requeued, once\n" in capfd.readouterr().err

    def test_requeues_with_the_configuration_of_slurmd(self, run, requeued, tmp_path):
        run({"ENVIRONMENT": "BATCH", "SLURM_CONF": "/own/slurm.conf"})
        assert requeued == ["7"]
        assert os.environ["SLURM_CONF"] == f"{tmp_path}/slurm.conf"

    def test_tells_why_a_job_stays(self, run, monkeypatch, capfd):
        refused = Mock(side_effect=EngineError("presently disabled", remedy="enable it"))
        monkeypatch.setattr("imagematrix.integrations.slurm.requeue.requeue_job", refused)
        assert run({"ENVIRONMENT": "BATCH"}) == (5, [])
        assert (
            "imagematrix: the job was not requeued: presently disabled\n  enable it\n"
            in capfd.readouterr().err
        )

    def test_is_one_that_slurm_names(self, run):
        assert run({"SLURMD_NODENAME": "n3"})[0] == 7

    def test_does_not_requeue_a_job_that_fits_no_image(self, run, requeued, tmp_path):
        (tmp_path / "slurm.conf").write_text("NodeName=n1\n")
        assert run({"ENVIRONMENT": "BATCH", "IMAGEMATRIX_WHERE": "cuda=none"}) == (3, [])
        assert requeued == []


class TestAStepOnSeveralNodes:
    """Its tasks decide for all nodes, from the folder that the site's file names."""

    @pytest.fixture
    def other(self, tmp_path):
        """Call it with the Host of the other node."""
        folder = tmp_path / "hosts"
        folder.mkdir()
        Path(settings.FILE).write_text(f'hosts = "{folder}"\n')
        prepare_folder(str(folder))

        def call(host):
            for name, each in (("n1", HOST), ("n2", host)):
                (folder / f"{name}.json").write_text(json_documents.dump_json(each.to_json()))

        return call

    def test_starts_what_fits_all_of_them(self, run, other):
        other(HOST)
        code, ((_, image, *_),) = run(STEP)
        assert (code, image.digest) == (7, DIGESTS["gpu"])

    def test_of_a_requeued_job_does_not_run_the_image_of_the_first_run(self, run, other, starts_nothing):
        other(HOST)
        assert run(STEP | {"SLURM_JOB_START_TIME": "1795878794"})[0] == 7
        again = STEP | {"SLURM_JOB_START_TIME": "1795878818", "SLURM_RESTART_COUNT": "1"}
        starts_nothing(run(again, image="other:v9"), 4, "other:v9")

    def test_is_refused_everywhere_if_one_cannot_take_part(self, run, other, starts_nothing):
        other(replace(HOST, driver=replace(HOST.driver, version="470.256.02")))
        starts_nothing(run(STEP), 3, "n2: driver-exact")
        assert run({**STEP, "IMAGEMATRIX_GANG": "off"})[0] == 7

    def test_without_gpus_runs_a_cpu_only_image_that_the_job_consents_to(
        self, run, other, monkeypatch, starts_nothing
    ):
        monkeypatch.setattr(device, "list_permitted_minors", lambda _: ())
        other(HOST)
        none = {**STEP, "SLURM_STEP_GPUS": ""}
        starts_nothing(run(none), 3, "Slurm gave it none of the GPUs of this node")
        code, ((_, image, *_),) = run({**none, "IMAGEMATRIX_ALLOW_CPU": "1"})
        assert (code, image.digest) == (7, DIGESTS["cpu"])

    def test_needs_the_folder(self, run, starts_nothing):
        starts_nothing(run(STEP), 2, "set hosts in the site's file, or IMAGEMATRIX_GANG=off")

    def test_is_refused_on_a_node_that_is_not_what_its_entry_says(self, run, other, tmp_path, capfd):
        other(HOST)
        changed = replace(HOST, driver=replace(HOST.driver, version="470.256.02"))
        (tmp_path / "hosts/n1.json").write_text(json_documents.dump_json(changed.to_json()))
        assert run(STEP) == (5, [])
        assert (
            "n1 is not what its entry in the folder of hosts says: it has driver 550"
            in capfd.readouterr().err
        )
