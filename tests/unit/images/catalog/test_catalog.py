"""The Catalog document: it round-trips, and invalid documents are rejected with a position."""

import json
import re

import pytest

from imagematrix.common import json_documents
from imagematrix.common.image_reference import split_version
from imagematrix.errors import UsageError
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.catalog import Catalog, Ptx, UserModeDriver, Variant
from imagematrix.images.catalog.sources import open_catalog

DIGEST = f"sha256:{'a' * 64}"
ENTRY = {
    "reference": "training:v1-x",
    "digest": DIGEST,
    "platform": "linux/amd64",
    "cuda": "12.4",
    "cubins": ["89", "90a"],
    "ptx": [{"target": "90", "isa": "8.4"}],
    "compressed_fatbin": True,
    "driver": {"mode": "exact", "version": "550.163.01"},
    "march": "znver4",
    "cpu_flags": ["avx2", "fma"],
    "vendor": "amd",
    "size": 681574400,
    "axes": {"cc": "gcc-14", "python": "3.13"},
    "facts": {"cpu_flags": "probable", "cubins": "bytes", "cuda": "claim"},
    "partial_cpu_flags": ["avx512f"],
}

DIVIDED = {
    "files": 1,
    "name": "torch/lib/libtorch_cuda_linalg.so",
    "cubins": ["75", "80"],
    "ptx": [],
    "parts": [
        {"count": 32, "cubins": ["80"], "ptx": []},
        {"count": 1, "cubins": ["75"], "ptx": [{"target": "80", "isa": "8.4"}]},
    ],
}


def document(*entries, **changes):
    return {
        "schema": "imagematrix.catalog/v1",
        "image": "training",
        "version": "v1",
        "variants": entries,
    } | changes


def parsed(*entries, **changes):
    return Catalog.from_json(json.loads(json.dumps(document(*entries, **changes))))


def test_document_matches_the_contract():
    catalog = parsed(ENTRY)
    assert catalog.to_json() == document() | {"prefer": [], "variants": [ENTRY]}
    assert catalog.variants == (
        Variant(
            reference="training:v1-x",
            digest=DIGEST,
            platform="linux/amd64",
            cuda="12.4",
            cubins=("89", "90a"),
            ptx=(Ptx(target="90", isa="8.4"),),
            compressed_fatbin=True,
            driver=UserModeDriver(mode="exact", version="550.163.01"),
            march="znver4",
            cpu_flags=frozenset({"avx2", "fma"}),
            vendor="amd",
            size=681574400,
            axes=(("cc", "gcc-14"), ("python", "3.13")),
            facts=(("cpu_flags", "probable"), ("cubins", "bytes"), ("cuda", "claim")),
            partial_flags=frozenset({"avx512f"}),
        ),
    )


@pytest.mark.parametrize(
    "driver",
    [
        None,
        {"mode": "host", "version": None},
        {"mode": "compat", "version": "580.65.06", "branches": [535, 550], "brands": ["tesla"]},
    ],
)
def test_every_driver_mode_round_trips(driver):
    assert parsed(ENTRY | {"driver": driver}).to_json()["variants"][0]["driver"] == driver


def test_optional_keys_may_be_absent():
    (variant,) = parsed({"reference": "t:x", "platform": "linux/amd64"}).variants
    assert variant == Variant(reference="t:x", digest=None, platform="linux/amd64")
    assert not variant.gpu


def test_absent_fact_is_a_claim():
    (variant,) = parsed(ENTRY).variants
    assert [variant.source(fact) for fact in ("cubins", "cuda", "driver")] == ["bytes", "claim", "claim"]


def test_variant_with_a_driver_but_unknown_cuda_is_a_gpu_variant():
    (variant,) = parsed(ENTRY | {"cuda": None, "driver": {"mode": "host", "version": None}}).variants
    assert variant.gpu


