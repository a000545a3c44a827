"""`imagematrix outdated`: what aged, what could not be asked, and what that concerns."""

import datetime as dt
import json

import pytest
from double import Double
from package_index import Index

from imagematrix.build.outdated.checks import check_drivers, check_toolkits
from imagematrix.build.plan.plan import Planned, PlanStatus
from imagematrix.hardware.vendors import cuda, driver_branches
from imagematrix.hardware.vendors.versions import make_sort_key
from imagematrix.images.catalog.catalog import Catalog, Variant

CPU = ("--only", "cuda=none")
LOCK = """
FROM {{ base }} AS compiler
FROM {{ base }}
COPY <<"END" /tmp/lock.txt
Two_words==1.2 --hash=sha256:00 --hash=sha256:01
fresh==2.0.post1 \\
    --hash=sha256:00
absent==1.0 --hash=sha256:00
END
"""


@pytest.fixture
def index(monkeypatch):
    with Index() as started:
        monkeypatch.setenv("PIP_INDEX_URL", started.url)
        yield started


@pytest.fixture
def report(cli, conforms):
    """Call it with words to get the exit code and the findings, by kind and name."""

    def call(*words):
        done = cli("outdated", "--json", *words)
        findings = conforms(json.loads(done.out))["findings"]
        return done.code, {(one["kind"], one["name"]): one for one in findings}, done.err

    return call


@pytest.fixture
def locked(project, server):
    """A matrix on a base in the registry, and its lock; call it with the digest in the lock."""
    base = f"{server.address}/base:v1"

    def write(digest, **more):
        path = project(("debian:trixie", base), **more)
        document = {"schema": "imagematrix.lock/v1", "bases": [{"name": base, "digest": digest}]}
        (path.parent / "imagematrix.lock").write_text(json.dumps(document))
        return path, base

    return write


@pytest.mark.usefixtures("engine")
def test_bases_that_moved_are_outdated(report, cli, server, locked):
    now = server.repository("base").image("v1", {})
    path, base = locked(now)
    done = cli("outdated", "-f", path, *CPU)
    assert (done.code, done.out, done.err) == (0, "", "nothing is outdated\n")
    old = f"sha256:{'0' * 64}"
    locked(old)
    code, found, said = report("-f", path, *CPU)
    assert code == 11
    assert "1 thing outdated" in said
    (finding,) = found.values()
    assert (finding["used"], finding["now"], finding["source"]) == (old, now, server.address)
    assert {cell["cell"] for cell in finding["cells"]} == {"cpu-x86-64-v3", "cpu-znver4"}
    assert cli("outdated", "-f", path, *CPU).out.splitlines()[2].split()[:2] == ["base", base]


@pytest.mark.usefixtures("engine")
def test_a_base_that_cannot_be_asked_is_unknown(report, server, locked):
    path, base = locked(f"sha256:{'0' * 64}")
    code, found, said = report("-f", path, *CPU)
    assert code == 8
    assert "push a base that was made on this machine to a registry" in said
    assert "later" not in said
    assert found["base", base]["status"] == "unknown"
    assert "does not have it" in found["base", base]["why"]
    server.fails("HEAD", "", times=9, status=403)
    _, found, said = report("-f", path, *CPU)
    assert "denies access" in found["base", base]["why"]
    assert f"`docker login {server.address}` with an account that has access; push a base" in said


@pytest.mark.usefixtures("engine")
def test_newer_wheels_are_outdated(report, server, locked, index):
    path, _ = locked(server.repository("base").image("v1", {}), template=LOCK)
    index.add(
        "two-words", "two_words-1.10-py3-none-any.whl", "two_words-1.9.tar.gz", "two_words-2.0a1-py3.whl"
    )
    index.add("fresh", "fresh-2.0.0-py3-none-any.whl", "fresh-2.0.0.post1-py3-none-any.whl")
    code, found, said = report("-f", path, *CPU)
    assert code == 11
    assert "1 unknown" in said
    assert {name: (one["used"], one["now"]) for (_, name), one in found.items()} == {
        "two-words": ("1.2", "1.10"),
        "absent": ("1.0", None),
    }
    assert found["wheel", "two-words"]["source"] == index.url


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("answer", [b"<html>", b"[]", b'{"files": [1]}', b'{"files": []}', None])
def test_an_index_without_an_answer_is_unknown(report, server, locked, index, answer):
    path, _ = locked(server.repository("base").image("v1", {}), template=LOCK)
    index.projects = dict.fromkeys(["two-words", "fresh", "absent"], answer)
    code, found, _ = report("-f", path, *CPU)
    assert code == 8
    assert {one["status"] for one in found.values()} == {"unknown"}
    assert len(found) == 3


@pytest.mark.usefixtures("engine")
def test_yanked_releases_do_not_count(report, server, locked, index):
    path, _ = locked(server.repository("base").image("v1", {}), template=LOCK)
    for name in ("two-words", "fresh", "absent"):
        index.projects[name] = [
            {"filename": "it-1.0-py3-none-any.whl"},
            {"filename": "it-9.0-py3-none-any.whl", "yanked": "broken"},
        ]
    assert report("-f", path, *CPU)[:2] == (0, {})


def item(driver, cell):
    return Planned(cell=cell(driver), status=PlanStatus.BUILD, reference=f"t:v1-{driver}")


