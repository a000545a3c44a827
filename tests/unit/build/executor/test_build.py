"""Carrying out a plan: failures do not affect other cells; contradictory images are not stored."""

import contextlib
import errno
import itertools
import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compiling import assembled, compiled
from matrices import add_axis, add_option

from imagematrix.audit.images import layer
from imagematrix.build.executor.logs import get_log_path, load_dockerfile
from imagematrix.build.executor.result import combine_failures, complete_results, make_build_document
from imagematrix.build.plan.plan import PlanStatus
from imagematrix.errors import AuditError, BuildError, EngineError, TagMovedError, UsageError
from imagematrix.images.oci.compression import get_libzstd_version
from imagematrix.images.oci.layout import MissingBlobError

CPU = "cuda=none"
TWO = "cuda=12.4,compute=8.9,march=znver4"  # two drivers
CUBIN = bytearray((Path(__file__).parents[2] / "audit" / "data" / "80.cubin").read_bytes())
CUBIN[48] = CUBIN[50] = 89  # the targets in the flags of its header
CUBIN90 = (Path(__file__).parents[2] / "audit" / "data" / "90a.cubin").read_bytes()
DRIVER = ("usr/lib/libcuda.so.550.163.01", b"")
GOOD = (DRIVER, ("opt/k.cubin", bytes(CUBIN)))
CLAIM = ("version: v1", "version: v1\n    device_code: claim")


class Recorder:
    """A Reporter that records its calls."""

    def __init__(self):
        self.notes = []

    def on_start(self, item):
        self.notes.append(("started", item.cell.id))

    def on_step(self, item, text):
        self.notes.append((text, item.cell.id))

    def on_output(self, item, text):
        pass

    def on_finish(self, result):
        self.notes.append((result.status, result.item.cell.id))


@pytest.fixture
def logs(tmp_path_factory):
    return tmp_path_factory.mktemp("project") / ".imagematrix" / "logs"


@pytest.fixture
def carry_out(carry_out, logs):
    """Call it with a plan to get the results of its cells and the calls of the reporter."""

    def call(plan, *, reporter=None, **options):
        reporter = reporter or Recorder()
        return carry_out(plan, logs=logs, reporter=reporter, **options), reporter.notes

    return call


@pytest.fixture
def interrupted(carry_out):
    """Call it with a plan and a reporter to carry it out until Ctrl-C."""

    def call(plan, reporter, **options):
        with pytest.raises(KeyboardInterrupt):
            carry_out(plan, reporter=reporter, **options)

    return call


def statuses(results):
    return {result.item.cell.id: result.status for result in results}


def test_cells_with_shared_stages_are_built_last(planned, carry_out):
    plan = planned(only="march=znver4")
    results, notes = carry_out(plan)
    assert [cell for what, cell in notes if what == "started"] == [
        "cpu-znver4",
        "cuda12.4-sm70-drv535.261.03-znver4",
        "cuda12.4-sm89-drv535.261.03-znver4",
        "cuda12.4-sm70-drv550.163.01-znver4",
        "cuda12.4-sm89-drv550.163.01-znver4",
    ]
    assert [result.item for result in results] == list(plan.with_status("build")), (
        "in the order of the matrix"
    )


def test_every_cell_is_built_stored_and_reported(planned, carry_out, backend, logs, conforms):
    plan = planned(only=CPU)
    results, notes = carry_out(plan)
    assert statuses(results) == {"cpu-x86-64-v3": "built", "cpu-znver4": "built"}
    assert backend.called("store") == [item.reference for item in plan.items]
    assert notes[:3] == [
        ("started", "cpu-x86-64-v3"),
        ("1/1 RUN true", "cpu-x86-64-v3"),
        ("built", "cpu-x86-64-v3"),
    ]
    assert (logs / "training" / "v1-cpu-znver4.log").read_text() == "making cpu-znver4\n"
    assert (logs.parent / ".gitignore").read_text() == "*\n"
    assert combine_failures(results) is None
    document = conforms(make_build_document(plan, results))
    assert [(cell["status"], cell["reproducible"], cell["error"]) for cell in document["cells"]] == [
        ("built", False, None)
    ] * 2


def test_report_lists_every_cell_of_the_plan(planned, carry_out, backend, conforms):
    carry_out(planned(only="march=znver4"))
    backend.errors["cpu-x86-64-v3"] = BuildError("no")
    plan = planned()
    document = conforms(make_build_document(plan, carry_out(plan)[0]))
    assert len(document["cells"]) == len(plan.items)
    assert {cell["status"] for cell in document["cells"]} == {
        *("built", "failed", "up-to-date", "excluded", "infeasible"),
    }
    assert document["cells"][0]["error"] == "no"
    assert document["cells"][0]["digest"] is None
    assert [cell["stage"] for cell in document["cells"] if "stage" in cell] == ["build"]