def test_errors_name_the_loaded_file(tmp_path):
    path = tmp_path / "catalog.json"
    path.write_text(json_documents.dump_json(document(ENTRY)))
    assert open_catalog(path) == open_catalog(str(path)) == parsed(ENTRY)
    path.write_text('{"schema": 1}')
    with pytest.raises(UsageError, match=rf"{path}: schema: expected a string, found a number"):
        open_catalog(path)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"schema": "imagematrix.host/v1"},
            "schema is 'imagematrix.host/v1', expected 'imagematrix.catalog/v1'",
        ),
        (
            {"schema": "imagematrix.catalog/v2"},
            "unsupported schema 'imagematrix.catalog/v2'",
        ),
        ({"schema": None}, "schema: expected a string, found null"),
        ({"image": 3}, "image: expected a string, found a number"),
        ({"variants": {}}, "variants: expected a list, found an object"),
        ({"variants": [[]]}, "variants[0]: expected an object, found a list"),
        ({"variants": [ENTRY, ENTRY]}, "variants[1]: reference: training:v1-x occurs twice"),
    ],
)
def test_invalid_catalog_is_rejected(changes, expected):
    with pytest.raises(UsageError) as caught:
        parsed(**changes)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"reference": None}, "reference: expected a string, found null"),
        ({"reference": "--privileged"}, "'--privileged' is not an image reference"),
        ({"reference": "a\n"}, "is not an image reference"),
        ({"reference": "a" * 600}, "is not an image reference"),
        ({"digest": "sha256:xyz"}, "digest: 'sha256:xyz' is not a sha256 digest"),
        ({"digest": DIGEST + "\n"}, "is not a sha256 digest"),
        ({"platform": True}, "platform: expected a string, found true or false"),
        (
            {"facts": {"cuda": "guess"}},
            "facts: cuda: 'guess' is not one of bytes, claim, probable, table, source, unknown",
        ),
        ({"facts": {"cuda": 1}}, "facts: cuda: expected a string, found a number"),
        ({"facts": []}, "facts: expected an object, found a list"),
        ({"cuda": "twelve"}, "cuda: 'twelve' is not a CUDA release such as 12.4"),
        ({"cuda": "١٢.٤"}, "is not a CUDA release"),
        ({"platform": "linux"}, "platform: 'linux' is not a platform such as linux/amd64"),
        ({"cubins": ["sm_89"]}, "cubins: 'sm_89' is not a target such as 89 or 90a"),
        ({"ptx": [{"target": "90"}]}, "variants[0]: ptx[0]: isa is missing (expected a string)"),
        ({"ptx": [{"target": "90", "isa": "8"}]}, "'8' is not a PTX ISA version such as 8.4"),
        ({"compressed_fatbin": 1}, "compressed_fatbin: expected true or false, found a number"),
        ({"driver": "550.163.01"}, "driver: expected an object, found a string"),
        ({"driver": {"mode": "other"}}, "mode: 'other' is not one of exact, compat, host"),
        (
            {"driver": {"mode": "exact"}},
            "version: is required in modes exact and compat, and only allowed there",
        ),
        (
            {"driver": {"mode": "host", "version": "550.163.01"}},
            "version: is required in modes exact and compat",
        ),
        ({"driver": {"mode": "exact", "version": "550"}}, "'550' is not a driver version such as 550.163.01"),
        (
            {"driver": {"mode": "compat", "version": "1.2", "branches": [True]}},
            "branches[0]: expected an integer",
        ),
        ({"cpu_flags": "avx2"}, "cpu_flags: expected a list, found a string"),
        ({"device_code": [DIVIDED | {"parts": [{"count": 0}]}]}, "0 is not a number of parts"),
        ({"device_code": [DIVIDED | {"parts": [{"cubins": ["80"]}]}]}, "count is missing"),
        ({"device_code": [DIVIDED | {"parts": [{"count": 1, "cubins": ["x"]}]}]}, "'x' is not a target"),
        ({"size": True}, "size: expected an integer, found true or false"),
        ({"size": 1e999}, "size: expected an integer, found a number"),
    ],
)
def test_invalid_variant_is_rejected(changes, expected):
    with pytest.raises(UsageError) as caught:
        parsed(ENTRY | changes)
    assert expected in str(caught.value)
    assert str(caught.value).startswith("catalog: ")
    assert len(str(caught.value)) < 250


def test_single_variant_round_trips():
    assert Variant.from_json(ENTRY).to_json() == ENTRY
    with pytest.raises(UsageError, match="variant: expected an object, found null"):
        Variant.from_json(None)


