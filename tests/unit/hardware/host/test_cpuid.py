"""CPU flags that kernels do not print.

In the folder `diagnostics` is the output of glibc on real CPUs, and on those of `qemu-x86_64 -cpu max` and
`-cpu SierraForest` of QEMU 11.1, which emulates cmpccxadd. The tests write the
output for other CPUs in the same format.
"""

import os
import resource
import signal
from pathlib import Path

import pytest

from imagematrix.cli.shared.inputs import load_node
from imagematrix.hardware.host import cpuid
from imagematrix.hardware.host import probe as probing
from imagematrix.hardware.host.host import Host
from imagematrix.hardware.host.probe import probe, probe_hardware
from imagematrix.hardware.host.tree import Tree
from imagematrix.hardware.vendors import cpuid as facts
from imagematrix.hardware.vendors import marches

OUTPUTS = Path(__file__).parent / "diagnostics"
VNNI = frozenset({"avx2", "avx_vnni"})
SERVER = VNNI | {"amx_tile", "avx512f"}
KINDS = 0x6, 0x9  # glibc's numbers of the leaves 7.1 and 24.0
# EAX and EDX of leaf 7.1 (Intel's instruction set extensions reference).
GRANITE_RAPIDS = (1 << 4 | 1 << 5 | 1 << 21, 0, 0, 1 << 14)
SIERRA_FOREST = (1 << 4 | 1 << 7 | 1 << 23, 0, 0, 1 << 4 | 1 << 5)
EVERYTHING = (0xFFFFFFFF,) * 4


def read(tree, shown):
    """Return the flags and the warnings of processors that are alike."""
    found = cpuid.read_unprinted_flags(tree, shown, alike=True)
    assert bool(found.unknown) == bool(found.warnings)
    return found.present, [*found.warnings]


@pytest.fixture
def seen(captured):
    """Return the flags and the warnings of a captured tree with an output of the loader."""

    def call(text, shown=VNNI):
        return read(Tree(str(captured({cpuid.CAPTURED[1:]: text}))), shown)

    return call


def processor(values, *, kernel=True):
    """Return the part of the output about a processor, with the registers of leaves and subleaves."""
    lines = [
        f"x86.processor[0x0].cpuid.subleaf_eax[{leaf:#x}].ecx[{subleaf:#x}].{name}={value:#x}\n"
        for (leaf, subleaf), registers in values.items()
        for name, value in zip(facts.REGISTERS, registers, strict=True)
    ]
    return "".join([*lines, f"x86.processor[0x0].xgetbv.ecx[0x0]={0x207:#x}\n" if kernel else ""])


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("glibc-2.36-epyc-7003", set()),
        ("glibc-2.41-epyc-7003", set()),
        ("glibc-2.36-qemu-11.1-max", {"cmpccxadd"}),
        ("glibc-2.43-qemu-11.1-sierraforest", {"cmpccxadd"}),
    ],
)
def test_recorded_outputs(seen, name, flags):
    assert seen((OUTPUTS / f"{name}.txt").read_text()) == (flags, [])


def test_recorded_outputs_have_the_leaves_in_both_parts():
    text = (OUTPUTS / "glibc-2.43-qemu-11.1-sierraforest.txt").read_text()
    registers, active = cpuid._parse_registers(text)
    assert registers[7, 1] == (0x880, 0, 0, 0)
    assert active[7, 1] == (0x880, 0, 0, 0)
    only_processor = text[text.index("x86.processor[0x0]") :]
    assert cpuid._parse_registers(only_processor)[0][7, 1] == (0x880, 0, 0, 0)


def test_flags_of_leaf_7(hosts, seen):
    assert seen(hosts.diagnostics({0x6: GRANITE_RAPIDS}), SERVER) == ({"amx_fp16"}, [])
    assert seen(hosts.diagnostics({0x6: SIERRA_FOREST})) == (
        {"avx_ifma", "avx_ne_convert", "avx_vnni_int8", "cmpccxadd"},
        [],
    )


