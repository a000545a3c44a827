"""Builds that trim device code: they get the program, and the identity has the version of its rules."""

import pytest
from fatbins import PTX, entry, fat

from imagematrix.build.plan.identity import TRIM
from imagematrix.build.plan.plan import PlanStatus
from imagematrix.build.trim.program import CONTEXT
from imagematrix.build.trim.rules import VERSION
from imagematrix.images.catalog import labels

TEMPLATE = """\
FROM {{ base }} AS compiler
FROM {{ base }}
{% if cuda %}
RUN --mount=type=bind,from=imagematrix-trim,target=/tmp/trim \\
    python3 /tmp/trim/trim.pyz --compute {{ compute }} /opt
{% endif %}
"""


def test_only_trimming_builds_get_the_program(planned, backend, carry_out):
    plan = planned(template=TEMPLATE, only="march=znver4")
    assert CONTEXT not in plan.bases
    by_cuda = {item.cell.cuda: item for item in plan.items if getattr(item, "identity", None)}
    assert by_cuda["12.4"].identity.components[TRIM] == VERSION
    assert by_cuda["12.4"].trims
    assert TRIM not in by_cuda[None].identity.components
    assert {result.status for result in carry_out(plan)} == {"built"}
    orders = {order.reference: order for order in backend.orders}
    assert CONTEXT in orders[by_cuda["12.4"].reference].sources.contexts
    assert CONTEXT not in orders[by_cuda[None].reference].sources.contexts


def test_trimming_is_unknown_without_an_identity(planned, backend):
    backend.missing.add("debian:trixie")
    assert not any(item.trims for item in planned(template=TEMPLATE).with_status(PlanStatus.FAILED))


@pytest.fixture
def labelled(planned, backend, carry_out, tar):
    """Call it with files to get the cubins and PTX that an image with them promises, in a cell for 8.9."""

    def call(*files, template=TEMPLATE, exact=False, driver="550.163.01"):
        plan = planned(template=template, only=f"march=znver4,driver={driver},compute=8.9,cuda=12.4")
        library = (f"usr/lib/libcuda.so.{driver}", driver.encode())
        backend.layers = [tar(library, *((f"opt/{n}.fatbin", file) for n, file in enumerate(files)))]
        (result,) = carry_out(plan)
        assert len(backend.called("make")) == 1, "whatever the audit proves"
        if result.error:
            return str(result.error)
        (stored,) = backend.images.values()
        variant = labels.read_variant(stored, reference="t:v1", digest=None, size=None)
        if exact:
            return [(one.name, one.cubins, [ptx.target for ptx in one.ptx]) for one in variant.device_code]
        return variant.cubins, [(one.target, one.isa) for one in variant.ptx]

    return call


NATIVE = fat(entry(target=89))
TEXT = fat(entry(PTX, 80))


def test_labels_promise_the_cubins_of_the_cell(labelled):
    assert labelled(NATIVE, fat(entry(target=86), entry(target=80))) == (("89",), [])


def test_labels_promise_ptx_kept_by_all_files_instead_of_cubins(labelled):
    assert labelled(TEXT, TEXT) == ((), [("80", "8.4")])


def test_labels_promise_ptx_besides_cubins(labelled):
    assert labelled(fat(entry(target=89), entry(PTX, 89))) == (("89",), [("89", "8.4")])


def test_mixed_cubins_and_ptx_are_promised_exactly(labelled):
    assert labelled(NATIVE, TEXT, exact=True) == [
        ("/opt/0.fatbin", ("89",), []),
        ("/opt/1.fatbin", (), ["80"]),
    ]


def test_ptx_that_the_image_s_own_driver_does_not_compile_contradicts(labelled):
    """CUDA 12.2, of branch 535, compiles PTX up to ISA 8.2."""
    told = labelled(NATIVE, TEXT, driver="535.261.03")
    assert "the labels promise cubins for 89, but /opt/1.fatbin has none" in told


def test_exact_code_that_says_nothing_more_is_left_out(labelled):
    assert labelled(fat(entry(target=89), entry(PTX, 80)), exact=True) == []


def test_parts_of_a_file_that_differ_are_told(labelled):
    assert labelled(NATIVE + TEXT, exact=True) == [("/opt/0.fatbin", ("89",), [])]


def test_exact_code_is_only_that_for_the_gpus_of_the_cell(labelled):
    many = fat(entry(target=75), entry(target=80), entry(target=89), entry(target=90))
    older = fat(entry(target=80), entry(target=86), entry(PTX, 80))
    assert labelled(many, many, older, exact=True) == [
        ("/opt/0.fatbin", ("89",), []),
        ("/opt/2.fatbin", ("86",), []),
    ]


def test_file_without_code_for_the_cell_contradicts(labelled):
    assert "the labels promise cubins for 89, but /opt/1.fatbin has 90" in labelled(
        NATIVE, fat(entry(target=90))
    )


def test_labels_promise_the_cell_without_trimming(labelled):
    template = "FROM {{ base }} AS compiler\nFROM {{ base }}\n"
    assert labelled(fat(entry(target=89), entry(PTX, 89)), template=template) == (("89",), [])
