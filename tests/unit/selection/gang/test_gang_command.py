"""select --gang and im.select_gang, on the saved hosts with the catalog of the shipped matrix."""

import gc
import json

import pytest

import imagematrix as im
from imagematrix.common import json_documents
from imagematrix.common.record import replace
from imagematrix.selection.gang import compatibility

TWO = ("genoa-h200", "sapphirerapids-h100")
DIGEST = f"sha256:{'a' * 64}"


@pytest.fixture
def gang(cli, profiles, catalog_file):
    """Call it with names of saved hosts and more options."""

    def call(*words, catalog=catalog_file):
        hosts = [word for name in words if name in profiles for word in ("--gang", profiles[name])]
        options = [word for word in words if word not in profiles]
        return cli("select", "training:v1", "--catalog", catalog, *hosts, *options)

    return call


@pytest.fixture
def gpus(shipped_catalog):
    """The variants for H100 and H200 of the catalog, with digests; call it with their libraries, by march."""

    def call(**libraries):
        return replace(
            shipped_catalog,
            variants=tuple(
                replace(one, digest=DIGEST, libraries=libraries.get(one.march, ()))
                for one in shipped_catalog.variants
                if one.cubins == ("90",) and one.march in {"znver4", "sapphirerapids"}
            ),
        )

    return call


def test_one_variant_for_all_hosts_is_generic(gang):
    one = "training:v1-cuda12.4-drv550.163.01-sm90-x86-64-v3-0123456789ab\n"
    assert gang(*TWO) == (0, one, "")
    assert gang(TWO[0]) == (0, "training:v1-cuda12.4-drv550.163.01-sm90-znver4-0123456789ab\n", "")


def test_alike_variants_are_listed_by_host(gang, profiles):
    code, output, _ = gang(*TWO, "--alike", "cuda,nccl,mpi,torch")
    names = [str(profiles[name]).removesuffix(".json") for name in TWO]
    assert code == 0
    assert output.splitlines() == [
        f"{names[0]} training:v1-cuda12.4-drv550.163.01-sm90-znver4-0123456789ab",
        f"{names[1]} training:v1-cuda12.4-drv550.163.01-sm90-sapphirerapids-0123456789ab",
    ]


def test_document_conforms_and_has_each_member(gang, conforms, profiles):
    code, output, _ = gang(*TWO, "--alike", "cuda", "--json")
    assert (code, conforms(json.loads(output))["complete"]) == (0, True)
    code, output, _ = gang(*TWO, "laptop", "--json")
    document = conforms(json.loads(output))
    assert (code, document["complete"]) == (3, False)
    assert [one["name"] for one in document["members"]] == [
        str(profiles[name]).removesuffix(".json") for name in TWO
    ]
    ((left,), nearest) = (document["left"], document["left"][0]["nearest"])
    assert left["rules"][0]["rule"] == "driver-exact"
    assert nearest == document["members"][0]["selected"]


def test_refusal_names_the_largest_gang_the_rest_and_what_helps(gang, profiles):
    code, output, error = gang(*TWO, "skylake-v100", "laptop", "--alike", "cuda")
    assert (code, output) == (3, "")
    lines = error.splitlines()
    assert lines[0] == (
        "imagematrix: no variants of training:v1 that are alike in cuda fit all 4 hosts: "
        "those with cuda 12.4 fit 3, but not:"
    )
    assert lines[1].startswith(
        f"  {str(profiles['laptop']).removesuffix('.json')}: driver-exact, driver-cuda: no"
    )
    code, _, error = gang(*TWO, "skylake-v100")
    assert code == 3
    assert "no variant of training:v1 fits all 3 hosts: training:v1-cuda12.4-" in error
    assert error.endswith("  --alike cuda,nccl,mpi,torch lets hosts run different variants\n")


@pytest.mark.parametrize("words", [TWO, (*TWO, "laptop")])
def test_garbage_is_looked_for_after_an_answer_and_a_refusal(gang, words):
    assert gang(*words)[0] == (0 if words == TWO else 3)
    assert gc.isenabled()


def test_unknown_versions_are_like_no_others(gang, gpus, tmp_path):
    path = tmp_path / "catalog.json"
    for libraries, known in (((("nccl", "2.27.3"),), True), ((("nccl", None),), False), (None, False)):
        catalog = gpus(znver4=libraries, sapphirerapids=libraries)
        path.write_text(json_documents.dump_json(catalog.to_json()))
        code, output, error = gang(*TWO, "--alike", "nccl", catalog=path)
        assert (code, output.count(f"@{DIGEST}")) == ((0, 2) if known else (3, 0))
        assert ("nccl is unknown of 4 variants, which are like no other" in error) is not known
        assert gang(TWO[0], "--alike", "nccl", catalog=path)[0] == 0  # a variant is like itself


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--alike", "cuda"), "--alike is about several hosts"),
        ((*TWO, "--alike", "ncll"), "no variant has a library 'ncll'\n  did you mean 'nccl'?"),
        ((*TWO, "--alike", "x\x1b[2J"), "invalid names of libraries: 'x\\x1b[2J'"),
        ((*TWO, "--host", "x.json"), "--gang has the hosts"),
        ((*TWO, "--format", "classad"), "--gang and --format classad are mutually exclusive"),
        (("--format", "classad", "--json"), "--json and --format classad are mutually exclusive"),
        (("--format", "clasad"), "invalid format: 'clasad'\n  did you mean 'classad'?"),
        (("--gang", "absent"), "absent: No such file or directory"),
        ((*TWO, "--gpus", "9"), "genoa-h200: 9 GPUs wanted: 8 of the host's 8 GPUs are usable\n  "),
    ],
)
def test_wrong_usage_is_told(gang, options, error):
    code, output, told = gang(*options)
    assert (code, output) == (2, "")
    assert error in told


