"""Locked wheels against what an index has: newer releases, better files, files that were withdrawn."""

from __future__ import annotations

import time
from functools import partial

import pytest
from double import Double
from package_index import Index, sha256

from imagematrix.build.outdated.indexes import IndexSettings, find_lock_indexes, read_index_settings
from imagematrix.build.outdated.wheel_files import parse_file_list
from imagematrix.build.outdated.wheels import check_wheels
from imagematrix.build.plan.plan import Planned, PlanStatus

MANY = "manylinux_2_28_x86_64"
NUMPY = f"numpy-2.0-cp313-cp313-{MANY}.whl"  # tells that the image has Python 3.13


class Cell(Double):
    def __init__(self, platform, context=None):
        self.platform = platform
        self.image = type("Image", (), {"context": context})()


@pytest.fixture
def index():
    with Index() as started:
        yield started


@pytest.fixture
def checked(index):
    """Call it with a Dockerfile to get what is found."""

    def call(dockerfile, platform="linux/amd64", context=None, settings=None, environment=()):
        cell = Cell(platform, context)
        item = Planned(cell=cell, status=PlanStatus.BUILD, reference="t:v1", dockerfile=dockerfile)
        settings = settings or IndexSettings(default=index.url)
        indexes = partial(find_lock_indexes, settings=settings, environment=dict(environment))
        found = list(check_wheels([item], indexes))
        assert all(one.items == (item,) for one in found)
        return found

    return call


@pytest.fixture
def judged(checked):
    """Call it with lines of a lock to get what is found, by project: what there is now, and why."""

    def call(*lines, **options):
        text = "\n".join(lines)
        found = checked(f'FROM base\nCOPY <<"END" /tmp/lock.txt\n{text}\nEND\n', **options)
        return {one.name: (one.now, one.why) for one in found}

    return call


def pin(filename, *others, name=None):
    """Return the line of a lock that names these files."""
    project, version = filename.removesuffix(".tar.gz").split("-")[:2]
    return " ".join(
        [f"{name or project}=={version}", *(f"--hash=sha256:{sha256(one)}" for one in (filename, *others))]
    )


def test_a_release_whose_files_are_locked_is_up_to_date(index, judged):
    index.add("numpy", NUMPY)
    assert judged(pin(NUMPY)) == {}


def test_a_newer_release_has_to_be_for_the_same_python_and_platform(index, judged):
    index.add("numpy", NUMPY)
    index.add("numpy", f"numpy-2.1-cp312-cp312-{MANY}.whl", "numpy-2.2-cp313-cp313-win_amd64.whl")
    index.add("numpy", f"numpy-2.3-cp313-cp313-{MANY}.whl", **{"requires-python": ">=3.14"})
    index.add("numpy", f"numpy-2.4rc1-cp313-cp313-{MANY}.whl", "numpy-2.5.tar.gz")
    index.add("numpy", "numpy-2.6-cp313-cp313-manylinux_2_39_x86_64.whl")
    assert judged(pin(NUMPY)) == {}
    index.add("numpy", f"numpy-2.0.1-cp313-cp313-{MANY}.whl")
    assert judged(pin(NUMPY)) == {"numpy": ("2.0.1", "the index has a newer release")}


def test_without_a_known_python_every_newer_wheel_counts(index, judged):
    pure = "pure-1.0-py3-none-any.whl"
    index.add("pure", pure, "pure-1.1-cp39-cp39-win_amd64.whl")
    assert judged(pin(pure)) == {"pure": ("1.1", "the index has a newer release")}


def test_releases_with_another_local_version_are_not_newer(index, judged):
    torch = f"torch-2.8.0+cu128-cp313-cp313-{MANY}.whl"
    index.add("torch", torch, torch.replace("cu128", "cu129"), torch.replace("2.8.0+cu128", "2.9.0+cpu"))
    assert judged(pin(torch)) == {}
    index.add("torch", torch.replace("2.8.0", "2.8.1"))
    assert judged(pin(torch))["torch"][0] == "2.8.1+cu128"
    index.projects["torch"] = []
    index.add("torch", "torch-2.8.0-py3-none-any.whl")
    assert judged(pin(torch)) == {}  # from another index than this one


