"""Faults of templates in a plan: all at once, each at its place, with the cells that have it."""

from __future__ import annotations

from pathlib import Path

import pytest
from matrices import add_key, add_option

from imagematrix.build.dockerfile.template_error import TemplateError
from imagematrix.build.matrix.load import load_matrix
from imagematrix.build.plan.build_inputs import BuildInputs
from imagematrix.build.plan.plan import PlanContext, PlanStatus
from imagematrix.build.plan.planner import plan
from imagematrix.errors import EngineError, UsageError

SUM = "sha256:" + "a" * 64
FAULTY = """\
{% set x = 1 %}
FROM {{ base }} AS compiler
{% if cuda %}
ADD https://example.com/{{ cuda }} /
{% endif %}
{# a comment
   of two lines #}
{% for word in ["a", "b"] %}
RUN echo {{ word }}
{% endfor %}
  {{ "COPYY" }} a b
RUN echo {{ march }} \\
  && true
COPY --from=compilr /a /
"""


def places(error: TemplateError) -> list[str]:
    return [message.partition(": ")[0] for message in messages(error)]


def messages(error: TemplateError) -> list[str]:
    return [str(fault).partition("/templates/")[2] for fault in error.faults]


def test_all_faults_of_all_cells_are_reported_at_their_places(planned):
    with pytest.raises(TemplateError) as caught:
        planned(template=FAULTY)
    of_cuda = "the content of https://example.com/{} may change, but not the identity of the image"
    one = "(in training:v1 cuda11.8-sm70-drv535.261.03-x86-64-v3 and 1 other cell)"
    more = "(in training:v1 cuda12.4-sm70-drv535.261.03-x86-64-v3 and 7 other cells)"
    every = "(in training:v1 cpu-x86-64-v3 and 11 other cells)"
    assert messages(caught.value) == [
        f"training.j2:4:5: {of_cuda.format('11.8')} {one}",
        f"training.j2:4:5: {of_cuda.format('12.4')} {more}",
        f"training.j2:11:3: the Dockerfile has 'COPYY', which is not an instruction {every}",
        f"training.j2:14:13: no stage is called compilr {every}",
    ]
    details = caught.value.details
    assert "\n   14 | COPY --from=compilr /a /\n      |             ^" in details
    assert details.count("did you mean 'compiler'? An image of this name is written compilr:latest") == 1


FIXED_VECTORS = """\
FROM {{ base }} AS compiler
# no -msve-vector-bits=256 here
ENV CFLAGS="{{ cflags }} -msve-vector-bits=scalable"
RUN cc {{ cflags }} \\
    -msve-vector-bits={{ 128 * 2 }} a.c
"""


@pytest.mark.parametrize("more", ["", "COPYY a b\n"])
def test_a_fixed_vector_length_is_a_fault_at_its_place(planned, more):
    with pytest.raises(TemplateError) as caught:
        planned(template=FIXED_VECTORS + more)
    assert messages(caught.value)[0] == (
        "training.j2:5:5: -msve-vector-bits=256 fixes the length of vectors: on CPUs with another length, "
        "code computes wrong results (in training:v1 cpu-x86-64-v3 and 11 other cells)"
    )
    assert "write -msve-vector-bits=scalable" in f"{caught.value.remedy} {caught.value.details}"
    assert len(messages(caught.value)) == (2 if more else 1)


def test_a_template_with_faults_is_read_once_for_all_cells(planned, monkeypatch):
    read_text, read = Path.read_text, []

    def record(path, *words, **named):
        read.append(path.name)
        return read_text(path, *words, **named)

    monkeypatch.setattr(Path, "read_text", record)
    with pytest.raises(TemplateError):
        planned(template=FAULTY)
    assert read.count("training.j2") == 1


