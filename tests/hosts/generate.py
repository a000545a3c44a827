"""Writes the host profiles beside this file: what `probe` says of kinds of nodes that fleets have.

Each is made by the probe itself, from a captured tree with the files that such a node has, and from what NVML
answers there. Run it after a change of the probe or of the tables: `python tests/hosts/generate.py`.

CPU flags are those that Linux shows on these processors, GPU ids and names those of pci.ids, memory sizes
those of `nvidia-smi`, minor numbers of capability nodes those of nvidia-caps. UUIDs are made up.
"""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path
from typing import NamedTuple

from imagematrix.hardware.host.host import Host, MigDevice
from imagematrix.hardware.host.nvml import Nvml, NvmlGpu
from imagematrix.hardware.host.probe import assemble_host
from imagematrix.hardware.host.tree import Tree

FOLDER = Path(__file__).parent

# What every x86-64 processor of these years shows, by maker.
X86 = """fpu vme de pse tsc msr pae mce cx8 apic sep mtrr pge mca cmov pat pse36 clflush mmx fxsr sse sse2
    ht syscall nx pdpe1gb rdtscp lm constant_tsc rep_good nopl nonstop_tsc cpuid pni pclmulqdq ssse3 fma
    cx16 sse4_1 sse4_2 movbe popcnt aes xsave avx f16c rdrand lahf_lm abm 3dnowprefetch fsgsbase bmi1 avx2
    smep bmi2 rdseed adx smap xsaveopt arat"""
INTEL = f"""{X86} dts acpi ss tm pbe arch_perfmon pebs bts xtopology aperfmperf dtes64 monitor ds_cpl vmx
    smx est tm2 sdbg xtpr pdcm pcid x2apic tsc_deadline_timer cpuid_fault epb ssbd ibrs ibpb stibp
    tpr_shadow flexpriority ept vpid ept_ad tsc_adjust erms invpcid intel_pt dtherm ida pln pts vnmi
    md_clear flush_l1d"""
INTEL_SERVER = (
    f"""{INTEL} dca cat_l3 cdp_l3 intel_ppin cqm rdt_a cqm_llc cqm_occup_llc cqm_mbm_total cqm_mbm_local"""
)
SKYLAKE = f"""{INTEL_SERVER} art mba avx512f avx512dq clflushopt clwb avx512cd avx512bw avx512vl xsavec
    xgetbv1 xsaves hwp hwp_act_window hwp_epp hwp_pkg_req pku ospke"""
ICELAKE = f"""{SKYLAKE} ibrs_enhanced avx512ifma sha_ni wbnoinvd avx512vbmi umip avx512_vbmi2 gfni vaes
    vpclmulqdq avx512_vnni avx512_bitalg tme avx512_vpopcntdq la57 rdpid sgx sgx_lc fsrm pconfig
    arch_capabilities split_lock_detect"""
SAPPHIRE_RAPIDS = f"""{ICELAKE} cat_l2 cdp_l2 avx_vnni avx512_bf16 waitpkg bus_lock_detect cldemote
    movdiri movdir64b enqcmd serialize tsxldtrk arch_lbr ibt amx_bf16 avx512_fp16 amx_tile amx_int8
    user_shstk hfi"""
ZEN = f"""{X86} mmxext fxsr_opt extd_apicid aperfmperf monitor cmp_legacy svm extapic cr8_legacy sse4a
    misalignsse osvw ibs skinit wdt tce topoext perfctr_core perfctr_nb bpext perfctr_llc mwaitx cpb
    cat_l3 cdp_l3 hw_pstate ssbd mba ibrs ibpb stibp vmmcall cqm rdt_a clflushopt clwb sha_ni xsavec
    xgetbv1 xsaves cqm_llc cqm_occup_llc cqm_mbm_total cqm_mbm_local clzero irperf xsaveerptr rdpru
    wbnoinvd amd_ppin npt lbrv svm_lock nrip_save tsc_scale vmcb_clean flushbyasid decodeassists
    pausefilter pfthreshold avic v_vmsave_vmload vgif v_spec_ctrl umip rdpid overflow_recov succor smca
    sme sev sev_es"""
MILAN = f"{ZEN} pcid x2apic erms invpcid pku ospke vaes vpclmulqdq fsrm debug_swap"
GENOA = f"""{MILAN} perfmon_v2 ibrs_enhanced avx512f avx512dq avx512ifma avx512cd avx512bw avx512vl
    avx512_bf16 cppc x2avic v_nmi avx512vbmi avx512_vbmi2 gfni avx512_vnni avx512_bitalg avx512_vpopcntdq
    la57 flush_l1d"""


