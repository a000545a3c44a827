"""`run` starts what `select` answers, if all GPUs are free."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from strategies import COMPUTES, TARGETS, allowed, catalogs, hosts

from imagematrix.common.record import replace
from imagematrix.errors import ImagematrixError
from imagematrix.hardware.host.host import Cpu, Driver, Gpu, Host
from imagematrix.images.catalog.catalog import Catalog, UserModeDriver, Variant
from imagematrix.launcher.docker.options import parse_run_args
from imagematrix.launcher.docker.request import make_request
from imagematrix.selection.selector import select

WANTED = [None, "all", "none", "1", "2", "3", "1,compute>=8.0", "2,name=L40S", "device=0", "0,1"]
# Mixed nodes that work, and images for some of their GPUs: most choices of GPUs differ in what fits them.
mixed = st.lists(st.sampled_from(COMPUTES), min_size=2, max_size=5).map(
    lambda some: Host(
        arch="x86_64",
        cpu=Cpu(vendor=None, model=None, flags=frozenset(), level=None),
        driver=Driver(version="550.163.01", kind=None, source="test"),
        gpus=tuple(
            Gpu(index=index, uuid=f"GPU-{index}", name="NVIDIA L40S", compute=compute)
            for index, compute in enumerate(some)
        ),
    )
)
codes = st.frozensets(st.sampled_from(TARGETS), min_size=1, max_size=4)
fitting = st.frozensets(codes, min_size=1, max_size=5).map(
    lambda some: Catalog(
        image="t",
        version="v1",
        variants=tuple(
            Variant(
                reference=f"t:v1-{'-'.join(sorted(code))}",
                digest=None,
                platform="linux/amd64",
                cuda="12.4",
                cubins=tuple(sorted(code)),
                driver=UserModeDriver(mode="exact", version="550.163.01"),
            )
            for code in some
        ),
    )
)


def answer(ask):
    """Return the selected image and the GPUs, or the error."""
    try:
        selection = ask()
    except ImagematrixError as error:
        return type(error), str(error), error.remedy
    return selection.selected, selection.gpus


def agree(host, catalog, wanted, *options):
    host = replace(host, gpus=tuple(replace(gpu, minor=gpu.index) for gpu in host.gpus))
    args = parse_run_args(["--dry-run", "--host=FILE", *options, "IMAGE"])
    started = answer(lambda: make_request(args, host, catalog, wanted, None).plan_on_any()[0])
    assert started == answer(lambda: select(host, catalog, gpus=wanted, allow_cpu="--allow-cpu" in options))


@given(hosts, catalogs, allowed, st.sampled_from(WANTED))
def test_run_and_select_are_one_answer(host, catalog, allow_cpu, wanted):
    agree(host, catalog, wanted, *["--allow-cpu"] * allow_cpu)


@given(mixed, fitting, st.sampled_from(["1", "2", "1,compute>=8.0"]))
def test_run_and_select_are_one_answer_on_mixed_nodes(host, catalog, wanted):
    agree(host, catalog, wanted)
