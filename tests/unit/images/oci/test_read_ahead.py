"""Streams that a thread reads ahead: the same bytes and errors, and never more than a few pieces."""

import io
import os
import threading

import pytest

from imagematrix.images.oci.byte_stream import PIECE, read_exactly
from imagematrix.images.oci.read_ahead import AHEAD, read_ahead


class Counted:
    """A stream without end that counts what is read from it, and fails after `most` pieces."""

    def __init__(self, most=1000):
        self.count = 0
        self.most = most
        self.waiting = threading.Event()

    def read(self, size=-1):
        if self.count == self.most:
            raise ValueError("it is damaged")
        self.count += 1
        if self.count == AHEAD:
            self.waiting.set()
        return bytes(size)


@pytest.mark.parametrize("size", [-1, 1 << 16, 100_001, PIECE, 5 * PIECE])
def test_it_has_the_same_content(size):
    content = os.urandom(2 * PIECE + 12345)
    with read_ahead(io.BytesIO(content)) as ahead:
        if size < 0:
            assert ahead.read() == content
        else:
            assert read_exactly(ahead.read, len(content) + size) == content
        assert ahead.read(size) == ahead.read(size) == b""


def test_it_is_read_only_as_far_as_pieces_may_wait():
    stream = Counted()
    with read_ahead(stream) as ahead:
        assert stream.waiting.wait(60)
        assert ahead.read(1) == b"\0"
    assert stream.count in (AHEAD, AHEAD + 1)


def test_after_the_context_nobody_reads():
    stream = Counted()
    with read_ahead(stream):
        pass
    before = stream.count
    assert before <= AHEAD
    assert not [thread for thread in threading.enumerate() if thread.name == "read ahead"]


def test_an_error_comes_after_the_bytes_before_it():
    with read_ahead(Counted(most=2)) as ahead:
        assert ahead.read(3 * PIECE) == ahead.read(3 * PIECE) == bytes(PIECE)
        with pytest.raises(ValueError, match="it is damaged"):
            ahead.read(1)
        assert ahead.read(1) == b""