class Cpu(NamedTuple):
    """A processor: its maker and model, by the words of /proc/cpuinfo, and its flags.

    `leaf` is EAX of CPUID's leaf 7, subleaf 1, which has flags that Linux does not show.
    """

    vendor: str
    model: str
    flags: str
    leaf: int = 0


CPUS = {
    "broadwell": Cpu(
        "GenuineIntel", "Intel(R) Xeon(R) CPU E5-2690 v4 @ 2.60GHz", f"{INTEL_SERVER} pti hle rtm"
    ),
    "skylake": Cpu("GenuineIntel", "Intel(R) Xeon(R) Gold 6148 CPU @ 2.40GHz", f"{SKYLAKE} pti hle rtm mpx"),
    "icelake": Cpu("GenuineIntel", "Intel(R) Xeon(R) Platinum 8358 CPU @ 2.60GHz", ICELAKE),
    "sapphirerapids": Cpu("GenuineIntel", "Intel(R) Xeon(R) Platinum 8480+", SAPPHIRE_RAPIDS, 0x1C30),
    "alderlake": Cpu(
        "GenuineIntel",
        "12th Gen Intel(R) Core(TM) i7-1260P",
        f"""{INTEL} art ibrs_enhanced clflushopt clwb sha_ni xsavec xgetbv1 xsaves split_lock_detect
        avx_vnni hwp hwp_notify hwp_act_window hwp_epp hwp_pkg_req hfi umip pku ospke waitpkg gfni vaes
        vpclmulqdq rdpid movdiri movdir64b fsrm serialize arch_lbr ibt arch_capabilities""",
        0x400C10,
    ),
    "rome": Cpu("AuthenticAMD", "AMD EPYC 7742 64-Core Processor", ZEN),
    "milan": Cpu("AuthenticAMD", "AMD EPYC 7543 32-Core Processor", MILAN),
    "genoa": Cpu("AuthenticAMD", "AMD EPYC 9654 96-Core Processor", GENOA),
    "masked-genoa": Cpu(
        "AuthenticAMD", "AMD EPYC 9654 96-Core Processor", f"{GENOA} hypervisor".replace(" avx512_bf16", "")
    ),
    "grace": Cpu(
        "0x41",
        "0xd4f",
        """fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc
        dcpop sha3 sm3 sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs sb paca pacg dcpodp
        sve2 sveaes svepmull svebitperm svesha3 svesm4 flagm2 frint svei8mm svebf16 i8mm bf16 dgh bti""",
    ),
}


class Product(NamedTuple):
    """A GPU: PCI device id, name, NVML's brand, compute capability, memory in MiB."""

    device_id: str
    name: str
    brand: str
    compute: str
    memory_mib: int


PRODUCTS = {
    "m60": Product("13f2", "Tesla M60", "tesla", "5.2", 8129),
    "v100": Product("1db5", "Tesla V100-SXM2-32GB", "tesla", "7.0", 32768),
    "t4": Product("1eb8", "Tesla T4", "nvidia", "7.5", 15360),
    "a100": Product("20b0", "NVIDIA A100-SXM4-40GB", "nvidia", "8.0", 40960),
    "a100-pcie": Product("20f1", "NVIDIA A100-PCIE-40GB", "nvidia", "8.0", 40960),
    "a10": Product("2236", "NVIDIA A10", "nvidia", "8.6", 23028),
    "l40s": Product("26b9", "NVIDIA L40S", "nvidia", "8.9", 46068),
    "h100": Product("2330", "NVIDIA H100 80GB HBM3", "nvidia", "9.0", 81559),
    "h200": Product("2335", "NVIDIA H200", "nvidia", "9.0", 143771),
    "gh200": Product("2342", "NVIDIA GH200 480GB", "nvidia", "9.0", 97871),
}


class Card(NamedTuple):
    """One GPU in a node: its product, address, minor number and MIG devices (GPU instance, profile, MiB)."""

    product: str
    bus_id: str
    minor: int
    mig: tuple[tuple[int, str, int], ...] | None = None


class Node(NamedTuple):
    """A node: processor, driver version and kind, GPUs, and a user-mode driver of another version, if any."""

    cpu: str
    version: str | None = None
    kind: str = "open"
    cards: tuple[Card, ...] = ()
    user_mode: str | None = None


def row(product: str, *buses: str, minors: tuple[int, ...] | None = None) -> tuple[Card, ...]:
    """Return GPUs of one kind at `buses`; their minors count up unless `minors` gives them."""
    numbers = minors or tuple(range(len(buses)))
    return tuple(Card(product, f"0000:{bus}:00.0", minor) for bus, minor in zip(buses, numbers, strict=True))