def test_a_newer_build_of_the_release_is_told(index, judged):
    index.add("numpy", NUMPY, NUMPY.replace("2.0-", "2.0-2-"), NUMPY.replace("2.0-", "2.0-10-"))
    index.add("numpy", NUMPY.replace("2.0-", "2.0-99-").replace("313", "312"))
    assert judged(pin(NUMPY)) == {
        "numpy": (NUMPY.replace("2.0-", "2.0-10-"), "the index has a newer build of the release")
    }
    assert judged(pin(NUMPY, NUMPY.replace("2.0-", "2.0-10-"))) == {}


@pytest.mark.parametrize(
    ("locked", "offered", "told"),
    [
        ("x-1.0-py3-none-any.whl", f"x-1.0-cp313-cp313-{MANY}.whl", True),
        ("x-1.0-py3-none-any.whl", "x-1.0-cp313-cp313-manylinux_2_39_x86_64.whl", False),
        ("x-1.0-py3-none-any.whl", f"x-1.0-cp314-cp314-{MANY}.whl", False),
        ("x-1.0-py3-none-any.whl", "x-1.0-cp313-cp313-manylinux_2_28_aarch64.whl", False),
        ("x-1.0-cp313-cp313-manylinux2014_x86_64.whl", f"x-1.0-cp313-cp313-{MANY}.whl", True),
        (f"x-1.0-cp313-cp313-{MANY}.whl", "x-1.0-cp313-cp313-manylinux2014_x86_64.whl", False),
        (f"x-1.0-cp39-abi3-{MANY}.whl", f"x-1.0-cp310-abi3-{MANY}.whl", True),
    ],
)
def test_a_better_wheel_of_the_release_is_told(index, judged, locked, offered, told):
    index.add("numpy", NUMPY)
    index.add("x", locked, offered)
    found = judged(pin(NUMPY), pin(locked))
    assert found == ({"x": (offered, "the index has a better wheel of the release")} if told else {})


def test_a_wheel_in_place_of_a_source_distribution_is_told(index, judged):
    index.add("numpy", NUMPY)
    index.add("x", "x-1.0.tar.gz")
    assert judged(pin(NUMPY), pin("x-1.0.tar.gz")) == {}
    index.add("x", f"x-1.0-cp313-cp313-{MANY}.whl")
    ((now, why),) = judged(pin(NUMPY), pin("x-1.0.tar.gz")).values()
    assert now == f"x-1.0-cp313-cp313-{MANY}.whl"
    assert why == "the index has a wheel of the release, where the lock has a source distribution"
    assert judged(pin("x-1.0.tar.gz")) == {}  # nothing tells the image's Python
    index.add("x", "x-1.1.tar.gz")
    assert judged(pin("x-1.0.tar.gz"))["x"][0] == "1.1"


def test_other_platforms_have_wheels_of_their_own(index, judged):
    arm = NUMPY.replace("x86_64", "aarch64")
    index.add("numpy", NUMPY, arm, arm.replace("2.0", "2.1"))
    assert judged(pin(NUMPY, arm)) == {}
    assert judged(pin(NUMPY, arm), platform="linux/arm64")["numpy"][0] == "2.1"
    assert judged(pin(NUMPY, arm), platform="linux/riscv64")["numpy"][0] == "2.1"


def test_several_pythons_in_a_lock_leave_it_open(index, judged):
    older = NUMPY.replace("313", "312")
    index.add("numpy", NUMPY, older, f"numpy-2.1-cp311-cp311-{MANY}.whl")
    assert judged(pin(NUMPY, older))["numpy"][0] == "2.1"
    assert judged(pin(NUMPY)) == {}


@pytest.mark.parametrize(("reason", "said"), [(True, ""), ("it is broken", " (it is broken)")])
def test_a_yanked_release_is_told(index, judged, reason, said):
    index.add("numpy", NUMPY, yanked=reason)
    index.add("numpy", NUMPY.replace("2.0", "1.0"))
    assert judged(pin(NUMPY)) == {"numpy": ("yanked", f"the locked release was yanked{said}")}
    index.add("numpy", NUMPY.replace("2.0", "2.1"))
    assert judged(pin(NUMPY)) == {
        "numpy": ("2.1", f"the locked release was yanked{said}, the index has a newer release")
    }


def test_a_yanked_release_is_told_if_no_other_could_be_installed(index, judged):
    index.add("numpy", NUMPY, yanked="bad")
    (now, why) = judged(pin(NUMPY))["numpy"]
    assert now == "yanked"
    assert why.startswith("the locked release was yanked (bad), the index has no final release")


