"""The exact device code of an image: for every GPU, the answer is that of the single files."""

import itertools
from fnmatch import fnmatchcase

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from imagematrix.audit.binaries.device_code import DeviceCode, Fatbins
from imagematrix.audit.images import device_code_entries
from imagematrix.common.record import replace
from imagematrix.hardware.host.host import Gpu
from imagematrix.hardware.vendors import cuda, device_code, versions
from imagematrix.images.catalog.catalog import Code, FilePart, Ptx, UseGuard, Variant
from imagematrix.selection.rules import device_code as rule

TARGETS = [device_code.make_target(word) for word in device_code.list_capability_words()]
COMPUTES = [word for word in device_code.list_capability_words() if word[-1].isdigit()]
DRIVERS = (None, "450.80.02", "535.261.03", "550.163.01", "580.65.06")
CODES = st.builds(
    DeviceCode,
    cubins=st.frozensets(st.sampled_from(TARGETS), max_size=4),
    ptx=st.frozensets(
        st.tuples(st.sampled_from(TARGETS), st.sampled_from(["7.8", "8.4", "9.0"])), max_size=3
    ),
    scattered=st.booleans(),
)


UNLESS = [(), (("8.0", "8.9"),), (("7.5", "7.5"), ("10.0", None))]
GUARDS = st.none() | st.builds(
    UseGuard, path=st.just("p.py"), line=st.integers(1, 2), unless=st.sampled_from(UNLESS)
)


def variant(codes, guards=()):
    guards = guards or [None] * len(codes)
    listed = [
        device_code_entries.make_entry(f"f{number}", code, guard=guard)
        for number, (code, guard) in enumerate(zip(codes, guards, strict=True))
    ]
    return Variant(
        reference="t:x",
        digest=None,
        platform="linux/amd64",
        cuda="12.4",
        device_code=device_code_entries.join_entries(listed),
    )


def runs(code, compute, driver):
    """Whether a file has code for a GPU: the rule of one file, without any of the package's code for it."""
    newest = cuda.get_newest_ptx_isa(driver) if driver else None
    texts = [] if code.scattered or newest is None else code.ptx
    return any(device_code.can_run_cubin(one, compute) for one in code.cubins) or any(
        device_code.can_compile_ptx(target, compute)
        and versions.make_sort_key(isa) <= versions.make_sort_key(newest)
        for target, isa in texts
    )


@given(st.lists(CODES, min_size=1, max_size=6), st.sampled_from(DRIVERS))
def test_answer_for_a_gpu_is_that_of_all_files(codes, driver):
    whole = variant(codes)
    assert sum(one.files for one in whole.device_code) == len(codes)
    for compute in COMPUTES:
        gpu = Gpu(index=0, uuid="GPU-0", compute=compute)
        expected = all(runs(code, compute, driver) for code in codes)
        assert (rule.rate_code(whole, gpu, driver) is not None) == expected


@settings(max_examples=20, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.lists(CODES, min_size=17, max_size=24), st.sampled_from(DRIVERS))
def test_joining_too_many_entries_adds_no_gpu(codes, driver):
    whole = variant(codes)
    assert len(whole.device_code) <= device_code_entries.MOST
    assert sum(one.files for one in whole.device_code) == len(codes)
    for compute in COMPUTES:
        gpu = Gpu(index=0, uuid="GPU-0", compute=compute)
        if rule.rate_code(whole, gpu, driver) is not None:
            assert all(runs(code, compute, driver) for code in codes)


@given(CODES, st.sets(st.sampled_from(COMPUTES), min_size=1, max_size=3), st.sampled_from(DRIVERS))
def test_narrowed_code_runs_equally_well_on_its_gpus(code, computes, driver):
    own = device_code_entries.make_entry("f", code)
    narrow = device_code_entries.narrow_entry(own, computes)
    assert set(narrow.targets) <= set(own.targets)
    for compute in computes:
        gpu = Gpu(index=0, uuid="GPU-0", compute=compute)
        both = [
            rule.rate_code(replace(variant([]), device_code=(one,)), gpu, driver) for one in (own, narrow)
        ]
        assert both[0] == both[1]


def test_files_that_no_gpu_tells_apart_are_one_entry():
    one, two = DeviceCode(cubins=frozenset({"80", "86"})), DeviceCode(cubins=frozenset({"80"}))
    assert variant([one, one, two]).device_code == (
        Code(files=2, name="f0", cubins=("80", "86"), globs=("f0", "f1")),
        Code(files=1, name="f2", cubins=("80",)),
    )


