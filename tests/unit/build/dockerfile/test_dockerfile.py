"""The base images of a Dockerfile, parsed as BuildKit does."""

import textwrap

import pytest

from imagematrix.build.dockerfile.dockerfile import (
    find_frontend,
    find_last_base,
    find_missing_sources,
    list_bases,
    replace_images,
    require_known_inputs,
    split_stages,
    truncate_after_stage,
    with_environment,
)
from imagematrix.build.dockerfile.instructions import DockerfileError
from imagematrix.errors import UsageError

SUM = "sha256:" + "a" * 64
HASH = "b" * 40


@pytest.mark.parametrize(
    ("dockerfile", "expected"),
    [
        ("FROM debian:trixie\n", ("debian:trixie",)),
        ("from debian as a\nFROM a AS b\nFROM A\n", ("debian",)),
        ("FROM debian AS one\nFROM one\nFROM debian\nFROM other\n", ("debian", "other")),
        ("FROM --platform=$BUILDPLATFORM golang@sha256:12 AS a\nFROM scratch\n", ("golang@sha256:12",)),
        ("FROM scratch\n", ()),
        ("# FROM a\n\n   FROM b   \n", ("b",)),
        ("FROM \\\n  # a comment between\n\n  debian \\\n AS x\n", ("debian",)),
        ("FROM a\\", ("a",)),
        ("FROM a\r\nFROM b\r\n", ("a", "b")),
        ("FROM a\nCOPY --link --from=tool:1 --chmod=755 /x /\n", ("a", "tool:1")),
        ("FROM a AS x\nFROM b\nCOPY --from=x /x /\nCOPY --from=0 /y /\n", ("a", "b")),
        ("FROM a\nRUN --mount=type=cache,target=/c --mount=type=bind,from=b,target=/b make\n", ("a", "b")),
        ("FROM a\nRUN --mount=from=b,target=/b make\n", ("a", "b")),
        ("FROM a\nRUN --mount=type=bind,source=from=x,target=/b make\n", ("a",)),
        ("# syntax=docker/dockerfile:1\nFROM a\n", ("docker/dockerfile:1", "a")),
        ("#escape=\\\n# check = skip=all\n#\tSyntax = x:1  \nFROM x:1\n", ("x:1",)),
        ('FROM a\nCOPY --from="b" /x /\nRUN "--mount=from=c" --mount=\'type=bind,from=d\' x\n', ("a", "b")),
        ("FROM a\nRUN --mount='type=bind,from=d' x\n", ("a", "d")),
        ('FROM a\nRUN --mount=type=bind,"from=b",target=/b make\n', ("a", "b")),
        ("FROM a\nRUN --mount=from=0,target=/b make\n", ("a", "0")),
        ("FR\\\nOM a\n", ("a",)),
        ('FROM a\nRUN ["cat", "<<EOF"]\nFROM b\n', ("a", "b")),
        ("FROM a\nONBUILD RUN <<EOF\nFROM b\nEOF\nFROM c\n", ("a", "c")),
        ('FROM a\nRUN echo it\\\'s <<E"O"F ${X:-y}\nFROM b\nEOF\nFROM c\n', ("a", "c")),
        ("FROM a\nRUN echo 'it <<EOF\nFROM b\n", ("a", "b")),
        ("FROM a\nCOPY --link --from=b -- --from=c /\n", ("a", "b")),
        ("FROM a\n\u00a0FROM b\n", ("a", "b")),
        ("FROM a\nRUN [ -e <<EOF ]\nFROM b\nEOF\n", ("a",)),
        # Not heredocs.
        ("FROM a\n# syntax=b\n", ("a",)),
        ("# a comment\n# syntax=b\nFROM a\n", ("a",)),
        ("FROM a\nRUN echo COPY --from=b\nRUN tool --from=b --mount=from=c\nCOPY x --from=d\n", ("a",)),
        ("FROM a\nENV FROM=b\nLABEL x='FROM c'\n", ("a",)),
    ],
)
def test_bases_are_read(dockerfile, expected):
    assert list_bases(dockerfile) == expected
    assert list_bases(dockerfile.replace("\n", "\n\n")) == expected  # empty lines do not end an instruction