def test_parts_of_files_round_trip_through_the_label():
    variant = Variant.from_json(ENTRY | {"device_code": [DIVIDED]})
    assert variant.to_json()["device_code"] == [DIVIDED]
    label = {labels.VARIANT: labels.write_variant(variant)}
    again = labels.read_variant(label, reference=variant.reference, digest=variant.digest, size=variant.size)
    assert again == variant


def test_absent_and_null_are_distinguished_in_any_order():
    absent = {key: value for key, value in ENTRY.items() if key != "ptx"} | {"reference": "training:v1-y"}
    for entries in ((absent, ENTRY | {"ptx": None}), (ENTRY | {"ptx": None}, absent)):
        with pytest.raises(UsageError, match="ptx: expected a list, found null"):
            parsed(*entries)


def test_deeply_nested_value_is_rejected():
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(UsageError, match=r"variants\[0\]: ptx: is nested too deeply"):
        Catalog.from_json(document(ENTRY | {"ptx": nested}) | {"variants": [ENTRY | {"ptx": nested}]})


def test_memory_and_order_of_defaults_round_trip():
    entries = [ENTRY | {"memory": {"gpu_mib": 16384}}, ENTRY | {"reference": "training:v1-y"}]
    stated = {"defaults": {"python": "3.13"}, "default_order": {"python": ["3.13", "3.12"]}}
    catalog = parsed(*entries, **stated)
    assert [one.gpu_memory_mib for one in catalog.variants] == [16384, None]
    assert catalog.default_order == (("python", ("3.13", "3.12")),)
    assert catalog.to_json() == document(*entries, **stated) | {"prefer": [], "variants": entries}
    assert parsed(ENTRY | {"memory": {}}).variants[0].gpu_memory_mib is None
    named = catalog.named("training:v1-y")
    assert (named.defaults, named.default_order) == ((), ())


@pytest.mark.parametrize(
    ("memory", "complaint"),
    [
        (16384, "memory: expected an object, found a number"),
        ({"gpu_mib": "16GiB"}, "memory: gpu_mib: expected an integer, found a string"),
        ({"gpu_mib": True}, "gpu_mib: expected an integer, found true or false"),
        ({"gpu_mib": 0}, "gpu_mib: 0 is not an amount from 1 to 99999999 MiB"),
        ({"gpu_mib": -1}, "gpu_mib: -1 is not an amount"),
        ({"gpu_mib": 100_000_000}, "gpu_mib: 100000000 is not an amount"),
    ],
)
def test_invalid_memory_is_rejected(memory, complaint):
    with pytest.raises(UsageError, match=re.escape(complaint)):
        parsed(ENTRY | {"memory": memory})


@pytest.mark.parametrize(
    ("order", "complaint"),
    [
        ({"python": ["3.12", "3.13"]}, "default_order: python: its first value is not the one in `defaults`"),
        ({"python": []}, "its first value is not the one in `defaults`"),
        ({"cc": ["gcc-14"]}, "cc: its first value is not the one in `defaults`"),
        ({"python": ["3.13", "3.13"]}, "it is not a list of different values of an axis"),
        ({"python": ["3.13", "\x1b[31m"]}, "it is not a list of different values of an axis"),
        ({"python": "3.13"}, "default_order: python: expected a list, found a string"),
        ({"python": [3]}, "default_order: python[0]: expected a string, found a number"),
        (["python"], "default_order: expected an object, found a list"),
    ],
)
def test_an_invalid_order_of_defaults_is_rejected(order, complaint):
    with pytest.raises(UsageError, match=re.escape(complaint)):
        parsed(ENTRY, defaults={"python": "3.13"}, default_order=order)


def test_equal_parts_are_shared():
    one, other = parsed(ENTRY, ENTRY | {"reference": "training:v1-y"}).variants
    assert one.driver is other.driver
    assert one.ptx is other.ptx
    assert one.cpu_flags is other.cpu_flags


