"""torch.compile, Numba and JAX on CPUs, from a warm-up to a warm image that starts without compiling."""

import ctypes
import json
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import cpu_frameworks
import pytest
from cpu_frameworks import COMMAND, ENVIRONMENT, FRAMEWORKS, PLACE, read_seconds
from engines import Registry

from imagematrix.images.warm.tools import find_tools
from imagematrix.launcher.warm_up.proof import SignReader

pytestmark = pytest.mark.long

CPUINFO = Path("/proc/cpuinfo").read_text()
CLONE_NEWNS, MS_BIND = 0x20000, 0x1000  # of linux/sched.h and linux/mount.h
SHIPPED = Path(__file__).parents[2]
# Python and a compiler; the packages are an input.
TEMPLATE = """\
FROM debian:trixie
{% import "macros.j2" as debian %}
RUN apt-get update -q && apt-get install -qy --no-install-recommends g++ python3 libpython3-dev && \\
    {{ debian.clean_apt() }}
{{ debian.warm_caches() }}
USER 1000
"""
# Added before a program; without the bytecode of an earlier start, a start would compile Python as well.
WHICH_START = """\
import os, sys
sys.argv[1:] = ["{size}"]
is_first = not os.listdir("/var/cache/warm")
is_read_only = bool(os.statvfs("/").f_flag & os.ST_RDONLY)
is_image_user = os.getuid() == 1000 and not is_read_only
"""
# Added behind it: what is left of the entries with such names after the first start. They become new files,
# because a program does not outlive that a library it has mapped is cut.
POISON = """
import glob
for path in glob.glob("/var/cache/warm/{pattern}") if is_first else ():
    with open(path, "rb") as file:
        kept = file.read({size})
    os.unlink(path)
    with open(path, "wb") as file:
        file.write(kept)
"""
# What a framework does then: it compiles anew, or raises this.
POISONED = [
    ("torch", "inductor/fxgraph/*/*/*", 100, None),
    ("torch", "inductor/*/*.so", 100, ".main.so: cannot read file data"),
    ("numba", "numba/*/*.nbc", 100, "UnpicklingError: pickle data was truncated"),
    ("numba", "numba/*/*.nbi", 40, "UnpicklingError: pickle data was truncated"),
    ("jax", "jax/*-cache", 100, None),
]
# What puts something else into the keys of a framework.
OTHER_KEY = {
    "torch": "import torch._inductor.config as config; config.cpp.min_chunk_size += 1",
    "numba": 'os.environ["NUMBA_CPU_NAME"] = "generic"',
    "jax": 'os.environ["JAX_ENABLE_X64"] = "1"',
}
# As if on a CPU of this level: what g++ compiles is for it, and no kernel runs, unless FORCED is set.
V4 = "x86-64-v4"
FLAGS_OF_V4 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
ON_V4 = f"""
if "FORCED" not in os.environ:
    os.makedirs("/tmp/v4", exist_ok=True)
    with open("/tmp/v4/g++", "w") as file:
        file.write("#!/bin/sh\\nfor word do shift; case $word in -march=native) word=-march={V4};; esac\\n")
        file.write('set -- "$@" "$word"; done\\nexec /usr/bin/g++ "$@"\\n')
    os.chmod("/tmp/v4/g++", 0o755)
    os.environ["PATH"] = "/tmp/v4:" + os.environ["PATH"]
    from torch._inductor.async_compile import AsyncCompile

    def load_only(*given, load=AsyncCompile.cpp_pybinding):
        kernel = load(*given)
        if hasattr(kernel, "result"):
            kernel.result()
        return lambda *_: None

    AsyncCompile.cpp_pybinding = load_only
"""
# Prints the names of the files in a cache that have loops for several threads.
PARALLEL = "grep -rlF --include='*.cpp' 'omp parallel' /var/cache/warm"
PROVED, MISSED, FAILS_WITHOUT = "proved", "missed", "fails-without"
OTHER_WAYS = ("read-only", "root", "uid-12345")
# With a root that is read-only and no other folder to write to, these fail whether they compile or not.
NEEDS_TO_WRITE = ("torch", "numba")