@pytest.mark.parametrize(
    "heredoc",
    [
        "RUN <<EOF\nFROM inside\nEOF",
        "RUN <<'EOF' sh\nFROM inside\nEOF",
        'RUN 3<<"EOF" sh\nFROM inside\nEOF',
        "RUN <<EOF\nFROM inside\n  EOF\nFROM inside\nEOF",
        "RUN <<-EOF\nFROM inside\n\tEOF",
        "RUN <<EOF\n\nFROM inside\n\nFROM inside\nEOF\n\nRUN <<EOF\n\nFROM inside\nEOF\n",
        "RUN <<EOF\nFROM inside\nEOF\r",
        "COPY <<one <<two /\nFROM inside\ntwo\none\nFROM inside\ntwo",
        "RUN cat \\\n  <<END-OF-FILE\nFROM inside\nEOF\nEND-OF-FILE",
        # Not heredocs.
        "RUN cat <<<here",
        "RUN echo $((1<<N)) $(( 1 << N ))",
        'RUN echo " <<EOF "',
        "RUN echo ' <<EOF '",
        'RUN echo \\" <<EOF\nEOF',
        "ENV x=<<EOF",
    ],
)
def test_heredoc_content_is_not_an_instruction(heredoc):
    assert list_bases(f"FROM before\n{heredoc}\nFROM after\n") == ("before", "after")


@pytest.mark.parametrize("line", ["FROM $BASE", "FROM debian:${TAG} AS x"])
def test_base_from_a_variable_is_rejected(line):
    with pytest.raises(DockerfileError, match=r"no value is known for the variable in FROM ") as caught:
        list_bases(f"FROM debian\n{line}\n")
    assert "before the first FROM, such as ARG BASE=debian:trixie" in caught.value.remedy


@pytest.mark.parametrize("line", ["COPY --from=$STAGE /x /", "RUN --mount=from=$STAGE,target=/x true"])
def test_source_from_a_variable_is_rejected(line):
    with pytest.raises(DockerfileError, match=r"takes its source from a variable, .*: \$STAGE") as caught:
        list_bases(f"ARG STAGE=x\nFROM debian\n{line}\n")
    assert caught.value.remedy == "begin a stage with FROM IMAGE AS NAME, and name the stage"


@pytest.mark.parametrize(
    "line",
    [
        "ADD https://example.com/a.tar /",
        "add --chmod=755 http://example.com/a \\\n  /a",
        'ADD ["https://example.com/a", "/"]',
        'ADD a "https://example.com/b" /',
        "ADD ht\\tps://example.com/a /",
        "ADD https://example.com/a.git /",
        "ADD https://example.com/a.git#main /",
        f"ADD https://example.com/a#{HASH} /",
        f"ADD https://example.com/a.git#{HASH[:12]} /",
        "ADD git://example.com/a#v1 /",
        "ADD ssh://git@example.com/a /",
        "ADD git@example.com:a.git /",
        "ADD me@$HOST:a.git /",
        "ADD me@$HOST /",
        "ADD $URL /",
        "ADD https$REST /",
        "ADD https://$HOST/a /",
        f"ADD https://example.com/a.git#{HASH}:$DIR /",
        "ADD --checksum= https://example.com/a /",
        "ADD --checksum=$SUM https://example.com/a /",
        "ADD --checksum=sha256:12 https://example.com/a /",
        "ADD <<EOF https://example.com/a /\nEOF",
    ],
)
def test_remote_file_whose_content_may_change_is_rejected(line):
    """It would change the image, but neither its identity nor its tag."""
    expected = r"line 2: the content of .* may change, but not the identity of the image"
    with pytest.raises(DockerfileError, match=expected) as caught:
        list_bases(f"FROM debian\n{line}\nFROM other\n")
    assert "--checksum=sha256:DIGEST" in caught.value.remedy or "add #COMMIT to it" in caught.value.remedy


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        (
            "https://example.com/a.tar",
            "`curl -fsSL https://example.com/a.tar | sha256sum`",
        ),
        (
            "https://example.com/a.tar?b=1&c=2",
            "`curl -fsSL 'https://example.com/a.tar?b=1&c=2' | sha256sum`",
        ),
        (
            "https://example.com/a.git#main",
            "add #COMMIT to it, such as the commit that `git ls-remote https://example.com/a.git` prints",
        ),
        ("$URL", "write the address without variables of the build, and add --checksum=sha256:DIGEST"),
    ],
)
def test_remedy_for_a_remote_file_is_a_command(source, remedy):
    with pytest.raises(DockerfileError) as caught:
        list_bases(f"FROM debian\nADD {source} /\n")
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    "line",
    [
        f"ADD --checksum={SUM} https://example.com/a /",
        f"ADD --link --checksum={SUM} https://example.com/$NAME /",
        f"ADD --checksum={HASH} https://example.com/a.git /",
        f"ADD https://example.com/a.git#{HASH} /",
        f"ADD https://example.com/a.git#{HASH}:dir /",
        f"ADD git@example.com:a#{HASH} /",
        "ADD a.tar b@1.tar data$X httpd.conf /",
        "ADD a https://example.com/",
        "ADD <<EOF /a\nhttps://example.com/a\nEOF",
        "COPY https:/a /",
        "RUN curl https://example.com/a",
        "ADD",
    ],
)
def test_files_of_the_context_and_fixed_remote_files_are_accepted(line):
    assert list_bases(f"FROM debian\n{line}\nFROM other\n") == ("debian", "other")