def test_lowest_isa_of_a_target_counts():
    code = DeviceCode(ptx=frozenset({("80", "8.4"), ("80", "7.8"), ("90", "8.4")}))
    assert device_code_entries.make_entry("f", code).ptx == (
        Ptx(target="80", isa="7.8"),
        Ptx(target="90", isa="8.4"),
    )


def test_optional_entries_are_listed_last_and_never_decide():
    listed = [
        device_code_entries.make_entry(f"o{n}", DeviceCode(cubins=frozenset({t})), optional=True)
        for n, t in enumerate(TARGETS)
    ]
    listed.append(device_code_entries.make_entry("z", DeviceCode(cubins=frozenset({"80"}))))
    joined = device_code_entries.join_entries(listed)
    assert [one.optional for one in joined] == [False, *[True] * device_code_entries.MOST_OPTIONAL]
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
    assert device_code_entries.find_lacking(Code(files=1, name="c", cubins=("86",)), promise) == ("8.0",)
    assert device_code_entries.find_lacking(texts("8.5"), promise)[0] == "8.0"
    assert device_code_entries.find_lacking(texts("8.4"), promise) == ()


def divided(*parts):
    """Return device code with these parts: of each its number and the targets of its cubins."""
    listed = tuple(
        Fatbins(count=count, cubins=frozenset(cubins), ptx=frozenset()) for count, *cubins in parts
    )
    return DeviceCode(cubins=frozenset().union(*(part.cubins for part in listed)), parts=listed)


def test_parts_of_a_file_are_listed_where_gpus_tell_them_apart():
    linalg = device_code_entries.make_entry(
        "linalg", divided((32, "80", "86"), (1, "75", "80", "86"), (4, "86", "80"))
    )
    assert linalg.parts == (
        FilePart(count=36, cubins=("80", "86")),
        FilePart(count=1, cubins=("75", "80", "86")),
    )
    assert device_code_entries.make_entry("even", divided((3, "80", "86"), (2, "80", "86"))).parts == ()


def test_many_kinds_of_parts_are_joined_without_losing_any():
    pairs = itertools.combinations([target for target in TARGETS if target.isdigit()], 2)
    code = device_code_entries.make_entry("f", divided(*((1, *pair) for pair in itertools.islice(pairs, 60))))
    assert 1 < len(code.parts) <= device_code_entries.MOST_PARTS
    assert sum(part.count for part in code.parts) == 60


def test_thousands_of_kinds_of_code_are_joined_in_linear_time(monkeypatch):
    """Of these, no two imply each other, so comparing each with each would never end."""
    compared = []
    implies = device_code_entries._implies
    monkeypatch.setattr(device_code_entries, "MOST_COMPARED", 20)
    monkeypatch.setattr(
        device_code_entries, "_implies", lambda *verdicts: compared.append(1) or implies(*verdicts)
    )
    kinds = [{("80", f"1.{number}"), ("70", f"1.{600 - number}")} for number in range(300)]
    parts = tuple(Fatbins(count=1, cubins=frozenset(), ptx=frozenset(ptx)) for ptx in kinds)
    code = device_code_entries.make_entry("f", DeviceCode(ptx=frozenset().union(*kinds), parts=parts))
    assert sum(part.count for part in code.parts) == 300
    assert len(variant([DeviceCode(ptx=frozenset(ptx)) for ptx in kinds]).device_code) <= 16
    assert len(compared) <= 20 * 20 + 32 * 32


def test_code_is_judged_once_for_each_entry(monkeypatch):
    """Looking a verdict up takes longer than comparing it."""
    judged = []
    judge = device_code_entries._judge
    monkeypatch.setattr(device_code_entries, "_judge", lambda code: judged.append(1) or judge(code))
    kinds = [{("80", f"1.{number}"), ("70", f"1.{200 - number}")} for number in range(100)]
    parts = tuple(Fatbins(count=1, cubins=frozenset(), ptx=frozenset(ptx)) for ptx in kinds)
    device_code_entries.make_entry("f", DeviceCode(ptx=frozenset().union(*kinds), parts=parts))
    assert len(judged) <= 2 * 100


def test_files_with_different_parts_are_different_entries():
    whole, some = divided((2, "75", "80")), divided((1, "75", "80"), (1, "80"))
    assert [code.name for code in variant([whole, some, whole, some]).device_code] == ["f0", "f1"]