@pytest.mark.parametrize(("stage", "method"), [("build", "make"), ("store", "store")])
def test_report_names_the_stage_that_failed(planned, carry_out, backend, conforms, tar, stage, method):
    backend.layers = [tar(("a", b"1"))]

    def fail(*_):
        raise BuildError("no")

    setattr(backend, method, fail)
    plan = planned(only="march=znver4,cuda=none")
    document = conforms(make_build_document(plan, carry_out(plan)[0]))
    assert [cell["stage"] for cell in document["cells"] if "stage" in cell] == [stage]


def test_report_names_an_audit_that_failed(planned, carry_out, backend, conforms, tar):
    backend.layers = [tar(*GOOD)]
    plan = planned(only=TWO)
    document = conforms(make_build_document(plan, carry_out(plan)[0]))
    assert [cell["stage"] for cell in document["cells"] if "stage" in cell] == ["audit"]


def test_report_names_no_stage_of_a_cell_that_was_not_planned_well(planned, carry_out, backend, conforms):
    backend.missing = {"debian:trixie"}
    plan = planned(only=CPU)
    document = conforms(make_build_document(plan, carry_out(plan)[0]))
    assert {cell["status"] for cell in document["cells"]} >= {"failed"}
    assert not [cell for cell in document["cells"] if "stage" in cell]


def test_empty_plan_calls_no_backend(planned, carry_out, backend, logs):
    plan = planned(("znver4]", "znver5]"), only="cuda=11.8,march=znver5")
    assert carry_out(plan) == ([], [])
    assert not backend.calls
    assert not logs.exists()


def test_failed_cell_does_not_affect_others(planned, carry_out, backend):
    backend.errors["cpu-x86-64-v3"] = BuildError("the compiler said no")
    results, _ = carry_out(planned(only=CPU))
    assert statuses(results) == {"cpu-x86-64-v3": "failed", "cpu-znver4": "built"}
    assert len(backend.images) == 1
    error = combine_failures(results)
    assert (type(error), str(error)) == (BuildError, "1 of 2 builds failed: cpu-x86-64-v3")


def test_dockerfile_beside_a_log_is_that_of_the_stored_image(planned, carry_out, backend, logs):
    """The plan compares a cell with it, so a failed build leaves the earlier one."""
    development = ("version: v1", "version: v1\n    development: true")
    first = planned(development, only="cuda=none,march=znver4")
    carry_out(first)
    log = get_log_path(logs, "training", "v1", "cpu-znver4")
    assert load_dockerfile(log) == first.items[0].dockerfile
    backend.errors["cpu-znver4"] = BuildError("no")
    second = planned(development, only="cuda=none,march=znver4", template="FROM {{ base }}\n")
    carry_out(second)
    assert load_dockerfile(log) == first.items[0].dockerfile
    backend.errors.clear()
    carry_out(second)
    assert load_dockerfile(log) == second.items[0].dockerfile != first.items[0].dockerfile


@pytest.mark.parametrize(
    "error", [ValueError("surrogates not allowed"), RecursionError("too deep"), MemoryError(), KeyError("x")]
)
def test_any_exception_is_the_result_of_its_cell(planned, carry_out, backend, logs, conforms, error):
    backend.errors["cpu-x86-64-v3"] = error
    plan = planned(only=CPU)
    results, notes = carry_out(plan)
    assert statuses(results) == {"cpu-x86-64-v3": "failed", "cpu-znver4": "built"}
    assert ("failed", "cpu-x86-64-v3") in notes
    conforms(make_build_document(plan, results))
    assert type(error).__name__ in str(results[0].error)
    assert results[0].log == logs / "training" / "v1-cpu-x86-64-v3.log"
    result = results[0].log.read_text()
    assert result.startswith("making cpu-x86-64-v3\nTraceback (most recent call last):\n")
    whole = combine_failures(results)
    assert (str(whole), whole.exit_code) == ("1 of 2 builds failed: cpu-x86-64-v3", 1)


def test_os_error_names_the_file_and_a_remedy(planned, carry_out, backend):
    backend.errors["cpu-x86-64-v3"] = OSError(errno.ENOSPC, "No space left on device", "/scratch")
    backend.errors["cpu-znver4"] = OSError("something else")
    results, _ = carry_out(planned(only=CPU))
    first, second = (result.error for result in results)
    assert str(first) == "/scratch: No space left on device"
    assert "TMPDIR" in first.remedy
    assert (str(second), second.remedy) == ("something else", None)
    assert combine_failures(results).exit_code == 6


@pytest.mark.usefixtures("ctrl_c")
def test_slow_push_does_not_delay_an_interrupt(planned, backend, interrupted, monkeypatch):
    """A push cannot be stopped; the results of the other cells are reported nevertheless."""
    monkeypatch.setattr("imagematrix.build.executor.build.GRACE", 0.1)
    pushing, pushed = threading.Event(), threading.Event()

    class Impatient(Recorder):
        def __init__(self):
            super().__init__()
            self.results = []

        def on_finish(self, result):
            self.results.append(result)

    def store(*_):
        pushing.set()
        assert pushed.wait(10)
        raise BuildError("too late")

    def interrupt():
        assert pushing.wait(10)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    backend.store = store
    threading.Thread(target=interrupt).start()
    plan, reporter = planned(only=CPU), Impatient()
    interrupted(plan, reporter)
    results = complete_results(plan.items, reporter.results)
    assert [result.status for result in results] == ["stopped", "stopped"]
    pushed.set()


