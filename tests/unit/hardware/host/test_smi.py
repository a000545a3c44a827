import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.errors import ImagematrixError, UsageError
from imagematrix.hardware.host import smi

START = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n'


def dump(*gpus, driver="<driver_version>550.163.01</driver_version>"):
    return f"{START}<nvidia_smi_log>{driver}{''.join(gpus)}</nvidia_smi_log>".encode()


def gpu(body="", bus="00000000:41:00.0", device="26B910DE"):
    return f'<gpu id="{bus}">{body}<pci><pci_device_id>{device}</pci_device_id></pci></gpu>'


def test_410(dumps):
    driver, gpus, warnings = smi.read_dump(dumps / "410-k80.xml")
    assert (driver.version, driver.kind, driver.source) == ("410.79", None, "nvidia-smi -q -x")
    assert warnings == ()
    assert [(gpu.index, gpu.pci_bus_id, gpu.minor) for gpu in gpus] == [
        (0, "0000:00:04.0", 0),  # in bus order, not in the dump's
        (1, "0000:00:05.0", 1),
    ]
    first = gpus[0]
    assert (first.name, first.brand, first.compute) == ("Tesla K80", "tesla", "3.7")
    assert (first.memory_mib, first.pci_device_id, first.state, first.mig) == (11441, "102d", "ok", None)


def test_470_with_mig(dumps):
    driver, (first, second), warnings = smi.read_dump(dumps / "470-a100-mig.xml")
    assert driver.version == "470.103.01"
    assert [(device.gpu_instance, device.compute_instance, device.memory_mib) for device in first.mig] == [
        (1, 0, 20096),
        (9, 0, 4864),
    ]
    assert first.mig[0].uuid is None
    assert (first.uuid, first.minor, first.state) == ("GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f", 2, "ok")
    assert first.memory_mib == 40536
    assert (second.mig, second.state) == ((), "mig-empty")
    assert warnings == ()


def test_535(dumps):
    driver, (only,), _ = smi.read_dump(str(dumps / "535-rtx4090.xml"))
    assert driver.version == "535.129.03"
    assert (only.compute, only.brand, only.memory_mib) == ("8.9", "geforce", 24564)


@pytest.mark.parametrize(
    ("mode", "state"),
    [
        ("None", "ok"),
        ("Pass-Through", "ok"),
        ("VGPU", "vgpu"),
        ("Host VGPU", "vgpu-host"),
        ("Host VSGA", "vgpu-host"),
    ],
)
def test_virtualization_modes(mode, state):
    element = f"<virtualization_mode>{mode}</virtualization_mode>"
    _, (result,), _ = smi.parse_dump(
        dump(gpu(f"<gpu_virtualization_mode>{element}</gpu_virtualization_mode>")), "x"
    )
    assert result.state == state


def test_a_vgpu_by_its_name():
    _, (result,), _ = smi.parse_dump(dump(gpu("<product_name>NVIDIA A10-24Q</product_name>")), "x")
    assert result.state == "vgpu"


def test_550_with_a_lost_gpu_and_a_vgpu(dumps):
    _, gpus, _ = smi.read_dump(dumps / "550-lost.xml")
    assert [gpu.state for gpu in gpus] == ["ok", "lost", "vgpu"]
    assert gpus[1].memory_mib is None
    assert gpus[1].uuid.endswith("b")
    assert gpus[2].brand == "vws"


def test_615_names_the_kernel_mode_driver(dumps):
    driver, (only,), warnings = smi.read_dump(dumps / "615-gb10.xml")
    assert driver.version == "615.23"
    assert (only.pci_bus_id, only.compute, only.memory_mib) == ("000f:01:00.0", "12.1", None)
    assert only.memory_shared
    assert warnings == ()


def test_580(dumps):
    driver, (only,), warnings = smi.read_dump(dumps / "580-h100.xml")
    assert (driver.version, driver.kind, warnings) == ("580.159.04", None, ())
    assert (only.name, only.brand, only.compute) == ("NVIDIA H100 80GB HBM3", "nvidia", "9.0")
    assert (only.pci_bus_id, only.pci_device_id, only.minor) == ("0000:00:06.0", "2330", 0)
    assert (only.memory_mib, only.mig, only.state) == (81559, None, "ok")


