"""Jobs of a real Slurm, each task in a container of the image that fits its node."""

import json
import os
import shutil
import signal
import subprocess

import pytest
from machines import wait_until
from slurm_cluster import USER
from slurm_jobs import GPUS, IMAGE, refused, squashfuses, srun

NOBODY = 65534


def batch(cluster, text, *words, code=0):
    """Submit a script and wait for its end; return what it printed, by the name of its file."""
    home = cluster.shared / "home"
    for old in home.glob("out-*"):
        old.unlink()
    (home / "job.sh").write_text(text)
    done = cluster.run("sbatch", "--wait", "-o", "out-%A-%a", *words, "job.sh")
    assert done.returncode == code, (
        done.stdout,
        done.stderr,
        [path.read_text() for path in home.glob("out-*")],
    )
    return {path.name: path.read_text() for path in sorted(home.glob("out-*"))}


def test_the_files_of_the_guide_have_no_findings(cluster):
    for node in cluster.nodes:
        done = cluster.imagematrix("slurm", "node-config", "--shards", "2", "--json", node=node)
        assert '"findings": []' in done.stdout


def test_each_node_starts_its_own_variant(cluster):
    script = f"cat /etc/variant; {GPUS}; echo $SLURM_PROCID $OWN $GIVEN $HOME; pwd"
    out = srun(cluster, "-N2", "-l", "--gpus-per-node=1", "--export=ALL,GIVEN=job", IMAGE, "sh", "-c", script)
    assert sorted(out.splitlines()) == [
        *("0: /home/user", "0: 0 image job /home/user", "0: nvidia0", "0: znver4"),
        *("1: /home/user", "1: 1 image job /home/user", "1: nvidia0", "1: skylake"),
    ]


def test_one_variant_for_all_nodes_is_refused_before_any_rank_starts(cluster):
    words = ("-N2", "--gpus-per-node=1", "--export=ALL,IMAGEMATRIX_GANG=same", IMAGE, "touch", "started")
    error = refused(cluster, *words, code=3)
    assert "no variant of training:v1 fits all 2 hosts" in error
    assert not (cluster.shared / "home/started").exists()


def test_nodes_without_facts_are_named_and_off_needs_none(cluster):
    entry = cluster.shared / "srv/hosts/n2.json"
    kept = entry.rename(entry.with_suffix(".kept"))
    try:
        words = ("-N2", "--gpus-per-node=1", IMAGE, "cat", "/etc/variant")
        assert "has no entry for n2" in refused(cluster, *words, code=5)
        out = srun(cluster, "--export=ALL,IMAGEMATRIX_GANG=off", *words)
        assert sorted(out.split()) == ["skylake", "znver4"]
    finally:
        kept.rename(entry)


def catalogs(cluster):
    """Return the catalogs that steps have left."""
    return {*(cluster.shared / "srv/hosts/steps").glob("*/*")}


def test_a_step_leaves_one_catalog_of_its_user(cluster):
    before = catalogs(cluster)
    srun(cluster, "-N2", "-n4", "--gpus-per-node=2", IMAGE, "true")
    (made,) = catalogs(cluster) - before
    assert made.parent.name == str(USER)
    assert {(path.stat().st_uid, path.stat().st_mode & 0o777) for path in (made, made.parent)} == {
        (USER, 0o600),
        (USER, 0o700),
    }


def test_a_folder_of_somebody_else_with_the_user_s_name_stops_no_step(cluster):
    steps = cluster.shared / "srv/hosts/steps"
    own = steps / str(USER)
    if own.exists():
        own.rename(steps / "kept")
    own.mkdir(mode=0o777)
    os.chown(own, NOBODY, NOBODY)
    before = catalogs(cluster)
    try:
        out = srun(cluster, "-N2", "--gpus-per-node=1", IMAGE, "cat", "/etc/variant")
        assert sorted(out.split()) == ["skylake", "znver4"]
        (made,) = catalogs(cluster) - before
        assert made.parent.name == f"{USER}.1"
        shutil.rmtree(made.parent)
    finally:
        own.rmdir()
        if (steps / "kept").exists():
            (steps / "kept").rename(own)


