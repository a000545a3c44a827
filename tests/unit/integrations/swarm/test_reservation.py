"""The resources that tasks reserve on a swarm's nodes, and requests that no node can ever serve."""

import pytest

from imagematrix.errors import UsageError
from imagematrix.integrations.swarm.nodes import SwarmNode
from imagematrix.integrations.swarm.reservation import Reservation, reserve_gpus, reserve_memory


def node(name="n1", *, shared=False, **offers):
    offers = {kind.replace("_", "-"): count for kind, count in offers.items()}
    return SwarmNode(name=name, manager=False, engine="26.1.5", shared=shared, offers=offers)


def listed(version="26.1.5", *, manager=False, labels=None, resources=()):
    """A node as the engine lists it."""
    engine = {"EngineVersion": version, "Labels": labels}
    description = {
        "Hostname": "n1",
        "Engine": engine,
        "Resources": {"NanoCPUs": 1, "GenericResources": list(resources)},
    }
    return {
        "ID": "abc",
        "Description": description,
        **({"ManagerStatus": {"Leader": True}} if manager else {}),
    }


def named(kind, value):
    return {"NamedResourceSpec": {"Kind": kind, "Value": value}}


def counted(kind, value):
    return {"DiscreteResourceSpec": {"Kind": kind, "Value": value}}


def test_a_node_is_what_the_engine_lists():
    resources = [named("NVIDIA-GPU", "GPU-a"), named("NVIDIA-GPU", "GPU-b"), counted("VRAM-4G", 12)]
    labels = {"io.imagematrix.offer": "shares"}
    parsed = SwarmNode.from_engine(listed(labels=labels, resources=[*resources, counted("SSD", 3)]))
    assert parsed == node(shared=True, NVIDIA_GPU=2, VRAM_4G=12)
    unknown = SwarmNode.from_engine({"ID": "abc"})
    assert unknown == SwarmNode(name="abc", manager=False, engine="", shared=False, offers={})


@pytest.mark.parametrize(
    ("version", "manager", "rejects"),
    [
        ("20.10.24+dfsg1", True, True),
        ("25.0.13", True, True),
        ("26.0.0", True, False),
        ("26.1.5+dfsg1", True, False),
        ("20.10.24", False, False),
        ("dev", True, False),
    ],
)
def test_managers_with_the_bug_of_overlay_networks(version, manager, rejects):
    parsed = SwarmNode.from_engine(listed(version, manager=manager))
    assert parsed.rejects_overlay is rejects


def test_whole_gpus_are_not_reserved_on_nodes_that_share_them():
    reserved = reserve_gpus([node(NVIDIA_GPU=2), node(shared=True, NVIDIA_GPU=8)], 2)
    assert reserved.resources == {"NVIDIA-GPU": 2}
    assert reserved.constraints == ("engine.labels.io.imagematrix.offer!=shares",)
    assert reserved.vram_mib is None
    assert reserve_gpus([], 0) == Reservation()


@pytest.mark.parametrize(
    ("nodes", "count", "message"),
    [
        ([node()], 1, "no node offers GPUs"),
        (
            [node("a", shared=True, NVIDIA_GPU=1), node("b", shared=True, NVIDIA_GPU=1)],
            1,
            "no node offers whole GPUs: a, b offer shares of them",
        ),
        (
            [node(NVIDIA_GPU=2), node(NVIDIA_GPU=1)],
            3,
            "requested 3 GPUs for each task, but no node offers more than 2",
        ),
    ],
)
def test_gpus_that_no_node_has(nodes, count, message):
    with pytest.raises(UsageError) as refused:
        reserve_gpus(nodes, count)
    assert str(refused.value) == message


def test_memory_is_reserved_in_the_form_that_nodes_offer():
    one_card = reserve_memory([node(VRAM=23028)], 3814)
    assert (one_card.resources, one_card.vram_mib) == ({"VRAM": 3814}, 3814)
    several = reserve_memory([node(VRAM_4G=12)], 3000)
    assert (several.resources, several.vram_mib) == ({"VRAM-4G": 1}, 3814)


def test_the_kind_with_most_room_is_reserved():
    both = [node(VRAM=23028), node(VRAM_4G=12, VRAM_8G=6)]
    assert reserve_memory(both, 3814).kind == "VRAM-4G"
    assert reserve_memory(both, 1000).kind == "VRAM"
    assert reserve_memory(both, 4000).kind == "VRAM-8G"
    assert reserve_memory([node(VRAM_8G=3), node(VRAM_4G=3)], 2000).kind == "VRAM-4G"


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([node(NVIDIA_GPU=1, VRAM=0)], "no node offers GPU memory"),
        (
            [node(VRAM=23028), node(VRAM_8G=1)],
            "requested 23029 MiB for each task, but no node offers more than 23028 MiB of a GPU",
        ),
    ],
)
def test_memory_that_no_card_has(nodes, message):
    with pytest.raises(UsageError) as refused:
        reserve_memory(nodes, 23029)
    assert str(refused.value) == message