NODES = {
    "broadwell-m60": Node("broadwell", "535.261.03", "proprietary", row("m60", "05", "06", "84", "85")),
    "skylake-v100": Node("skylake", "535.261.03", "proprietary", row("v100", "15", "16", "3a", "3b")),
    # The minors of a DGX A100 do not follow the bus.
    "rome-a100": Node(
        "rome",
        "550.163.01",
        "proprietary",
        row("a100", "07", "0f", "47", "4e", "87", "90", "b7", "bd", minors=(2, 3, 0, 1, 6, 7, 4, 5)),
    ),
    "milan-a10": Node("milan", "535.261.03", "proprietary", row("a10", "25", "c1")),
    "icelake-l40s": Node("icelake", "550.163.01", "open", row("l40s", "31", "4b", "b1", "ca")),
    "sapphirerapids-h100": Node(
        "sapphirerapids",
        "550.163.01",
        "open",
        row("h100", "1b", "29", "45", "4e", "9b", "ab", "c5", "ce"),
    ),
    "genoa-h200": Node(
        "genoa", "550.163.01", "open", row("h200", "03", "13", "53", "63", "83", "93", "d3", "e3")
    ),
    "mixed": Node(
        "milan", "535.261.03", "proprietary", row("t4", "21") + row("a100-pcie", "81", minors=(1,))
    ),
    "mig": Node(
        "sapphirerapids",
        "550.163.01",
        "open",
        (
            Card(
                "h100",
                "0000:1b:00.0",
                0,
                ((2, "3g.40gb", 40448), (9, "1g.10gb", 9984), (10, "1g.10gb", 9984)),
            ),
            Card("h100", "0000:43:00.0", 1),
        ),
    ),
    "driver-mismatch": Node("icelake", "550.163.01", "open", row("l40s", "31", "b1"), "550.144.03"),
    "laptop": Node("alderlake"),
    "masked": Node("masked-genoa", "550.163.01", "open", row("l40s", "06")),
    "grace-hopper": Node("grace", "550.163.01", "open", (Card("gh200", "0009:01:00.0", 0),)),
}


def cpuinfo(cpu: Cpu, count: int = 2) -> str:
    """Return the text of /proc/cpuinfo on a host with `count` CPUs."""
    flags = " ".join(cpu.flags.split())
    if cpu.vendor.startswith("0x"):
        block = (
            "processor\t: {n}\nBogoMIPS\t: 2000.00\nFeatures\t: {flags}\nCPU implementer\t: {vendor}\n"
            "CPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: {model}\nCPU revision\t: 0\n\n"
        )
    else:
        block = (
            "processor\t: {n}\nvendor_id\t: {vendor}\nmodel name\t: {model}\ncpu MHz\t\t: 2400.000\n"
            "core id\t\t: {n}\n"
            "flags\t\t: {flags}\nbugs\t\t: spectre_v1 spectre_v2\nbogomips\t: 4800.00\npower management:\n\n"
        )
    return "".join(block.format(n=n, vendor=cpu.vendor, model=cpu.model, flags=flags) for n in range(count))


def diagnostics(features: dict[int, tuple[int, int, int, int]], *, usable: bool = True) -> str:
    """Return what `ld.so --list-diagnostics` prints of CPUID, by glibc's numbers of the leaves.

    The features are `usable` if the kernel has enabled their registers.
    """
    lines = [
        f"x86.cpu_features.features[{number:#x}].{kind}[{register:#x}]={value if shown else 0:#x}\n"
        for number, values in features.items()
        for kind, shown in (("cpuid", True), ("active", usable))
        for register, value in enumerate(values)
    ]
    return "".join([*lines, "x86.cpu_features.preferred.Fast_Rep_String=0x0\n"])


def banner(version: str, kind: str, arch: str = "x86_64") -> str:
    """Return the text of /proc/driver/nvidia/version."""
    module = f"Open Kernel Module for {arch}" if kind == "open" else f"{arch} Kernel Module"
    rest = "Release Build  (builder@host)" if kind == "open" else "Tue Apr  8 12:41:17 UTC 2025"
    compiler = "gcc version 12.2.0 (Debian 12.2.0-14)"
    return f"NVRM version: NVIDIA UNIX {module}  {version}  {rest}\nGCC version:  {compiler}\n"


def information(card: Card, uuid: str) -> str:
    """Return the text of a GPU's information file."""
    return (
        f"Model: \t\t {PRODUCTS[card.product].name}\nIRQ:   \t\t 185\nGPU UUID: \t {uuid}\n"
        f"Video BIOS: \t 96.00.99.00.01\nBus Type: \t PCIe\nDMA Size: \t 52 bits\n"
        f"DMA Mask: \t 0xfffffffffffff\nBus Location: \t {card.bus_id}\n"
        f"Device Minor: \t {card.minor}\nGPU Excluded:\t No\n"
    )


