"""The pace of a client."""

import contextlib
import socket

import pytest

from imagematrix.integrations.http_service.pace import Pace, Traffic

LEAST = 1_000


@pytest.mark.parametrize(
    ("looks", "slow_s"),
    [
        # Times in s, bytes sent, received and queued, and whether the rest of a request is awaited.
        ([(1, 0, 0, 0, False), (9, 0, 0, 0, False)], 0),
        ([(1, 0, 0, 0, True), (9, 0, 0, 0, True)], 8),
        ([(1, 0, 0, 0, True), (9, 0, 7_999, 0, True)], 8),
        ([(1, 0, 0, 0, True), (9, 0, 8_000, 0, True)], 0),
        ([(1, 0, 0, 0, True), (2, 0, 5_000, 0, True), (4, 0, 5_000, 0, True)], 2),
        ([(1, 0, 0, 0, True), (5, 9_000_000, 0, 0, True)], 4),
        ([(1, 0, 0, 1, False), (6, 0, 9_000_000, 1, False)], 5),
        ([(1, 0, 0, 1, False), (6, 5_000, 0, 1, False)], 0),
        ([(1, 0, 0, 1, False), (6, 0, 0, 0, False)], 0),
        ([(1, 0, 0, 1, True), (6, 0, 0, 1, True), (7, 0, 0, 0, True)], 0),
    ],
)
def test_who_is_slow(looks, slow_s):
    pace = Pace(None, 0, 0)
    for now, sent, received, queued, asking in looks:
        pace = pace.update(now, Traffic(sent, received, queued), asking=asking, least=LEAST)
    assert pace.get_slow_s(looks[-1][0]) == slow_s


def test_the_kernel_counts_what_is_sent_and_read():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        with socket.create_connection(listener.getsockname()) as client:
            served, _ = listener.accept()
            with served:
                client.sendall(bytes(1_000))
                assert served.recv(1_000, socket.MSG_WAITALL) == bytes(1_000)
                served.sendall(bytes(500))
                assert client.recv(500, socket.MSG_WAITALL) == bytes(500)
                seen = Traffic.measure(served)
                assert (seen.received, seen.queued) == (1_000, 0)
                assert seen.sent in {500, 501}  # with the first packet's number
                served.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    while served.send(bytes(1 << 16)):
                        pass
                assert Traffic.measure(served).queued > 0
            with pytest.raises(OSError, match="Bad file descriptor"):
                Traffic.measure(served)