def test_a_yanked_file_is_told(index, judged):
    index.add("numpy", NUMPY, yanked="bad")
    index.add("numpy", NUMPY.replace("313", "312"))
    index.add("numpy", f"numpy-1.0-cp313-cp313-{MANY}.whl")
    assert judged(pin(NUMPY)) == {"numpy": ("yanked", f"{NUMPY} was yanked (bad)")}
    assert judged(pin(NUMPY.replace("313", "312"))) == {}


def test_an_index_may_answer_in_html(index, judged):
    index.projects["numpy"] = f"""<!DOCTYPE html><html><body>
        <a href="../../files/{NUMPY}#sha256={sha256(NUMPY)}">{NUMPY}</a>
        <!-- <a href="x/numpy-9.0-py3-none-any.whl">x</a> --><A NAME=none title='">'></a>
        <a href="https://[">broken</a>
        <a href="x/numpy-3.0%2Bcpu-cp313-cp313-{MANY}.whl#sha256=1" data-yanked>x</a>
        <a href="x/{NUMPY.replace("2.0", "2.2")}?x=1#md5=1" data-requires-python="&lt;3">x</a>
        <a href="x/{NUMPY.replace("2.0", "2.1")}#sha256={sha256("other")}" data-requires-python="junk">x</a>
        """.encode()
    assert judged(pin(NUMPY)) == {"numpy": ("2.1", "the index has a newer release")}


def test_options_in_a_lock_name_its_index(index, judged):
    index.add("numpy", NUMPY, NUMPY.replace("2.0", "2.1"))
    nowhere = IndexSettings(default="http://127.0.0.1:1/simple", extra=("http://127.0.0.1:1/other",))
    found = judged(f"--index-url {index.url}/", pin(NUMPY), settings=nowhere)
    assert found == {"numpy": ("2.1", "the index has a newer release")}
    assert judged("--no-index", pin(NUMPY)) == {"numpy": (None, "the lock asks no index (--no-index)")}


def test_several_indexes_are_asked_together(index, judged):
    with Index() as other:
        other.add("numpy", NUMPY.replace("2.0", "2.1"))
        index.add("numpy", NUMPY)
        assert judged(pin(NUMPY)) == {}
        assert judged(f"--extra-index-url={other.url}", pin(NUMPY))["numpy"][0] == "2.1"
        other.projects.clear()
        assert judged(f"--extra-index-url={other.url}", pin(NUMPY)) == {}
        other.projects["numpy"] = 403
        assert judged(f"--extra-index-url={other.url}", pin(NUMPY)) == {
            "numpy": (None, "the index answered 403")
        }


def test_logins_are_sent_and_never_shown(index, checked, tmp_path):
    index.add("numpy", NUMPY.replace("2.0", "2.1"))
    lock = f"RUN <<E\n-i http://ci:${{TOKEN}}@{index.address}/simple\n{pin(NUMPY)}\nE\n"
    environment = {"TOKEN": "a%40b", "PIP_INDEX_URL": f"http://{index.address}/other"}
    settings = read_index_settings(tmp_path, environment)
    (found,) = checked(lock, settings=settings, environment=environment)
    assert found.source == index.url
    assert "a@b" not in repr(found)
    assert index.logins == ["Basic Y2k6YUBi"]  # ci:a@b


def test_values_of_variables_are_neither_sent_elsewhere_nor_shown(index, checked):
    lock = f"RUN <<E\n--extra-index-url {index.url}/${{TOKEN}}\n{pin(NUMPY)}\nE\n"
    index.add("numpy", NUMPY)
    (found,) = checked(lock, environment={"TOKEN": "t0ken"})
    assert found.why.startswith("not asked: only hosts that your own configuration")
    assert "t0ken" not in repr(found)
    assert index.logins == [None]


def test_an_answer_from_an_address_with_a_secret_does_not_show_it(index, checked):
    index.projects["numpy"] = b"no JSON"
    lock = f"RUN <<E\n-i {index.url}/${{TOKEN}}\n{pin(NUMPY)}\nE\n"
    own = frozenset({("http", "127.0.0.1", int(index.address.rpartition(":")[2]))})
    (found,) = checked(lock, settings=IndexSettings(trusted=own), environment={"TOKEN": "t0ken"})
    assert "/${TOKEN}/numpy/" in found.why
    assert "t0ken" not in repr(found)
    assert len(index.logins) == 1


