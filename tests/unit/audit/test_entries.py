"""The exact device code of an image: for every GPU, the answer is that of the single files."""

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from imagematrix.audit import entries
from imagematrix.audit.device_code import DeviceCode
from imagematrix.catalog.catalog import Code, Ptx, Variant
from imagematrix.facts import cuda, device_code, versions
from imagematrix.node.host import Gpu
from imagematrix.record import replace
from imagematrix.selection.rules import device_code as rule

TARGETS = [device_code.target(word) for word in device_code.known()]
COMPUTES = [word for word in device_code.known() if word[-1].isdigit()]
DRIVERS = (None, "450.80.02", "535.261.03", "550.163.01", "580.65.06")
CODES = st.builds(
    DeviceCode,
    cubins=st.frozensets(st.sampled_from(TARGETS), max_size=4),
    ptx=st.frozensets(
        st.tuples(st.sampled_from(TARGETS), st.sampled_from(["7.8", "8.4", "9.0"])), max_size=3
    ),
    scattered=st.booleans(),
)


def variant(codes):
    listed = [entries.entry(f"f{number}", code) for number, code in enumerate(codes)]
    return Variant(
        reference="t:x",
        digest=None,
        platform="linux/amd64",
        cuda="12.4",
        device_code=entries.joined(listed),
    )


def runs(code, compute, driver):
    """Whether a file has code for a GPU: the rule of one file, without any of the package's code for it."""
    newest = cuda.ptx_isa(driver) if driver else None
    texts = [] if code.scattered or newest is None else code.ptx
    return any(device_code.cubin_runs(one, compute) for one in code.cubins) or any(
        device_code.ptx_runs(target, compute) and versions.order(isa) <= versions.order(newest)
        for target, isa in texts
    )


@given(st.lists(CODES, min_size=1, max_size=6), st.sampled_from(DRIVERS))
def test_answer_for_a_gpu_is_that_of_all_files(codes, driver):
    whole = variant(codes)
    assert sum(one.files for one in whole.device_code) == len(codes)
    for compute in COMPUTES:
        gpu = Gpu(index=0, uuid="GPU-0", compute=compute)
        expected = all(runs(code, compute, driver) for code in codes)
        assert (rule.code(whole, gpu, driver) is not None) == expected


@settings(max_examples=20, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.lists(CODES, min_size=17, max_size=24), st.sampled_from(DRIVERS))
def test_joining_too_many_entries_adds_no_gpu(codes, driver):
    whole = variant(codes)
    assert len(whole.device_code) <= entries.MOST
    assert sum(one.files for one in whole.device_code) == len(codes)
    for compute in COMPUTES:
        gpu = Gpu(index=0, uuid="GPU-0", compute=compute)
        if rule.code(whole, gpu, driver) is not None:
            assert all(runs(code, compute, driver) for code in codes)


@given(CODES, st.sets(st.sampled_from(COMPUTES), min_size=1, max_size=3), st.sampled_from(DRIVERS))
def test_narrowed_code_runs_equally_well_on_its_gpus(code, computes, driver):
    own = entries.entry("f", code)
    narrow = entries.narrowed(own, computes)
    assert set(narrow.targets) <= set(own.targets)
    for compute in computes:
        gpu = Gpu(index=0, uuid="GPU-0", compute=compute)
        both = [rule.code(replace(variant([]), device_code=(one,)), gpu, driver) for one in (own, narrow)]
        assert both[0] == both[1]


def test_files_that_no_gpu_tells_apart_are_one_entry():
    one, two = DeviceCode(cubins=frozenset({"80", "86"})), DeviceCode(cubins=frozenset({"80"}))
    assert variant([one, one, two]).device_code == (
        Code(files=2, name="f0", cubins=("80", "86")),
        Code(files=1, name="f2", cubins=("80",)),
    )


def test_lowest_isa_of_a_target_counts():
    code = DeviceCode(ptx=frozenset({("80", "8.4"), ("80", "7.8"), ("90", "8.4")}))
    assert entries.entry("f", code).ptx == (Ptx(target="80", isa="7.8"), Ptx(target="90", isa="8.4"))


def test_optional_entries_are_listed_last_and_never_decide():
    listed = [
        entries.entry(f"o{n}", DeviceCode(cubins=frozenset({t})), optional=True)
        for n, t in enumerate(TARGETS)
    ]
    listed.append(entries.entry("z", DeviceCode(cubins=frozenset({"80"}))))
    joined = entries.joined(listed)
    assert [one.optional for one in joined] == [False, *[True] * entries.MOST_OPTIONAL]
    assert replace(variant([]), device_code=joined).code == (Code(files=1, name="z", cubins=("80",)),)


def test_entries_that_others_imply_are_joined_first():
    """All 16 pairs decide; the one with all of their code does not."""
    pairs = [DeviceCode(cubins=frozenset(TARGETS) - {target}) for target in TARGETS[:16]]
    anything = DeviceCode(cubins=frozenset(TARGETS))
    exact = variant([*pairs, anything]).device_code
    assert len(exact) <= 16


def test_lacking_capabilities_are_those_that_the_promise_serves():
    def texts(isa):
        return Code(files=1, name="b", ptx=(Ptx(target="80", isa=isa),))

    promise = [Code(files=1, name="a", cubins=("80",)), texts("8.4")]
    assert entries.lacking(Code(files=1, name="c", cubins=("86",)), promise) == ("8.0",)
    assert entries.lacking(texts("8.5"), promise)[0] == "8.0"
    assert entries.lacking(texts("8.4"), promise) == ()
