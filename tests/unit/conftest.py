"""What the unit tests share: a small matrix that is good, to be spoilt by each test in its own way."""

import textwrap

import pytest

GOOD = """\
schema: imagematrix.matrix/v1
images:
  training:
    version: v1
    template: training.j2
    context: .
axes:
  cuda: [none, "11.8", "12.4"]
  compute: ["7.0", "8.9"]
  driver: [535.261.03, 550.163.01]
  march: [x86-64-v3, znver4]
properties:
  cuda:
    none: {base: "debian:trixie", compiler: gcc-14}
    "11.8": {base: "debian:bookworm", compiler: gcc-12}
    "12.4": {base: "debian:trixie", compiler: gcc-14}
exclude:
  - {cuda: "11.8", driver: 550.163.01, why: they have the newer toolkit}
"""
TEMPLATE = """\
FROM {{ base }} AS compiler
RUN apt-get install g++
FROM compiler AS program
RUN cc {{ march_option }} main.c{% if cuda %} -DSM={{ sm }}{% endif %}

FROM {{ base }}
COPY --from=program /a.out /
"""


@pytest.fixture
def project(tmp_path):
    """A folder with the good matrix and its template; call it with (old, new) pairs to write a spoilt one."""
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "training.j2").write_text(TEMPLATE)
    path = tmp_path / "matrix.yaml"
    path.write_text(GOOD)

    def spoil(*changes, text=None, template=None):
        content = GOOD if text is None else textwrap.dedent(text)
        for old, new in changes:
            assert old in content
            content = content.replace(old, new)
        path.write_text(content)
        if template is not None:
            (tmp_path / "templates" / "training.j2").write_text(textwrap.dedent(template))
        return path

    return spoil