def test_a_flag_needs_what_shows_that_the_kernel_saves_its_registers(hosts, seen):
    text = hosts.diagnostics(dict.fromkeys(KINDS, EVERYTHING)) + processor({})
    flags, _ = seen(text)
    assert not any(flag.startswith(("amx", "avx10", "avx512")) for flag in flags)
    assert {"amx_fp16", "avx10_2", "sha512"} <= seen(text, SERVER)[0]
    assert seen(text, frozenset({"avx2"})) == (frozenset(), [])


def test_apx_needs_the_registers_that_no_printed_flag_shows(hosts, seen):
    features = {0x6: (0, 0, 0, 1 << 21), 0x9: (0, 0, 0, 0)}
    assert seen(hosts.diagnostics(features))[0] == {"apx"}
    assert seen(hosts.diagnostics(features, usable=False)) == (frozenset(), [])
    del features[0x9]  # an older glibc, which does not know these registers
    flags, (warning,) = seen(hosts.diagnostics(features))
    assert flags == frozenset()
    assert "do not print: apx: `ld.so --list-diagnostics` does not show them" in warning


def test_avx10_has_a_version(hosts, seen):
    for version, flags in ((1, set()), (2, {"avx10_2"}), (3, {"avx10_2"})):
        leaves = {0x6: (0, 0, 0, 1 << 10), 0x9: (0, version | 7 << 16, 0, 0)}
        assert seen(hosts.diagnostics(leaves), SERVER)[0] - {"avx_vnni_int16"} == flags


def test_leaves_that_only_the_newest_libraries_show(hosts, seen):
    text = hosts.diagnostics({0x6: (1 << 31, 0, 0, 1 << 4), 0x9: (0, 0, 0, 0)})
    amx = {"amx_avx512", "amx_fp8", "amx_movrs", "amx_tf32", "amx_transpose"}
    flags, (warning,) = seen(text, SERVER)
    assert flags == {"movrs", "avx_vnni_int8"}
    assert all(flag in warning for flag in (*amx, "avx512_bmm"))
    leaves = {(0x1E, 1): (0x1FF, 0, 0, 0), (0x80000021, 0): (1 << 23, 0, 0, 0)}
    assert seen(text + processor(leaves), SERVER) == (flags | amx | {"avx512_bmm"}, [])
    assert seen(text + processor({}), SERVER) == (flags, [])  # zeros are left out
    assert seen(text + processor({}, kernel=False), SERVER)[1]


def test_an_old_library_and_a_bare_tree_are_named(captured, seen):
    for text in ("", "ld.so: unrecognized option", "x86.cpu_features.features[0x6].cpuid[0x0]=\n"):
        flags, (warning,) = seen(text)
        assert flags == frozenset()
        assert "sha512" in warning
        assert "glibc shows some from 2.33 on" in warning
    _, (warning,) = read(Tree(str(captured({}).parent)), VNNI)
    assert "the captured tree has no ld-diagnostics.txt" in warning


def test_processors_that_differ_are_not_taken_as_one(hosts, captured):
    cpu = hosts.Cpu("GenuineIntel", "Xeon", "fpu lm avx2 avx_vnni")
    text = hosts.cpuinfo(cpu)
    root = captured({"ld-diagnostics.txt": hosts.diagnostics({0x6: SIERRA_FOREST}), "proc/cpuinfo": text})
    known = probe(root)
    assert "cmpccxadd" in known.cpu.flags
    assert known.cpu.unknown_flags == frozenset()
    for changed in ("avx_vnni rtm", "avx_vnni\nstepping\t: 3", "avx_vnni\nmodel\t: 3"):
        one, other = (text.replace("avx_vnni", changed.replace("3", digit)) for digit in "34")
        halves = one.split("\n\n")[0], (text if "rtm" in changed else other).split("\n\n")[1]
        captured({"proc/cpuinfo": "\n\n".join([*halves, ""])})
        host = probe(root)
        assert "cmpccxadd" not in host.cpu.flags
        assert "cmpccxadd" in host.cpu.unknown_flags
        assert "the processors are not of one kind" in "".join(host.warnings)


