"""The matrix that `init --from` writes: it serves every host that a cell can serve, with nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from choosing import Make
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from imagematrix.build.matrix.expand import expand_matrix
from imagematrix.build.matrix.feasibility import find_infeasibility
from imagematrix.build.matrix.load import parse_matrix
from imagematrix.build.matrix.matrix import Cell, Image
from imagematrix.build.matrix.promised_variants import promise_variant
from imagematrix.build.plan.plan import DropStatus, PlanContext, PlanStatus
from imagematrix.build.plan.planner import plan
from imagematrix.build.proposal import cells as module
from imagematrix.build.proposal.cells import propose_cells
from imagematrix.build.proposal.exclude_rules import propose_rules
from imagematrix.build.proposal.matrix_text import TEMPLATE, format_matrix
from imagematrix.cli.shared.host_filter import HostNeeds
from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.hardware.host.host import Accelerator, Cpu, Driver, Gpu, Host
from imagematrix.hardware.vendors import cuda, device_code, marches
from imagematrix.images.catalog.axis_conditions import match_values
from imagematrix.images.catalog.catalog import Catalog
from imagematrix.selection.fleet.hosts import load_hosts
from imagematrix.selection.selector import Selector

ROOT = Path(__file__).parents[4]
DRIVERS = ("390.157", "470.256.02", "535.261.03", "550.163.01", "570.195.03", "580.95.05", "99.1")
MARCHES = {
    "x86_64": ["x86-64", "x86-64-v3", "haswell", "znver4", "sapphirerapids"],
    "aarch64": ["armv8-a", "neoverse-v2"],
}
BASELINES = {"x86_64": "x86-64", "aarch64": "armv8-a"}


cpus = st.sampled_from([(arch, march) for arch, some in MARCHES.items() for march in some])
gpus = st.builds(
    Gpu,
    index=st.just(0),
    compute=st.sampled_from(
        ["3.5", "5.2", "7.0", "7.5", "8.0", "8.6", "8.7", "9.0", "10.0", "10.3", "12.1", None]
    ),
    name=st.sampled_from(["NVIDIA L40S", "Tesla\nT4 # x", None]),
    state=st.sampled_from(["ok"] * 5 + ["lost", "vgpu"]),
)


@st.composite
def hosts(draw):
    arch, march = draw(cpus)
    lacking = draw(
        st.sampled_from([frozenset[str]()] * 3 + [frozenset(["avx512f", "avx2"]), frozenset(["sse2", "fp"])])
    )
    have = draw(st.lists(gpus, max_size=2)) if draw(st.booleans()) else []
    return Host(
        arch=draw(st.sampled_from([arch] * 5 + ["riscv64"])),
        cpu=Cpu(
            vendor=draw(st.sampled_from(["AuthenticAMD", "GenuineIntel", None])),
            model=draw(st.sampled_from(["EPYC", "a: b # \x1b[1m", None])),
            flags=marches.get_required_flags(march, "gcc-14") - lacking,
            level=None,
        ),
        driver=Driver(version=draw(st.sampled_from(DRIVERS)), kind=None, source="test")
        if draw(st.integers(0, 4))
        else None,
        gpus=tuple(replace(gpu, index=place) for place, gpu in enumerate(have)),
        accelerators=draw(
            st.sampled_from([()] * 4 + [(Accelerator(kind="amd", where="0000:01:00.0", why="x"),)])
        ),
    )


fleets = st.dictionaries(st.text(min_size=1, max_size=3), hosts(), min_size=1, max_size=6)


def servable(host):
    """Whether any cell with the baseline's march, which all others contain, fits a host."""
    platform = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}.get(host.arch)
    if platform is None:
        return False
    image = Image(name="any", version="v1", template="")
    common = {"platform": platform, "march": BASELINES[host.arch]}
    points = [{**common, "cuda": "none"}]
    drivers = {host.driver.version} if host.driver and host.driver.version != "99.1" else set()
    points += [
        {**common, "cuda": release, "driver": version, "compute": compute}
        for release, row in cuda.load_releases().items()
        for compute in device_code.list_capability_words()
        for version in drivers | {"host"}
        if row.targets and compute[-1] not in "af"
    ]
    cells = [Cell(image=image, axes=point, properties={"compiler": "gcc-14"}) for point in points]
    catalog = Catalog(
        image="any",
        version="v1",
        variants=tuple(promise_variant(cell) for cell in cells if not find_infeasibility(cell)),
    )
    return bool(Selector(catalog).explain(host).fits)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the template that `init --from` writes, and a folder for each driver."""
    path = tmp_path_factory.mktemp("fleet")
    (path / "templates" / TEMPLATE).parent.mkdir(parents=True)
    shutil.copyfile(Path(module.__file__).parent / "Dockerfile.j2", path / "templates" / TEMPLATE)
    for name in ("macros.j2", "cuda_wheels.j2"):
        shutil.copyfile(ROOT / "templates" / name, path / "templates" / name)
    for version in DRIVERS:
        (path / "drivers" / version).mkdir(parents=True)
    return path


@pytest.fixture(scope="module")
def stub_drivers():
    """Let every folder contain the driver that its cell wants."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "imagematrix.build.plan.driver.read_driver_folder", lambda *_: SimpleNamespace(digest="sha256:1")
        )
        yield