def test_locks_outside_a_here_document_are_read(index, checked):
    index.add("numpy", NUMPY.replace("2.0", "2.1"))
    pinned = f"numpy[extra]==2.0 ; python_version > '3' \\\n  {pin(NUMPY)[11:]}"
    for text in ("{}\n", "RUN x <<END\nEND\n{}\n", 'COPY <<"A" a\n--no-index\nA\nCOPY <<B b\n{}\nB\n'):
        assert [one.now for one in checked(text.replace("{}", pinned))] == ["2.1"]


def test_locks_in_copied_files_are_read(index, checked, tmp_path):
    context = tmp_path / "context"
    context.mkdir()
    (context / "lock.txt").write_text(pin(NUMPY) + "\n")
    (tmp_path / "outside.txt").write_text("other==1 --hash=sha256:00\n")
    (context / "link.txt").symlink_to(tmp_path / "outside.txt")
    (context / "large.txt").write_text("other==1 --hash=sha256:00\n".ljust(2**20 + 1))
    index.add("numpy", NUMPY.replace("2.0", "2.1"))
    copies = (
        "COPY --chmod=644 lock.txt link.txt ../outside.txt large.txt . \0 /tmp/\nCOPY --from=x lock.txt /y\n"
    )
    (found,) = checked(f"FROM a\n{copies}", context=context)
    assert (found.name, found.now) == ("numpy", "2.1")
    assert checked(f"FROM a\n{copies}") == []


@pytest.mark.parametrize(
    "instruction",
    [
        'COPY ["locks/gpu.txt", "/x"]',
        "COPY locks/g*.txt /x",
        "COPY . /x/",
        "COPY \\\n  --chown=1 \\\n  locks/gpu.txt /x",
        "  copy locks /x",
        "ADD 'locks/gpu.txt' /x",
        "COPY link/gpu.txt /x",
        "ARG KIND\nCOPY locks/$KIND.txt /x",
        "RUN --mount=type=bind,source=locks/gpu.txt,target=/x pip install -r /x",
    ],
)
def test_locks_are_found_however_they_are_copied(index, checked, tmp_path, instruction):
    (tmp_path / "locks").mkdir()
    (tmp_path / "link").symlink_to("locks")
    (tmp_path / "locks" / "gpu.txt").write_text(pin(NUMPY) + "\n")
    (tmp_path / ".dockerignore").write_text("old")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "lock.txt").write_text("old==1 --hash=sha256:00\n")
    index.add("numpy", NUMPY.replace("2.0", "2.1"))
    (found,) = checked(f"FROM a\n{instruction}\n", context=tmp_path)
    assert (found.name, found.now) == ("numpy", "2.1")


def test_a_path_that_no_build_copies_is_no_lock(checked, tmp_path):
    (tmp_path / "lock.txt").write_text("numpy==2.0 --hash=sha256:00\n")
    assert checked("FROM a\nCOPY lock[.txt other.txt /x/\n", context=tmp_path) == []


@pytest.mark.parametrize("unit", ["a==1\\\n", "<<a\n", "a==1 --hash=\\\n"])
def test_long_locks_take_no_time_that_grows_with_their_square(judged, unit):
    began = time.process_time()
    assert judged(unit * 50_000).keys() <= {"a"}
    assert time.process_time() - began < 10


@pytest.mark.parametrize("unit", ["<a ", "<!--", "<a href=", "<a \"<a '", "<a x='\"'\"", "<a b #", "<"])
def test_long_pages_take_no_time_that_grows_with_their_square(unit):
    began = time.process_time()
    assert parse_file_list(b"<" + unit.encode() * 100_000, "https://x/") == []
    assert time.process_time() - began < 10


def test_odd_names_and_versions_are_no_files(index, judged):
    many = ".".join(map(str, range(120)))
    for name in (f"numpy-{'9' * 5000}-py3-none-any.whl", f"numpy-2.1-{many}-{many}-{many}.whl"):
        index.add("numpy", name)
    index.add("numpy", NUMPY.replace("2.0", "2.2"), **{"requires-python": f">={'9' * 5000}"})
    found = judged(pin(NUMPY), f"numpy=={'9' * 5000} --hash=sha256:00")
    assert found["numpy"][0] == "2.2"


def test_an_answer_without_an_end_is_cut(index, judged, monkeypatch):
    from imagematrix.build.outdated import wheels as module

    monkeypatch.setattr(module, "LIMIT", 10)
    index.add("numpy", NUMPY)
    assert judged(pin(NUMPY))["numpy"][0] is None