@pytest.mark.parametrize(
    ("axes", "complaint"),
    [
        ({"cuda": "12.4"}, "axes: 'cuda' is not an image's own axis"),
        ({"Python": "3.13"}, "axes: 'Python' is not an image's own axis"),
        ({"python": "3 13"}, "axes: python: '3 13' is not the value of an axis"),
        ({"python": "\x1b[31m"}, "is not the value of an axis"),
        ({"python": 3}, "python: expected a string, found a number"),
        (["python"], "axes: expected an object, found a list"),
    ],
)
def test_invalid_axes_and_defaults_are_rejected(axes, complaint):
    with pytest.raises(UsageError, match=re.escape(complaint)):
        parsed(ENTRY | {"axes": axes})
    with pytest.raises(UsageError, match=re.escape(complaint.replace("axes:", "defaults:"))):
        parsed(ENTRY, defaults=axes)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("training", ("training", None)),
        ("training:v1", ("training", "v1")),
        ("reg:5000/ml/training", ("reg:5000/ml/training", None)),
        ("reg:5000/ml/training:v1-cpu", ("reg:5000/ml/training", "v1-cpu")),
        (f"reg:5000/training@{DIGEST}", ("reg:5000/training", DIGEST)),
        (f"training:v1@{DIGEST}", ("training", DIGEST)),
    ],
)
def test_image_name_is_split(name, parts):
    assert split_version(name) == parts


@pytest.mark.parametrize(
    "name", ["", ":v1", "training:", "@", f"@{DIGEST}", "training@", f"training:@{DIGEST}"]
)
def test_invalid_image_name_is_rejected(name):
    with pytest.raises(UsageError, match=r"invalid image name .*: expected a name such as training:v1"):
        split_version(name)


def of_registry(*variants):
    return Catalog(image="r:5000/ml/training", version="v1", variants=variants)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("r:5000/ml/training:v1", True),
        ("ml/training:v1", True),
        ("training:v1", True),
        ("training", True),
        ("other.example/ml/training:v1", True),
        ("other.example/training:v1", False),
        ("aining:v1", False),
        ("ml:v1", False),
        ("x/ml/training:v1", False),
        ("training:v2", False),
    ],
)
def test_an_image_is_known_without_its_registry_and_first_folders(make, name, known):
    catalog = of_registry(make.variant("r:5000/ml/training:v1-a"))
    assert catalog.known_as(name) == (catalog if known else None)


def test_a_variant_is_known_without_its_registry(make):
    variants = [make.variant(f"r:5000/ml/training:v1-{name}", digest=f"sha256:{name * 64}") for name in "ab"]
    catalog = of_registry(*variants)
    for name in ("training:v1-b", f"ml/training@sha256:{'b' * 64}"):
        assert catalog.known_as(name).variants == (variants[1],)


GUARDED = {"files": 2, "name": "p/_a.so", "cubins": ["90"], "ptx": [], "globs": ["p/_*.so"]}


def test_guard_of_an_entry_is_read_and_written():
    guard = {"path": "p/it.py", "line": 3, "unless": [["7.5", "8.9"], ["10.0", None]]}
    (variant,) = parsed(ENTRY | {"device_code": [GUARDED | {"guard": guard}]}).variants
    (code,) = variant.to_json()["device_code"]
    assert code == GUARDED | {"guard": guard}
    own = variant.device_code[0].guard
    assert [one for one in ("7.0", "7.5", "8.9", "9.0", "10.0", "15.0") if own.exempts(one)] == [
        "7.5",
        "8.9",
        "10.0",
        "15.0",
    ]
    assert own.words == "7.5 to 8.9, 10.0 and later"


@pytest.mark.parametrize(
    "unless",
    [
        None,
        {},
        "8.0",
        ["8.0"],
        [["8.0"]],
        [["8.0", "8.9", "9.0"]],
        [[8.0, 8.9]],
        [["8.0", "9"]],
        [[None, "8.9"]],
        [["8.0", 0]],
    ],
)
def test_invalid_guard_is_rejected(unless):
    guard = {"path": "p/it.py", "line": 3, "unless": unless}
    with pytest.raises(UsageError, match=r"guard: unless: it is not a list of pairs such as"):
        parsed(ENTRY | {"device_code": [GUARDED | {"guard": guard}]})
