"""Folders of caches in a Dockerfile: what the image has in the end counts, and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.build.dockerfile.cache_folders import find_cache_faults
from imagematrix.build.dockerfile.instructions import DockerfileError
from imagematrix.images.warm.tools import list_folders

GOOD = "NUMBA_CACHE_DIR=/var/cache/warm/numba"
BAD = "NUMBA_CACHE_DIR=/root/.cache"


def places(dockerfile):
    """Return the line and column of each fault."""
    marks = [fault.locate(dockerfile) for fault in find_cache_faults(dockerfile)]
    return [(mark.line, mark.column) for mark in marks]


@pytest.mark.parametrize(
    ("dockerfile", "expected"),
    [
        ("FROM a\n", []),
        (f"FROM a\nENV {GOOD}\n", []),
        (f"FROM a\nENV {BAD}\n", [(2, 5)]),
        ("FROM a\nENV NUMBA_CACHE_DIR /tmp/x\n", [(2, 5)]),
        ("FROM a\nENV NUMBA_CACHE_DIR /var/x y\n", []),
        ('FROM a\nENV A=1 NUMBA_CACHE_DIR="/home/me/a b" B=2\n', [(2, 9)]),
        (
            "FROM a\nENV A=1 \\\n    # of Numba\n    NUMBA_CACHE_DIR=/tmp \\\n    CUPY_CACHE_DIR=/tmp\n",
            [(4, 5), (5, 5)],
        ),
        ("FROM a\nENV NUMBA_CACHE_DIR=$HOME/x\n", [(2, 5)]),
        ("FROM a\nENV NUMBA_CACHE_DIR=~/x\n", [(2, 5)]),
        ("FROM a\nENV NUMBA_CACHE_DIR=/opt/p/__pycache__\n", [(2, 5)]),
        ("FROM a\nENV HF_HOME=/tmp/hf TMPDIR=/tmp\n", []),
        # The last value is the image's.
        (f"FROM a\nENV {BAD}\nENV {GOOD}\n", []),
        (f"FROM a\nENV {GOOD}\nENV {BAD}\n", [(3, 5)]),
        # Of stages that the image starts from, and no others.
        (f"FROM a AS Body\nENV {BAD}\nFROM b\nFROM body\n", [(2, 5)]),
        (f"FROM a AS body\nENV {BAD}\nFROM body\nENV {GOOD}\n", []),
        (f"FROM a AS tool\nENV {BAD}\nFROM b\nCOPY --from=tool /x /x\n", []),
        (f"FROM a AS tool\nENV {BAD}\nFROM tool AS other\nENV {GOOD}\nFROM tool\n", [(2, 5)]),
        # No variables.
        (f"FROM a\nARG {BAD}\nLABEL {BAD}\nRUN {BAD} make\n", []),
        ("FROM a\nENV\n", []),
        ("FROM a\nENV 'NUMBA_CACHE_DIR=/tmp\n", []),
    ],
)
def test_folders_that_serve_one_user_are_found(dockerfile, expected):
    assert places(dockerfile) == expected


def test_fault_says_what_to_do():
    (fault,) = find_cache_faults(f"FROM a\nENV {BAD}\n")
    assert fault.message == (
        "NUMBA_CACHE_DIR: a cache in /root/.cache breaks when another user runs the image (--user)"
    )
    assert "write {{ debian.warm_caches() }} in the template" in fault.remedy


@given(st.lists(st.sampled_from([*" ='\"\\\n#$/a", *list_folders()])))
def test_any_variables_are_read_or_refused(parts):
    dockerfile = f"FROM a\nENV {''.join(parts)}\n"
    try:
        faults = find_cache_faults(dockerfile)
    except DockerfileError:
        return
    assert all(0 <= fault.at < len(dockerfile) for fault in faults)
