"""`swarm run` and `swarm gc`, with a simulated manager of a swarm."""

import json
import signal
import struct
import threading

import pytest

from imagematrix.integrations.swarm import manager
from imagematrix.integrations.swarm.logs import ServiceLogs

MIB = 3814
SWARM = {"LocalNodeState": "active", "ControlAvailable": True}
LABEL = "io.imagematrix.swarm"
CREATE = ("POST", "/services/create")
LOGS = ("GET", "/services/s1/logs")
TASKS = ("GET", "/tasks")


def node(name="n1", version="26.1.5", labels=None, **offers):
    kinds = [
        {"DiscreteResourceSpec": {"Kind": kind.replace("_", "-"), "Value": count}}
        for kind, count in offers.items()
    ]
    engine = {"EngineVersion": version, "Labels": labels or {}}
    return {
        "ID": name,
        "Description": {"Hostname": name, "Engine": engine, "Resources": {"GenericResources": kinds}},
    }


def task(slot, state, code=None, reason="", service="s1"):
    container = {"ContainerID": "c", "ExitCode": code} if code is not None else None
    status = {
        "State": state,
        "Timestamp": "2026-11-22T12:00:00Z",
        "Err": reason,
        "ContainerStatus": container,
    }
    return {"ID": f"t{slot}", "Slot": slot, "ServiceID": service, "Status": status}


def job(name="s1", count=1, label="job"):
    mode = {"ReplicatedJob": {"TotalCompletions": count}}
    return {"ID": name, "Spec": {"Name": f"job-{name}", "Mode": mode, "Labels": {LABEL: label}}}


def frame(task_id, text):
    body = f"com.docker.swarm.task.id={task_id} {text}\n".encode()
    return struct.pack(">BxxxL", 1, len(body)) + body


@pytest.fixture
def swarm(engine, monkeypatch):
    """A simulated manager of a swarm; call it with a method, a path and a document to set its answer."""
    monkeypatch.setattr(manager, "POLL_S", 0.01)
    monkeypatch.setattr(ServiceLogs, "follow", lambda _: None)  # its threads would outlive the test
    engine.info |= {"Swarm": SWARM}

    def answer(method, path, document, status=200):
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        engine.responses[method, path] = (status, body)

    answer("GET", "/nodes", [node(VRAM=23028)])
    answer(*CREATE, {"ID": "s1"}, 201)
    answer("GET", "/services/s1", job())
    answer(*LOGS, b"")
    answer(*TASKS, [])
    answer("DELETE", "/services/s1", b"{}")
    return answer


@pytest.mark.usefixtures("swarm")
def test_a_job_is_created_as_requested(cli, engine):
    said = cli("swarm", "run", "--vram", "4G", "--job", "--replicas", "10", "ml/train:v1", "train", "-x")
    assert said == (0, "s1\n", "")
    created = json.loads(next(body for body in engine.bodies if body))
    assert created["Mode"] == {"ReplicatedJob": {"MaxConcurrent": 10, "TotalCompletions": 10}}
    spec = created["TaskTemplate"]
    assert spec["ContainerSpec"]["Image"] == "127.0.0.1:5050/ml/train:v1"
    assert spec["ContainerSpec"]["Args"] == ["train", "-x"]
    assert spec["RestartPolicy"]["Condition"] == "none"
    reserved = spec["Resources"]["Reservations"]["GenericResources"]
    assert reserved == [{"DiscreteResourceSpec": {"Kind": "VRAM", "Value": MIB}}]
    assert created["Name"].startswith("train-")


@pytest.mark.usefixtures("swarm")
def test_a_dry_run_creates_nothing(cli, engine, conforms):
    words = ("swarm", "run", "--dry-run", "--vram", "4G", "--name", "x", "-e", "A=b c", "train:v1")
    said = cli(*words)
    assert said.out.startswith("docker service create --detach --no-resolve-image ")
    assert "--generic-resource VRAM=3814" in said.out
    assert "--env 'A=b c'" in said.out
    document = conforms(json.loads(cli(*words[:2], "--json", *words[2:]).out))
    assert (document["id"], document["vram_mib"]) == (None, MIB)
    assert not any("/create" in path for path in engine.requests)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--vram", "24G"], "requested 22888 MiB for each task"),
        (["--gpus", "1"], "no node offers GPUs"),
        (["--vram", "500M"], "share of 476 MiB too small"),
        (["--vram", "four"], "invalid --vram four"),
        ([], "expected either --gpus or --vram"),
        (["--gpus", "1", "--vram", "4G"], "expected either --gpus or --vram"),
        (["--vram", "4G", "--wait"], "--wait requires --job"),
        (["--vram", "4G", "--job", "--rm"], "--rm requires --job and --wait"),
        (["--vram", "4G", "--job", "--wait", "--json"], "--wait and --json are mutually exclusive"),
        (["--vram", "4G", "--network", "nowhere"], "network not found: nowhere"),
    ],
)
def test_a_job_that_can_never_run_is_refused(cli, engine, swarm, words, message):
    swarm("GET", "/nodes", [node(VRAM=22000)])
    swarm("GET", "/networks/nowhere", {"message": "not found"}, 404)
    cli("swarm", "run", *words, "train:v1").refuses(2, message)
    assert not any("/create" in path for path in engine.requests)