def test_unknown_march_fails_only_its_own_cells(planned, carry_out, backend):
    del backend.macros["-march=znver4"]
    results, _ = carry_out(planned(only=CPU))
    assert statuses(results) == {"cpu-x86-64-v3": "built", "cpu-znver4": "failed"}
    assert "does not support -march=znver4" in str(results[1].error)


def test_fail_fast_stops_the_remaining_cells(planned, carry_out, backend):
    plan = planned()
    first = plan.with_status("build")[0].cell.id
    backend.errors[first] = BuildError("no")
    results, notes = carry_out(plan, fail_fast=True)
    assert statuses(results)[first] == "failed"
    assert len(results) == 12
    assert [status for status in statuses(results).values() if status == "stopped"]
    assert ("failed", first) in notes
    assert ("stop",) in backend.calls
    assert "1 of 12 builds failed" in str(combine_failures(results))


def test_lost_engine_stops_the_remaining_cells(planned, carry_out, backend):
    plan = planned()
    gone = EngineError("no engine")
    backend.errors[plan.with_status("build")[0].cell.id] = gone
    results, _ = carry_out(plan)
    assert "stopped" in statuses(results).values()
    assert combine_failures(results) is gone


def test_error_lists_at_most_five_failed_cells(planned, carry_out, backend):
    plan = planned()
    for item in plan.with_status("build")[:6]:
        backend.errors[item.cell.id] = BuildError("no")
    error = combine_failures(carry_out(plan)[0])
    assert str(error).startswith("6 of 12 builds failed: cpu-x86-64-v3, cpu-znver4, ")
    assert str(error).endswith(", …")
    assert str(error).count(", ") == 5


def test_results_are_in_plan_order(planned, carry_out):
    plan = planned()
    results, _ = carry_out(plan, jobs=4)
    assert [result.item for result in results] == list(plan.with_status("build"))


def test_changed_inputs_of_a_version_are_refused(planned, carry_out, backend):
    old = planned()
    carry_out(old)
    backend.calls.clear()
    with pytest.raises(TagMovedError) as caught:
        carry_out(planned(template="FROM {{ base }}\n"))
    assert caught.value.exit_code == 7
    assert {words[0] for words in backend.calls} == {"resolve", "present"}
    lines = str(caught.value).splitlines()
    assert lines[0] == "a version never changes, and these cells would change:"
    assert lines[1] == "  cpu-x86-64-v3: context, dockerfile changed"
    assert lines[2] == f"    existing  {old.items[0].reference}"
    assert lines[3].startswith("    new       training:v1-cpu-x86-64-v3-")
    assert lines[-1] == "  and 7 more"
    assert "raise the version" in caught.value.remedy


def test_development_version_replaces_its_image(planned, carry_out, backend):
    development = ("version: v1", "version: v1\n    development: true")
    carry_out(planned(development, only=CPU))
    old = list(backend.images)
    backend.errors["cpu-znver4"] = BuildError("no")
    plan = planned(development, only=CPU, template="FROM {{ base }}\n")
    carry_out(plan)
    assert list(backend.images) == [old[1], plan.items[0].reference]  # the image of the failed cell is kept


def test_image_with_a_layout_is_audited_and_reproducible(planned, carry_out, backend, tar):
    backend.layers = [tar(*GOOD)]
    results, _ = carry_out(planned(only=f"{TWO},driver=550.163.01"))
    assert [(result.status, result.reproducible) for result in results] == [("built", True)]


BUDGET = add_option("budget: 1MB")


def test_image_above_its_size_budget_is_not_stored(planned, carry_out, backend, tar):
    backend.layers = [tar(("a", bytes(700_000))), tar(("b", bytes(400_000)))]
    plan = planned(BUDGET, only=CPU)
    results, _ = carry_out(plan)
    assert set(statuses(results).values()) == {"failed"}
    error = combine_failures(results)
    assert error.exit_code == 6
    text = str(results[0].error)
    assert text.startswith("the image has 1.12 MB (compressed), more than its budget of 1.00 MB; largest")
    assert text.index("706.56 kB sha256:") < text.index("409.60 kB sha256:")
    assert not backend.images
    without = planned(only=CPU).items[0].identity
    assert plan.items[0].identity.find_changed_components(without.components) == (
        "context",
    )  # the matrix is in the context


def test_image_within_its_size_budget_is_built(planned, carry_out, backend, tar):
    backend.layers = [tar(("a", bytes(1000)))]
    assert set(statuses(carry_out(planned(BUDGET, only=CPU))[0]).values()) == {"built"}