def test_caches_of_one_user_are_faults_where_the_image_is_warmed(planned):
    template = "FROM {{ base }}\nENV NUMBA_CACHE_DIR=/root/.cache/numba\n"
    assert planned(template=template)
    with pytest.raises(TemplateError) as caught:
        planned(add_option("warm_up: {command: train}"), template=template)
    (found,) = messages(caught.value)
    assert found.startswith("training.j2:2:5: NUMBA_CACHE_DIR: a cache in /root/.cache/numba breaks when ")
    assert found.endswith(" (in training:v1 cpu-x86-64-v3 and 11 other cells)")
    assert "write {{ debian.warm_caches() }} in the template" in str(caught.value.remedy)


def test_images_that_share_a_template_are_named(planned):
    two = add_key("  serving:\n    version: v7\n    template: training.j2")
    with pytest.raises(TemplateError, match=r"\(in training:v1 cpu-znver4 and 1 other cell\)"):
        planned(two, template="FROM {{ base }}\nCOPYY\n", only="cuda=none,march=znver4")


def test_faults_of_macros_are_in_their_file(planned, tmp_path):
    (tmp_path / "templates").mkdir(exist_ok=True)
    (tmp_path / "templates" / "own.j2").write_text(
        "{% macro m(x) %}\nRUN true\nCOPYY {{ x }}\n{% endmacro %}\n"
    )
    template = '{% import "own.j2" as own %}\nFROM {{ base }}\n{{ own.m("a") }}\nRUNN x\n'
    with pytest.raises(TemplateError) as caught:
        planned(template=template, only="cuda=none,march=znver4")
    assert places(caught.value) == ["own.j2:3:1", "training.j2:4:1"]


@pytest.mark.parametrize(
    "template",
    [
        "FROM {{ base }}\n{% filter reverse %}\nx nur\n{% endfilter %}\n\n\nCOPYY\n",
        "FROM {{ base }}\n{% set x %}\na\n{% endset %}\nRUN echo {{ x | length }}\nCOPYY\n",
    ],
)
def test_a_template_that_marks_would_change_gives_the_line_of_the_dockerfile(planned, template):
    with pytest.raises(TemplateError, match=r"training.j2:1:1: in line \d of a Dockerfile that it gives: "):
        planned(template=template, only="cuda=none,march=znver4")


def test_marks_of_a_template_lead_nowhere_else(planned, tmp_path):
    (tmp_path / "secret").write_text("hidden\n")
    for mark in ("../secret:1", "9:1", "0:999999999"):
        forged = f"FROM {{{{ base }}}}\n\ue000{mark}\ue001COPYY\n"
        with pytest.raises(TemplateError, match=r"/training.j2:[12]:1: ") as caught:
            planned(template=forged, only="cuda=none,march=znver4")
        assert "hidden" not in caught.value.details


def test_images_on_faulty_images_have_no_faults_of_their_own(planned, tmp_path):
    (tmp_path / "templates").mkdir(exist_ok=True)
    (tmp_path / "templates" / "upper.j2").write_text('FROM {{ images["training"] }}\n')
    two = ("images:\n", "images:\n  upper: {version: v1, template: upper.j2}\n")
    with pytest.raises(TemplateError) as caught:
        planned(two, template="FROM {{ base }}\nCOPYY\n", only="cuda=none,march=znver4")
    assert len(caught.value.faults) == 1
    assert "(in training:v1 cpu-znver4)" in str(caught.value)


COPYING = "FROM {{ base }} AS compiler\nRUN true\nCOPY mian.c lib $X *.h ./lib/ /\n"


def test_missing_sources_fail_their_cells_with_a_suggestion(planned, tmp_path):
    (tmp_path / "main.c").touch()
    (tmp_path / "lib").mkdir()
    made = planned(template=COPYING)
    failed = made.with_status(PlanStatus.FAILED)
    assert len(failed) == len(made.items) - len([item for item in made.items if item not in failed])
    assert {item.why.partition("/templates/")[2] for item in failed} == {
        "training.j2:3:6: mian.c is not in the context"
    }
    assert {item.error.remedy for item in failed} == {"did you mean 'main.c'?"}
    assert not planned(template=COPYING.replace("mian", "main")).with_status(PlanStatus.FAILED)