def test_a_refused_creation_is_reported(cli, swarm):
    swarm(*CREATE, {"message": "rpc error: name conflicts"}, 409)
    cli("swarm", "run", "--gpus", "0", "--name", "x", "train:v1").refuses(2, "service x already exists")
    swarm(*CREATE, {"message": "invalid mount target"}, 400)
    cli("swarm", "run", "--gpus", "0", "train:v1").refuses(8, "refused: invalid mount target")


def test_an_engine_that_is_no_manager_is_reported(cli, engine):
    cli("swarm", "run", "--gpus", "1", "train:v1").refuses(8, "this engine is not in a swarm")
    engine.info |= {"Swarm": SWARM | {"ControlAvailable": False}}
    cli("swarm", "run", "--gpus", "1", "train:v1").refuses(8, "this engine is a worker of its swarm")


def test_shares_and_nodes_that_a_job_cannot_use_are_reported(cli, swarm):
    offering = node("n2", "20.10.24", VRAM_8G=12)
    swarm("GET", "/nodes", [node(VRAM=23028), offering])
    swarm("GET", "/networks/net", {"Driver": "overlay"})
    said = cli("swarm", "run", "--vram", "4G", "--network", "net", "train:v1")
    assert said.code == 0
    messages = " ".join(said.err.split())
    assert "each task reserves a share of 7629 MiB (VRAM-8G)" in messages
    assert "no task runs on n1: these nodes offer shares of other sizes" in messages


def test_managers_that_reject_tasks_with_an_overlay_network_are_reported(cli, swarm):
    manager = node("n3", "20.10.24") | {"ManagerStatus": {"Leader": True}}
    words = ("swarm", "run", "--vram", "4G", "--network", "net", "train:v1")
    said = "the manager n3 (20.10.24) rejects tasks on other nodes with a GPU and an overlay network"
    for nodes, driver, expected in (
        ([manager, node(VRAM=23028)], "overlay", True),
        ([manager, node(VRAM=23028)], "host", False),
        ([manager | node("n3", "20.10.24", VRAM=23028)], "overlay", False),
        ([manager | node("n3", "26.1.5"), node("n1", "20.10.24", VRAM=23028)], "overlay", False),
    ):
        swarm("GET", "/nodes", nodes)
        swarm("GET", "/networks/net", {"Driver": driver})
        assert (said in " ".join(cli(*words).err.split())) is expected


def test_waiting_prints_the_output_and_ends_with_the_exit_code(cli, engine, swarm):
    swarm(*TASKS, [task(1, "complete", 0)])
    swarm(*LOGS, frame("t1", "loss 0.5") + frame("t1", "done"))
    said = cli("swarm", "run", "--vram", "4G", "--job", "--wait", "--rm", "--name", "x", "train:v1")
    # This engine has the same lines in both streams.
    assert said == (0, "loss 0.5\ndone\n", "created service x\nloss 0.5\ndone\n")
    assert engine.requests[-1].endswith("/services/s1")


def test_the_exit_code_is_that_of_the_first_task_that_failed(cli, swarm):
    swarm(*TASKS, [task(1, "complete", 0), task(2, "failed", 3, "task: non-zero exit (3)")])
    swarm(*LOGS, frame("t2", "sorry"))
    words = ("swarm", "run", "--vram", "4G", "--job", "--wait", "--replicas", "2", "--name", "x")
    said = cli(*words, "train:v1")
    assert said.code == 3
    assert "x.2 | sorry\n" in said.out
    assert "task x.2 failed: task: non-zero exit (3)" in said.err
    swarm(*TASKS, [task(1, "complete", 0), task(2, "rejected", None, "No such image: 127.0.0.1:5050/x")])
    cli(*words, "train:v1").fails(8, "task x.2 rejected: No such image", "1 task of x could not be run")