@settings(
    max_examples=25, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow]
)
@given(fleets)
@pytest.mark.usefixtures("stub_drivers")
def test_written_matrix_serves_every_servable_host(folder, fleet):
    found = propose_cells(fleet)
    left = {name for some in found.unserved for name in some.hosts}
    assert left == {name for name, host in fleet.items() if not servable(host)}
    if not found.suited:
        return
    path = folder / "matrix.yaml"
    path.write_text(format_matrix(found, drivers="drivers/{version}"))
    matrix = parse_matrix(path.read_text(), path, ())
    needs = HostNeeds(fleet, None)
    made = plan(
        matrix,
        PlanContext(resolve=lambda _: f"sha256:{'0' * 64}"),
        find_skipped=needs.find_unneeded,
    )
    assert (needs.find_unserved_error() is not None) is bool(left)
    for name, host in fleet.items():
        needs = HostNeeds({name: host}, None)
        needs.find_unneeded(matrix, expand_matrix(matrix))
        assert (needs.find_unserved_error() is not None) is (name in left)
    assert {item.status for item in made.items} <= {
        PlanStatus.BUILD,
        DropStatus.EXCLUDED,
        DropStatus.INFEASIBLE,
    }
    assert made.with_status(PlanStatus.BUILD)
    # Nothing else is in it: each value and each rule is needed.
    assert sum(found.count_hosts("march", value) for value in found.axes["march"]) == found.served_count
    for axis, values in found.axes.items():
        assert all(found.count_hosts(axis, value) for value in values)


def test_each_value_has_a_reason_and_a_number_of_nodes(profiles):
    text = format_matrix(propose_cells(load_hosts(*profiles.values())))
    assert '    - "8.9"  # 3 nodes: NVIDIA L40S\n' in text
    assert "    - 550.163.01  # 8 nodes: they have this kernel module\n" in text
    assert "    - none    # 1 node: they have no GPU\n" in text
    assert "# No cell can serve " in text
    assert "/mixed: no device code in the image runs on GPU 1" in text


def test_names_of_hosts_and_parts_cannot_leave_their_comment():
    gpu = Make.gpu(name="L40S\nexclude: []\x1b[31m")
    text = format_matrix(propose_cells({"a\nb": Make.host(gpu), "c\nd": Make.host(Make.gpu(compute=None))}))
    assert "\nexclude: []" not in text
    assert "\x1b" not in text
    assert not any(line.startswith(("b", "d")) for line in text.splitlines())