def test_the_second_run_of_a_requeued_job_does_not_run_the_image_of_the_first(cluster):
    before = catalogs(cluster)
    text = f"""\
#!/bin/bash
#SBATCH -N2 --gpus-per-node=1 --requeue --open-mode=append
step() {{ srun "$@" cat /etc/variant; echo "step ended with $?"; }}
if [ -z "$SLURM_RESTART_COUNT" ]; then
    step {IMAGE}
    scontrol requeue $SLURM_JOB_ID
    sleep 60
fi
step --container=nothing:v9
step {IMAGE}
"""
    ((_, out),) = batch(cluster, text).items()
    variants = [line for line in out.splitlines() if line in {"skylake", "znver4"}]
    ends = [line.split()[-1] for line in out.splitlines() if line.startswith("step")]
    assert "has no variant of nothing:v9" in out
    assert len(variants) == 4, out
    assert (ends[0], ends[2]) == ("0", "0"), out
    assert ends[1] in {"4", str(128 + signal.SIGTERM)}, out
    said = [json.loads(path.read_text()) for path in catalogs(cluster) - before]
    runs = {(one["image"], one["step"], one["restart"]): one["start"] for one in said}
    assert {*runs} == {("training:v1", "0", "0"), ("training:v1", "1", "1")}
    assert len({*runs.values()}) == 2
    assert all(map(str.isdigit, runs.values()))


def test_features_choose_nodes(cluster):
    assert (
        srun(cluster, "--constraint=im-compute-7.0", "--gpus=1", IMAGE, "cat", "/etc/variant") == "skylake\n"
    )
    assert (
        srun(cluster, "--constraint=im-driver-550.163.01", "--gpus=1", IMAGE, "cat", "/etc/variant")
        == "znver4\n"
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--gpus-per-task=1",), ["0: nvidia0", "1: nvidia1"]),
        (("--gpus=2", "--gpu-bind=map_gpu:1,0"), ["0: nvidia1", "1: nvidia0"]),
        (("--gpus=2",), ["0: nvidia0 nvidia1", "1: nvidia0 nvidia1"]),
    ],
)
def test_each_task_has_the_gpus_that_slurm_gave_it(cluster, options, expected):
    script = f"{GPUS}; sleep 1"  # so that both hold theirs at the same time
    out = srun(cluster, "-N1", "-n2", "-l", *options, IMAGE, "sh", "-c", script)
    assert sorted(out.splitlines()) == expected


def test_a_task_opens_its_gpu_and_no_other(cluster):
    script = "for n in 0 1; do (: < /dev/nvidia$n) 2> /dev/null && echo opens $n || echo refused $n; done"
    first = cluster.popen("srun", "-w", "n1", "--gpus=1", IMAGE, "sh", "-c", "echo ready; sleep 20")
    assert first.stdout.readline() == "ready\n"
    assert srun(cluster, "-w", "n1", "--gpus=1", IMAGE, "sh", "-c", script) == "refused 0\nopens 1\n"
    # Without a container both nodes are there, and the device cgroup refuses one.
    assert srun(cluster, "-w", "n1", "--gpus=1", "sh", "-c", script) == "refused 0\nopens 1\n"
    cluster.run("scancel", "--user=user")
    first.communicate()


def test_batch_scripts_and_arrays_run_in_containers(cluster):
    text = f"#!/bin/bash\n#SBATCH {IMAGE} --gpus=1\ncat /etc/variant; {GPUS}; echo $SLURM_ARRAY_TASK_ID $@\n"
    ((_, out),) = batch(cluster, text, "-w", "n2").items()
    assert out == "skylake\nnvidia0\n\n"
    printed = batch(cluster, text, "--array=1-3")
    assert [out.splitlines()[2] for out in printed.values()] == ["1", "2", "3"]
    assert {out.splitlines()[0] for out in printed.values()} <= {"znver4", "skylake"}


def test_exit_codes_input_and_terminals_are_the_program_s(cluster):
    step = ("-N1", "--gpus=1", IMAGE)
    srun(cluster, *step, "sh", "-c", "exit 42", code=42)
    assert "nothing-here not found in the image" in srun(cluster, *step, "nothing-here", code=127)
    assert srun(cluster, *step, "cat", input="given\n") == "given\n"
    assert (
        "/dev/pts/0" in cluster.run("script", "-qc", f"srun --gpus=1 --pty {IMAGE} tty", "/dev/null").stdout
    )


def test_signals_reach_the_program(cluster):
    script = "trap 'echo usr1' USR1; trap 'echo term; exit 9' TERM; echo ready; while :; do sleep 0.1; done"
    step = cluster.popen("srun", "--gpus=1", IMAGE, "sh", "-c", script)
    assert step.stdout.readline() == "ready\n"
    cluster.run("scancel", "-s", "USR1", "--user=user")
    assert step.stdout.readline() == "usr1\n"
    cluster.run("scancel", "--user=user")
    # Slurm signals the runtime, which passes it on, and the program itself.
    assert step.communicate(timeout=20)[0].replace("usr1\n", "") == "term\n"
    assert step.returncode == 9


