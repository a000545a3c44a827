"""The CPU flags that code needs come from the compiler in the image."""

import subprocess

import pytest

from imagematrix.build.executor.compiler import Compilers
from imagematrix.build.plan.protocols import BuildSources
from imagematrix.errors import BuildError
from imagematrix.hardware.vendors import marches

NO_COMPILER = "FROM {{ base }}\nRUN cc {{ march_option }}\n"


def sources(item):
    return BuildSources(context=item.cell.image.context, platform=item.cell.platform)


@pytest.fixture
def flags(planned, backend):
    """Call it like `planned` to get the flags of each cell."""

    def call(*changes, **options):
        items = planned(*changes, **options).with_status("build")
        compilers = Compilers(items, backend.export)
        return {item.cell.id: compilers.get_flags(item, sources(item)) for item in items}

    return call


def test_flags_come_from_the_compiler_s_macros(flags):
    assert flags(only="cuda=none") == {
        "cpu-x86-64-v3": frozenset({"avx2"}),
        "cpu-znver4": frozenset({"avx2", "avx512f"}),
    }


ASKED = """\
FROM debian:{suite} AS compiler
RUN apt-get install g++

FROM compiler AS imagematrix-macros
RUN mkdir /macros; for cc in cc x86_64-linux-gnu-gcc; do for option in '' {options}; do \
"$cc" $option -dM -E -x c /dev/null > "/macros/$cc$option" || rm "/macros/$cc$option"; done; done
FROM scratch
COPY --from=imagematrix-macros /macros /
"""


def test_each_compiler_is_queried_once_for_all_marches(flags, backend):
    assert len(flags()) == 12
    assert backend.called("export") == [
        ASKED.format(suite="trixie", options="-march=x86-64-v3 -march=znver4"),
        ASKED.format(suite="bookworm", options="-march=x86-64-v3"),
    ]


def test_compiler_is_that_of_the_image_s_own_arguments(planned, backend):
    other = "  other: {version: v1, template: training.j2, context: ., build_args: {GCC: 14}}\naxes:"
    plan = planned(
        ("    context: .\n", "    context: .\n    build_args: {GCC: 12}\n"),
        ("axes:", other),
        only="cuda=none",
        template="FROM {{ base }} AS compiler\nARG GCC\nRUN apt-get install g++-$GCC\nFROM {{ base }}\n",
    )
    items = plan.with_status("build")
    seen = []
    real = backend.export

    def export(dockerfile, sources):
        seen.append(sources.args)
        answer = real(dockerfile, sources)
        del answer["cc-march=znver4"]
        return answer | ({"cc-march=znver4": "#define __AVX__ 1"} if sources.args["GCC"] == "14" else {})

    backend.export = export
    compilers = Compilers(items, backend.export)
    flags = {}
    for item in items:
        try:
            found = compilers.get_flags(
                item, plan.build_inputs.make_sources(item.cell, item.cell.image.context, {})
            )
        except BuildError:
            found = None
        flags[item.cell.image.name, item.cell.axes["march"]] = found
    assert seen == [{"GCC": "12"}, {"GCC": "14"}]
    assert flags["training", "znver4"] is None
    assert flags["other", "znver4"] == {"avx"}


def test_march_unknown_to_the_compiler_is_a_build_error(flags, backend):
    del backend.macros["-march=znver4"]
    with pytest.raises(
        BuildError, match="the compiler of cpu-znver4 does not support -march=znver4"
    ) as caught:
        flags(only="cuda=none")
    assert "a base image with a newer compiler" in caught.value.remedy


def test_compiler_of_vectors_of_one_length_is_a_build_error(flags, backend):
    backend.macros["-march=znver4"] = "#define __ARM_FEATURE_SVE_BITS 256\n"
    with pytest.raises(
        BuildError, match="compiler of cpu-znver4 makes code for vectors of 256 bits"
    ) as caught:
        flags(only="cuda=none")
    assert "-msve-vector-bits=scalable" in caught.value.remedy


def test_failed_compiler_query_is_not_repeated(planned, backend):
    backend.errors["export"] = BuildError("no such package")
    items = planned(only="cuda=none").with_status("build")
    compilers = Compilers(items, backend.export)
    for item in items:
        with pytest.raises(BuildError, match="no such package"):
            compilers.get_flags(item, sources(item))
    assert len(backend.called("export")) == 1


