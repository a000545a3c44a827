"""Builds that trim device code: they get the program, and their identity says by which rules."""

import pytest

from imagematrix.audit.layers import Layers
from imagematrix.builder.build import build
from imagematrix.errors import UsageError
from imagematrix.planning.identity import TRIM
from imagematrix.trim.program import CONTEXT
from imagematrix.trim.rules import VERSION

TEMPLATE = """\
FROM {{ base }} AS compiler
FROM {{ base }}
{% if cuda %}
RUN --mount=type=bind,from=imagematrix-trim,target=/tmp/trim \\
    python3 /tmp/trim/trim.pyz --compute {{ compute }} /opt
{% endif %}
"""


def test_those_that_trim_see_the_program_and_others_do_not(planned, backend, silent, tmp_path_factory):
    found = planned(template=TEMPLATE, only="march=znver4")
    assert CONTEXT not in found.bases
    by_cuda = {item.cell.cuda: item for item in found.items if getattr(item, "identity", None)}
    assert by_cuda["12.4"].identity.components[TRIM] == VERSION
    assert by_cuda["12.4"].trims
    assert TRIM not in by_cuda[None].identity.components
    logs = tmp_path_factory.mktemp("logs")
    results = build(found, backend, backend, jobs=1, logs=logs, reporter=silent, layers=Layers())
    assert {result.status for result in results} == {"built"}
    orders = {call[2].reference: call[2] for call in backend.calls if call[0] == "make"}
    assert CONTEXT in orders[by_cuda["12.4"].reference].sources.contexts
    assert CONTEXT not in orders[by_cuda[None].reference].sources.contexts


def test_an_image_without_an_identity_is_not_known_to_trim(planned, backend):
    backend.missing.add("debian:trixie")
    with pytest.raises(UsageError):
        planned(template=TEMPLATE)