def test_whole_files_are_joined_before_those_with_parts():
    partial = [divided((1, target, "90"), (1, "90")) for target in TARGETS[:14]]
    whole = [DeviceCode(cubins=frozenset({target, "90"})) for target in TARGETS[:14]]
    kept = variant([*whole, *partial]).device_code
    assert len(kept) <= device_code_entries.MOST
    assert all(code.parts for code in kept if code.name != kept[0].name) or any(code.parts for code in kept)


def test_narrowed_parts_are_those_of_the_gpus_in_question():
    own = device_code_entries.make_entry("f", divided((2, "75", "80", "90"), (3, "80", "90")))
    assert device_code_entries.narrow_entry(own, ["9.0"]).parts == ()
    assert device_code_entries.narrow_entry(own, ["7.5"]).parts == (
        FilePart(count=3),
        FilePart(count=2, cubins=("75",)),
    )


@given(
    st.lists(st.tuples(CODES, GUARDS), min_size=1, max_size=4),
    st.sampled_from(COMPUTES),
    st.sampled_from(DRIVERS),
)
def test_guarded_files_decide_on_all_gpus_that_are_not_exempt(files, compute, driver):
    codes, guards = zip(*files, strict=True)
    own = variant(codes, guards)
    deciding = [code for code, guard in files if not (guard and guard.exempts(compute))]
    gpu = Gpu(index=0, uuid="GPU-0", compute=compute)
    expected = bool(deciding) and all(runs(code, compute, driver) for code in deciding)
    assert (rule.rate_code(own, gpu, driver) is not None) == expected
    common = device_code_entries.find_common_cubins(codes, guards)
    if any(device_code.can_run_cubin(cubin, compute) for cubin in common):
        assert all(runs(code, compute, None) for code in deciding)


NAMES = (
    "p/_a1_C.so",
    "p/_a2_C.so",
    "p/_b_C.so",
    "p/k[1].so",
    "p/sm90/x.so",
    "p/sm80/x.so",
    "q/_a_C.so",
    "/opt/a/x",
    "/opt/b/y",
)


@given(st.sets(st.sampled_from(NAMES), min_size=1))
def test_globs_match_all_of_some_names_and_no_others(own):
    others = {*NAMES} - own
    globs = device_code_entries.find_covering_globs(sorted(own), others)
    assert all(any(fnmatchcase(name, glob) for glob in globs) for name in own)
    assert not any(fnmatchcase(name, glob) for name in others for glob in globs)
    assert len(globs) <= len(own)


def test_few_globs_suffice():
    assert device_code_entries.find_covering_globs(["v/_fa2_C.so", "v/_fa3_C.so"], ["v/_C.so"]) == [
        "v/_fa*_C.so"
    ]
    assert device_code_entries.find_covering_globs(["v/_fa2_C.so", "w/_fa3_C.so"], []) == [
        "v/_fa2_C.so",
        "w/_fa3_C.so",
    ]
    names = ["v/a1.so", "v/a2.so", "v/b1.so", "v/b2.so"]
    assert device_code_entries.find_covering_globs(names, ["v/c1.so"]) == ["v/a*.so", "v/b*.so"]


def test_names_that_take_too_many_globs_have_none():
    """Each of these begins with the one before it, so each letter divides them again."""
    names = ["v/" + "a" * length for length in range(1, 1500)]
    assert device_code_entries.find_covering_globs(names, ["v/" + "a" * 1500 + "b"]) == []
    folders = [f"v{number}/a" for number in range(17)]
    assert device_code_entries.find_covering_globs(folders[:16], []) == sorted(folders[:16])
    assert device_code_entries.find_covering_globs(folders, []) == []


def test_entries_of_several_files_have_the_globs_of_all():
    codes = [DeviceCode(cubins=frozenset({target})) for target in ("80", "90a", "90a")]
    joined = device_code_entries.join_entries(
        device_code_entries.make_entry(name, code)
        for name, code in zip(("v/_C.so", "v/_f1.so", "v/_f2.so"), codes, strict=True)
    )
    assert [(code.files, code.globs) for code in joined] == [(1, ()), (2, ("v/_f*.so",))]
    many = [device_code_entries.make_entry(f"v/{n}{n % 7}.so", codes[n % 2]) for n in range(100)]
    assert [code.globs for code in device_code_entries.join_entries(many)] == [(), ()]
