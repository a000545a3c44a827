"""What several images share is built before them."""

from imagematrix.builder.sharing import beginnings

STAGES = """\
FROM debian AS compiler
RUN apt-get install g++
WORKDIR /src
FROM compiler AS program
COPY main.cpp .
RUN g++ {march}
FROM debian
COPY --from=program /src/a.out /a.out
RUN echo {which} > /which
"""


def texts(*cells, template=STAGES):
    """What comes before each cell: the last lines of the texts."""
    dockerfiles = {cell: template.format(march=cell[0], which=cell[1]) for cell in cells}
    found = beginnings(dockerfiles)
    assert list(found) == list(cells)
    return {cell: [one.dockerfile.splitlines()[-1] for one in own] for cell, own in found.items()}


def test_a_step_that_more_images_share_than_those_on_it_comes_first():
    both = ["COPY main.cpp ."]
    assert texts("a1", "a2", "b1", "b2") == {"a1": both, "a2": both, "b1": both, "b2": both}
    assert texts("a1", "a2", "b1") == {"a1": both, "a2": both, "b1": []}, "b1 has a program of its own"


def test_nothing_comes_first_that_only_such_steps_build_on_that_are_not_shared():
    assert texts("a1", "b1", "c1") == {"a1": [], "b1": [], "c1": []}
    assert texts("a1") == {"a1": []}
    assert texts("a1", "a2") == {"a1": [], "a2": []}, "all or none of them have the program"


def test_a_beginning_needs_others():
    template = STAGES.replace("FROM debian\n", "FROM program AS tested\nRUN test {which}\nFROM debian\n")
    template = template.replace("COPY --from=program /src/a.out /a.out\n", "")
    template += "COPY --from=tested /log /log\nLABEL number={{}}\n"
    cells = [march + which + number for march in "ab" for which in "12" for number in "xy"]
    dockerfiles = {
        cell: template.format(march=cell[0], which=cell[1]).replace("{}", cell[2]) for cell in cells
    }
    for cell, (source, program) in beginnings(dockerfiles).items():
        assert source.dockerfile.endswith("COPY main.cpp .\n")
        assert program.dockerfile.endswith(f"RUN g++ {cell[0]}\n")
        assert (source.needs, program.needs) == (frozenset(), {source.name})


def test_a_stage_that_comes_twice_is_built_once():
    twice = STAGES.replace("FROM debian\nCOPY", "FROM compiler AS other\nCOPY main.cpp .\nFROM debian\nCOPY")
    assert texts("a1", "a2", "b1", "b2", template=twice)["a1"] == ["COPY main.cpp ."]