def test_library_takes_hosts_by_name_and_in_a_list(profiles, shipped_catalog):
    hosts = im.load_hosts(*(profiles[name] for name in TWO))
    found = im.select_gang(hosts, shipped_catalog, alike=["cuda"])
    assert isinstance(found, im.Gang)
    assert list(found.by_name) == list(hosts)
    first = found.selection(found.members[0].name)
    assert (first.selected, first.gpus) == (found.members[0].variant.reference, found.members[0].gpus)
    listed = im.select_gang(hosts.values(), shipped_catalog, alike="cuda, nccl")
    assert [member.name for member in listed.members] == ["1", "2"]
    many = im.select_gang([*hosts.values()] * 6, shipped_catalog, alike="cuda, nccl")
    assert [member.name for member in many.members] == [str(number) for number in range(1, 13)]
    assert listed.alike == ("cuda", "nccl")
    assert [one.variant for one in listed.members] == [one.variant for one in found.members]


@pytest.mark.parametrize("hosts", [{}, [], None, "hosts", ["host"]])
def test_no_hosts_are_refused(hosts, shipped_catalog):
    with pytest.raises(im.UsageError, match=r"hosts|not a Host"):
        im.select_gang(hosts, shipped_catalog)


def test_a_gang_needs_a_decision_about_own_axes(profiles, gpus):
    catalog = gpus()
    axes = {"znver4": (("python", "3.12"),), "sapphirerapids": (("python", "3.13"),)}
    each = tuple(replace(one, axes=axes[one.march]) for one in catalog.variants)
    catalog = replace(catalog, variants=tuple(replace(one, march="x", cpu_flags=frozenset()) for one in each))
    host = im.Host.load(profiles["genoa-h200"])
    with pytest.raises(im.UsageError, match=r"that fit all hosts differ in python \(3.12, 3.13\)"):
        im.select_gang([host, host], catalog)
    found = im.select_gang([host, host], catalog, where="python=3.13")
    assert [dict(member.variant.axes) for member in found.members] == [{"python": "3.13"}] * 2


def test_variants_that_nothing_tells_apart_are_refused(profiles, gpus):
    host = im.Host.load(profiles["genoa-h200"])
    first = im.select_gang([host], gpus()).members[0].variant
    catalog = replace(gpus(), variants=(first, replace(first, reference=f"{first.reference}-again")))
    with pytest.raises(im.UsageError, match="cannot be told apart"):
        im.select_gang([host], catalog)


def test_members_of_a_refused_gang_are_in_the_order_of_the_list(profiles, shipped_catalog):
    hosts = [*im.load_hosts(profiles["genoa-h200"]).values()] * 11
    with pytest.raises(im.NothingFitsAll) as caught:
        im.select_gang([*hosts, im.Host.load(profiles["masked"])], shipped_catalog)
    members = [member.name for member in caught.value.gang.members]
    assert members == [str(number) for number in range(1, 12)]


def test_a_catalog_without_variants_fits_nobody(profiles, shipped_catalog):
    with pytest.raises(im.NothingFitsAll, match="no variant of training:v1 fits any of the 1 host") as caught:
        im.select_gang([im.Host.load(profiles["laptop"])], replace(shipped_catalog, variants=()))
    assert caught.value.exit_code == 3
    assert caught.value.gang.to_json()["left"] == [{"hosts": ["1"], "nearest": None, "rules": []}]


def test_cuda_of_a_variant_for_gpus_may_be_unknown(make):
    cpu, gpu = make.cpu_variant(), make.variant(cuda=None, cubins=())
    assert compatibility.count_unknown_versions([cpu, gpu, make.variant()], ["cuda"]) == {"cuda": 1}
    assert compatibility.describe_shared_libraries(cpu, ["cuda"]) == "no cuda"
    assert compatibility.make_compatibility_key(gpu, ["cuda"]) != compatibility.make_compatibility_key(
        replace(gpu, reference="t:other"), ["cuda"]
    )


def test_a_node_with_several_kinds_of_gpus_passes_those_that_the_variant_fits(profiles, shipped_catalog):
    mixed, a100 = im.Host.load(profiles["mixed"]), im.Host.load(profiles["rome-a100"])
    a100 = replace(a100, driver=mixed.driver)
    found = im.select_gang({"a": mixed, "b": a100}, shipped_catalog, gpus=1)
    assert [member.variant.cubins for member in found.members] == [("80",), ("80",)]
    assert found.by_name["a"].gpus == (mixed.gpus[1].uuid,)
    alone = im.select_gang({"a": mixed}, shipped_catalog, gpus=1)
    assert alone.by_name["a"].gpus == (mixed.gpus[0].uuid,)
