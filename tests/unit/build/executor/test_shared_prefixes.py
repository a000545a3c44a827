"""What several images share is built before them."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from imagematrix.build.dockerfile.steps import Recipe, list_build_steps
from imagematrix.build.executor.shared_prefixes import find_shared_prefixes

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


def recipes(dockerfiles):
    return {key: Recipe(dockerfile=text, platform="linux/amd64") for key, text in dockerfiles.items()}


def before(dockerfiles, parallelism=1):
    return find_shared_prefixes(recipes(dockerfiles), {}, parallelism=parallelism)


def texts(*cells, template=STAGES):
    """What comes before each cell: the last lines of the texts."""
    dockerfiles = {cell: template.format(march=cell[0], which=cell[1]) for cell in cells}
    found = before(dockerfiles)
    assert list(found) == list(cells)
    return {cell: [one.dockerfile.splitlines()[-1] for one in own] for cell, own in found.items()}


def test_a_step_on_which_images_differ_comes_first():
    both = ["COPY main.cpp ."]
    assert texts("a1", "a2", "b1", "b2") == {"a1": both, "a2": both, "b1": both, "b2": both}
    assert texts("a1", "a2", "b1") == {"a1": both, "a2": both, "b1": both}, "b1 builds on it as well"


def test_nothing_comes_first_if_nothing_above_it_is_shared():
    assert texts("a1", "b1", "c1") == {"a1": [], "b1": [], "c1": []}
    assert texts("a1") == {"a1": []}
    assert texts("a1", "a2") == {"a1": [], "a2": []}, "all or none of them have the program"


def test_a_base_comes_first_if_not_all_build_the_same_on_it():
    template = STAGES.replace("FROM debian AS compiler\n", "FROM {march} AS compiler\n")
    template = template.replace("FROM debian\n", "FROM debian\nRUN upgrade\n")
    compilers = [f"FROM debian AS compiler\nRUN apt-get install {name}\n" for name in "xy"]
    dockerfiles = {
        f"{name}{which}": f"{text}FROM scratch\nCOPY --from=compiler / /\nRUN {which}\n"
        for name, text in zip("xy", compilers, strict=True)
        for which in "12"
    }
    for own in before(dockerfiles).values():
        assert [(one.name, one.dockerfile) for one in own] == [("debian", "FROM debian AS compiler\n")]
    assert texts("a1", "a2", "b1", "b2", template=template)["a1"] == []


def test_a_beginning_needs_others():
    template = STAGES.replace("FROM debian\n", "FROM program AS tested\nRUN test {which}\nFROM debian\n")
    template = template.replace("COPY --from=program /src/a.out /a.out\n", "")
    template = template.replace("RUN echo {which} > /which\n", "")
    template += "COPY --from=tested /log /log\nLABEL number={{}}\n"
    cells = [march + which + number for march in "ab" for which in "12" for number in "xy"]
    dockerfiles = {
        cell: template.format(march=cell[0], which=cell[1]).replace("{}", cell[2]) for cell in cells
    }
    for cell, own in before(dockerfiles).items():
        source, program = own
        assert source.dockerfile.endswith("COPY main.cpp .\n")
        assert program.dockerfile.endswith(f"RUN g++ {cell[0]}\n")
        assert (source.needs, program.needs) == (frozenset(), {source.name})


def test_what_would_wait_for_others_is_begun_at_once():
    driver = "FROM debian AS driver\nRUN download {which}\nRUN unpack\nFROM debian\nCOPY --from=driver / /\n"
    template = STAGES.replace("FROM debian\n", driver)
    assert texts("a1", "a2", "b1", "b2", template=template)["a1"] == [
        *("FROM debian AS compiler", "COPY main.cpp .", "RUN unpack")
    ]
    assert texts("a1", "a2", template=template)["a1"] == []
    alone = texts("a1", "a2", "b3", "b4", template=template)["a1"]
    assert alone == ["COPY main.cpp ."], "no other image has these drivers"


def test_what_is_copied_onto_several_bases_comes_first():
    template = (
        "FROM debian AS wheels\nRUN download\nFROM {base} AS body\nENV A=b\n"
        "COPY --link --from=wheels /w /w\nRUN ldconfig\nFROM body\nRUN {which}\n"
    )
    cells = {f"{base}{which}": template.format(base=base, which=which) for base in "ab" for which in "12"}
    for own in before(cells).values():
        (linked,) = [one.dockerfile for one in own if one.dockerfile.endswith(" /w\n")]
        assert linked.endswith("RUN download\nFROM scratch\nCOPY --link --from=wheels /w /w\n")


LARGE = """\
FROM debian AS wheels
RUN download
FROM debian AS other
RUN compile
RUN trim {cell}
FROM debian
COPY --link --from=wheels /wheels/ /
ENV A=b
COPY --from=other /a /a
RUN {cell}
"""


def large(*cells, parallelism):
    """What is exported before each cell, and what is only built: the last lines of the texts."""
    found = before({cell: LARGE.format(cell=cell) for cell in cells}, parallelism)
    return {
        cell: [
            [one.dockerfile.splitlines()[-1] for one in own if one.exported == exported]
            for exported in (True, False)
        ]
        for cell, own in found.items()
    }


def test_layers_that_most_images_have_are_exported_first():
    copied = ["COPY --link --from=wheels /wheels/ /"]
    base = ["FROM debian AS wheels"]
    assert large("a", "b", parallelism=2) == {key: [copied, [*base, "RUN compile"]] for key in "ab"}
    assert large("a", "b", parallelism=1) == {key: [[], []] for key in "ab"}
    assert large("a", parallelism=4) == {"a": [[], []]}, "nobody else has them"
    assert large("a", "a2", "b", parallelism=2)["a"][0] == copied
    scratch = LARGE.replace("FROM debian\nCOPY", "FROM scratch\nCOPY")
    for own in before({cell: scratch.format(cell=cell) for cell in "ab"}, 2).values():
        assert [one.dockerfile.splitlines()[-1] for one in own if one.exported] == copied


def test_layers_that_few_images_have_are_not_exported_first():
    def exported(parallelism):
        dockerfiles = {
            f"{version}{cell}": LARGE.replace("download", version).format(cell=cell)
            for version in "xyz"
            for cell in "ab"
        }
        return {one.name for own in before(dockerfiles, parallelism).values() for one in own if one.exported}

    assert not exported(5), "fewer than two of five builds have the same, on average"
    assert len(exported(6)) == 3


def test_a_compiler_exports_no_layers():
    images = recipes({cell: LARGE.format(cell=cell) for cell in "ab"})
    others = recipes({"macros": LARGE.format(cell="a")})
    own = find_shared_prefixes(images, others, parallelism=2)
    assert set(own) == {"a", "b", "macros"}
    assert own["macros"] == own["a"], "it waits for the same steps"


class BuildKit:
    """A model of how BuildKit finds the results of steps, as seen with 28.5.2."""

    def __init__(self):
        self.times: Counter[str] = Counter()
        self.cache = set()
        self.active = {}  # by step: how many builds have it, and whether it was found in the cache

    def start(self, steps):
        for step in steps:
            if step.digest in self.active:
                users, found = self.active[step.digest]
                self.active[step.digest] = users + 1, found
                continue
            below_found = all(self.active[below][1] for below in step.below)
            found = step.digest in self.cache and below_found
            if not found:
                self.times[step.digest] += 1
                self.cache.add(step.digest)
            self.active[step.digest] = 1, found

    def end(self, steps):
        for step in steps:
            users, found = self.active.pop(step.digest)
            if users > 1:
                self.active[step.digest] = users - 1, found


@st.composite
def matrices(draw):
    """Dockerfiles of a matrix: stages on each other, whose instructions differ by some of three axes."""
    lines: list[str] = []
    stages: list[str] = []
    for stage in range(draw(st.integers(1, 4))):
        below = draw(st.sampled_from(["debian", "alpine", "os{0}", *stages]))
        lines.append(f"FROM {below} AS s{stage}")
        for number in range(draw(st.integers(0, 3))):
            axes = "".join(draw(st.sets(st.sampled_from(["{0}", "{1}", "{2}"]), max_size=2)))
            command = draw(st.sampled_from(["RUN", "COPY", "ENV"]))
            source = draw(st.sampled_from(stages)) if stages and draw(st.booleans()) else None
            if command == "COPY" and source:
                command = f"COPY --from={source}" + draw(st.sampled_from(["", " --link"]))
            lines.append(f"{command} a{axes}={stage}{number} /")
        stages.append(f"s{stage}")
    lines.append("FROM debian")
    lines += [f"COPY --from={stage} / /" for stage in stages]
    values = draw(st.sets(st.tuples(*[st.sampled_from("ab")] * 3), min_size=2))
    return {"".join(cell): "\n".join(lines).format(*cell) + "\n" for cell in sorted(values)}


@given(matrices(), st.integers(1, 8), st.randoms(use_true_random=False))
def test_steps_that_images_share_run_once(dockerfiles, parallelism, random):
    """Whatever the order in which builds start and end."""
    images = recipes(dockerfiles)
    found = before(dockerfiles, parallelism)
    first = {one.name: one for own in found.values() for one in own}
    steps = {key: _once(recipe) for key, recipe in images.items()}
    shared = Counter(step.digest for own in steps.values() for step in own if step.command == "run")
    steps |= {key: _once(recipe) for key, recipe in recipes(_texts(first)).items()}
    waits = {key: {one.name for one in own} for key, own in found.items()}
    waits |= {name: set(one.needs) for name, one in first.items()}
    for own in found.values():
        names = [one.name for one in own]
        assert all(one.needs <= {*names[:place]} for place, one in enumerate(own)), "in the order of needs"
    engine = BuildKit()
    running: list[str] = []
    ended: set[str] = set()
    while len(ended) < len(steps):
        ready = [key for key in steps if key not in ended and key not in running and waits[key] <= ended]
        if ready and (not running or random.random() < 0.6):
            running.append(random.choice(ready))
            engine.start(steps[running[-1]])
        else:
            running.remove(over := random.choice(running))
            engine.end(steps[over])
            ended.add(over)
    assert all(engine.times[digest] == 1 for digest, images in shared.items() if images > 1)


def _texts(first):
    return {name: one.dockerfile for name, one in first.items()}


def _once(recipe):
    return list({step.digest: step for step in list_build_steps(recipe)}.values())
