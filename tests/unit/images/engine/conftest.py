"""An engine on this machine, and one that is reached over the network."""

import pytest


@pytest.fixture(params=["engine", "remote_engine"])
def any_engine(request):
    """A FakeEngine on a Unix socket, then one on a TCP port."""
    return request.getfixturevalue(request.param)