def test_classic_store_compares_uncompressed_size_with_the_budget(planned, carry_out):
    (result, *_), _ = carry_out(planned(BUDGET, only=CPU))
    assert str(result.error).endswith(
        "3.00 GB (uncompressed, as the classic image store has no compressed layers), "
        "more than its budget of 1.00 MB; largest layers: 3.00 GB RUN make"
    )


def facts(backend):
    return [json.loads(own["io.imagematrix.variant"]).get("facts") for own in backend.images.values()]


def test_labels_list_facts_proven_by_bytes(planned, carry_out, backend, tar):
    plan = planned(only=f"{TWO},driver=550.163.01")
    backend.layers = [tar(*GOOD)]
    carry_out(plan)
    assert facts(backend) == [{"cubins": "bytes", "driver": "bytes"}]


def test_image_for_gpus_without_device_code_is_not_stored(planned, carry_out, backend, tar):
    backend.layers = [tar(DRIVER)]
    results, _ = carry_out(planned(only=f"{TWO},driver=550.163.01"))
    assert [str(result.error) for result in results] == [
        "the labels promise cubins for 89, but there is none"
    ]
    assert "device_code: claim" in results[0].error.remedy
    assert combine_failures(results).exit_code == 9
    assert not backend.images


def test_device_code_compiled_at_run_time_is_a_claim_of_the_matrix(planned, carry_out, backend, tar):
    backend.layers = [tar(DRIVER)]
    plan = planned(CLAIM, only=f"{TWO},driver=550.163.01")
    results, _ = carry_out(plan)
    assert facts(backend) == [{"cubins": "claim", "driver": "bytes"}]
    assert [result.status for result in results] == ["built"]
    assert len(backend.called("make")) == 1
    without = planned(only=f"{TWO},driver=550.163.01").items[0].identity
    assert plan.items[0].identity.find_changed_components(without.components) == ("context", "device code")
    for claimed, plain in zip(planned(CLAIM, only=CPU).items, planned(only=CPU).items, strict=True):
        assert claimed.identity.find_changed_components(plain.identity.components) == ("context",)


OPTIONAL = ("version: v1", 'version: v1\n    optional_device_code: ["/opt/mla/*"]')


def test_optional_files_of_the_matrix_may_lack_code(planned, carry_out, backend, tar):
    only = f"{TWO},driver=550.163.01"
    backend.layers = [tar(*GOOD, ("opt/mla/90a.cubin", CUBIN90))]
    results, _ = carry_out(planned(only=only))
    assert "/opt/mla/90a.cubin has 90a" in str(results[0].error)
    plan = planned(OPTIONAL, only=only)
    results, _ = carry_out(plan)
    assert [result.error for result in results] == [None]
    (own,) = backend.images.values()
    assert json.loads(own["io.imagematrix.optional"]) == ["/opt/mla/*"]
    listed = json.loads(own["io.imagematrix.variant"])["device_code"]
    assert [(one["name"], one["cubins"], one.get("optional")) for one in listed] == [
        ("/opt/k.cubin", ["89"], None),
        ("/opt/mla/90a.cubin", ["90a"], True),
    ]
    changed = plan.items[0].identity.find_changed_components(planned(only=only).items[0].identity.components)
    assert changed == ("context", "optional device code")


def test_optional_files_that_are_not_there_are_an_error(planned, carry_out, backend, tar):
    backend.layers = [tar(*GOOD)]
    results, _ = carry_out(planned(OPTIONAL, only=f"{TWO},driver=550.163.01"))
    assert "'/opt/mla/*' matches no file with any" in str(results[0].error)
    assert not backend.images


def test_claimed_device_code_that_is_seen_is_proven(planned, carry_out, backend, tar):
    backend.layers = [tar(*GOOD)]
    carry_out(planned(CLAIM, only=f"{TWO},driver=550.163.01"))
    assert facts(backend) == [{"cubins": "bytes", "driver": "bytes"}]
    (order,) = backend.orders
    assert not order.labels, "they are written once, after the audit"


def test_without_a_layout_only_claims_are_facts(planned, carry_out, backend):
    carry_out(planned(only=f"{TWO},driver=550.163.01"))
    assert facts(backend) == [None]
    (order,) = backend.orders
    assert order.labels == backend.images[order.reference], "its only build gets them"
    carry_out(planned(CLAIM, only=f"{TWO},driver=535.261.03"))
    assert facts(backend) == [None, {"cubins": "claim"}]


def test_image_that_contradicts_its_labels_is_not_stored(planned, carry_out, backend, tar):
    backend.layers = [tar(*GOOD)]
    plan = planned(only=TWO)
    results, _ = carry_out(plan)
    assert [result.status for result in results] == ["failed", "built"]
    assert backend.called("store") == [plan.items[1].reference]
    error = combine_failures(results)
    assert isinstance(error, AuditError)
    assert error.exit_code == 9
    assert "the labels promise the user-mode driver 535.261.03, but" in str(results[0].error)
    assert "libcuda.so.550.163.01" in str(results[0].error)