def test_virtual_gpus_use_the_driver_of_the_node(folder):
    text = format_matrix(propose_cells({"node": Make.host(Make.gpu(state="vgpu"))}))
    assert "    - host  # 1 node: the node's own driver\n" in text
    assert "driver_from" not in text
    assert expand_matrix(parse_matrix(text, folder / "matrix.yaml", ())).cells


def test_releases_are_few_and_new():
    old = Make.host(Make.gpu(compute="3.5"), driver="470.256.02")
    new = Make.host(Make.gpu(compute="10.3"), driver="580.95.05")
    middle = Make.host(Make.gpu(compute="7.0"), driver="535.261.03")
    assert len(propose_cells({"old": old, "new": new, "middle": middle}).axes["cuda"]) == 2
    assert propose_cells({"middle": middle}).axes["cuda"] == ("12.9",)
    asked = propose_cells({"middle": middle, "new": new}, releases=["12.4"])
    assert asked.axes["cuda"] == ("12.4",)
    assert [(some.hosts, some.miss.why) for some in asked.unserved] == [
        (("new",), "CUDA 12.4 cannot target compute capability 10.3 (sm_103); 12.9 to 13.5 can")
    ]


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        (Make.host(Make.gpu(), driver="390.157"), "390.157"),
        (Make.host(Make.gpu(), driver=None), "no NVIDIA kernel module is loaded"),
        (Make.host(Make.gpu(), driver="99.1"), "99.1"),
        (Make.host(Make.gpu(compute=None)), "no CUDA release of the tables has code for its GPUs"),
        (Make.host(Make.gpu(), arch="riscv64"), "images are made for linux/amd64 and linux/arm64"),
        (Make.host(march="x86-64", without=("sse2",)), "no value of -march of gcc-14 suits its CPUs"),
        (Make.host(Make.gpu(state="lost")), "has fallen off the bus"),
    ],
)
def test_hosts_that_no_cell_serves_are_told_why(host, reason):
    (unserved,) = propose_cells({"node": host}).unserved
    whys = [rule.why for rule in unserved.miss.relevant] or [unserved.miss.why]
    assert reason in "; ".join(whys)


@pytest.mark.parametrize("release", ["12.44", "banana", "99.9"])
def test_unknown_releases_are_rejected(release):
    with pytest.raises(UsageError, match="unknown CUDA release"):
        propose_cells({"node": Make.host()}, releases=[release])


@pytest.mark.parametrize("drivers", ["", "http://example.com/{version}", "a;b", "one.run"])
def test_invalid_patterns_are_rejected(drivers):
    fleet = {"a": Make.host(Make.gpu()), "b": Make.host(Make.gpu(), driver="535.261.03")}
    with pytest.raises(UsageError, match="--drivers"):
        format_matrix(propose_cells(fleet), drivers=drivers)


points = st.fixed_dictionaries(
    {"a": st.sampled_from("12"), "b": st.sampled_from("123"), "c": st.sampled_from("1234")}
)


@given(st.lists(points, min_size=1, max_size=8))
def test_rules_leave_exactly_the_needed_cells(needed):
    axes = {axis: sorted({point[axis] for point in needed}) for axis in "abc"}
    every = [{"a": a, "b": b, "c": c} for a in axes["a"] for b in axes["b"] for c in axes["c"]]
    unneeded = [point for point in every if point not in needed]
    found = propose_rules(axes, unneeded, needed)
    left = every
    for rule in found:
        kept = [point for point in left if not rule.drops(point)]
        assert len(kept) < len(left)
        left = kept
    assert all(point in needed for point in left)
    assert all(point in left for point in needed)


def test_expanded_text_has_exactly_the_needed_cells(profiles, folder):
    found = propose_cells(load_hosts(*profiles.values()))
    path = folder / "matrix.yaml"
    cells = expand_matrix(parse_matrix(format_matrix(found), path, ())).cells
    feasible = [dict(cell.axes) for cell in cells if not find_infeasibility(cell)]
    assert sorted(feasible, key=str) == sorted(found.points, key=str)
    assert match_values(["8.*"], found.axes["compute"]) == {"8.0", "8.6", "8.9"}
