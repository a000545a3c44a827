"""The order of builds: cells with new stages come first."""

from hypothesis import given
from hypothesis import strategies as st

from imagematrix.build.executor.build import order_by_new_stages


def dockerfile(stages):
    return "".join(f"FROM base AS s{stage}\nRUN {stage}\n" for stage in stages) + "FROM s\n"


def test_cells_with_shared_stages_come_last():
    axes = [(cuda, march) for cuda in ("11", "12") for march in ("v2", "v3", "v4")]
    files = {f"{cuda}-{march}": dockerfile([cuda, march]) for cuda, march in axes}
    assert order_by_new_stages(files) == ["11-v2", "12-v3", "11-v4", "11-v3", "12-v2", "12-v4"]


@given(st.lists(st.frozensets(st.integers(0, 8), max_size=6), max_size=12))
def test_next_cell_has_the_most_new_stages(cells):
    names = [str(number) for number in range(len(cells))]
    result = order_by_new_stages(
        {name: dockerfile(sorted(own)) for name, own in zip(names, cells, strict=True)}
    )
    seen: set[object] = set()
    left = dict(zip(names, cells, strict=True))
    for name in result:
        most = max(len(own - seen) for own in left.values())
        assert name == next(one for one, own in left.items() if len(own - seen) == most)
        seen |= left.pop(name)
    assert not left