RUNTIME = ("-shared", "-fPIC", "-Wl,-soname,libcudart.so.13")
STRICT = ("version: v1", "version: v1\n    audit: {march: strict}")


@pytest.fixture
def unmarched(tmp_path):
    """A program for any CPU."""
    return compiled(tmp_path / "tool", "int main(void) { return 0; }").read_bytes()


def test_march_without_effect_is_a_warning(planned, carry_out, backend, tar, unmarched):
    backend.layers = [tar(("opt/tool", unmarched))]
    plan = planned(only=f"{CPU},march=znver4")
    results, _ = carry_out(plan)
    effect = "-march=znver4 shows no effect: nothing in /opt/tool is beyond the baseline"
    warnings = (f"{effect}; pass {{{{ cflags }}}} of the template to the compiler",)
    assert [(result.status, result.warnings) for result in results] == [("built", warnings)]
    assert json.dumps(list(warnings)) in json.dumps(make_build_document(plan, results))


def test_march_without_effect_is_an_error_in_strict_mode(planned, carry_out, backend, tar, unmarched):
    backend.layers = [tar(("opt/tool", unmarched))]
    plan = planned(STRICT, only=f"{CPU},march=znver4")
    error = combine_failures(carry_out(plan)[0])
    assert (type(error), error.exit_code, backend.called("store")) == (AuditError, 9, [])
    lenient = planned(only=f"{CPU},march=znver4")
    parts = [dict(one.items[0].identity.components) for one in (plan, lenient)]
    assert parts[0].pop("context") != parts[1].pop("context")  # the matrix is in the context of this project
    assert parts[0] == parts[1]


def test_image_whose_code_signs_is_labelled_as_one(planned, carry_out, backend, tar, tmp_path):
    """An option of the compiler makes it sign, whatever the march needs."""
    signing = assembled(tmp_path / "it.so", exported=(0xD65F0BFF,)).read_bytes()  # retaa
    backend.layers = [tar(("opt/it.so", signing))]
    arm = "#define __aarch64__ 1\n#define __ARM_FEATURE_PAUTH 1\n"
    backend.export = lambda *_: {"cc": arm, "cc-march=armv8.3-a": arm}
    march = "march: [x86-64-v3, znver4]", "march: [armv8.3-a]"
    results, _ = carry_out(planned(add_axis("platform: [linux/arm64]"), march, only="cuda=none"))
    assert [(result.status, result.error) for result in results] == [("built", None)]
    (own,) = backend.images.values()
    assert json.loads(own["io.imagematrix.variant"])["signed_returns"] is True


def test_newer_runtime_is_a_warning_even_in_strict_mode(planned, carry_out, backend, tar, tmp_path):
    library = compiled(tmp_path / "it", "int it(void) { return 1; }", *RUNTIME).read_bytes()
    backend.layers = [tar(*GOOD), tar(("usr/lib/libcudart.so.13.0.48", library))]
    results, _ = carry_out(planned(STRICT, only=f"{TWO},driver=550.163.01"))
    ((status, (warning,)),) = [(result.status, result.warnings) for result in results]
    assert status == "built"
    assert "needs driver 580.65.06 or newer, and the image has driver 550.163.01" in warning


@pytest.mark.parametrize(
    ("errors", "kind", "code"),
    [
        ([TagMovedError("moved"), TagMovedError("moved")], TagMovedError, 7),
        ([AuditError("no"), AuditError("no")], AuditError, 9),
        ([AuditError("no"), BuildError("no")], BuildError, 6),
        ([TagMovedError("moved"), BuildError("no")], BuildError, 6),
        ([TagMovedError("moved"), EngineError("gone")], EngineError, 8),
        ([UsageError("what?"), UsageError("what?")], BuildError, 6),
    ],
)
def test_common_error_type_of_failures_decides_the_exit_code(planned, carry_out, backend, errors, kind, code):
    backend.errors = dict(zip(("cpu-x86-64-v3", "cpu-znver4"), errors, strict=True))
    error = combine_failures(carry_out(planned(only=CPU))[0])
    assert (type(error), error.exit_code) == (kind, code)


@pytest.mark.parametrize(
    ("own", "expected"),
    [("", ("zstd -3", get_libzstd_version())), ("compression: gzip", ("gzip -6", None))],
)
def test_compression_of_new_layers_is_reported(planned, carry_out, backend, tar, own, expected):
    backend.layers = [tar(("a", b"1"))]
    plan = planned(add_option(own), only="march=znver4,cuda=none")
    results, _ = carry_out(plan)
    assert [(result.compression, result.libzstd) for result in results] == [expected]
    document: dict[str, Any] = make_build_document(plan, results)
    (cell,) = (cell for cell in document["cells"] if "digest" in cell)
    assert (cell["compression"], cell["libzstd"]) == expected
    (order,) = backend.orders
    assert str(order.compression) == expected[0]