def identity(name: str, card: Card) -> str:
    """Return a UUID that is the same in every run."""
    domain = [*NODES].index(name)
    return f"GPU-{domain:08x}-{PRODUCTS[card.product].device_id}-4000-8000-{card.minor:012x}"


def capture(root: Path, name: str) -> None:
    """Write the files of the node `name` below `root`."""
    node = NODES[name]
    arch = "aarch64" if node.cpu == "grace" else "x86_64"
    files: dict[str, str | bytes] = {
        "proc/cpuinfo": cpuinfo(CPUS[node.cpu]),
        "proc/sys/kernel/arch": f"{arch}\n",
        "dev/null": "",
    }
    if leaf := CPUS[node.cpu].leaf:
        files["ld-diagnostics.txt"] = diagnostics({0x6: (leaf, 0, 0, 0)})
    if node.version:
        files["proc/driver/nvidia/version"] = banner(node.version, node.kind, arch)
        for device in ("nvidiactl", "nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools"):
            files[f"dev/{device}"] = ""
        library = f"usr/lib/{arch}-linux-gnu/libcuda.so"
        files[f"{library}.{node.user_mode or node.version}"] = ""
        files["etc/ld.so.cache"] = loader_cache(("libcuda.so.1", f"/{library}.1", 0))
    for card in node.cards:
        bus = f"sys/bus/pci/devices/{card.bus_id}"
        files[f"{bus}/vendor"], files[f"{bus}/class"] = "0x10de\n", "0x030200\n"
        files[f"{bus}/device"] = f"0x{PRODUCTS[card.product].device_id}\n"
        files[f"proc/driver/nvidia/gpus/{card.bus_id}/information"] = information(card, identity(name, card))
        files[f"dev/nvidia{card.minor}"] = ""
        for instance, _, _ in card.mig or ():
            # nvidia-caps numbers 15 GPU instances a GPU, each with its own node and 8 for compute instances.
            first = 3 + (card.minor * 15 + instance) * 9
            gpu, parts = f"gpu{card.minor}", (f"gi{instance}/access", f"gi{instance}/ci0/access")
            for number, part in enumerate(parts, first):
                path = f"proc/driver/nvidia/capabilities/{gpu}/mig/{part}"
                files[path] = f"DeviceFileMinor: {number}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
                files[f"dev/nvidia-caps/nvidia-cap{number}"] = ""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(text if isinstance(text, bytes) else text.encode())
    for file in root.glob("usr/lib/*/libcuda.so.*"):
        file.with_name("libcuda.so.1").symlink_to(file.name)


def loader_cache(*libraries: tuple[str, str, int]) -> bytes:
    """Return an ld.so.cache with the names, the paths and the CPU capabilities of libraries."""
    start = 48 + 24 * len(libraries)
    texts, rows = b"", b""
    for name, path, capabilities in libraries:
        place = start + len(texts)
        rows += struct.pack("<iIIIQ", 0x303, place, place + len(name) + 1, 0, capabilities)
        texts += f"{name}\0{path}\0".encode()
    return b"glibc-ld.so.cache1.1" + struct.pack("<II", len(libraries), len(texts)) + bytes(20) + rows + texts


def answer(name: str) -> Nvml:
    """Return what NVML answers on the node `name`."""
    node = NODES[name]
    if node.user_mode:
        return Nvml(error=18, message="RM has detected an NVML/RM version mismatch.", library=node.user_mode)
    return Nvml(
        driver=node.version,
        library=node.version,
        gpus=tuple(_answer(name, index, card) for index, card in enumerate(node.cards)),
    )


def _answer(name: str, index: int, card: Card) -> NvmlGpu:
    product = PRODUCTS[card.product]
    mig = [
        MigDevice(
            uuid=f"MIG-{number:08x}-{product.device_id}-5000-8000-{instance:012x}",
            profile=profile,
            gpu_instance=instance,
            compute_instance=0,
            memory_mib=memory,
        )
        for number, (instance, profile, memory) in enumerate(card.mig or ())
    ]
    return NvmlGpu(
        index=index,
        bus_id=card.bus_id,
        device_id=product.device_id,
        minor=card.minor,
        uuid=identity(name, card),
        name=product.name,
        compute=product.compute,
        brand=product.brand,
        memory_mib=product.memory_mib,
        mig=tuple(mig) or None,
        virtualization=0,
    )


def profile(name: str) -> Host:
    """Return the host that the probe finds on the node `name`."""
    with tempfile.TemporaryDirectory() as folder:
        capture(Path(folder), name)
        return assemble_host(Tree(folder), query=lambda: answer(name))


def main() -> None:
    """Write every profile."""
    for name in NODES:
        text = json.dumps(profile(name).to_json(), indent=2, ensure_ascii=False) + "\n"
        (FOLDER / f"{name}.json").write_text(text)


if __name__ == "__main__":
    main()