def test_a_program_without_handlers_ends_at_once(cluster):
    step = cluster.popen("srun", "--gpus=1", IMAGE, "sh", "-c", "echo ready; exec sleep 60")
    assert step.stdout.readline() == "ready\n"
    cluster.run("scancel", "--user=user")
    error = step.communicate(timeout=20)[1]
    assert step.returncode == 143, error  # by SIGTERM, not by the SIGKILL that comes later


def test_what_ignores_the_signal_ends_with_the_job_and_leaves_nothing(cluster):
    step = cluster.popen(
        "srun", "--gpus=1", IMAGE, "sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"
    )
    assert step.stdout.readline() == "ready\n"
    cluster.run("scancel", "--user=user")
    step.communicate(timeout=30)
    wait_until(lambda: not squashfuses(cluster), "no mounted image", 20)
    assert srun(cluster, "-N2", "--gpus-per-node=2", IMAGE, "true") == ""  # no claim is left either


def test_the_time_limit_ends_a_job(cluster):
    script = "trap 'echo ended by signal; exit 3' TERM; while :; do sleep 0.1; done"
    error = srun(cluster, "-t", "0:01", "--gpus=1", IMAGE, "sh", "-c", script, code=3, timeout=180)
    assert "DUE TO TIME LIMIT" in error


def test_a_refusal_reaches_the_user_with_its_reasons(cluster):
    error = srun(cluster, "-N1", IMAGE, "true", code=3)
    assert "none of the 2 variants of training:v1 fits this host" in error
    assert "Slurm gave it none of the GPUs of this node" in error
    assert "has no variant of nothing:v1" in srun(
        cluster, "--gpus=1", "--container=nothing:v1", "true", code=4
    )


def test_a_rank_that_is_refused_ends_the_others(cluster):
    own = "IMAGEMATRIX_GANG=off,IMAGEMATRIX_WHERE=compute=9.0"
    error = refused(cluster, "-N2", "--gpus-per-node=1", f"--export=ALL,{own}", IMAGE, "sleep", "60", code=3)
    assert "srun: error: n2: task 1: Exited with exit code 3" in error


def test_a_rank_that_dies_ends_the_others(cluster):
    script = "[ $SLURM_PROCID = 0 ] || kill -KILL $$; exec sleep 60"
    done = cluster.run("srun", "-N2", "--gpus-per-node=1", IMAGE, "sh", "-c", script, timeout=20)
    assert "n2: task 1: Exited with exit code 137\n" in done.stderr
    assert "*** STEP" in done.stderr
    wait_until(lambda: not squashfuses(cluster), "no mounted image", 20)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "training:v1;touch evil",
            "$(touch evil)",
            "`touch evil`",
            "a|touch evil",
            "a&&touch evil",
            "a b",
            "%e",
        ),
        *(
            "a\ntouch evil",
            "'$(touch evil)'",
            "'; touch evil; '",
            '"; touch evil"',
            "../x",
            "/etc",
            "*",
            "--help",
            "",
        ),
        *("training:v1 -- 'touch' 'evil' #", "training:v1 # task: x"),
    ],
)
def test_names_that_try_to_be_shell_are_refused_and_nothing_runs(cluster, name):
    done = cluster.run("srun", "--gpus=1", f"--container={name}", "echo", "REACHED")
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "not the name of an image" in done.stderr or "cannot be read" in done.stderr
    assert not (cluster.shared / "home/evil").exists()


def test_arguments_keep_quotes_and_lines(cluster):
    words = ["a 'b' c", "'", "''", '"$HOME" `id` $(id) \\', "", "*", "two\ntouch evil\n", "# task: x", " -- "]
    script = 'for word; do printf "<%s>" "$word"; done'
    out = srun(cluster, "--gpus=1", IMAGE, "sh", "-c", script, "sh", *words)
    assert out == "".join(f"<{word}>" for word in words)
    assert not (cluster.shared / "home/evil").exists()


def test_jobs_share_a_gpu_by_shards(cluster):
    script = f"{GPUS}; sleep 2"
    jobs = [cluster.popen("srun", "-w", "n1", "--gres=shard:1", IMAGE, "sh", "-c", script) for _ in range(2)]
    # Slurm fills a GPU with shards before it takes another.
    assert [job.communicate() for job in jobs] == [("nvidia0\n", "")] * 2


def test_a_container_survives_its_slurmd(cluster):
    job = cluster.popen("srun", "-w", "n2", "--gpus=1", IMAGE, "sh", "-c", "echo ready; sleep 4; echo done")
    assert job.stdout.readline() == "ready\n"
    cluster.stop("slurmd-n2")
    cluster.start_slurmd("n2")
    assert job.communicate() == ("done\n", "")
    assert job.returncode == 0


