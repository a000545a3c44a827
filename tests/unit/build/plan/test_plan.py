"""The plan: the status of each cell, with reasons."""

import shutil
from collections import Counter
from functools import partial

import pytest
from matrices import add_axis

from imagematrix.build.dockerfile.template_error import TemplateError
from imagematrix.build.matrix.load import load_matrix
from imagematrix.build.plan.context import STATE, load_listing
from imagematrix.build.plan.plan import DropStatus, PlanContext, PlanStatus
from imagematrix.build.plan.planner import plan
from imagematrix.errors import EngineError, TagMovedError, UsageError
from imagematrix.images.catalog.labels import DEVELOPMENT

ONE = "cuda=12.4,compute=8.9,driver=550.163.01,march=znver4"


def test_missing_images_are_to_be_built(planned, conforms):
    plan = planned()
    assert Counter(item.status for item in plan.items) == {"build": 12, "excluded": 4, "infeasible": 2}
    item = plan.items[-5]
    assert item.cell.id == "cuda12.4-sm89-drv550.163.01-znver4"
    assert item.reference == f"training:v1-{item.cell.id}-{item.identity.digest[7:19]}"
    assert item.dockerfile.startswith("FROM debian:trixie AS compiler")
    assert plan.to_json()["cells"][-5] == {
        "image": "training",
        "version": "v1",
        "cell": item.cell.id,
        "axes": {"cuda": "12.4", "compute": "8.9", "driver": "550.163.01", "march": "znver4"},
        "status": "build",
        "rule": None,
        "why": None,
        "reference": item.reference,
        "input": item.identity.digest,
        "from": None,
        "changed": [],
        "files": [],
        "nearest_host": None,
        "execution": None,
    }
    conforms(plan.to_json())


def test_shared_facts_are_queried_once(planned, backend):
    planned()
    assert sorted(backend.calls) == [
        ("present", "training", "v1"),
        ("resolve", "debian:bookworm"),
        ("resolve", "debian:trixie"),
    ]


def test_excluded_cell_names_its_rule(planned, tmp_path):
    excluded = planned().list_dropped("excluded")
    assert {item.rule for item in excluded} == {f"{tmp_path / 'matrix.yaml'}:18"}
    assert {item.why for item in excluded} == {"they have the newer toolkit"}
    assert {item.to_json()["reference"] for item in excluded} == {None}


@pytest.mark.parametrize(
    ("change", "cells", "rule", "why"),
    [
        (('"8.9"]', '"10.0"]'), "compute=10.0,cuda=11.8", "toolkit-target", "CUDA 11.8 cannot target"),
        (
            ("[535.261.03,", "[470.256.02,"),
            "cuda=12.4,driver=470.256.02",
            "driver-cuda",
            "is too old for CUDA 12.4",
        ),
        (
            ("znver4]", "znver5]"),
            "cuda=11.8,march=znver5",
            "march-compiler",
            "gcc-12 does not support -march=znver5",
        ),
        (
            add_axis("platform: [linux/arm64]"),
            "march=znver4",
            "march-platform",
            "march znver4 is for x86_64, not for linux/arm64",
        ),
    ],
)
def test_infeasible_cell_names_the_vendor_rule(planned, backend, change, cells, rule, why, conforms):
    plan = planned(change, only=cells)
    kept = [item for item in plan.items if item.status != "excluded"]
    assert {(item.status, item.rule) for item in kept} == {("infeasible", rule)}
    assert all(why in item.why for item in kept)
    assert not backend.calls
    conforms(plan.to_json())