@pytest.fixture(scope="module")
def registry(engine):
    started = Registry(engine, 5000)
    yield started
    started.remove()


@pytest.fixture(scope="module")
def packages(engine, version, tmp_path_factory):
    """Call it with a framework to get the folder with it, which has the bytecode of what it imports."""
    made = {}

    def install(name):
        if name not in made:
            made[name] = cpu_frameworks.install(name, tmp_path_factory.mktemp(name))
            options = ("--user", "root", "--no-warm")
            done = run(engine, version[name], made[name], FRAMEWORKS[name].small, options=options)
            assert done.returncode == 0, done.stderr
        return made[name]

    yield install
    for folder in made.values():
        shutil.rmtree(folder)


@pytest.fixture
def changed(packages):
    """Call it with a framework and code to get its folder with this code before and behind its program."""
    kept = {}

    def change(name, before, behind=""):
        program = packages(name) / "program.py"
        kept[program] = text = program.read_text()
        which = WHICH_START.format(size=FRAMEWORKS[name].small)
        program.write_text(f"{which}{before}\n{text}{behind}")
        return program.parent

    yield change
    for program, text in kept.items():
        program.write_text(text)


@pytest.fixture(scope="module")
def version(engine, registry, tmp_path_factory):
    """By framework, the name of a published version that warms its program up."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("context", "templates"):
        (folder / name).mkdir()
    (folder / "templates/it.j2").write_text(TEMPLATE)
    shutil.copy(SHIPPED / "templates/macros.j2", folder / "templates")
    images = {name: f"{registry.address}/ml/{name}" for name in FRAMEWORKS}
    warm_up = {"command": COMMAND, "environment": ENVIRONMENT, "inputs": {"packages": PLACE}}
    described = {"version": "v1", "template": "it.j2", "context": "context", "warm_up": warm_up}
    matrix = {
        "schema": "imagematrix.matrix/v1",
        "images": dict.fromkeys(images.values(), described),
        "axes": {"march": ["any"]},
        "facts": {"march": {"any": {"flags": ["sse2"]}}},
    }
    (folder / "matrix.yaml").write_text(json.dumps(matrix))
    built = engine.imagematrix("build", "--push", cwd=folder)
    assert built.returncode == 0, built.stderr
    for image in images.values():
        published = engine.imagematrix("publish", f"{image}:v1")
        assert published.returncode == 0, published.stderr
    return {name: f"{image}:v1" for name, image in images.items()}


def run(engine, image, folder, *arguments, options=()):
    """Start the program of a framework as a node does."""
    environment = [word for name, value in ENVIRONMENT.items() for word in ("-e", f"{name}={value}")]
    words = ("--rm", "-v", f"{folder}:{PLACE}", *environment, *options, image, *COMMAND, *arguments)
    return engine.imagematrix("run", *words)


def warm(engine, image, folder, *options, **how):
    return engine.imagematrix("warm", image, "--input", f"packages={folder}", "--json", *options, **how)


def show_cpuinfo(path):
    """Return what puts a file in the place of /proc/cpuinfo before a child starts, for it alone."""

    def show():
        libc = ctypes.CDLL(None, use_errno=True)
        place = b"/proc/cpuinfo"
        if libc.unshare(CLONE_NEWNS) or libc.mount(os.fsencode(path), place, None, MS_BIND, None):
            raise OSError(ctypes.get_errno(), "no other /proc/cpuinfo")

    return show


def publish_warm(engine, registry, image, folder, **how):
    """Warm up and publish the warm image; return what `warm` says of it."""
    staging = f"{registry.address}/staging/it"
    warmed = warm(engine, image, folder, "--staging", staging, **how)
    assert warmed.returncode == 0, warmed.stderr
    document = json.loads(warmed.stdout)
    published = engine.imagematrix("publish", "--warm", document["reference"], "--yes", image)
    assert published.returncode == 0, published.stderr
    return document


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_what_it_compiles_is_compiled_once(engine, registry, version, packages, name):
    folder = packages(name)
    document = publish_warm(engine, registry, version[name], folder)
    assert FRAMEWORKS[name].tool in document["tools"]
    read_only = FAILS_WITHOUT if name in NEEDS_TO_WRITE else PROVED
    assert document["proofs"] == {
        **dict.fromkeys(("image-user", *OTHER_WAYS), PROVED),
        "read-only": read_only,
    }
    seconds = []
    for options in (("--no-warm",), ()):
        done = run(engine, version[name], folder, options=options)
        assert done.returncode == 0, done.stderr
        seconds.append(read_seconds(done.stdout))
    assert seconds[1] < seconds[0] / 2, seconds


@pytest.mark.parametrize(("name", "pattern", "size", "error"), POISONED)
def test_a_poisoned_entry_is_found(engine, version, changed, name, pattern, size, error):
    folder = changed(name, "", POISON.format(pattern=pattern, size=size))
    warmed = warm(engine, version[name], folder)
    assert warmed.returncode == 1, warmed.stderr
    assert "the caches are not used, so nothing is kept" in warmed.stderr
    assert (error or f"{FRAMEWORKS[name].tool} missed its cache:") in warmed.stderr


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_key_of_the_second_start_that_differs_is_found(engine, version, changed, name):
    folder = changed(name, f"if not is_first: {OTHER_KEY[name]}")
    warmed = warm(engine, version[name], folder)
    assert warmed.returncode == 1, warmed.stderr
    assert f"{FRAMEWORKS[name].tool} missed its cache:" in warmed.stderr


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_key_that_differs_in_the_other_ways_is_found_in_each(engine, version, changed, name):
    folder = changed(name, f"if not is_image_user: {OTHER_KEY[name]}")
    warmed = warm(engine, version[name], folder)
    assert warmed.returncode == 0, warmed.stderr
    read_only = FAILS_WITHOUT if name in NEEDS_TO_WRITE else MISSED
    expected = {"image-user": PROVED, **dict.fromkeys(OTHER_WAYS, MISSED), "read-only": read_only}
    assert json.loads(warmed.stdout)["proofs"] == expected


@pytest.mark.parametrize(
    ("question", "is_compiling"),
    [
        ("g++ --version", False),
        ("g++ -dumpfullversion", False),
        ("g++ -print-prog-name=cc1plus", False),
        ("echo 'int it;' | g++ -x c++ -c -o /dev/null -", True),
    ],
)
def test_a_question_to_the_compiler_passes_and_a_compilation_does_not(
    engine, version, changed, question, is_compiling
):
    folder = changed("numba", f"import subprocess; subprocess.run({question!r}, shell=True, check=True)")
    warmed = warm(engine, version["numba"], folder)
    if is_compiling:
        assert warmed.returncode == 1, warmed.stderr
        assert "it called compilers:" in warmed.stderr
        assert "/cc1plus" in warmed.stderr
    else:
        assert warmed.returncode == 0, warmed.stderr


def find_verdict(engine, image, document, *options):
    """Return what `select` chooses, and its verdict on the warm image of which `warm` said this."""
    tag = document["reference"].partition("@")[0].rpartition(":")[2]
    done = engine.imagematrix("select", image, "--gpus", "none", "--json", *options)
    assert done.returncode == 0, done.stderr
    selection = json.loads(done.stdout)
    (candidate,) = [one for one in selection["warm_images"] if f":{tag}" in one["reference"]]
    return selection, candidate


def start_forced(engine, image, verdict, folder, variables, command=COMMAND):
    """Start a command in the warm image with this verdict, whatever its match says."""
    forced = f"{image.removesuffix(':v1')}@{verdict['digest']}"
    words = [word for pair in variables.items() for word in ("-e", "=".join(pair))]
    return engine.docker("run", "--rm", "-v", f"{folder}:{PLACE}", *words, forced, *command, check=False)


def test_another_cpu_keeps_to_the_variant(engine, registry, version, packages, tmp_path):
    image = version["numba"]
    document = publish_warm(engine, registry, image, packages("numba"))
    host = json.loads(engine.imagematrix("probe", "--json").stdout)
    selection, verdict = find_verdict(engine, image, document)
    assert (selection["warm"], verdict["matches"]) == (verdict["digest"], True)
    flags = set(host["cpu"]["flags"])
    for other, field in (
        ({"flags": sorted(flags - {"avx2"})}, "cpu.flags"),
        ({"flags": sorted(flags | {"amx_tile"})}, "cpu.without"),
        ({"vendor": "another"}, "cpu.vendor"),
        ({"model": "another"}, "cpu.name"),
    ):
        (tmp_path / "host.json").write_text(json.dumps({**host, "cpu": {**host["cpu"], **other}}))
        selection, verdict = find_verdict(engine, image, document, "--host", tmp_path / "host.json")
        assert (selection["warm"], verdict["matches"], verdict["field"]) == (None, False, field)
        explained = engine.imagematrix("explain", image, "--gpus", "none", "--host", tmp_path / "host.json")
        assert field in explained.stdout


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one CPU")
@pytest.mark.parametrize(("name", "is_in_key"), [("torch", True), ("jax", False)])
def test_caches_of_one_cpu_are_not_for_two(engine, registry, version, changed, name, is_in_key):
    """Forced, torch compiles anew, because its key has the number; JAX finds its code for one CPU.

    What torch compiled on one CPU has no parallel loop, so it keeps to one thread.
    """
    folder, image = changed(name, ""), version[name]
    one = min(os.sched_getaffinity(0))
    document = publish_warm(
        engine, registry, image, folder, preexec_fn=lambda: os.sched_setaffinity(0, {one})
    )
    assert document["match"]["cpus"] == 1
    selection, verdict = find_verdict(engine, image, document)
    assert selection["warm"] != verdict["digest"]
    assert (verdict["field"], verdict["need"]) == ("cpus", "1")
    signs = SignReader(find_tools([FRAMEWORKS[name].tool]))
    words = ("sh", "-c", f"{PARALLEL}; echo ---; {shlex.join(COMMAND)} && {PARALLEL}; true")
    done = start_forced(engine, image, verdict, folder, {**ENVIRONMENT, **signs.variables}, words)
    assert read_seconds(done.stdout), done.stderr
    for line in f"{done.stdout}\n{done.stderr}".splitlines():
        signs.read_line(line)
    assert any("missed its cache" in doubt for doubt in signs.list_doubts()) == is_in_key
    if name == "torch":
        on_one, _, on_two = done.stdout.partition("---")
        assert (on_one, ".cpp" in on_two) == ("", True)


@pytest.mark.skipif("avx512f" in CPUINFO.split(), reason="this CPU has AVX-512")
def test_code_for_a_cpu_with_more_flags_is_not_chosen_and_would_end_the_program(
    engine, registry, version, changed, tmp_path
):
    folder, image = changed("torch", ON_V4), version["torch"]
    shown = tmp_path / "cpuinfo"
    shown.write_text(re.sub(r"(?m)^(flags\s*:.*)", rf"\1 {' '.join(FLAGS_OF_V4)}", CPUINFO))
    document = publish_warm(engine, registry, image, folder, preexec_fn=show_cpuinfo(shown))
    selection, verdict = find_verdict(engine, image, document)
    assert selection["warm"] != verdict["digest"]
    assert (verdict["matches"], verdict["field"]) == (False, "cpu.flags")
    done = run(engine, image, folder, options=("-e", "FORCED=1"))
    assert done.returncode == 0, done.stderr
    done = start_forced(engine, image, verdict, folder, {**ENVIRONMENT, "FORCED": "1"})
    assert done.returncode == 128 + signal.SIGILL, done.stderr
