"""Files of variables are read as docker reads them."""

import pytest

from imagematrix.errors import UsageError
from imagematrix.launcher.docker.env_file import read_env_file


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"\xef\xbb\xbfA=1\n", ["A=1"]),
        (b"A=1\r\nB=2\r\n", ["A=1", "B=2"]),
        (b"A=1\rB=2\n", ["A=1\rB=2"]),
        (b"A=1\r\r\n", ["A=1\r"]),
        (b"A= 1 \n", ["A= 1 "]),
        (b"A='1'", ["A='1'"]),
        (b"A=1=2\n", ["A=1=2"]),
        (b"A=\x0b1\x1c\xc2\x85\n", ["A=\x0b1\x1c\x85"]),
        (b"\xc2\xa0\t A=1\n", ["A=1"]),
        (b"  # comment\n \n#\n", []),
        (b"HOME\nUNSET\n", ["HOME=/home"]),
        (b"A=1\n\xef\xbb\xbfB=1\n", ["A=1", "\ufeffB=1"]),
        (b"", []),
    ],
)
def test_lines_are_those_of_docker(tmp_path, raw, expected):
    (tmp_path / "env").write_bytes(raw)
    assert read_env_file(str(tmp_path / "env"), {"HOME": "/home"}) == expected


@pytest.mark.parametrize(
    "raw", [b"A B=1\n", b"A =1\n", b"A\xc2\xa0B\n", b"=1\n", b"A\tB\n", b"A=1\0\n", b"A\x0bB=1\n"]
)
def test_what_docker_refuses_is_refused(tmp_path, raw):
    (tmp_path / "env").write_bytes(b"B=1\n" + raw)
    with pytest.raises(UsageError, match=r"--env-file .*/env: invalid variable '"):
        read_env_file(str(tmp_path / "env"), {})


@pytest.mark.parametrize(
    ("name", "reason"), [("none", "No such file"), (".", "Is a directory"), ("x", "UTF-8")]
)
def test_a_file_that_cannot_be_read_is_an_error(tmp_path, name, reason):
    (tmp_path / "x").write_bytes(b"A=\xff\n")
    with pytest.raises(UsageError, match=rf"--env-file .* cannot be read: .*{reason}"):
        read_env_file(str(tmp_path / name), {})