def test_existing_images_are_up_to_date(planned, carry_out):
    carry_out(planned(only="march=znver4"))
    plan = planned()
    assert {item.cell.axes["march"] for item in plan.with_status("up-to-date")} == {"znver4"}
    assert {item.cell.axes["march"] for item in plan.with_status(PlanStatus.BUILD)} == {"x86-64-v3"}


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ({"template": "FROM {{ base }}\n"}, ("dockerfile",)),
        ({"file": "new.c"}, ("context",)),
        ({"salt": "a newer one"}, ("base debian:trixie",)),
        ({"base": "debian:sid"}, ("base debian:sid", "base debian:trixie", "dockerfile")),
    ],
)
def test_image_with_other_inputs_is_refused(planned, carry_out, backend, tmp_path, change, changed):
    (tmp_path / ".dockerignore").write_text("matrix.yaml\ntemplates\n")
    before = planned(only=ONE)
    carry_out(before)
    if "file" in change:
        (tmp_path / change["file"]).touch()
    backend.salt = change.get("salt", "")
    base = ('"12.4": {base: "debian:trixie"', f'"12.4": {{base: "{change.get("base", "debian:trixie")}"')
    (item,) = planned(base, only=ONE, template=change.get("template")).with_status("refused")
    assert item.difference.components == changed
    assert item.why == f"{', '.join(changed)} changed"
    assert item.difference.reference == before.items[0].reference


def test_refusal_names_the_changed_files(project, backend, tmp_path, carry_out):
    """A build on this machine records the files of its context beside its log."""
    (tmp_path / ".dockerignore").write_text("matrix.yaml\ntemplates\n*.log\n")
    (tmp_path / "main.c").write_text("int main;")
    state = tmp_path / STATE

    def plan_again():
        recorded = partial(load_listing, state)
        against = PlanContext(resolve=backend.resolve, store=backend, find_recorded=recorded)
        return plan(load_matrix(project()), against, expression=ONE)

    carry_out(plan_again(), logs=state / "logs")
    (tmp_path / "main.c").write_text("int main();")
    for number in range(6):
        (tmp_path / f"{number}.h").touch()
    (item,) = plan_again().with_status("refused")
    assert item.difference.files == ("0.h", "1.h", "2.h", "3.h", "4.h", "5.h", "main.c")
    assert item.why == "context changed: 0.h, 1.h, 2.h, 3.h, 4.h, …"
    with pytest.raises(TagMovedError, match=r"context changed: 0\.h, 1\.h"):
        carry_out(plan_again())
    shutil.rmtree(state)
    (item,) = plan_again().with_status("refused")
    assert (item.difference.files, item.why) == ((), "context changed")


def test_development_version_is_built_again(planned, carry_out, backend):
    development = ("version: v1", "version: v1\n    development: true")
    carry_out(planned(development, only=ONE))
    (old,) = backend.images
    again = planned(development, only=ONE, template="FROM {{ base }}\n")
    (item,) = again.with_status(PlanStatus.BUILD)
    assert item.difference.reference == old
    carry_out(again)
    assert list(backend.images) == [item.reference]


def test_image_made_under_development_is_built_again_for_a_final_version(
    planned, carry_out, backend, project, tmp_path
):
    """Its label says that it may be replaced, so it is not pushed either."""
    (tmp_path / ".dockerignore").write_text("*\n")  # otherwise the matrix is an input, too
    development = ("version: v1", "version: v1\n    development: true")
    carry_out(planned(development, only=ONE))
    (old,) = backend.images
    registry = PlanContext(resolve=backend.resolve, engine=backend)
    (item,) = plan(load_matrix(project()), registry, expression=ONE).with_status(PlanStatus.BUILD)
    assert item.reference == old
    final = planned(only=ONE)
    (item,) = final.with_status(PlanStatus.BUILD)
    assert (item.reference, item.difference) == (old, None)
    carry_out(final)
    assert DEVELOPMENT not in backend.images[old]
    assert planned(only=ONE).with_status(PlanStatus.UP_TO_DATE)
    (item,) = plan(load_matrix(project()), registry, expression=ONE).with_status(PlanStatus.ADOPT)


def test_image_made_under_development_is_replaced_by_a_final_one(planned, carry_out, backend):
    development = ("version: v1", "version: v1\n    development: true")
    carry_out(planned(development, only=ONE))
    (old,) = backend.images
    final = planned(only=ONE, template="FROM {{ base }}\n")
    (item,) = final.with_status(PlanStatus.BUILD)
    assert item.difference.reference == old
    carry_out(final)
    assert list(backend.images) == [item.reference] != [old]


def test_every_feasible_cell_is_built_without_an_engine(project, conforms):
    planned = plan(load_matrix(project(('"8.9"]', '"10.0"]'))), PlanContext())
    assert len(planned.with_status(PlanStatus.BUILD)) == 7
    assert len(planned.list_dropped(DropStatus.INFEASIBLE)) == 7
    assert all(item.identity is None for item in planned.with_status(PlanStatus.BUILD))
    document = conforms(planned.to_json())
    assert all(cell["reference"] is None for cell in document["cells"])