def test_a_node_that_is_drained_ends_what_runs_there(cluster):
    job = cluster.popen("srun", "-w", "n2", "--gpus=1", IMAGE, "sh", "-c", "echo ready; sleep 2; echo done")
    assert job.stdout.readline() == "ready\n"
    cluster.run("scontrol", "update", "nodename=n2", "state=drain", "reason=test", user=False)
    try:
        assert job.communicate() == ("done\n", "")
        assert srun(cluster, "-N1", "--gpus=1", IMAGE, "cat", "/etc/variant") == "znver4\n"
    finally:
        cluster.run("scontrol", "update", "nodename=n2", "state=resume", user=False)


def test_two_hundred_tasks_start_at_once_on_a_cold_store(cluster, published):
    """Each fetches the image if need be: one does, and the others wait for it."""
    own = "IMAGEMATRIX_STORE=/home/user/store,IMAGEMATRIX_GANG=off"
    words = ("-N2", "-n200", "--overcommit", "--gpus-per-node=2", f"--export=ALL,{own}")
    out = srun(cluster, *words, f"--container={published}", "cat", "/etc/variant", timeout=900)
    assert sorted(out.split()) == ["skylake"] * 100 + ["znver4"] * 100
    assert len([*(cluster.shared / "home/store/images").iterdir()]) == 2


@pytest.fixture(scope="module")
def ranks(cluster, mpi_layout):
    """The options of a step with two ranks on each node, for which training:v1 has Open MPI in /srv/mpi."""
    subprocess.run(["cp", "-a", mpi_layout, cluster.shared / "srv/mpi-layout"], check=True)
    for name in cluster.nodes:
        pull = ("pull", "training:v1", "--catalog", "oci:/srv/mpi-layout", "--to", "/srv/mpi")
        cluster.imagematrix(*pull, node=name)
    return ("-N2", "--ntasks-per-node=2", "--mpi=pmix", "--gpus-per-node=2")


@pytest.mark.parametrize("own", ["", ",IMAGEMATRIX_ENGINE=charliecloud"])
def test_ranks_of_open_mpi_meet_across_nodes(cluster, ranks, own):
    """The default runtime is bwrap then. Two ranks on a node pass each other more than a message holds."""
    program = (
        "from mpi4py import MPI; c = MPI.COMM_WORLD; v = open('/etc/variant').read().strip(); "
        "n = c.allreduce(c.rank); m = c.sendrecv('x' * (4 << 20), c.rank ^ 1, source=c.rank ^ 1); "
        "a = c.gather(v); c.rank or print(c.size, n, len(m), *sorted(a))"
    )
    exported = f"--export=ALL,IMAGEMATRIX_STORE=/srv/mpi{own}"
    out = srun(cluster, *ranks, exported, IMAGE, "python3", "-c", program)
    assert out == f"4 6 {4 << 20} skylake skylake znver4 znver4\n"


def test_ranks_are_refused_with_runc_in_which_they_would_hang(cluster, ranks):
    exported = "--export=ALL,IMAGEMATRIX_STORE=/srv/mpi,IMAGEMATRIX_RUNTIME=runc"
    error = refused(cluster, *ranks, exported, IMAGE, "true", code=8)
    assert "leaves MPI_Init waiting" in error


class TestANodeThatChanged:
    """Slurm believes that n2 has another driver."""

    @pytest.fixture(autouse=True)
    def _told(self, cluster):
        before = cluster.lines["n2"]
        cluster.lines["n2"] = before.replace("535.261.03", "535.104.05")
        cluster.configure()
        cluster.run("scontrol", "reconfigure", user=False)
        cluster.wait_until_idle()
        yield
        cluster.lines["n2"] = before
        cluster.configure()
        cluster.run("scontrol", "reconfigure", user=False)
        cluster.wait_until_idle()

    def test_is_exit_code_5_with_both_lines(self, cluster):
        error = srun(cluster, "-w", "n2", "--gpus=1", IMAGE, "true", code=5)
        assert "node n2 is not what Slurm says: Features=im-driver-535.104.05" in error
        assert "im-driver-535.261.03" in error
        assert srun(cluster, "-w", "n1", "--gpus=1", IMAGE, "cat", "/etc/variant") == "znver4\n"

    def test_gives_a_batch_job_back_once(self, cluster):
        text = f"#!/bin/bash\n#SBATCH --gpus=1 -w n2 --open-mode=append\necho try; srun {IMAGE} true\n"
        ((_, out),) = batch(cluster, text, code=5).items()
        assert out.count("try") == 2
        assert out.count("was requeued, once") == 1
        assert out.count("is not what Slurm says") == 2