def test_engine_compresses_images_of_the_classic_store(planned, carry_out, backend, tar):
    results, _ = carry_out(planned(only=CPU))
    assert {(result.compression, result.libzstd, result.reproducible) for result in results} == {
        ("engine", None, False)
    }
    backend.layers, backend.keeps = [tar(("a", b"1"))], False  # a builder apart from the engine
    results, _ = carry_out(planned(("version: v1", "version: v2"), only=CPU))
    assert {(result.compression, result.reproducible) for result in results} == {("engine", False)}


def test_verified_image_is_compared_with_the_stored_one(planned, carry_out, backend, tar):
    """Another libzstd may have compressed the stored image, so its uncompressed layers decide."""
    backend.layers = [tar(("a", b"1"))]
    (name,) = (result.item.reference for result in carry_out(planned(only="march=znver4,cuda=none"))[0])
    plan = planned(only="march=znver4,cuda=none")
    content = carry_out(plan, verify=True)[0][0]
    assert (content.status, content.warnings) == ("verified", ())
    stored = backend.kept[name]
    backend.kept[name] = replace(stored, digest="sha256:other")
    (same,) = carry_out(plan, verify=True)[0]
    assert same.status == "verified"
    assert f"as another libzstd than {get_libzstd_version()} writes them" in same.warnings[0]
    relabelled = stored.configuration | {
        "config": stored.configuration["config"] | {"Labels": {"by": "others"}}
    }
    backend.kept[name] = replace(stored, digest="sha256:other", configuration=relabelled)
    assert carry_out(plan, verify=True)[0][0].warnings == ()
    backend.kept[name] = replace(stored, digest="sha256:other", layers=("sha256:another",))
    (other,) = carry_out(plan, verify=True)[0]
    assert str(other.error) == ("not reproducible: layer 1 of 1 is not that of the stored image sha256:other")


def test_verify_builds_twice_and_keeps_the_stored_image(planned, carry_out, backend, tar):
    backend.layers = [tar(("a", b"1"))]
    carry_out(planned(only="march=znver4,cuda=none"))
    backend.calls.clear()
    results, _ = carry_out(planned(only=CPU), verify=True)
    assert statuses(results) == {"cpu-x86-64-v3": "built", "cpu-znver4": "verified"}
    assert sorted((call[1], call[2].no_cache) for call in backend.calls if call[0] == "make") == [
        ("cpu-x86-64-v3", False),
        ("cpu-x86-64-v3", True),
        ("cpu-znver4", False),
        ("cpu-znver4", True),
    ]
    assert len(backend.called("store")) == 1


def test_irreproducible_image_is_not_stored(planned, carry_out, backend, tar):
    backend.layers = [tar(("a", b"1"))]
    real = backend.make

    def make(order, log, step):
        if order.no_cache:
            backend.layers = [tar(("a", b"2"))]
        return real(order, log, step)

    backend.make = make
    results, _ = carry_out(planned(only="cuda=none,march=znver4"), verify=True)
    assert "the second build differs: layer 1 of 1: a differs in content" in str(results[0].error)
    assert not results[0].reproducible
    assert not backend.images


def test_classic_store_cannot_verify_reproducibility(planned, carry_out, backend):
    results, _ = carry_out(planned(only=CPU), verify=True)
    assert set(statuses(results).values()) == {"failed"}
    assert "not built again" in str(results[0].error)
    assert not backend.images


def test_verified_adopted_image_is_built_but_not_stored(planned, carry_out, backend, tar):
    backend.layers = [tar(("a", b"1"))]
    plan = planned(only="cuda=none,march=znver4")
    adopted = replace(plan, items=tuple(replace(item, status=PlanStatus.ADOPT) for item in plan.items))
    results, _ = carry_out(adopted, verify=True)
    assert [result.status for result in results] == ["adopted"]
    assert backend.called("adopt") == [plan.items[0].reference]
    assert not backend.called("store")
    assert backend.called("export")


def test_adopting_needs_neither_compiler_nor_base(planned, carry_out, backend):
    plan = planned(only=CPU)
    adopted = replace(plan, items=tuple(replace(item, status=PlanStatus.ADOPT) for item in plan.items))
    results, _ = carry_out(adopted, jobs=2)
    assert set(statuses(results).values()) == {"adopted"}
    assert not backend.called("export")
    assert not backend.called("base")


def test_shared_layer_is_audited_once(planned, carry_out, backend, tar, layers_read):
    backend.layers = [tar(("bin/true", b"")), tar()]
    assert set(statuses(carry_out(planned(only=CPU), jobs=2)[0]).values()) == {"built"}
    assert len(layers_read) == len(set(layers_read)) == 2


