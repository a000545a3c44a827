from __future__ import annotations

import pytest

from imagematrix.hardware.vendors import cuda, device_code, gpus, versions
from imagematrix.hardware.vendors._data import load

CHIPS = load("gpus.json")["chips"]


@pytest.mark.parametrize("number", ["26b9", "26B9", "0x26b9", "0X26B9"])
def test_product_is_found_by_device_id(number):
    assert gpus.get_product(number) == gpus.Product(
        pci_device_id="26b9", name="L40S", compute="8.9", last_branch=None
    )


@pytest.mark.parametrize(
    ("number", "compute", "last_branch"),
    [
        ("2335", "9.0", None),
        ("1db6", "7.0", 580),
        ("102d", "3.7", 470),
        ("06c0", "2.0", 390),
        ("0ff2", "3.0", 367),
        ("3000", None, None),
    ],
)
def test_product_has_capability_and_last_branch(number, compute, last_branch):
    product = gpus.get_product(number)
    assert (product.compute, product.last_branch) == (compute, last_branch)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("H100", ("9.0",)),
        ("h100-pcie", ("9.0",)),
        ("NVIDIA", ()),
        ("rtx4090", ("8.9",)),
        ("GeForce RTX 4090", ("8.9",)),
        ("T4", ("7.5",)),
        ("V100", ("7.0",)),
        ("", ()),
        ("-", ()),
    ],
)
def test_capability_is_found_by_the_name_of_a_product(name, found):
    assert gpus.find_capabilities(name) == found


@pytest.mark.parametrize("number", ["", "0000", "ffff", "26b", "0x", "10de"])
def test_unknown_product_is_none(number):
    assert gpus.get_product(number) is None


def test_device_ids_are_unique_and_named():
    products = [(number, name) for chip in CHIPS.values() for number, name in chip["devices"].items()]
    assert len(dict(products)) == len(products)
    assert all(len(number) == 4 and number == number.lower() and name for number, name in products)


def test_every_chip_capability_is_a_known_target():
    capabilities = {chip["compute"] for chip in CHIPS.values()} - {None}
    assert {word for word in capabilities if word not in device_code.list_capability_words()} == set()


def test_last_branches_are_known_to_cuda_or_older():
    branches = {release.branch for release in cuda.load_releases().values()}
    assert {chip["last_branch"] for chip in CHIPS.values()} - branches - {None} == {390}


@pytest.mark.parametrize(
    ("number", "compute", "last"),
    [
        ("1db6", None, 580),
        ("1db6", "9.0", 580),
        ("0ff2", "3.0", 367),
        ("ffff", "3.0", 470),
        (None, "2.1", 390),
        (None, "6.1", 580),
        (None, "7.2", None),
        (None, "8.9", None),
        (None, None, None),
    ],
)
def test_last_branch_of_a_gpu(number, compute, last):
    assert gpus.get_last_branch(number, compute) == last


@pytest.mark.parametrize(
    ("brand", "name", "expected"),
    [
        ("tesla", "Tesla V100-SXM2-16GB", True),
        ("nvidia", "NVIDIA H100 80GB HBM3", True),
        ("NVIDIA", "NVIDIA L40S", True),
        ("nvidia", None, True),
        ("nvidia", "NVIDIA GeForce RTX 4090", False),
        ("tesla", "NVIDIA TITAN V", False),
        ("nvidia", "NVS 510", False),
        ("nvidia", "NVIDIA GB10", False),
        ("geforce", "NVIDIA GeForce RTX 3090", False),
        ("titan", "NVIDIA TITAN RTX", False),
        ("quadro", "Quadro RTX 6000", False),
        ("nvidiartx", "NVIDIA RTX A6000", False),
        ("grid", "GRID T4-16Q", False),
        (None, "Tesla T4", True),
        ("unknown", "Tesla T4", True),
        (None, "NVIDIA L40S", False),
        (None, None, False),
    ],
)
def test_data_centre_parts_are_recognized(brand, name, expected):
    assert gpus.is_data_centre(brand, name) is expected


