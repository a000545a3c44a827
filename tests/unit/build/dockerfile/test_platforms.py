"""The platforms of stages: what runs on the machine that builds, and what on the image's."""

import pytest

from imagematrix.build.dockerfile.dockerfile import find_faults, list_bases, list_run_platforms
from imagematrix.build.dockerfile.instructions import DockerfileError
from imagematrix.build.dockerfile.platforms import BUILDER, TARGET, list_builder_bases

CROSS = """\
FROM --platform=$BUILDPLATFORM debian:1 AS compiler
RUN apt-get install gcc

FROM compiler AS program
RUN make

FROM debian:2
COPY --from=program /x /x
"""


@pytest.mark.parametrize(
    ("dockerfile", "bases"),
    [
        (CROSS, ("debian:1",)),
        (CROSS.replace("$BUILDPLATFORM", "${BUILDPLATFORM}"), ("debian:1",)),
        (CROSS.replace("$BUILDPLATFORM", "$TARGETPLATFORM"), ()),
        (CROSS.replace("$BUILDPLATFORM", "linux/amd64"), ()),
        (CROSS.replace("$BUILDPLATFORM", "${BUILDPLATFORM:-linux/amd64}"), ("debian:1",)),
        (CROSS.replace("$BUILDPLATFORM", "$BUILDOS/${BUILDARCH}"), ("debian:1",)),
        ("ARG PLAT=$BUILDPLATFORM\n" + CROSS.replace("$BUILDPLATFORM", "$PLAT"), ("debian:1",)),
        ("ARG PLAT=linux/amd64\n" + CROSS.replace("$BUILDPLATFORM", "$PLAT"), ()),
        (CROSS + "# BUILDPLATFORM\n", ("debian:1",)),
        ("FROM debian:1\n# $BUILDPLATFORM\n", ()),
        (
            CROSS.replace("FROM debian:2", "FROM --platform=$BUILDPLATFORM debian:1 AS x\nFROM debian:2"),
            ("debian:1",),
        ),
    ],
)
def test_bases_for_the_machine_that_builds(dockerfile, bases):
    assert list_builder_bases(dockerfile) == bases


@pytest.mark.parametrize(
    ("dockerfile", "run"),
    [
        (CROSS, {BUILDER}),
        (CROSS + "RUN ldconfig\n", {BUILDER, TARGET}),
        (CROSS.replace("--platform=$BUILDPLATFORM ", ""), {TARGET}),
        (CROSS.replace("FROM compiler", "FROM --platform=$TARGETPLATFORM compiler"), {BUILDER, TARGET}),
        (CROSS.replace("$BUILDPLATFORM", "linux/arm64"), {"linux/arm64"}),
        (CROSS.replace("$BUILDPLATFORM", "linux/arm64/v8"), {"linux/arm64"}),
        ("ARG PLAT=linux/arm64\n" + CROSS.replace("$BUILDPLATFORM", "$PLAT"), {"linux/arm64"}),
        ("ARG PLAT=\n" + CROSS.replace("$BUILDPLATFORM", "$PLAT"), {TARGET}),
        (CROSS.replace("$BUILDPLATFORM", "$TARGETOS/$TARGETARCH"), {TARGET}),
        (CROSS.replace("$BUILDPLATFORM", "$PLAT"), {"$PLAT"}),
        ("FROM a AS unused\nRUN x\n\nFROM b\nCOPY x /\n", set()),
        ("FROM a AS compiler\nRUN x\n\nFROM b\nCOPY x /\n", {TARGET}),
    ],
)
def test_programs_that_a_build_runs(dockerfile, run):
    assert list_run_platforms(dockerfile, ["compiler"]) == run


def test_value_of_a_build_argument_counts():
    dockerfile = "ARG PLAT=linux/arm64\n" + CROSS.replace("$BUILDPLATFORM", "$PLAT")
    assert list_run_platforms(dockerfile, (), {"PLAT": "linux/amd64"}) == {"linux/amd64"}
    assert list_run_platforms(dockerfile, (), {"PLAT": None}) == {"$PLAT"}


@pytest.mark.parametrize(
    "dockerfile",
    [
        "FROM --platform=$BUILDPLATFORM debian\n",
        "FROM --platform=$BUILDOS/$BUILDARCH debian\n",
        "FROM --platform=${BUILDPLATFORM} debian AS a\n\nFROM a AS b\n\nFROM b\nRUN x\n",
    ],
)
def test_image_for_the_machine_that_builds_is_a_fault(dockerfile):
    with pytest.raises(
        DockerfileError, match="the last stage is for the platform of the machine that builds"
    ):
        list_bases(dockerfile)
    (fault,) = find_faults(dockerfile)
    assert fault.at == dockerfile.rindex("FROM")
    assert "COPY --from=STAGE" in fault.remedy


def test_platform_is_written_as_other_flags_are():
    assert list_builder_bases('FROM --platform="$BUILDPLATFORM" a AS x\nFROM b\n') == ("a",)
    assert list_builder_bases("FROM \\\n  --platform=$BUILDPLATFORM \\\n  a AS x\nFROM b\n") == ("a",)