@pytest.mark.parametrize(
    ("trigger", "source"),
    [
        ("COPY --from=tool:1 /x /", "tool:1"),
        ("copy --link --from=0 \\\n /x /", "0"),
        ("RUN --mount=type=bind,from=tool:1,target=/x make", "tool:1"),
        ("ADD https://example.com/a /", "https://example.com/a"),
    ],
)
def test_triggers_that_bring_inputs_from_elsewhere_are_rejected(trigger, source):
    """Newer releases of BuildKit carry them out in every build on the image."""
    with pytest.raises(UsageError, match=f"ONBUILD brings {source} into later builds") as caught:
        list_bases(f"FROM debian\nONBUILD {trigger}\n")
    assert "into the templates that build on this image" in caught.value.remedy
    with pytest.raises(UsageError, match=f"the base image b:1 brings {source} into every build, by ONBUILD"):
        require_known_inputs(["RUN true", trigger], "b:1")


@pytest.mark.parametrize(
    "trigger",
    [
        "RUN make",
        "COPY . /src",
        "ADD a /",
        "ENV a=--from=b",
        "RUN --mount=type=cache,target=/c make",
        "COPY",
        "",
    ],
)
def test_other_triggers_are_accepted(trigger):
    """Their inputs are in the base and in the context."""
    assert list_bases(f"FROM debian\nONBUILD {trigger}\n") == ("debian",)
    require_known_inputs([trigger], "b:1")


def test_dockerfile_is_cut_after_a_stage():
    dockerfile = textwrap.dedent(
        """\
        FROM debian AS Compiler
        RUN <<EOF
        FROM nothing
        EOF

        # The next one.
        FROM compiler AS program
        RUN make
        """
    )
    assert truncate_after_stage(dockerfile, "compiler") == dockerfile[: dockerfile.index("FROM compiler AS")]
    assert truncate_after_stage(dockerfile, "program") == dockerfile
    assert truncate_after_stage(dockerfile, "other") is None
    assert truncate_after_stage("FROM debian\n", "compiler") is None


@pytest.mark.parametrize(
    ("dockerfile", "expected"),
    [
        ("FROM debian:trixie\n", "debian:trixie"),
        ("FROM a AS one\nRUN x\nFROM b AS two\nFROM One\nCOPY --from=two /x /\n", "a"),
        ("FROM a AS b\nFROM c\nFROM b\nFROM scratch\n", None),
        ("FROM scratch AS empty\nFROM empty\n", None),
        ("FROM a AS a\nFROM a AS b\nFROM b\n", "a"),
        ("", None),
    ],
)
def test_base_of_the_last_stage_is_read(dockerfile, expected):
    assert find_last_base(dockerfile) == expected