def test_sources_that_are_excluded_or_behind_links(planned, tmp_path):
    (tmp_path / "main.c").touch()
    (tmp_path / "lib").mkdir()
    (tmp_path / "link").symlink_to("lib")
    (tmp_path / ".dockerignore").write_text("main.c\n")
    template = "FROM {{ base }} AS compiler\nCOPY link/a . / link /x\nCOPY /main.c /\n"
    (item,) = planned(template=template, only="cuda=none,march=znver4").with_status(PlanStatus.FAILED)
    assert "training.j2:3:6: /main.c is there, but .dockerignore of the context excludes it" in item.why
    assert item.error.remedy == f"write !main.c at the end of {tmp_path / '.dockerignore'}"
    with (tmp_path / ".dockerignore").open("a") as file:
        file.write("!main.c")
    assert not planned(template=template).with_status(PlanStatus.FAILED)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("COPY main.c /\nCOPYY\n", ["training.j2:2:6", "training.j2:3:1"]),
        ("COPYY\nRUN true \\\n", ["training.j2:2:1", "training.j2:3:1"]),
    ],
    ids=["missing source", "last instruction that goes on"],
)
def test_syntax_is_reported_together_with_other_faults(planned, lines, found):
    with pytest.raises(TemplateError) as caught:
        planned(template=f"FROM {{{{ base }}}}\n{lines}", only="cuda=none,march=znver4")
    assert places(caught.value) == found


def test_arguments_before_from_give_the_base(planned, project, backend):
    template = "ARG CUDA={{ cuda }}\nARG BASE=debian:trixie\nFROM x:$CUDA AS compiler\nFROM $BASE\n"
    one = "cuda=12.4,compute=8.9,driver=550.163.01,march=znver4"
    (item,) = planned(template=template, only=one).with_status(PlanStatus.BUILD)
    assert item.bases == ("x:12.4", "debian:trixie")
    assert "FROM x:12.4 AS compiler\nFROM debian:trixie\n" in item.dockerfile
    assert {"base x:12.4", "base debian:trixie"} <= item.identity.components.keys()
    of_matrix = add_option("build_args: {BASE: alpine}")
    (item,) = planned(of_matrix, template=template, only=one).with_status(PlanStatus.BUILD)
    assert item.bases == ("x:12.4", "alpine")
    matrix = load_matrix(project(of_matrix, template=template))
    given = PlanContext(
        resolve=backend.resolve, store=backend, build_inputs=BuildInputs(args={"BASE": "busybox"})
    )
    (item,) = plan(matrix, given, expression=one).with_status(PlanStatus.BUILD)
    assert item.bases == ("x:12.4", "busybox")
    unknown = add_option("build_args: {BASE: }")
    with pytest.raises(UsageError, match="no value is known for the variable in FROM"):
        planned(unknown, template=template, only=one)


def test_checksum_of_a_remote_file_is_part_of_the_identity(planned):
    template = f"FROM {{{{ base }}}} AS compiler\nADD --checksum={SUM} https://example.com/a /\n"
    one = "cuda=none,march=znver4"
    (item,) = planned(template=template, only=one).with_status(PlanStatus.BUILD)
    (other,) = planned(template=template.replace("aaa", "bbb"), only=one).with_status(PlanStatus.BUILD)
    assert "dockerfile" in item.identity.find_changed_components(other.identity.components)


@pytest.mark.parametrize("kind", [EngineError, UsageError])
def test_syntax_line_is_no_base_in_messages(project, kind):
    def resolve(name):
        if name.startswith("docker/"):
            raise kind(f"the image {name} is nowhere", remedy="try again")
        return SUM

    path = project(template="# syntax=docker/dockerfile:1\nFROM {{ base }} AS compiler\n")
    made = plan(load_matrix(path), PlanContext(resolve=resolve), expression="cuda=none,march=znver4")
    (item,) = made.with_status(PlanStatus.FAILED)
    assert isinstance(item.error, kind)
    assert item.why == (
        "the line # syntax=docker/dockerfile:1 names an image that reads the Dockerfile, not a base: "
        "the image docker/dockerfile:1 is nowhere"
    )
    assert item.error.remedy == "remove this line, unless the Dockerfile needs it; otherwise try again"
