"""What the tests of commands share."""

import pytest


@pytest.fixture
def no_engine(docker_host):
    """No engine is where DOCKER_HOST points."""
    docker_host("unix:///nowhere/docker.sock")