@pytest.mark.parametrize(
    ("dockerfile", "expected"),
    [
        ("FROM a:1 AS x\nFROM x\nFROM a:1\n", "FROM A AS x\nFROM x\nFROM A\n"),
        (
            "from  --platform=linux/arm64 \\\n  a:1 AS a:1\nFROM a:1",
            "from  --platform=linux/arm64 \\\n  A AS a:1\nFROM a:1",
        ),
        ("FROM b\nCOPY --link --from=a:1 a:1 /a:1\n", "FROM B\nCOPY --link --from=A a:1 /a:1\n"),
        (
            "FROM c\nRUN --mount=from=a:1,target=/a --mount=type=bind,from=b,target=/b echo a:1 b\n",
            "FROM c\nRUN --mount=from=A,target=/a --mount=type=bind,from=B,target=/b echo a:1 b\n",
        ),
        ("# FROM a:1\nFROM a:12\nRUN <<E\nFROM a:1\nE\n", "# FROM a:1\nFROM a:12\nRUN <<E\nFROM a:1\nE\n"),
        ("# syntax=a:1\n# FROM a:1\nFROM b\n", "# syntax=A\n# FROM a:1\nFROM B\n"),
        ("FROM scratch\n", "FROM scratch\n"),
    ],
)
def test_images_are_replaced(dockerfile, expected):
    assert replace_images(dockerfile, {"a:1": "A", "b": "B"}) == expected
    assert replace_images(dockerfile, {}) == dockerfile


def test_stages_include_the_stages_they_build_on():
    dockerfile = "FROM a AS One\nRUN 1\n\nFROM one AS two\nRUN 2\n\nFROM b\nRUN 3\n\nFROM two\nRUN 4\n"
    one, two, third = split_stages(dockerfile)
    assert one == "FROM a AS One\nRUN 1\n\n"
    assert two == f"{one}FROM one AS two\nRUN 2\n\n"
    assert third == "FROM b\nRUN 3\n\n", "the last stage is the image itself"
    assert split_stages(dockerfile.replace("RUN 4", "RUN 5")) == (one, two, third)
    other = split_stages(dockerfile.replace("RUN 1", "RUN 0"))
    assert [own == theirs for own, theirs in zip(other, split_stages(dockerfile), strict=True)] == [
        False,
        False,
        True,
    ]
    assert split_stages("FROM a\nRUN 1\n") == ()


@pytest.mark.parametrize(
    "dockerfile",
    [
        "# escape=`\nFROM a\nCOPY `\n --from=b /x /\n",
        "#!/bin/x\n# escape=`\nFROM a\n",
        "// syntax=x\nFROM a\n",
        '{"syntax": "x"}',
        "FROM a\nINCLUDE b\n",
        "\ufeffFROM a\n",
        'FROM a\nCOPY --fr"om=b" /x /\n',
        "FROM a\nCOPY --fr\\om=b /x /\n",
        "FROM a\nCOPY --from=b\\c /bc /\n",
        "FROM a\nCOPY --from=to\\\nol tool /\n",
        'FROM "a"\n',
        "FROM a\nCOPY --from=b /x /\nFROM c AS b\n",
        "FROM a AS b\nRUN --mount=from=c,target=/c true\nFROM a AS c\n",
        "FROM a b\n",
        "FROM\n",
        "FROM a\nRUN echo \\\\\nFROM b\n",
        "FROM a\nRUN echo ${x[@]} <<EOF\nFROM b\nEOF\n",
        "FROM a\nRUN echo \"${X:-' <<EOF '}\"  <<EOF\nFROM b\nEOF\n",
        'FROM a\nRUN ["sh"] <<EOF\nFROM b\nEOF\n',
    ],
)
def test_ambiguous_syntax_is_rejected(dockerfile):
    with pytest.raises(UsageError) as caught:
        list_bases(dockerfile)
    assert caught.value.remedy


