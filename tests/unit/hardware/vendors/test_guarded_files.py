"""The table of files with device code that some GPUs do not use."""

import pytest

from imagematrix.hardware.vendors import _data, guarded_files

ROWS = _data.load("guarded.json")["rows"]


def paths(package, version):
    return {
        row.path.rpartition("/")[2].partition(".")[0] for row in guarded_files.find_rows(package, version)
    }


@pytest.mark.parametrize(
    ("version", "found"),
    [
        ("0.10.2", set()),
        ("0.11.0", {"_flashmla_extension_C"}),
        ("0.11.0+cu129", {"_flashmla_extension_C"}),
        ("0.11.0.post1", set()),
        ("0.11.0rc2", set()),
        ("0.11.0.dev3+g1", set()),
        ("0.11.2", set()),
        ("0.33.0", {"_qutlass_C"}),
        ("later", set()),
    ],
)
def test_rows_hold_for_the_versions_whose_sources_were_read(version, found):
    assert paths("vllm", version) == found


def test_other_packages_have_no_rows():
    assert paths("sgl-kernel", "0.3.21") == {"flashmla_ops"}
    assert paths("sglang-kernel", "0.4.10") == {"flashmla_ops", "infllm_ops"}
    assert paths("xformers", "0.0.32.post1") == {"_C"}
    assert paths("xformers", "0.0.32") == set()
    assert paths("torch", "2.8.0") == set()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["path"])
def test_rows_are_complete(row):
    assert guarded_files.normalize_name(row["package"]) == row["package"]
    assert [*guarded_files.find_rows(row["package"], row["first"])]
    assert [*guarded_files.find_rows(row["package"], row["last"])]
    assert row["guard"]["source"].endswith(".py")
    assert "\n" not in row["guard"]["text"]
    assert guarded_files.is_listed(f"/usr/lib/python3/site-packages/{row['path']}")


def test_only_paths_of_rows_are_listed():
    assert not guarded_files.is_listed("/usr/lib/python3/site-packages/vllm/_C.abi3.so")
    assert not guarded_files.is_listed("/opt/other_vllm/_flashmla_C.abi3.so")