def test_image_without_a_context_has_no_files(planned, tmp_path):
    without = ("    context: .\n", "")
    before = planned(without, only=ONE)
    (tmp_path / "build.json").write_text("{}")
    (item,) = before.with_status(PlanStatus.BUILD)
    assert item.identity == planned(without, only=ONE).with_status(PlanStatus.BUILD)[0].identity
    expected = r"training.j2:2:6: the image has no context, from which it takes main.c \(in training:v1 cpu"
    with pytest.raises(TemplateError, match=expected) as caught:
        planned(without, template="FROM {{ base }}\nCOPY main.c /\n")
    assert "context: src" in caught.value.remedy


def test_too_many_images_on_images_are_rejected(planned, tmp_path):
    images = ""
    for number in range(150):
        below = f"{{{{ images['i{number + 1}'] }}}}" if number < 149 else "debian:trixie"
        (tmp_path / "templates" / f"{number}.j2").write_text(f"FROM {below}\n")
        images += f"  i{number}: {{version: v1, template: {number}.j2}}\n"
    with pytest.raises(UsageError, match="more than 100 images build on each other"):
        planned(("axes:", f"{images}axes:"), only="cuda=none,march=znver4")


def test_missing_base_fails_its_cells(planned, backend, tmp_path):
    other = "  app: {version: v1, template: app.j2}\n  on: {version: v1, template: on.j2}\naxes:"
    (tmp_path / "templates" / "app.j2").write_text("FROM other:1\n")
    (tmp_path / "templates" / "on.j2").write_text("FROM {{ images['app'] }}\n")
    backend.missing = {"other:1"}
    plan = planned(("axes:", other))
    failed = {(item.cell.image.name, item.why) for item in plan.with_status(PlanStatus.FAILED)}
    assert failed == {("app", "other:1 is nowhere"), ("on", "it builds on app: other:1 is nowhere")}
    assert {item.cell.image.name for item in plan.with_status(PlanStatus.BUILD)} == {"training"}
    assert list(plan.unresolved) == ["other:1"]
    assert sorted(plan.bases) == ["debian:bookworm", "debian:trixie"]
    assert backend.calls.count(("resolve", "other:1")) == 1


BUILDER_STAGE = "FROM --platform=$BUILDPLATFORM debian:1 AS compiler\nFROM debian:2\n"


@pytest.fixture
def planned_with_indexes(project, backend):
    """Call it with the names of bases that are indexes, to get the plan of a cell with a cross build."""

    def call(*indexes, template=BUILDER_STAGE, error=None):
        asked = []

        def is_index(name, digest):
            asked.append((name, digest))
            if error:
                raise error
            return name in indexes

        against = PlanContext(resolve=backend.resolve, is_index=is_index, store=backend)
        made = plan(load_matrix(project(template=template)), against, expression="cuda=none")
        assert all(asked == backend.resolve(name) for name, asked in asked)
        return made, [name for name, _ in asked]

    return call


def test_base_for_the_machine_that_builds_is_an_index(planned_with_indexes):
    made, asked = planned_with_indexes("debian:1")
    assert {item.status for item in made.items} == {"build"}
    assert asked == ["debian:1"], "only that base, and once for all cells"
    made, _ = planned_with_indexes("debian:2")
    assert {item.status for item in made.items} == {"failed"}
    assert made.items[0].why.startswith("the base image debian:1 is for one platform, but stages take it for")
    assert made.items[0].error.remedy.startswith("name an index of images for all platforms")


def test_other_bases_may_be_of_one_platform(planned_with_indexes):
    made, asked = planned_with_indexes(template="FROM debian:1 AS compiler\nFROM debian:2\n")
    assert {item.status for item in made.items} == {"build"}
    assert asked == []


def test_plan_needs_no_registry_for_locked_bases(planned_with_indexes):
    made, _ = planned_with_indexes(error=EngineError("the registry cannot be reached"))
    assert {item.status for item in made.items} == {"build"}