def test_table_gives_flags_without_a_compiler_stage(flags, backend):
    result = flags(only="cuda=none", template=NO_COMPILER)
    assert result["cpu-znver4"] == marches.get_required_flags("znver4", "gcc-14")
    assert not backend.called("export")


def test_stage_without_cc_is_named(flags, backend):
    backend.export = lambda *_: {}
    with pytest.raises(BuildError, match="the template's stage 'compiler' has no command cc") as caught:
        flags(only="cuda=none")
    assert "ln -s /usr/bin/gcc-14 /usr/local/bin/cc" in caught.value.remedy


def test_cells_fail_without_compiler_and_table(planned):
    unknown = ('base: "debian:trixie", compiler: gcc-14}\n    "11', 'base: "x"}\n    "11')
    (one, other) = planned(unknown, template=NO_COMPILER).with_status("failed")
    assert one.why == other.why == "the CPU flags of its march are unknown"
    assert "stage that has the compiler 'compiler'" in one.error.remedy


def test_cell_without_a_march_needs_no_flags(flags):
    result = flags(
        text="""\
            schema: imagematrix.matrix/v1
            images: {training: {version: v1, template: training.j2}}
            axes: {cuda: [none]}
            """,
        template="FROM debian AS compiler\n",
    )
    assert result == {"cpu": frozenset()}


ARM = """\
    schema: imagematrix.matrix/v1
    images: {training: {version: v1, template: training.j2, context: .}}
    axes: {platform: [linux/arm64], march: [neoverse-v2]}
    properties: {march: {neoverse-v2: {compiler: gcc-14}}}
    """
STAGE = "FROM --platform=$BUILDPLATFORM debian:trixie AS compiler\nFROM debian:trixie\n"
NATIVE = "#define __x86_64__ 1\n#define __AVX2__ 1\n"
CROSS = "#define __aarch64__ 1\n#define __ARM_FEATURE_SVE2 1\n"


@pytest.mark.parametrize(
    "answer",
    [
        # On a builder of the other architecture, cc is that of the machine, and rejects the core.
        {"cc": NATIVE, "aarch64-linux-gnu-gcc": CROSS, "aarch64-linux-gnu-gcc-mcpu=neoverse-v2": CROSS},
        {"cc": NATIVE, "cc-mcpu=neoverse-v2": NATIVE}
        | {"aarch64-linux-gnu-gcc": CROSS, "aarch64-linux-gnu-gcc-mcpu=neoverse-v2": CROSS},
        # On a builder of the same architecture, and where a template links its cross compiler, it is cc.
        {"cc": CROSS, "cc-mcpu=neoverse-v2": CROSS, "aarch64-linux-gnu-gcc": CROSS},
    ],
)
def test_compiler_for_the_cell_s_architecture_answers(flags, backend, answer):
    backend.export = lambda *_: answer
    assert flags(text=ARM, template=STAGE) == {"linux-arm64-neoverse-v2": frozenset({"sve2"})}


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ({"cc": NATIVE, "cc-mcpu=neoverse-v2": NATIVE}, "its cc makes code for x86_64"),
        ({"cc": "", "cc-mcpu=neoverse-v2": ""}, "its cc makes code for another"),
    ],
)
def test_no_answer_for_another_architecture_is_taken(flags, backend, answer, found):
    backend.export = lambda *_: answer
    with pytest.raises(BuildError, match="has no compiler for aarch64") as caught:
        flags(text=ARM, template=STAGE)
    assert found in str(caught.value)
    assert "install aarch64-linux-gnu-gcc in it" in caught.value.remedy


def test_remedy_makes_clang_the_compiler_for_the_architecture(flags, backend, tmp_path):
    backend.export = lambda *_: {"cc": NATIVE}
    with pytest.raises(BuildError) as caught:
        flags(text=ARM, template=STAGE)
    script = caught.value.remedy.partition(": RUN ")[2].replace("/usr/local/bin", str(tmp_path))
    (tmp_path / "clang").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "clang").chmod(0o755)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(["sh", "-c", script], check=True, env=path)
    done = subprocess.run(["cc", "-dM", "a b"], capture_output=True, text=True, check=True, env=path)
    assert done.stdout == "--target=aarch64-linux-gnu -dM a b\n"


def test_march_unknown_to_the_cross_compiler_is_a_build_error(flags, backend):
    backend.export = lambda *_: {"cc": NATIVE, "aarch64-linux-gnu-gcc": CROSS}
    with pytest.raises(BuildError, match="does not support -mcpu=neoverse-v2"):
        flags(text=ARM, template=STAGE)
