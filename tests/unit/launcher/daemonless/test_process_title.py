"""What other users see of the process that keeps a container."""

import ctypes
import os
import subprocess
import sys

import pytest

from imagematrix.launcher.daemonless import process_title

SHOW = """\
from imagematrix.launcher.daemonless.process_title import hide_arguments
hide_arguments()
hide_arguments()
print(open("/proc/self/cmdline", "rb").read().rstrip(b"\\0").split(b"\\0"))
import sys; print(sys.argv)
"""


def test_values_among_the_arguments_are_not_shown():
    words = [sys.executable, "-c", SHOW, "-e", "TOKEN=secret", "a" * 5000]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    shown, arguments = done.stdout.splitlines()
    assert shown == repr([os.fsencode(word) for word in words[:3]])
    assert arguments == repr(["-c", *words[3:]])


def test_few_arguments_stay():
    words = [sys.executable, "-c", SHOW]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == repr([os.fsencode(word) for word in words])


def opened(texts):
    """Return a function in place of open() for files of /proc with these contents."""

    def call(path, *_, **__):
        if texts is None:
            raise PermissionError(path)
        name = path.rpartition("/")[2]
        reader, writer = os.pipe()
        os.write(writer, texts[name])
        os.close(writer)
        return os.fdopen(reader, "r" if name == "stat" else "rb")

    return call


@pytest.mark.parametrize(
    ("texts", "written"),
    [
        (None, []),
        ({"stat": b"1 (a) b) " + b"x " * 45 + b"0 0", "cmdline": b"a\0b"}, []),
        ({"stat": b"1 (a) b) " + b"x " * 45 + b"100 130", "cmdline": b"a\0b\0c\0d\0"}, [(106, 0, 24)]),
        ({"stat": b"1 (a) b) " + b"x " * 45 + b"100 106", "cmdline": b"a\0b\0c\0"}, []),
    ],
)
def test_only_what_follows_the_first_words_is_overwritten(monkeypatch, texts, written):
    found = []
    monkeypatch.setattr(ctypes, "memset", lambda *words: found.append(words))
    monkeypatch.setattr(process_title, "open", opened(texts), raising=False)
    process_title.hide_arguments()
    assert found == written
