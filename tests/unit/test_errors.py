"""The tree of errors: all can be pickled and copied."""

import copy
import importlib
import pickle
import pkgutil
from typing import Any

import pytest

import imagematrix
from imagematrix.build.dockerfile.instructions import DockerfileError, Fault
from imagematrix.build.dockerfile.template_error import TemplateError, TemplateFault
from imagematrix.build.matrix import problems
from imagematrix.build.matrix.problems import Mark, MatrixError
from imagematrix.errors import ImagematrixError
from imagematrix.images.catalog.catalog import Catalog
from imagematrix.launcher.docker.devices import DeviceProblem, DevicesError
from imagematrix.selection.gang.gang import ExcludedHosts, Gang, NothingFitsAll
from imagematrix.selection.selection import NothingFits

SOME: Any = {"any": "thing"}  # for a Selection
NODE = DeviceProblem(path="/dev/nvidia0", what="not found", remedy="nvidia-modprobe -c 0")
LEFT = ExcludedHosts(hosts=("node1",), nearest=None, rules=())
GANG = Gang(catalog=Catalog(image="t", version="v1", variants=()), alike=None, members=(), left=(LEFT,))
FAULT = Fault("unknown instruction: RUM", 7, "did you mean RUN?")
PROBLEM = problems.Problem(message="bad", mark=Mark(1, 2))
OWN = {
    NothingFitsAll: lambda: NothingFitsAll("none fits all", gang=GANG, remedy="build one"),
    NothingFits: lambda: NothingFits("none fits", selection=SOME, remedy="build one"),
    DevicesError: lambda: DevicesError((NODE,)),
    DockerfileError: lambda: DockerfileError("FROM a\nRUM b", [FAULT]),
    TemplateError: lambda: TemplateError([TemplateFault("a.j2", PROBLEM, "RUM b")]),
    MatrixError: lambda: MatrixError("matrix.yaml", [PROBLEM]),
}


def import_all():
    """Import all modules of the package."""
    for module in pkgutil.walk_packages(imagematrix.__path__, "imagematrix."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def kinds(base=ImagematrixError):
    """Yield an error and all that are derived from it, as far as they are imported."""
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


import_all()


@pytest.mark.parametrize("kind", dict.fromkeys(kinds()), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))],  # noqa: S301
)
def test_every_error_can_be_copied_and_pickled(kind, copied):
    error = OWN.get(kind, lambda: kind("it is so", remedy="do this"))()
    error.add_note("and more")
    result = copied(error)
    assert type(result) is kind
    assert (str(result), result.args, vars(result)) == (str(error), error.args, vars(error))
    assert result.remedy == error.remedy


def test_an_error_has_the_lines_that_it_was_made_of_and_no_others():
    error = ImagematrixError("a\n::error::b", "  ::error::c", remedy="d\n##[error]e")
    assert str(error) == "a\ufffd::error::b\n  \ufffd:error::c"
    assert error.remedy == "d\ufffd\ufffd#[error]e"
