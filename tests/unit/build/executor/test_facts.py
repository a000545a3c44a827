"""Facts that a matrix states about a march, in labels and identity."""

import json

import pytest
from matrices import add_facts, add_include

from imagematrix.build.executor.compiler import Compilers
from imagematrix.build.plan.protocols import BuildSources

NO_COMPILER = "FROM {{ base }}\nRUN cc {{ march_option }}\n"
NEWLAKE = (
    add_facts("facts: {march: {newlake: {vendor: intel, flags: [avx2, avx1024f, pku]}}}\n"),
    add_include("{cuda: none, march: newlake, compiler: gcc-17}"),
)


@pytest.fixture
def newlake(planned, backend):
    """Call it with more changes to get the item of the cell cpu-newlake and its flags."""
    backend.macros["-march=newlake"] = "#define __AVX2__ 1\n#define __AVX512F__ 1\n"

    def call(*changes, **options):
        (item,) = planned(*NEWLAKE, *changes, only="march=newlake", **options).items
        sources = BuildSources(context=item.cell.image.context, platform=item.cell.platform)
        return item, Compilers([item], backend.export).get_flags(item, sources)

    return call


def test_flags_combine_compiler_output_and_stated_facts(newlake):
    assert newlake()[1] == {"avx2", "avx512f", "avx1024f"}


def test_stated_facts_apply_without_a_compiler(newlake):
    assert newlake(template=NO_COMPILER)[1] == {"avx2", "avx1024f"}


def test_changed_fact_changes_the_image(newlake):
    item, _ = newlake()
    other, _ = newlake(("avx1024f, ", ""))
    assert item.cell.id == other.cell.id
    assert item.reference != other.reference
    assert item.identity.find_changed_components(other.identity.components) == ("context", "facts")


def test_fact_is_an_input_only_of_cells_that_use_it(planned):
    before = {item.cell.id: item.identity for item in planned().with_status("build")}
    after = {item.cell.id: item.identity for item in planned(*NEWLAKE).with_status("build")}
    # The matrix itself is in the context here.
    assert {after[name].find_changed_components(before[name].components) for name in before} == {("context",)}
    (new,) = after.keys() - before.keys()
    assert json.loads(after[new].components["facts"]) == {
        "cpu_flags": ["avx1024f", "avx2"],
        "vendor": "intel",
    }