def test_image_with_discarded_layers_is_built_again_alone(planned, carry_out, backend, tar):
    """The store needs a layer that it no longer has, or another store needs it."""
    backend.layers = [tar(("bin/true", b""))]
    store = backend.store

    def forgetful(order, made):
        if not order.unshared:
            raise MissingBlobError("a layer")
        return store(order, made)

    backend.store = forgetful
    results, _ = carry_out(planned(only=CPU))
    assert set(statuses(results).values()) == {"built"}
    assert [order.unshared for order in backend.orders] == [False, True] * 2


def test_what_images_share_is_built_before_them(planned, carry_out, backend):
    asked = []
    export = backend.export

    def noted(dockerfile, sources, first):
        asked.append(first)
        return export(dockerfile, sources)

    backend.export = noted
    carry_out(planned(only="cuda=12.4"))
    (first,) = {order.shared_prefixes for order in backend.orders}
    assert [one.dockerfile for one in first] == ["FROM debian:trixie AS compiler\nRUN apt-get install g++\n"]
    (asked_first,) = asked
    assert [one.name for one in asked_first] == [one.name for one in first], "it runs at the same time"


def test_next_image_is_built_during_a_store(planned, carry_out, backend):
    third = threading.Event()
    make, store = backend.make, backend.store

    def noted(*words):
        if len(backend.called("make")) == 2:
            third.set()
        return make(*words)

    def patient(*words):
        assert third.wait(10)
        return store(*words)

    backend.make, backend.store = noted, patient
    results, _ = carry_out(planned(), jobs=2)
    assert set(statuses(results).values()) == {"built"}


