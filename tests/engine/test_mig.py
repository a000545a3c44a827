"""MIG devices on a simulated machine, each with its own device nodes."""

import json

import pytest

# In the profile GPU 0 has a 3g.40gb (GPU instance 2) and two of 1g.10gb (9 and 10); GPU 1 has no MIG devices.
LARGE, SMALL = (21, 22), ((84, 85), (93, 94))
BUSY = 10


@pytest.fixture(scope="module")
def node(simulate):
    return simulate("mig")


def run(node, *words):
    return node.imagematrix("run", *words)


def seen(node, *words):
    """Return the numbers of the GPU nodes and of the capability nodes in a container."""
    script = "cd /dev; ls -d nvidia[0-9]* nvidia-caps/*"
    done = run(node, *words, "--rm", "training:v1", "sh", "-c", script)
    names = done.stdout.split()
    gpus = tuple(int(name[6:]) for name in names if name[6:].isdecimal())
    return gpus, tuple(
        sorted(int(name.removeprefix("nvidia-caps/nvidia-cap")) for name in names if "cap" in name)
    )


def parts(node):
    """Return for each MIG device of GPU 0 whether it is free."""
    gpus = json.loads(node.imagematrix("gpus", "--json").stdout)["gpus"]
    return [part["free"] for part in gpus[0]["mig"]]


def test_a_profile_passes_the_nodes_of_one_device(node):
    assert seen(node, "--gpus", "3g.40gb") == ((0,), LARGE)
    assert seen(node, "--gpus", "1g.10gb") == ((0,), SMALL[0])
    assert seen(node, "--gpus", "2,profile=1g.10gb") == ((0,), tuple(sum(SMALL, ())))
    assert seen(node, "--gpus", "device=1") == ((1,), ())


def test_each_mig_device_is_claimed_once(node):
    for taken in ([False, True], [False, False]):
        done = run(node, "--gpus", "1g.10gb", "-d", "training:v1", "sleep", "300")
        assert done.returncode == 0, done.stderr
        assert parts(node) == [True, *taken]
    refused = run(node, "--gpus", "1g.10gb", "--rm", "training:v1", "true")
    assert refused.returncode == BUSY
    assert "requested 1 MIG device, 0 free" in refused.stderr
    assert seen(node, "--gpus", "3g.40gb") == ((0,), LARGE)
    whole = run(node, "--gpus", "device=0", "--rm", "training:v1", "true")
    assert whole.returncode == BUSY
    assert seen(node, "--gpus", "1") == ((1,), ())


def test_a_mig_device_can_be_shared(node):
    for name in ("one", "two"):
        words = ("--gpus", "3g.40gb", "--vram", "15Gi", "-d", "--name", name, "training:v1", "sleep", "300")
        assert run(node, *words).returncode == 0
    again = run(node, "--gpus", "3g.40gb", "--vram", "15Gi", "--rm", "training:v1", "true")
    assert again.returncode == BUSY
    assert parts(node) == [False, True, True]


def test_the_error_for_a_missing_profile_lists_existing_ones(node):
    done = run(node, "--gpus", "2g.20gb", "--rm", "training:v1", "true")
    assert done.returncode == 2
    assert "1g.10gb" in done.stderr
    assert "3g.40gb" in done.stderr