def test_610_still_has_the_old_field():
    driver, _, _ = smi.parse_dump(dump(driver="<driver_version>610.43.02</driver_version>"), "x")
    assert driver.version == "610.43.02"
    both = "<driver_version>610.43.02</driver_version><kmd_version>610.43.03</kmd_version>"
    assert smi.parse_dump(dump(driver=both), "x")[0].version == "610.43.03"


@pytest.mark.parametrize(
    "text", ["", "<driver_version>N/A</driver_version>", "<driver_version>x</driver_version>"]
)
def test_no_version(text):
    driver, gpus, warnings = smi.parse_dump(dump(driver=text), "node.xml")
    assert driver is None
    assert gpus == ()
    assert warnings == ("node.xml: version of the kernel-mode driver not found",)


@pytest.mark.parametrize(
    "value", ["N/A", "[N/A]", "[Not Supported]", "Unknown Error", "Insufficient Permissions", "", "  \n "]
)
def test_placeholders_for_missing_values(value):
    fields = "".join(
        f"<{name}>{value}</{name}>" for name in ("product_name", "product_brand", "uuid", "minor_number")
    )
    _, (only,), _ = smi.parse_dump(
        dump(gpu(f"{fields}<fb_memory_usage><total>{value}</total></fb_memory_usage>")), "x"
    )
    assert (only.name, only.brand, only.uuid, only.minor, only.memory_mib) == (None,) * 5
    assert only.compute == "8.9"


@pytest.mark.parametrize(
    ("device", "expected"),
    [("0x26B910DE", "26b9"), ("26b910de", "26b9"), ("26B91002", None), ("N/A", None), ("26B9", None)],
)
def test_device_ids(device, expected):
    _, (only,), _ = smi.parse_dump(dump(gpu(device=device)), "x")
    assert only.pci_device_id == expected
    assert only.compute == ("8.9" if expected else None)


def test_gpus_of_unknown_address_come_last():
    _, gpus, _ = smi.parse_dump(dump(gpu(bus="?"), gpu(bus="00000000:C1:00.0"), gpu()), "x")
    assert [gpu.pci_bus_id for gpu in gpus] == ["0000:41:00.0", "0000:c1:00.0", None]


def test_mig_devices_without_numbers_are_left_out():
    mig = (
        "<mig_mode><current_mig>Enabled</current_mig></mig_mode><mig_devices>"
        "<mig_device><gpu_instance_id>N/A</gpu_instance_id></mig_device>"
        "<mig_device><gpu_instance_id>3</gpu_instance_id><compute_instance_id>0</compute_instance_id>"
        "<uuid>MIG-1</uuid></mig_device></mig_devices>"
    )
    _, (only,), warnings = smi.parse_dump(dump(gpu(mig)), "x")
    assert [(device.gpu_instance, device.uuid) for device in only.mig] == [(3, "MIG-1")]
    assert "instance numbers" in warnings[0]


def test_the_dtd_may_be_embedded():
    text = dump(gpu()).replace(
        b'SYSTEM "nvsmi_device_v12.dtd"',
        b"[<!ELEMENT nvidia_smi_log (driver_version, gpu*)><!ATTLIST gpu id CDATA #REQUIRED>]",
    )
    assert len(smi.parse_dump(text, "x")[1]) == 1


BOMB = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 10))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "invalid XML"),
        (b"==============NVSMI LOG==============\nDriver Version : 550.163.01\n", "invalid XML"),
        (dump()[:-3], "invalid XML"),
        (dump() * 2, "invalid XML"),
        (b"\xff\xfe<", "invalid XML"),
        (b'<?xml version="1.0" encoding="idna"?><nvidia_smi_log/>', "invalid XML"),
        (b'<?xml version="1.0" encoding="utf-7"?><nvidia_smi_log/>', "invalid XML"),
        (b"<html><body/></html>", "got 'html'"),
        (
            f"<!DOCTYPE x [<!ENTITY a0 'x'>{BOMB}]><nvidia_smi_log>&a9;</nvidia_smi_log>".encode(),
            "entity 'a0'",
        ),
        (
            b'<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><nvidia_smi_log>&e;</nvidia_smi_log>',
            "entity 'e'",
        ),
        (b'<!DOCTYPE x [<!ENTITY % p "x">]><nvidia_smi_log/>', "entity 'p'"),
        (b"<nvidia_smi_log>" + b"<a>" * 100_000, "nested too deeply"),
        (dump(gpu() * 5000), "too many GPUs"),
        (dump(gpu("<mig_devices>" + "<mig_device/>" * 9 + "</mig_devices>") * 500), "MIG devices"),
        (dump("".join(f"<a{number}/>" for number in range(20_000))), "too many names"),
    ],
)
def test_other_files_are_refused(raw, message):
    with pytest.raises(UsageError, match=message) as caught:
        smi.parse_dump(raw, "node.xml")
    assert str(caught.value).startswith("node.xml: ")


