"""Images whose code is for another march than their labels name."""

import re

import pytest
from compiling import compiled
from images import Parts, layout, tar

from imagematrix.audit.claims import broken
from imagematrix.audit.layers import Layers
from imagematrix.audit.march import doubts
from imagematrix.audit.report import audit
from imagematrix.audit.sources import read
from imagematrix.catalog.catalog import Variant
from imagematrix.facts import marches

SUM = "for (int i = 0; i < 64; i++) a[i] = a[i] * 3.5 + i; return a[3];"
PROGRAM = f"double a[64]; int main(int n, char **v) {{ a[n] = n; {SUM} }}"
WIDE = '__attribute__((target("avx512f,prefer-vector-width=512")))'
UNCALLED = f"{WIDE} static double more(double *a) {{ {SUM} }} double (*kept)(double *) = more;"
HASWELL = Variant(
    reference="t:x",
    digest=None,
    platform="linux/amd64",
    march="haswell",
    cpu_flags=marches.required("haswell", "gcc-14"),
)


@pytest.fixture
def program(tmp_path):
    """Call it with C and options of gcc to get a program's bytes."""
    return lambda source, *options: compiled(tmp_path / "tool", source, "-O3", *options).read_bytes()


@pytest.fixture
def audited(tmp_path):
    """Call it with the members of a layer to get the audit of an image with it."""

    def call(*members):
        image = Parts(tar(*members))
        (result,) = read(layout(tmp_path / image.digest[7:19], image), "linux/amd64", Layers())
        return audit(result)

    return call


def test_effective_march_is_accepted(audited, program):
    report = audited(("opt/tool", program(PROGRAM, "-march=haswell")))
    assert (broken(report, HASWELL), doubts(report, HASWELL)) == ("", [])
    assert report.decided


def test_march_without_effect_is_doubted(audited, program):
    report = audited(("opt/tool", program(PROGRAM)))
    assert broken(report, HASWELL) == ""
    assert doubts(report, HASWELL) == [
        "-march=haswell shows no effect: nothing in /opt/tool is beyond the baseline"
    ]


def test_isa_note_counts_as_an_effect(audited, program):
    noted = program("int main(void) { return 0; }", "-Wl,-z,x86-64-v3")
    assert doubts(audited(("opt/tool", noted)), HASWELL) == []


@pytest.mark.parametrize("members", [(), (("opt/tool", b"#!/bin/sh\n"),)])
def test_images_without_programs_are_not_doubted(audited, members):
    assert doubts(audited(*members), HASWELL) == []


@pytest.mark.parametrize("changes", [{"march": None}, {"march": "x86-64", "cpu_flags": frozenset({"sse2"})}])
def test_baseline_march_is_not_doubted(audited, program, changes):
    variant = Variant(reference="t:x", digest=None, platform="linux/amd64", **changes)
    assert doubts(audited(("opt/tool", program(PROGRAM))), variant) == []


def test_required_code_beyond_the_march_contradicts(audited, program):
    report = audited(("opt/tool", program(PROGRAM, "-march=x86-64-v4", "-mprefer-vector-width=512")))
    text = broken(report, HASWELL)
    assert re.fullmatch(r"the labels promise code for x86-64-v3, but /opt/tool needs avx512.*", text)


def test_undispatched_code_beyond_the_march_is_doubted(audited, program):
    report = audited(("opt/tool", program(PROGRAM + UNCALLED, "-march=haswell")))
    assert broken(report, HASWELL) == ""
    (doubt,) = doubts(report, HASWELL)
    assert doubt == (
        "/opt/tool has code beyond -march=haswell in more: avx512f; "
        "nothing shows that it checks the CPU before using it"
    )
    assert not report.decided


def test_dispatched_code_is_not_doubted(audited, program):
    chosen = UNCALLED.replace("more", "more_avx512f")
    assert doubts(audited(("opt/tool", program(PROGRAM + chosen, "-march=haswell"))), HASWELL) == []
    asking = 'int asks(void) { return __builtin_cpu_supports("avx512f"); }'
    raw = program(PROGRAM + UNCALLED + asking, "-march=haswell")
    assert doubts(audited(("opt/tool", raw)), HASWELL) == []


def test_dispatched_code_does_not_count_as_an_effect(audited, program):
    chosen = UNCALLED.replace("more", "more_avx512f")
    assert "shows no effect" in doubts(audited(("opt/tool", program(PROGRAM + chosen))), HASWELL)[0]


def test_long_lists_are_shortened(audited, program):
    raw = program(PROGRAM)
    (text,) = doubts(audited(*((f"opt/{name}", raw) for name in "abcde")), HASWELL)
    assert "/opt/a, /opt/b, /opt/c and 2 more" in text