def test_source_before_its_stage_is_named():
    with pytest.raises(UsageError, match="the Dockerfile has b as a source before its stage") as caught:
        list_bases("FROM a\nCOPY --from=b /x /\nFROM c AS b\n")
    assert caught.value.remedy == "put its stage first"


def test_two_stages_of_one_name_are_rejected():
    """BuildKit builds the last one."""
    text = "FROM a AS tool\nFROM b AS Tool\nFROM c\nCOPY --from=tool /x /\n"
    with pytest.raises(UsageError, match="the Dockerfile has a second stage tool") as caught:
        list_bases(text)
    assert caught.value.remedy == "give each stage a name of its own"


def test_shebang_may_precede_the_syntax_directive():
    assert list_bases("#!/usr/bin/env docker\n# syntax=x:1\nFROM a\n") == ("x:1", "a")
    assert list_bases("#!/usr/bin/env docker") == ()


def test_quoted_names_are_replaced():
    dockerfile = 'FROM a\nCOPY --from="b" from=b /\nRUN --mount=source=from=b,"from=b" true\n'
    expected = dockerfile.replace('="b"', '="B"').replace('"from=b"', '"from=B"')
    assert replace_images(dockerfile, {"b": "B"}) == expected


@pytest.mark.parametrize(
    ("instruction", "reads"),
    [
        ("COPY a b /", True),
        ("copy --chmod=755 a \\\n  /", True),
        ('COPY ["a", "/"]', True),
        ("COPY <<EOF a /\nCOPY x /\nEOF", True),
        ("ADD a.tar /", True),
        ("RUN --mount=type=bind,target=/src make", True),
        ("RUN --mount=target=/src make", True),
        ("RUN --mount=type=cache,target=/c --mount=src=a,dst=/b make", True),
        ("COPY --from=0 a /", False),
        ("COPY --from=debian:trixie a /", False),
        ("COPY <<EOF /a\nCOPY x /\nEOF", False),
        (f"ADD --checksum={SUM} https://example.com/a /", False),
        (f"ADD git@example.com:a.git#{HASH} /a", False),
        (f"ADD --checksum={SUM} $URL /", False),
        ("RUN --mount=type=cache,target=/c make", False),
        ("RUN --mount=from=debian:trixie,target=/c make", False),
        ("RUN cp a b", False),
        ("# COPY a b", False),
        ("ONBUILD COPY a b", False),
        ("COPY", False),
    ],
)
def test_instructions_that_read_the_context_are_found(instruction, reads):
    text = f"FROM debian:trixie\nRUN true\n{instruction}\nRUN true\n"
    found = find_missing_sources(text, lambda path: (f"no {path}", "none"))
    assert bool(found) is reads
    assert {fault.locate(text).line for fault in found} <= {3, 4}


@pytest.mark.parametrize(
    ("instruction", "paths"),
    [
        ("COPY main.c lib/ /src/", ["main.c", "lib/"]),
        ('COPY ["a b.c", "d.c", "/"]', ["a b.c", "d.c"]),
        ("COPY --chown=1:1 --link a.c /a.c", ["a.c"]),
        ("COPY <<EOF b.c /\nCOPY x /\nEOF", ["b.c"]),
        (f"ADD --checksum={SUM} https://example.com/a b.tar /", ["b.tar"]),
        ("RUN --mount=type=bind,source=src,target=/src make", ["src"]),
        ("RUN --mount=type=bind,target=/src make", ["."]),
    ],
)
def test_missing_paths_are_found_where_they_are_written(instruction, paths):
    text = f"FROM debian:trixie\n\n{instruction}\n"
    found = find_missing_sources(text, lambda path: (path, "none"))
    assert [fault.message for fault in found] == paths
    begin = text.index(instruction)
    for fault in found:
        place = text.find(fault.message, begin + len("COPY ")) if fault.message != "." else begin
        assert fault.at == place


