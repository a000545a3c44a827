"""A start in a container of the engine, which is looked at while it runs."""

import tarfile
from types import SimpleNamespace
from typing import Any

import pytest
from requests.exceptions import ReadTimeout

from imagematrix.errors import EngineError, EngineUnreachableError
from imagematrix.images.catalog.warm_up import WarmUp
from imagematrix.images.engine import container_files
from imagematrix.launcher.warm_up.container_run import ContainerRuns


@pytest.fixture
def watch(monkeypatch):
    """Call it with what a look at the size raises to get why a program failed that ends after it."""

    def call(error):
        answers = iter([ReadTimeout(), {"StatusCode": 0}])

        def wait(*_, **__):
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

        def measure(*_):
            raise error

        monkeypatch.setattr(container_files, "measure_written", measure)
        client: Any = SimpleNamespace(api=SimpleNamespace(wait=wait))
        start: Any = SimpleNamespace(warm_up=WarmUp(command=("train",)))
        return ContainerRuns(client, start)._watch("container")

    return call


@pytest.mark.parametrize("error", [EngineError("refused: lstat x: no such file"), tarfile.ReadError("cut")])
def test_files_that_go_while_they_are_counted_end_no_warm_up(watch, error):
    assert watch(error) is None


def test_an_engine_that_is_gone_ends_it(watch):
    with pytest.raises(EngineUnreachableError):
        watch(EngineUnreachableError("gone"))