def test_without_a_sign_nothing_is_read(captured, monkeypatch):
    root = captured({"proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu lm avx2 avx512f\n"})
    monkeypatch.setattr(cpuid, "read_unprinted_flags", None)
    assert probe(root).cpu.flags == {"fpu", "lm", "avx2", "avx512f"}


def test_every_flag_has_the_sign_of_a_cpu_with_unprinted_flags():
    assert all(bit.proofs >= VNNI for bit in facts.list_unprinted_flags().values())


def test_the_tree_of_this_machine_in_a_container(captured, monkeypatch, tmp_path):
    boot = Path(cpuid.BOOT).read_text()
    tree = Tree(str(captured({cpuid.BOOT[1:]: boot, cpuid.CAPTURED[1:]: "not read"})))
    loader(tmp_path, monkeypatch, "x86.cpu_features.features[0x6].cpuid[0x0]=0x1")
    assert read(tree, VNNI)[0] == {"sha512"}
    captured({cpuid.BOOT[1:]: "another"})
    assert read(tree, VNNI)[0] == frozenset()


def loader(folder, monkeypatch, *lines, rest="exec sleep 600"):
    """Put a program in the place of ld.so that prints lines, then the first mark, and then goes on."""
    program = folder / "ld.so"
    text = "\n".join([*lines, "x86.cpu_features.preferred.I586=0x1"])
    program.write_text(f"#!/bin/sh\n[ -z \"$HOME\" ] || exit 1\ncat <<'END'\n{text}\nEND\n{rest}\n")
    program.chmod(0o755)
    monkeypatch.setattr(cpuid, "LOADER", str(program))


def test_the_loader_is_stopped_as_soon_as_all_is_known(monkeypatch, tmp_path):
    loader(tmp_path, monkeypatch, "x86.cpu_features.features[0x6].cpuid[0x0]=0x1")
    spawn, started = os.posix_spawn, []

    def spawned(*words, **options):
        started.append(spawn(*words, **options))
        return started[-1]

    monkeypatch.setattr(os, "posix_spawn", spawned)
    assert read(Tree("/"), VNNI) == ({"sha512"}, [])
    (child,) = started
    with pytest.raises(ChildProcessError):  # it has ended; other tests may have children of their own
        os.waitpid(child, os.WNOHANG)


def test_the_loader_is_read_on_for_leaves_of_the_processor(monkeypatch, tmp_path):
    rest = f"cat <<'END'\n{processor({(0x80000021, 0): (1 << 23, 0, 0, 0)})}END\nexec sleep 600"
    # The shell is slow between the two parts, so that they come one after the other.
    loader(tmp_path, monkeypatch, "x86.cpu_features.features[0x6].cpuid[0x3]=0x10", rest=rest)
    assert read(Tree("/"), SERVER) == ({"avx_vnni_int8", "avx512_bmm"}, [])


def test_the_loader_is_read_in_a_process_with_many_open_files(monkeypatch, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, limits[1]), limits[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        loader(tmp_path, monkeypatch, "x86.cpu_features.features[0x6].cpuid[0x0]=0x1")
        assert read(Tree("/"), VNNI) == ({"sha512"}, [])
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("rest", ["exit 0", "exec sleep 600"])
def test_the_loader_is_read_in_a_process_that_ignores_the_end_of_children(monkeypatch, tmp_path, rest):
    loader(tmp_path, monkeypatch, "x86.cpu_features.features[0x6].cpuid[0x0]=0x1", rest=rest)
    handler = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert read(Tree("/"), VNNI) == ({"sha512"}, [])
    finally:
        signal.signal(signal.SIGCHLD, handler)


def test_a_loader_that_another_thread_waited_for_is_not_killed(monkeypatch, tmp_path):
    """Its number may be that of another process."""
    loader(tmp_path, monkeypatch, rest="exit 0")
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda child, _signal: killed.append(child))
    spawn = os.posix_spawn

    def spawned(*words, **options):
        child = spawn(*words, **options)
        os.waitpid(child, 0)
        return child

    monkeypatch.setattr(os, "posix_spawn", spawned)
    assert read(Tree("/"), VNNI)[0] == frozenset()
    assert not killed