def test_missing_paths_count_in_stages_that_are_built():
    text = textwrap.dedent(
        """\
        FROM a AS unused
        COPY one /
        FROM a AS Compiler
        COPY two /
        FROM a AS tool
        COPY three /
        FROM a
        COPY four /
        FROM a AS body
        RUN --mount=from=0,target=/x true
        COPY --from=tool /x /
        COPY --from=3 /x /
        FROM body
        COPY five /
        """
    )
    named = [fault.message for fault in find_missing_sources(text, lambda path: (path, ""))]
    assert named == ["three", "four", "five"]
    named = [
        fault.message for fault in find_missing_sources(text, lambda path: (path, ""), ["compiler", "none"])
    ]
    assert named == ["two", "three", "four", "five"]
    assert find_missing_sources(text, lambda path: None if path != "one" else (path, "")) == []


def test_all_faults_are_reported_at_once_with_their_places():
    text = textwrap.dedent(
        """\
        # syntax=docker/dockerfile:1
        FROM debian AS program
        COPYY a /
        ADD https://example.com/a /
        RUN <<EOF
        FROM inside
        EOF

        ADD <<EOF https://example.com/b /
        NOTHING
        EOF
        FROM $BASE
        COPY --from=progam /a \\
          /b
        COPY --from=late /a /
        FROM debian AS late
        """
    )
    with pytest.raises(DockerfileError) as caught:
        list_bases(text)
    found = [(mark.line, mark.column) for mark in (fault.locate(text) for fault in caught.value.faults)]
    assert found == [(3, 1), (4, 5), (9, 11), (12, 6), (13, 13), (15, 13)]
    assert str(caught.value).splitlines()[-2] == "line 13: no stage is called progam"


@pytest.mark.parametrize(
    "rest",
    [
        "RUN echo \\\\\nFROMM b\n",
        'RUN ["sh"] <<EOF\nFROMM b\nEOF\n',
    ],
)
def test_nothing_is_said_of_what_follows_an_unclear_end(rest):
    with pytest.raises(DockerfileError) as caught:
        list_bases(f"FROMM a\n{rest}")
    assert [fault.at for fault in caught.value.faults] == [0, 8]


@pytest.mark.parametrize(
    "line", ["COPY --from=progam /x /", "FROM progam", "RUN --mount=from=Progam,target=/x x"]
)
def test_misspelt_stage_is_rejected_with_the_nearest(line):
    with pytest.raises(DockerfileError, match=r"no stage is called [pP]rogam") as caught:
        list_bases(f"FROM debian AS program\n{line}\n")
    assert "did you mean 'program'? An image of this name is written " in caught.value.remedy


@pytest.mark.parametrize(
    "dockerfile",
    [
        "FROM node AS nodes\nFROM node AS other\nCOPY --from=node /x /\n",
        "FROM debian AS program\nCOPY --from=progam:latest /x /\n",
        "FROM debian AS program\nCOPY --from=library/program /x /\n",
        "FROM debian AS program\nCOPY --from=golang /x /\n",
        "FROM python\nFROM debian AS pythons\n",
    ],
)
def test_images_are_no_misspelt_stages(dockerfile):
    assert list_bases(dockerfile)


def test_misspelt_instruction_is_suggested():
    with pytest.raises(DockerfileError, match="'COYP', which is not an instruction") as caught:
        list_bases("FROM a\nCOYP a b\n")
    assert caught.value.remedy == "did you mean 'COPY'?"


def test_frontend_is_no_base():
    assert find_frontend("#!/bin/x\n# syntax=x:1\nFROM a\n") == "x:1"
    assert find_frontend("FROM a\n# syntax=x:1\n") is None


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n# a comment\n\n", "\r\n# a comment\r\n"])
def test_variables_are_not_set_after_an_instruction_that_goes_on(end):
    with pytest.raises(DockerfileError, match="a last instruction that goes on"):
        with_environment(f"FROM a\nRUN x \\{end}", {"A": "b"})
    assert with_environment(f"FROM a\nRUN x{end}", {"A": "b"}).endswith("\n\nENV A=b\n")
