"""The decision of a step's tasks: from the shared folder, with one catalog, on each node by itself."""

import threading

import pytest

from imagematrix.common.record import replace
from imagematrix.common.settings import Site, read_site
from imagematrix.errors import ProbeError, UsageError
from imagematrix.hardware.host.host import Host
from imagematrix.images.catalog.warm_image import WarmImage, WarmMatch
from imagematrix.integrations.slurm.agreement import VARIABLE, Agreement, make_agreement, select_for_task
from imagematrix.integrations.slurm.step import find_step
from imagematrix.integrations.slurm.step_catalog import prepare_folder
from imagematrix.selection.gang.gang import NothingFitsAll

VARIABLES = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "genoa,sapphire",
    "SLURMD_NODENAME": "genoa",
}
IMAGE = "training:v1"
DIGEST = f"sha256:{'d' * 64}"
USUAL = ("cuda", "nccl", "mpi", "torch")


@pytest.fixture
def folder(tmp_path, profiles):
    """The shared folder, with two nodes."""
    for node, profile in (("genoa", "genoa-h200"), ("sapphire", "sapphirerapids-h100")):
        (tmp_path / f"{node}.json").write_bytes(profiles[profile].read_bytes())
    prepare_folder(str(tmp_path))
    return tmp_path


@pytest.fixture
def decide(folder, shipped_catalog):
    """Call it with a node to get what its task selects; `host` is the node as it is."""

    def call(node="genoa", host=None, alike=USUAL, catalog=lambda: shipped_catalog, variables=(), **options):
        step = find_step(IMAGE, {**VARIABLES, "SLURMD_NODENAME": node, **dict(variables)})
        assert step is not None
        own = host or Host.load(folder / f"{node}.json")
        return select_for_task(step, Agreement(alike=alike, folder=str(folder)), own, catalog, **options)

    return call


STEP = find_step(IMAGE, VARIABLES)


@pytest.mark.parametrize(
    ("word", "site", "alike"),
    [
        (None, None, USUAL),
        ("same", None, None),
        (" same\n", None, None),
        (" ", None, USUAL),
        ("cuda, nccl ", None, "cuda, nccl"),
        (None, "same", None),
        ("same", "same", None),
    ],
)
def test_variable_and_site_say_what_is_agreed_on(word, site, alike):
    agreed = make_agreement(STEP, {VARIABLE: word or ""}, Site(gang=site), "/hosts")
    assert agreed == Agreement(alike=alike, folder="/hosts")


def test_off_needs_no_folder_and_anything_else_does():
    assert make_agreement(STEP, {VARIABLE: "off"}, Site(), None) is None
    with pytest.raises(UsageError, match="a step on 2 nodes needs the facts about all of them") as caught:
        make_agreement(STEP, {}, Site(), None)
    assert "set hosts in the site's file, or IMAGEMATRIX_GANG=off" in str(caught.value.remedy)


def test_users_override_the_site_only_if_they_may():
    variables = {VARIABLE: "off"}
    with pytest.raises(UsageError, match=r"IMAGEMATRIX_GANG off: .*users may not override"):
        make_agreement(STEP, variables, Site(file="f", gang="same"), "/hosts")
    site = Site(file="f", gang="same", users_may_override=frozenset({"gang"}))
    assert make_agreement(STEP, variables, site, "/hosts") is None


@pytest.mark.parametrize(("value", "valid"), [("same", True), ("cuda,nccl", True), ("Cuda nccl", False)])
def test_the_site_s_file_has_the_key(value, valid, tmp_path, monkeypatch):
    path = tmp_path / "site.toml"
    path.write_text(f'gang = "{value}"\n')
    monkeypatch.setattr("imagematrix.common.settings.FILE", str(path))
    if valid:
        assert read_site().gang == value
    else:
        with pytest.raises(UsageError, match=r"site.toml:1: gang: expected off, same or names"):
            read_site()


def test_each_task_gets_its_node_s_variant_of_the_same_decision(decide):
    assert decide("genoa").variant.march == "znver4"
    assert decide("sapphire").variant.march == "sapphirerapids"
    assert decide("genoa", alike=None, variables={"SLURM_STEP_ID": "1"}).variant.march == "x86-64-v3"


def test_a_step_on_several_nodes_keeps_to_variants(decide, shipped_catalog):
    variants = tuple(
        replace(variant, digest=f"sha256:{number:064x}")
        for number, variant in enumerate(shipped_catalog.variants)
    )
    warm = tuple(
        WarmImage(base=str(variant.digest), reference="t:v1-warm-a-b", digest=DIGEST, match=WarmMatch())
        for variant in variants
    )
    chosen = decide(catalog=lambda: replace(shipped_catalog, variants=variants, warm=warm))
    assert chosen.variant.march == "znver4"
    assert chosen.warm is None


def test_a_task_launches_with_the_gpus_that_it_was_given(decide, folder):
    host = Host.load(folder / "genoa.json")
    host = replace(host, gpus=host.gpus[3:5])
    assert decide(host=host).gpus == tuple(gpu.uuid for gpu in host.gpus)
    assert decide(host=host, gpus="device=4").gpus == (host.gpus[1].uuid,)
    assert decide(gpus="none").variant.gpu is False


def test_all_tasks_use_the_catalog_of_the_first(decide, folder, shipped_catalog):
    opened = []

    def catalog():
        opened.append(1)
        return shipped_catalog

    barrier = threading.Barrier(20)
    found = []

    def task():
        barrier.wait()
        found.append(decide(catalog=catalog).selected)

    threads = [threading.Thread(target=task) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20
    assert len(set(found)) == 1
    empty = replace(shipped_catalog, variants=())
    assert decide("sapphire", catalog=lambda: empty).variant  # what is published later changes nothing
    assert len([*(folder / "steps").iterdir()]) == 1
    with pytest.raises(NothingFitsAll):
        decide(catalog=lambda: empty, variables={"SLURM_STEP_ID": "1"})


def test_a_changed_node_is_told(decide, folder):
    host = Host.load(folder / "genoa.json")
    changed = replace(host, driver=replace(host.driver, version="580.65.06"))
    with pytest.raises(
        ProbeError, match=r"genoa is not what its entry .* driver 580.65.06 instead of 550.163.01"
    ):
        decide(host=changed)
    other = replace(host, gpus=(replace(host.gpus[0], name="NVIDIA\x1b A10"),))
    with pytest.raises(ProbeError, match="it has a GPU GPU 0") as caught:
        decide(host=other)
    assert "\x1b" not in str(caught.value)
    assert "node-config --save` on genoa" in str(caught.value.remedy)
    more = replace(host, cpu=replace(host.cpu, flags=host.cpu.flags | {"avx10"}))
    with pytest.raises(ProbeError, match="the CPU flags avx10"):
        decide(host=more)
    fewer = replace(host, cpu=replace(host.cpu, flags=host.cpu.flags - {"avx2"}))
    with pytest.raises(ProbeError, match=r"does not fit this host"):
        decide(host=fewer)


def test_a_node_without_an_entry_is_told(decide, folder):
    (folder / "sapphire.json").unlink()
    with pytest.raises(ProbeError, match="has no entry for sapphire"):
        decide()


def test_nodes_that_cannot_work_together_are_refused_on_each_of_them(decide, folder, profiles):
    (folder / "sapphire.json").write_bytes(profiles["skylake-v100"].read_bytes())
    told = set()
    for node in ("genoa", "sapphire"):
        with pytest.raises(NothingFitsAll) as caught:
            decide(node, alike=None)
        told.add(str(caught.value))
    assert len(told) == 1