@pytest.mark.parametrize("place", ["processes/process_info/process_name", "accounted_processes/name"])
def test_the_name_of_a_process_does_not_make_a_gpu_lost(place):
    names = place.split("/")
    said = "".join(f"<{name}>" for name in names) + "/home/u/gpu is lost/python"
    said += "".join(f"</{name}>" for name in reversed(names))
    assert [one.state for one in smi.parse_dump(dump(gpu(said)), "x")[1]] == ["ok"]
    lost = gpu("<serial>GPU is lost</serial>" + said)
    assert [one.state for one in smi.parse_dump(dump(lost), "x")[1]] == ["lost"]


def test_only_the_versions_beside_the_gpus_are_kept():
    parsed = smi._Dump("x")
    parsed.feed(dump("<timestamp>Mon</timestamp>" + "".join(f"<a{number}/>" for number in range(99))))
    assert parsed.versions == {"driver_version": "550.163.01"}


def test_size_is_bounded(monkeypatch, tmp_path):
    monkeypatch.setattr(smi, "LIMIT", 2**20)
    path = tmp_path / "big.xml"
    path.write_bytes(dump() + b" " * 2**20)
    with pytest.raises(UsageError, match="larger than 1 MiB"):
        smi.read_dump(path)


def test_long_text_is_truncated():
    _, (only,), _ = smi.parse_dump(dump(gpu(f"<product_name>{'x' * 1_000_000}</product_name>")), "x")
    assert only.name == "x" * smi.TEXT


@pytest.mark.parametrize("text", ["all", "GPU-", "0", "GPU-1,GPU-2", f"GPU-{'1' * 200}"])
def test_what_is_no_uuid_is_none(text):
    """It is passed to `docker run --gpus`, where "all" names every GPU."""
    _, (only,), _ = smi.parse_dump(dump(gpu(f"<uuid>{text}</uuid>")), "x")
    assert only.uuid is None


@pytest.mark.parametrize("path", ["/nowhere/dump.xml", "/", "a\0b"])
def test_unreadable(path):
    with pytest.raises(UsageError):
        smi.read_dump(path)


@given(st.binary())
def test_any_bytes(raw):
    for content in (raw, dump().replace(b"550.163.01", raw), dump(gpu("@")).replace(b"@", raw)):
        try:
            smi.parse_dump(content, "x")
        except ImagematrixError:
            continue


PATHS = [*smi.WANTED, *smi.WANTED_MIG, *smi.VERSIONS, "mig_devices/mig_device", "gpu"]
NAMES = st.sampled_from(sorted({name for path in PATHS for name in path.split("/")}))
TREES = st.recursive(
    st.sampled_from(["Enabled", "1", "12 MiB", "26B910DE", "x", "550.1"]),
    lambda inner: st.lists(st.tuples(NAMES, inner), max_size=4).map(
        lambda items: "".join(f"<{name}>{body}</{name}>" for name, body in items)
    ),
    max_leaves=30,
)


@given(TREES)
def test_any_elements(body):
    smi.parse_dump(dump(body, f"<gpu>{body}</gpu>"), "x")


@pytest.mark.parametrize("kept", ["<uuid>", "<minor_number>", "pci"])
def test_one_gpu_twice(dumps, kept):
    text = (dumps / "535-rtx4090.xml").read_text()
    start, end = text.index("<gpu id="), text.rindex("</gpu>") + len("</gpu>")
    other = re.sub("(?<=<uuid>)[^<]+", "GPU-other", text[start:end]) if kept != "<uuid>" else text[start:end]
    other = re.sub("(?<=<minor_number>)[^<]+", "99", other) if kept != "<minor_number>" else other
    # Each kind of fact alone shows that it is the same GPU, the address in two spellings too.
    other = (
        re.sub(r"0000(0000:\w\w:\w\w\.0)", r"\1", other) if kept == "pci" else other.replace(":00.0", ":1f.0")
    )
    with pytest.raises(UsageError, match="not the output of `nvidia-smi -q -x`: duplicate "):
        smi.parse_dump(f"{text[:end]}{other}{text[end:]}".encode(), "x")