def test_changes_are_reported_until_the_job_ends(cli, engine, swarm):
    later = [
        [task(1, "pending", None, "no suitable node")],
        [task(1, "running")],
        {"message": "the swarm does not have a leader"},
        [task(1, "complete", 0)],
    ]

    def proceed():
        found = later.pop(0)
        swarm(*TASKS, found, 503 if isinstance(found, dict) else 200)

    engine.before_response[TASKS] = proceed
    said = cli("swarm", "run", "--vram", "4G", "--job", "--wait", "--name", "x", "train:v1")
    assert said.code == 0
    assert said.err.splitlines()[:3] == ["created service x", "1 waiting: no suitable node", "1 running"]


def test_a_job_removed_during_the_wait_is_reported(cli, engine, swarm):
    engine.before_response[TASKS] = lambda: swarm("GET", "/services/s1", {"message": "not found"}, 404)
    cli("swarm", "run", "--vram", "4G", "--job", "--wait", "train:v1").refuses(8, "the service was removed")


@pytest.mark.parametrize("remove", [False, True])
def test_an_interrupt_removes_the_job_only_on_request(cli, engine, swarm, remove):
    swarm(*TASKS, [task(1, "running")])
    once = iter([signal.SIGINT])

    def interrupt():
        for number in once:
            signal.pthread_kill(threading.main_thread().ident, number)

    engine.before_response[TASKS] = interrupt
    words = ["--rm"] if remove else []
    said = cli("swarm", "run", "--vram", "4G", "--job", "--wait", *words, "--name", "x", "train:v1")
    assert said.code == 130
    told = "removed service x" if remove else "service x continues without this command"
    assert told in said.err


def test_unreadable_output_does_not_fail_the_job(cli, swarm):
    swarm(*TASKS, [task(1, "complete", 0)])
    swarm(*LOGS, {"message": "configured logging driver does not support reading"}, 500)
    said = cli("swarm", "run", "--vram", "4G", "--job", "--wait", "--name", "x", "train:v1")
    assert said.code == 0
    assert "output of x may be incomplete" in said.err


def container(identifier, service, finished="2026-11-22T12:00:00Z"):
    labels = {LABEL: "job", "com.docker.swarm.service.id": service}
    return {
        "Id": identifier,
        "Names": [f"/{identifier}"],
        "Labels": labels,
        "State": {"FinishedAt": finished},
    }


@pytest.fixture
def clutter(engine, swarm):
    """A job that has ended, and two containers of jobs, one of which still exists."""
    engine.containers = [container("c1", "s1"), container("c2", "gone")]
    swarm("GET", "/containers/json", [*engine.containers, {"Id": "c3"}])
    swarm("GET", "/services", [job()])
    swarm(*TASKS, [task(1, "failed", 3)])
    swarm("DELETE", "/containers/c2", b"{}")


@pytest.mark.usefixtures("clutter")
def test_gc_removes_ended_jobs_and_containers_of_removed_jobs(cli, swarm, conforms):
    tried = cli("swarm", "gc", "--dry-run", "--json")
    document = conforms(json.loads(tried.out))
    assert document["services"] == ["job-s1"]
    assert document["containers"] == ["c2"]
    assert document["dry_run"] is True
    assert cli("swarm", "gc") == (0, "service job-s1\ncontainer c2\n", "")
    swarm("DELETE", "/containers/c2", {"message": "removal in progress"}, 409)
    assert cli("swarm", "gc").code == 0
    swarm("DELETE", "/containers/c2", {"message": "disk error"}, 500)
    assert cli("swarm", "gc").code == 8


@pytest.mark.usefixtures("clutter")
def test_gc_keeps_what_ended_recently(cli):
    assert cli("swarm", "gc", "--older-than", "36500d") == (0, "", "")
    cli("swarm", "gc", "--older-than", "soon").refuses(2, "invalid --older-than soon")


@pytest.mark.usefixtures("clutter")
@pytest.mark.parametrize("state", ["new", "pending", "assigned", "preparing", "starting", "running"])
def test_gc_keeps_queued_and_running_jobs(cli, swarm, state):
    swarm(*TASKS, [task(1, "complete", 0), task(2, state)])
    assert cli("swarm", "gc").out == "container c2\n"


@pytest.mark.usefixtures("clutter")
def test_gc_on_a_worker_removes_only_containers(cli, engine):
    engine.info |= {"Swarm": SWARM | {"ControlAvailable": False}}
    assert cli("swarm", "gc", "--dry-run").out == "container c1\ncontainer c2\n"