class Cell(Double):
    """As much of a Cell as the checks read."""

    def __init__(self, driver, name="cell"):
        self.driver_version, self.id = driver, name
        self.image = type("Image", (), {"name": "training", "version": "v1"})()


@pytest.mark.parametrize(
    ("driver", "today", "now", "why"),
    [
        ("535.288.01", dt.date(2026, 6, 30), None, None),
        ("535.288.01", dt.date(2026, 7, 1), "end of 535", "support of the branch 535 ended in 2026-06"),
        ("535.261.03", dt.date(2026, 6, 1), "535.288.01", "535.288.01 is newer"),
        (
            "535.261.03",
            dt.date(2026, 7, 1),
            "535.288.01",
            "support of the branch 535 ended in 2026-06, 535.288.01 is newer",
        ),
        ("550.163.01", dt.date(2026, 1, 1), "end of 550", "NVIDIA no longer lists the branch 550"),
        ("999.1.1", dt.date(2026, 1, 1), None, "the table of driver branches lacks it"),
        ("540.4.0", dt.date(2026, 1, 1), None, "the table of driver branches lacks it"),
        (None, dt.date(2026, 1, 1), None, None),
    ],
)
def test_drivers_are_compared_with_the_table(driver, today, now, why):
    found = list(check_drivers([item(driver, Cell)], today))
    assert [(one.now, one.why) for one in found] == ([(now, why)] if why else [])
    assert all(one.date and one.source.startswith("https://") for one in found if one.now)


def test_a_finding_states_the_sources_of_what_it_says():
    branch = driver_branches.get_branch("535.261.03")
    (newer,) = check_drivers([item("535.261.03", Cell)], dt.date(2026, 6, 1))
    assert (newer.source, newer.date) == (branch.newest.source, branch.newest.date)
    (ended,) = check_drivers([item("535.288.01", Cell)], dt.date(2026, 7, 1))
    assert (ended.source, ended.date) == (branch.source, branch.date)
    (both,) = check_drivers([item("535.261.03", Cell)], dt.date(2026, 7, 1))
    assert (both.source, both.date) == (f"{ended.source}, {newer.source}", min(ended.date, newer.date))


def test_the_table_of_branches_is_sound():
    for name, branch in driver_branches.load_branches().items():
        assert branch.source.startswith("https://docs.nvidia.com/")
        dt.date.fromisoformat(branch.date)
        if branch.newest:
            assert make_sort_key(branch.newest.version)[0] == int(name)
            assert branch.newest.source.startswith("https://")
            dt.date.fromisoformat(branch.newest.date)
        if branch.end != driver_branches.UNLISTED:
            dt.date.fromisoformat(f"{branch.end}-01")


def test_toolkits_whose_label_differs_from_the_tables_are_outdated(engine):
    known = cuda.get_lowest_driver("12.4")
    variants = [
        Variant(
            reference=f"training:v1-{name}-0123456789ab",
            digest=None,
            platform="linux/amd64",
            cuda="12.4",
            oldest_driver=stated,
        )
        for name, stated in (("old", "1.1"), ("same", known), ("none", None))
    ]
    engine.add_catalog(Catalog(image="training", version="v1", variants=tuple(variants)))
    items = [
        Planned(cell=Cell(None, name), status=PlanStatus.BUILD, reference=f"training:v1-{name}")
        for name in ("old", "same", "none")
    ]
    (finding,) = check_toolkits(items)
    assert (finding.name, finding.used, finding.now) == ("CUDA 12.4", "1.1", known)
    assert [one.cell.id for one in finding.items] == ["old"]


def test_an_engine_that_does_not_answer_is_unknown(report, server, locked, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    path, _ = locked(server.repository("base").image("v1", {}))
    code, found, said = report("-f", path, *CPU)
    assert code == 8
    assert found["toolkit", "training:v1"]["status"] == "unknown"
    assert "1 thing could not be asked" in said


@pytest.mark.usefixtures("engine")
def test_hosts_that_choose_a_cell_are_named(report, cli, shipped, profiles):
    code, found, _ = report("-f", shipped, "--hosts", profiles["laptop"].parent)
    assert code == 11
    hosts = {
        name: [host.rpartition("/")[2] for host in one["hosts"]]
        for (kind, name), one in found.items()
        if kind == "driver"  # there may also be a lock of bases beside the shipped matrix
    }
    assert "skylake-v100" in hosts["535.261.03"]
    assert "icelake-l40s" in hosts["550.163.01"]
    assert not any("laptop" in names for names in hosts.values())
    generic = ("--only", "driver=550.163.01,march=x86-64-v3")  # hosts choose among all cells
    _, found, _ = report("-f", shipped, "--hosts", profiles["laptop"].parent, *generic)
    assert found["driver", "550.163.01"]["cells"]
    assert found["driver", "550.163.01"]["hosts"] == []
    shown = cli("outdated", "-f", shipped, "--hosts", profiles["skylake-v100"]).out
    assert "driver 535.261.03: support of the branch 535 ended" in shown
    assert str(profiles["skylake-v100"]).removesuffix(".json") in shown


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--only", "x=1"), 2),
        (("--only", "cuda=11.8,compute=9.0"), 2),
        (("--hosts", "/nowhere"), 2),
        (("-f", "/nowhere"), 2),
    ],
)
def test_wrong_use(cli, shipped, words, code):
    assert cli("outdated", "-f", shipped, *words).code == code