@pytest.mark.parametrize("rest", ["exit 0", "exec sleep 600"])
def test_a_loader_that_shows_nothing(monkeypatch, tmp_path, rest):
    loader(tmp_path, monkeypatch, rest=rest)
    monkeypatch.setattr(cpuid, "TIMEOUT_S", 0.2)
    flags, (warning,) = read(Tree("/"), VNNI)
    assert flags == frozenset()
    assert "glibc shows some" in warning


def test_systems_without_glibc(monkeypatch, tmp_path):
    monkeypatch.setattr(cpuid, "LOADER", str(tmp_path / "none"))
    _, (warning,) = read(Tree("/"), VNNI)
    assert "this system has no glibc" in warning
    (tmp_path / "none").write_text("not a program")
    (tmp_path / "none").chmod(0o755)
    assert read(Tree("/"), VNNI)[0] == frozenset()


@pytest.mark.skipif(not Path(cpuid.LOADER).exists(), reason="no glibc for x86-64")
def test_the_loader_of_this_machine():
    flags, warnings = read(Tree("/"), VNNI)
    assert flags <= facts.list_unprinted_flags().keys()
    assert not any("captured" in warning for warning in warnings)


def test_this_machine_is_described_alike_by_select_and_by_its_saved_probe(hosts, tmp_path, monkeypatch):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(hosts.cpuinfo(hosts.Cpu("GenuineIntel", "Xeon", "lm avx2 avx_vnni")))
    monkeypatch.setattr(probing, "CPUINFO", str(cpuinfo))
    loader(tmp_path, monkeypatch, *hosts.diagnostics({0x6: SIERRA_FOREST}).splitlines()[:-1])
    host = probe_hardware(nvml=False)
    assert "cmpccxadd" in host.cpu.flags
    assert Host.from_json(host.to_json()) == host == load_node(None, None, None, None)[0]


MARCHES = sorted(march for march in marches.list_names() if marches.get_arch(march) == "x86_64")


@pytest.mark.parametrize("march", MARCHES)
def test_every_march_fits_a_host_that_has_its_flags(hosts, captured, march):
    needs = {marches.get_required_flags(march, compiler) for compiler in marches.list_compilers()} - {None}
    needed = frozenset().union(*needs)
    unprinted = needed & facts.list_unprinted_flags().keys()
    printed = " ".join(needed - unprinted | {"lm"})
    leaves: dict[facts.Leaf, list[int]] = {}
    for bit in (facts.list_unprinted_flags()[flag] for flag in unprinted):
        leaves.setdefault(bit.leaf, [0, 0, 0, 0])[bit.register] |= bit.least << bit.low
    numbers = {leaf: number for number, leaf in cpuid.FEATURES.items()}
    features = {number: leaves.get(leaf, (0, 0, 0, 0)) for leaf, number in numbers.items()}
    text = hosts.diagnostics(features) + processor(leaves)
    host = probe(
        captured(
            {
                "proc/cpuinfo": hosts.cpuinfo(hosts.Cpu("GenuineIntel", march, printed)),
                "proc/sys/kernel/arch": "x86_64",
                "ld-diagnostics.txt": text,
            }
        )
    )
    assert host.cpu.flags == needed | {"lm"}
    assert host.warnings == ()