@pytest.mark.parametrize(
    ("name", "brand"),
    [
        ("NVIDIA L40S", "nvidia"),
        ("L40S", "nvidia"),
        ("NVIDIA A100-SXM4-40GB", "nvidia"),
        ("A100 PCIe 80GB", "nvidia"),
        ("A2 / A16", "nvidia"),
        ("NVIDIA H100 80GB HBM3", "nvidia"),
        ("GH200 120GB / 480GB", "nvidia"),
        ("Tesla V100-SXM2-16GB", "tesla"),
        ("Tesla T4", "tesla"),
        ("NVIDIA A40-8Q", None),
        ("GRID T4-16Q", None),
        ("NVIDIA A10G", "nvidia"),
        ("NVIDIA A800-SXM4-80GB", "nvidia"),
        ("NVIDIA H20", "nvidia"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "nvidia"),
        ("RTX PRO 6000 Blackwell Workstation Edition", None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition-96Q", None),
        ("L40 CNX-4C", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA RTX A6000", None),
        ("Quadro RTX 6000", None),
        ("NVIDIA TITAN V", None),
        ("NVIDIA GB10", None),
        ("NVIDIA", None),
        ("", None),
        (None, None),
    ],
)
def test_brand_is_derived_from_the_name(name, brand):
    assert gpus.get_brand(name) == brand
    assert gpus.is_data_centre(brand, name) is (brand is not None)


def test_data_centre_names_match_products():
    names = {gpus.get_product(number).name for chip in CHIPS.values() for number in chip["devices"]}
    words = {word for name in names for word in name.replace("/", " ").replace("-", " ").split()}
    assert {word for name in load("gpus.json")["data_centre"] for word in name.split()} <= words
    branded = {name for name in names if gpus.get_brand(name)}
    others = ("GeForce", "Quadro", "RTX", "NVS", "TITAN", "CMP")
    assert [name for name in branded if name.startswith(others)] == ["RTX PRO 6000 Blackwell Server Edition"]


def test_brands_match_nvml():
    pynvml = pytest.importorskip("pynvml")
    numbers = {getattr(pynvml, name) for name in dir(pynvml) if name.startswith("NVML_BRAND_")}
    assert set(gpus.BRANDS) <= numbers
    assert gpus.BRANDS[pynvml.NVML_BRAND_TESLA] == "tesla"
    assert gpus.BRANDS[pynvml.NVML_BRAND_NVIDIA] == "nvidia"
    assert set(gpus.BRANDS.values()) >= gpus.DATA_CENTRE_BRANDS


@pytest.mark.parametrize(
    ("compute", "branch"),
    [
        ("5.2", 0),
        ("6.1", 0),
        ("7.0", 384),
        ("7.5", 410),
        ("8.0", 450),
        ("8.6", 455),
        ("8.9", 520),
        ("9.0", 520),
        ("10.0", 570),
        ("12.0", 570),
        ("12.1", 575),
        ("99.0", 575),
        (None, 0),
    ],
)
def test_first_branch_is_that_of_the_first_release_for_the_gpu_or_a_newer_one(compute, branch):
    assert gpus.get_first_branch(compute) == branch


def test_first_branches_rise_with_the_capability():
    """No GPU needs a newer driver than a GPU of a later generation."""
    order = sorted(gpus.list_first_branches(), key=versions.make_sort_key)
    branches = [gpus.list_first_branches()[compute] for compute in order]
    assert branches == sorted(set(branches))


def test_no_chip_was_dropped_before_it_was_supported():
    ended = {
        row["compute"]: row["last_branch"] for row in CHIPS.values() if row["last_branch"] and row["compute"]
    }
    assert all(gpus.get_first_branch(compute) <= last for compute, last in ended.items())