@pytest.fixture
def ctrl_c():
    """Handle Ctrl-C even in the background of a script, where SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("jobs", [1, 2])
def test_interrupt_stops_running_builds_and_propagates(planned, backend, interrupted, jobs):
    steps = itertools.count(1)

    class Impatient(Recorder):
        def on_step(self, *_):
            if next(steps) == jobs:
                main = threading.main_thread().ident
                threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()

    backend.hold = True
    interrupted(planned(), Impatient(), jobs=jobs)
    assert ("stop",) in backend.calls
    assert len(backend.called("make")) == jobs
    assert not backend.images
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("build")]


@pytest.mark.usefixtures("ctrl_c")
def test_interrupt_does_not_wait_for_audits(planned, backend, interrupted, tar, monkeypatch):
    reading, go_on = threading.Event(), threading.Event()
    results = []

    class Listing(Recorder):
        def on_finish(self, result):
            results.append(result.status)

    def read(*_):
        reading.set()
        go_on.wait()

    def interrupt():
        assert reading.wait(10)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    monkeypatch.setattr(layer, "read_layer", read)
    backend.layers = [tar(("bin/true", b""))]
    threading.Thread(target=interrupt).start()
    interrupted(planned(only=CPU), Listing())
    assert results == ["stopped"]
    go_on.set()


def test_interrupt_while_a_thread_starts_waits_for_its_build(planned, interrupted, monkeypatch):
    """The build needs the files that are removed at the end."""
    results = []
    started = threading.Event()

    class Slow(Recorder):
        def on_start(self, _):
            started.set()
            time.sleep(0.3)

        def on_finish(self, result):
            results.append(result.status)

    start = threading.Thread.start

    def started_late(self):
        start(self)
        if self.name == "pool":
            assert started.wait(10)
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", started_late)
    interrupted(planned(), Slow())
    assert results == ["stopped"]


def test_an_interrupt_meets_no_lock_of_the_pool(planned, carry_out, monkeypatch):
    """A main thread that is interrupted while it submits a build would keep the lock that all builds need."""
    submit, callers = ThreadPoolExecutor.submit, []

    def noted(*words):
        callers.append(threading.current_thread())
        return submit(*words)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", noted)
    carry_out(planned(only=CPU), jobs=2)
    assert callers
    assert threading.main_thread() not in callers


def test_unwritable_log_fails_only_its_own_cell(planned, carry_out, logs):
    (logs / "training" / "v1-cpu-znver4.log").mkdir(parents=True)
    results, _ = carry_out(planned(only=CPU))
    assert statuses(results) == {"cpu-x86-64-v3": "built", "cpu-znver4": "failed"}
    assert "Is a directory" in str(results[1].error)


def test_missing_log_folder_fails_before_any_build(planned, carry_out, backend, logs):
    logs.parent.touch()
    with pytest.raises(UsageError, match=r"\.imagematrix.*: (Not a directory|File exists)"):
        carry_out(planned(only=CPU))
    assert not backend.called("make")


def test_base_that_cannot_be_pinned_fails_its_cells_before_their_builds(
    planned, backend, carry_out, tmp_path
):
    other = "  app: {version: v1, template: app.j2}\naxes:"
    (tmp_path / "templates" / "app.j2").write_text("FROM other:1\n")
    plan = planned(("axes:", other), only=CPU)

    def pinned(name, _digest):
        if name == "other:1":
            raise UsageError("no registry gives it", remedy="`imagematrix lock --upgrade`")

    backend.pin_by_digest = pinned
    results, _ = carry_out(plan, jobs=2)
    outcomes = {(one.item.cell.image.name, one.status, str(one.error or "")) for one in results}
    assert outcomes == {
        ("training", "built", ""),
        ("app", "failed", "no registry gives it"),
    }
    assert len(backend.called("make")) == 2


def test_bases_are_exported_during_the_first_builds(planned, carry_out, backend, tar, layers_read):
    """All builds would otherwise export the same base at the same time."""
    backend.layers = [tar(("bin/true", b""))]
    backend.salt = "the engine has another, so its digest names the one that is locked"
    plan = planned(only=CPU)
    backend.salt = ""
    carry_out(plan, jobs=2)
    ((_, base, sources),) = [call for call in backend.calls if call[0] == "base"]
    assert base == "debian:trixie"
    assert sources.images == {base: f"docker-image://{base}@{plan.bases[base]}"}
    assert len(layers_read) == 1, "shared layers are read before the images are built"


@pytest.mark.parametrize("error", [BuildError("no such base"), OSError("no space left on device")])
def test_failed_base_export_is_left_to_the_builds(planned, carry_out, backend, error):
    backend.errors["debian:trixie"] = error
    results, notes = carry_out(planned(only=CPU), jobs=2)
    assert set(statuses(results).values()) == {"built"}
    assert len(notes) == 6


def test_serial_builds_export_no_base_ahead(planned, carry_out, backend):
    carry_out(planned(only=CPU), jobs=1)
    assert not backend.called("base")


def test_compiler_is_queried_during_builds(planned, carry_out, backend, tar):
    backend.layers = [tar(("a", b""))]
    queried, built = threading.Event(), threading.Event()
    export, make = backend.export, backend.make

    def late(*words):
        queried.set()
        assert built.wait(10), "no build started before the compiler answered"
        return export(*words)

    @contextlib.contextmanager
    def early(order, log, step):
        assert queried.wait(10)
        built.set()
        with make(order, log, step) as made:
            yield made

    backend.export, backend.make = late, early
    assert set(statuses(carry_out(planned(only=CPU))[0]).values()) == {"built"}
    assert len(backend.called("export")) == 1


def test_failed_build_reports_an_unknown_march(planned, carry_out, backend):
    del backend.macros["-march=znver4"]
    make = backend.make
    exported = threading.Event()
    export = backend.export
    backend.export = lambda *words: (export(*words), exported.set())[0]

    def fails(order, log, step):
        assert exported.wait(10)
        time.sleep(0.1)  # for the result to be recorded
        if "znver4" in order.reference:
            raise BuildError("cc1plus: error: bad value 'znver4' for '-march=' switch")
        return make(order, log, step)

    backend.make = fails
    results, _ = carry_out(planned(only=CPU))
    assert [str(result.error) for result in results if result.error] == [
        "the compiler of cpu-znver4 does not support -march=znver4"
    ]


def test_base_export_is_cancelled_if_all_builds_failed(planned, carry_out, backend):
    backend.errors["export"] = BuildError("no compiler")
    backend.hold = True
    results, _ = carry_out(planned(only=CPU), jobs=2)
    assert set(statuses(results).values()) == {"failed"}
    assert backend.stopped.is_set()


def test_edits_during_a_build_are_not_built(planned, carry_out, backend, tmp_path):
    """The build of the first cell is slow; the next one still gets the files of the plan."""
    (tmp_path / "main.c").write_text("planned")
    plan = planned(only=CPU)
    seen = []
    make = backend.make

    def making(order, log, step):
        (tmp_path / "main.c").write_text("edited")
        seen.append((order.sources.context / "main.c").read_text())
        return make(order, log, step)

    backend.make = making
    results, _ = carry_out(plan)
    assert set(statuses(results).values()) == {"built"}
    assert seen == ["planned", "planned"]
    assert tmp_path not in {order.sources.context for order in backend.orders}
    assert planned(only=CPU).with_status("refused")


def test_edits_after_the_plan_fail_the_cells(planned, carry_out, tmp_path):
    plan = planned(only=CPU)
    (tmp_path / "new.c").touch()
    results, _ = carry_out(plan)
    assert set(statuses(results).values()) == {"failed"}
    assert "changed after the plan was made: new.c" in str(results[0].error)


def test_image_of_a_modified_snapshot_is_not_stored(planned, carry_out, backend):
    make = backend.make

    def making(order, log, step):
        (order.sources.context / "new.c").touch()
        return make(order, log, step)

    backend.make = making
    results, _ = carry_out(planned(only="cuda=none,march=znver4"))
    assert "was changed while an image was built from it" in str(results[0].error)
    assert not backend.images


def test_existing_folder_gets_no_gitignore(planned, carry_out, logs):
    logs.parent.mkdir()
    carry_out(planned())
    assert not (logs.parent / ".gitignore").exists()
