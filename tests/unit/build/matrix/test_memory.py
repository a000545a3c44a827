"""The memory that cells need of each GPU, and what `validate` says of amounts that leave a GPU out."""

from __future__ import annotations

import pytest
from matrices import add_axis, add_option, add_properties

from imagematrix.build.matrix.expand import expand_matrix
from imagematrix.build.matrix.load import load_matrix
from imagematrix.build.matrix.promised_variants import list_candidates

PRECISIONS = add_axis("precision: [fp16, int8, int4]")
NEEDS = add_properties("precision: {fp16: {memory: 24GiB}, 'int*': {memory: 13000MiB}}")
BATCHES = add_axis("batch: [small, large]")
OF_BATCHES = add_properties("batch: {large: {memory: 20000MiB}}")


def cells(matrix):
    return {
        (cell.cuda is not None, *map(cell.axes.get, ("precision", "batch"))): cell.gpu_memory_mib
        for cell in expand_matrix(matrix).cells
    }


def test_a_matrix_that_states_nothing_needs_nothing(project):
    matrix = load_matrix(project())
    assert {cell.gpu_memory_mib for cell in expand_matrix(matrix).cells} == {None}
    assert matrix.warnings == ()


def test_the_image_states_what_all_its_variants_for_gpus_need(project):
    matrix = load_matrix(project(add_option("memory: 15000.5MiB")))
    found = {(cell.cuda is None, cell.gpu_memory_mib) for cell in expand_matrix(matrix).cells}
    assert found == {(True, None), (False, 15001)}


def test_the_largest_of_several_amounts_counts(project):
    changes = (PRECISIONS, NEEDS, BATCHES, OF_BATCHES, add_option("memory: 14GB"))
    found = cells(load_matrix(project(*changes)))
    assert found[True, "fp16", "small"] == found[True, "fp16", "large"] == 24576
    assert found[True, "int8", "small"] == 13352  # 14 GB
    assert found[True, "int4", "large"] == 20000
    assert {found[False, precision, "large"] for precision in ("fp16", "int8", "int4")} == {None}


def test_variants_and_their_catalog_have_it(project):
    order = add_option("defaults: {precision: [fp16, int8]}")
    matrix = load_matrix(project(PRECISIONS, NEEDS, order))
    catalog = list_candidates(matrix, expand_matrix(matrix), matrix.images[0]).catalog
    assert catalog.default_order == (("precision", ("fp16", "int8")),)
    assert catalog.to_json()["default_order"] == {"precision": ["fp16", "int8"]}
    assert catalog.to_json()["defaults"] == {"precision": "fp16"}
    needs = {dict(one.axes)["precision"]: one.to_json().get("memory") for one in catalog.variants if one.gpu}
    assert needs == {"fp16": {"gpu_mib": 24576}, "int8": {"gpu_mib": 13000}, "int4": {"gpu_mib": 13000}}


ABOVE = "NVIDIA A10 reports 23028 MiB, NVIDIA L4 reports 23034 MiB, GeForce RTX 4090 reports 24564 MiB"


@pytest.mark.parametrize(
    ("amount", "mib", "products", "enough"),
    [
        ("15360MiB", 15360, None, None),
        ("15361MiB", 15361, "NVIDIA T4 reports 15360 MiB", 15000),
        ("16GiB", 16384, "NVIDIA T4 reports 15360 MiB", 15000),
        ("16896MiB", 16896, "NVIDIA T4 reports 15360 MiB", 15000),
        ("16897MiB", 16897, None, None),
        ("16GB", 15259, None, None),
        ("80GiB", 81920, "NVIDIA H100 80GB reports 81559 MiB", 81000),
        ("24GiB", 24576, ABOVE, 23000),
    ],
)
def test_an_amount_just_above_what_a_product_reports_is_a_warning(project, amount, mib, products, enough):
    of_value = add_properties(f"precision: {{fp16: {{memory: {amount}}}}}")
    for changes in ([add_option(f"memory: {amount}")], [PRECISIONS, of_value]):
        warnings = load_matrix(project(*changes)).warnings
        assert [(one.message, one.remedy) for one in warnings] == (
            [(f"memory {amount} is {mib} MiB: {products}", f"write {enough}MiB if it is enough")]
            if products
            else []
        )


def test_validate_prints_the_warnings_with_their_places(project, cli):
    path = project(add_option("memory: 16GiB"))
    result = cli("validate", "-f", str(path))
    assert f"{path}:7:13: memory 16GiB is 16384 MiB: NVIDIA T4 reports 15360 MiB" in result.err, result.err
    assert "write 15000MiB if it is enough" in result.err
    assert result.code == 0, result.err
