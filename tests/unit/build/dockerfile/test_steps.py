"""What the instructions of a Dockerfile build."""

from dataclasses import replace

import pytest

from imagematrix.build.dockerfile.steps import Recipe, list_build_steps


def steps(dockerfile):
    return list_build_steps(Recipe(dockerfile=dockerfile, platform="linux/amd64"))


def shared(one, other):
    """Which instructions of the first Dockerfile build the same as one of the second, without FROM."""
    others = {step.digest for step in steps(other)}
    return [step.digest in others for step in steps(one) if step.command != "from"]


def test_what_an_instruction_builds_depends_on_all_before_it():
    dockerfile = "FROM a\nENV A=1\nRUN 1 \\\n  2\nWORKDIR /w\nRUN <<E\n3\nE\nLABEL a=b\n"
    assert [step.command for step in steps(dockerfile)] == ["from", "run", "workdir", "run"]
    assert shared(dockerfile, dockerfile) == [True, True, True]
    assert shared(dockerfile, dockerfile.replace("a=b", "a=c")) == [True, True, True]
    assert shared(dockerfile, dockerfile.replace("3", "4")) == [True, True, False]
    assert shared(dockerfile, dockerfile.replace("2", "4")) == [False, False, False]
    assert shared(dockerfile, dockerfile.replace("A=1", "A=2")) == [False, False, False]
    assert shared(dockerfile, dockerfile.replace("FROM a", "FROM b")) == [False, False, False]


def test_an_instruction_knows_what_it_is_built_on():
    dockerfile = "FROM a\nENV A=1\nRUN 1 \\\n  2\nWORKDIR /w\nRUN <<E\n3\nE\nLABEL a=b\n"
    base, run, folder, last = steps(dockerfile)
    assert base.digest == "a"
    assert [step.below for step in (base, run, folder)] == [(), ("a",), (run.digest,)]
    assert [step.needs for step in (base, run, folder)] == [set(), {"a"}, {"a", run.digest}]
    assert dockerfile[base.start : base.end] == "FROM a\n"
    assert dockerfile[: run.end].endswith("  2\n")
    assert dockerfile[: folder.end].endswith("WORKDIR /w\n")
    assert dockerfile[: last.end].endswith("\nE\n")
    assert [step.digest for step in steps("FROM a\nENV A=1\n")] == ["a"]
    assert [step.below for step in steps("FROM scratch\nCOPY a /\n")] == [()]


def test_what_an_instruction_builds_depends_on_its_sources():
    dockerfile = "FROM a AS One\nRUN 1\nFROM b\nRUN 2\nCOPY --from=one /x /x\nCOPY --from=0 /y /y\n"
    assert shared(dockerfile, dockerfile.replace("RUN 2", "RUN 3")) == [True, False, False, False]
    assert shared(dockerfile, dockerfile.replace("RUN 1", "RUN 3")) == [False, True, False, False]
    for text in (dockerfile, dockerfile.replace("COPY --from=one /x /x\n", "")):
        one, last = steps(text)[1], steps(text)[-1]
        assert one.digest in last.needs
        assert steps(text)[3].below == ("b",), "a copy is not on top of its source"
    mounted = "FROM a AS one\nRUN 1\nFROM b\nRUN --mount=from=one,target=/o 2\n"
    assert shared(mounted, mounted.replace("RUN 1", "RUN 3")) == [False, False]


def test_a_stage_begins_with_what_another_has_built():
    dockerfile = "FROM a AS body\nRUN 1\n\nFROM body\nRUN 2\n"
    assert shared(dockerfile, "FROM a AS trunk\nRUN 1\nFROM trunk AS rest\nRUN 3\n") == [True, False]
    assert shared(dockerfile, dockerfile.replace("RUN 2", "RUN 3")) == [True, False]
    assert shared(dockerfile, dockerfile.replace("RUN 1", "RUN 3")) == [False, False]


def test_stages_that_the_last_one_does_not_need_are_not_built():
    dockerfile = "FROM a AS unused\nRUN 1\nFROM b AS used\nRUN 2\nFROM c\nCOPY --from=used / /\n"
    assert [dockerfile[step.start : step.end].strip() for step in steps(dockerfile)] == [
        *("FROM b AS used", "RUN 2", "FROM c", "COPY --from=used / /")
    ]


def test_comments_build_nothing():
    dockerfile = "FROM a\nRUN 1\n# for znver4\n\nRUN 2\n"
    assert shared(dockerfile, dockerfile.replace("znver4", "x86-64-v3")) == [True, True]
    assert shared(dockerfile, dockerfile.replace("# for znver4\n", "")) == [True, True]


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({}, [True] * 6),
        ({"platform": "linux/arm64"}, [False] * 6),
        ({"context": "/other"}, [True, False, False, True, True, True]),
        ({"arguments": "B=2"}, [True, True, False, True, True, True]),
        ({"images": {"extra": "sha256:2"}}, [True, True, True, True, False, False]),
        ({"images": {"b": "sha256:2"}}, [True, True, True, False, True, False]),
    ],
)
def test_what_an_instruction_builds_depends_on_what_it_reads(other, same):
    text = (
        "FROM a AS one\nRUN 1\nCOPY x /x\nARG B\nRUN 2\n"
        "FROM b\nRUN 3\nCOPY --from=extra --link /e /e\nCOPY --from=one /x /x\n"
    )
    recipe = Recipe(dockerfile=text, platform="linux/amd64")
    others = {step.digest for step in list_build_steps(replace(recipe, **other))}
    own = [step for step in list_build_steps(recipe) if step.command != "from"][:6]
    assert [step.digest in others for step in own] == same


@pytest.mark.parametrize(
    ("instruction", "independent"),
    [
        ("COPY --link --from=one /x /x", True),
        ("copy --from=one --link=true /x /x", True),
        ("COPY --link \\\n  --chown=0:0 x y /z/", True),
        ("ADD --link --chown=7 x /y", True),
        ("COPY --from=one /x /x", False),
        ("COPY --link=false x /x", False),
        ("COPY --link x y", False),  # below WORKDIR
        ("COPY --link $X /x", False),
        ("COPY --link --chown=user x /x", False),
        ("COPY x --link /x", False),
        ("RUN --link x /x", False),
    ],
)
def test_what_a_linked_copy_makes_is_the_same_on_any_image(instruction, independent):
    def text(base):
        return f"FROM c AS one\nRUN 1\nFROM {base}\n{instruction}\n"

    both = {step.digest: step for step in steps(text("a"))}.keys() & {
        step.digest for step in steps(text("b"))
    }
    links = [step for step in steps(text("a")) if step.command == "link"]
    assert [step.digest in both for step in links] == [True] * independent
    last = steps(text("a"))[-1]
    assert last.digest not in both
    assert last.below == ("a", *(step.digest for step in links))
