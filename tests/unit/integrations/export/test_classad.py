"""`probe --format classad`: a node's facts as attributes for HTCondor."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.hardware.host.host import Cpu, Driver, Gpu, Host, MigDevice
from imagematrix.integrations.export.classad import ATTRIBUTES, make_attribute_lines

NAME = re.compile("Im[A-Z][A-Za-z]*")
# A literal of HTCondor's long form: a backslash only before a quotation mark.
STRING = r'"(?:[^"\\\n]|\\")*"'
SCALAR = rf"(?:{STRING}|-?\d+(?:\.\d+)?|undefined)"
LITERAL = re.compile(rf"{SCALAR}|\{{(?:{SCALAR}(?:, {SCALAR})*)?\}}")
TEXTS = st.none() | st.text(max_size=20) | st.text('"\\\n\t\x1b{},a', max_size=8)


def host(**changes):
    cpu = Cpu(vendor=None, model=None, flags=frozenset(), level=None)
    return Host(**{"arch": "x86_64", "cpu": cpu, **changes})


def attributes(described):
    """Return the attributes, after a check of their lines."""
    found = {}
    for line in make_attribute_lines(described):
        name, _, value = line.partition(" = ")
        assert name in ATTRIBUTES
        assert NAME.fullmatch(name)
        assert LITERAL.fullmatch(value), line
        found[name] = value
    return found


def test_a_gpu_node():
    found = attributes(Host.load("tests/hosts/mig.json"))
    uuid = "GPU-00000008-2330-4000-8000-00000000000"
    assert found.pop("ImGpuUuids") == f'{{"{uuid}0", "{uuid}1"}}'
    assert found.pop("ImCpuFlags").startswith('{"3dnowprefetch", "abm", "acpi", ')
    assert found == {
        "ImArch": '"x86_64"',
        "ImCpuVendor": '"GenuineIntel"',
        "ImCpuModel": '"Intel(R) Xeon(R) Platinum 8480+"',
        "ImCpuLevel": '"x86-64-v4"',
        "ImDriver": '"550.163.01"',
        "ImDriverKind": '"open"',
        "ImDriverUserMode": '"550.163.01"',
        "ImDriverCuda": '"12.4"',
        "ImGpus": "2",
        "ImGpusUsable": "2",
        "ImGpuNames": '{"NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"}',
        "ImGpuComputes": '{"9.0", "9.0"}',
        "ImGpuMemoryMib": "{81559, 81559}",
        "ImGpuStates": '{"ok", "ok"}',
        "ImGpuMigDevices": "{3, 0}",
        "ImGpuComputeMin": "9.0",
        "ImGpuComputeMax": "9.0",
        "ImAccelerators": "0",
    }


def test_what_is_unknown_is_undefined_and_so_has_no_line():
    found = attributes(host(gpus=(Gpu(index=0, compute="8.9"), Gpu(index=1, state="lost"))))
    assert found == {
        "ImArch": '"x86_64"',
        "ImCpuFlags": "{}",
        "ImGpus": "2",
        "ImGpusUsable": "1",
        "ImGpuNames": "{undefined, undefined}",
        "ImGpuUuids": "{undefined, undefined}",
        "ImGpuComputes": '{"8.9", undefined}',
        "ImGpuMemoryMib": "{undefined, undefined}",
        "ImGpuStates": '{"ok", "lost"}',
        "ImGpuMigDevices": "{0, 0}",
        "ImAccelerators": "0",
    }


@pytest.mark.parametrize(
    ("text", "literal"),
    [
        ('8" GPU', '"8\\" GPU"'),
        ("a\\b", '"a\ufffdb"'),
        ("end\\", '"end\ufffd"'),
        ("two\nlines\x1b[31m", '"two\ufffdlines\ufffd[31m"'),
        ("", '""'),
        ("Größe", '"Größe"'),
    ],
)
def test_texts_are_quoted_so_that_every_reader_sees_the_same(text, literal):
    assert attributes(host(gpus=(Gpu(index=0, name=text),)))["ImGpuNames"] == f"{{{literal}}}"


def test_the_bounds_of_capabilities_are_numbers_in_their_order():
    found = attributes(
        host(gpus=tuple(Gpu(index=i, compute=c) for i, c in enumerate(["10.0", "9.0", "12.1"])))
    )
    assert (found["ImGpuComputeMin"], found["ImGpuComputeMax"]) == ("9.0", "12.1")


@given(st.lists(st.tuples(TEXTS, TEXTS), max_size=3), TEXTS, TEXTS)
def test_whatever_the_facts_say_there_is_one_valid_line_for_each(rows, vendor, model):
    part = MigDevice(uuid=None, profile=None, gpu_instance=1, compute_instance=0)
    gpus = tuple(Gpu(index=i, name=a, uuid=b, mig=(part,)) for i, (a, b) in enumerate(rows))
    cpu = Cpu(vendor=vendor, model=model, flags=frozenset(["avx2"]), level=None)
    driver = Driver(version="35.4.1", kind=None, source="")
    found = attributes(host(gpus=gpus, cpu=cpu, driver=driver))
    assert "ImDriverCuda" not in found
    assert found["ImGpuMigDevices"] == f"{{{', '.join(['1'] * len(rows))}}}"


def test_the_command_prints_the_lines(cli):
    result = cli(
        "probe", "--nvidia-smi", "tests/unit/hardware/host/dumps/550-lost.xml", "--format", "classad"
    )
    assert result.code == 0
    assert 'ImDriver = "550.163.01"' in result.out.splitlines()
    assert 'ImGpuStates = {"ok", "lost", "vgpu"}' in result.out.splitlines()
    assert "warning: GPU 1" in result.err
