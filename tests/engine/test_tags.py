"""Tags never move, and a failed cell does not stop others."""

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPU = {"cuda": ["none"], "march": ["x86-64-v2", "x86-64-v3"]}


def build(engine, folder, *words, **options):
    return engine.imagematrix("build", "-f", folder / "matrix.yaml", *words, **options)


def statuses(done):
    return {cell["cell"]: cell["status"] for cell in json.loads(done.stdout)["cells"]}


def add_to_template(folder, line):
    template = folder / "templates/training/Dockerfile.j2"
    template.write_text(template.read_text().replace('CMD ["train"]', f'{line}\nCMD ["train"]'))


@pytest.mark.long
def test_a_second_build_does_nothing_and_reports_it(engine, project):
    folder = project(CPU, image="twice")
    first = build(engine, folder)
    assert first.returncode == 0, first.stderr
    assert len(first.stdout.split()) == 2
    assert all(re.fullmatch(r"twice:v1-cpu-x86-64-v[23]-[0-9a-f]{12}", name) for name in first.stdout.split())
    second = build(engine, folder)
    assert (second.returncode, second.stdout) == (0, "")
    assert "nothing to build: 2 images up to date" in second.stderr


def test_a_changed_template_under_the_same_version_is_refused(engine, project):
    folder = project(CPU, image="frozen")
    references = build(engine, folder).stdout.split()
    add_to_template(folder, "ENV CHANGED=yes")
    refused = build(engine, folder)
    assert (refused.returncode, refused.stdout) == (7, "")
    assert "dockerfile changed" in refused.stderr
    assert references[0] in refused.stderr
    assert "raise the version" in refused.stderr
    planned = engine.imagematrix("plan", "--json", "-f", folder / "matrix.yaml")
    assert planned.returncode == 7
    assert {cell["status"] for cell in json.loads(planned.stdout)["cells"]} == {"refused"}
    # Nothing has changed, and the next version is free.
    assert engine.inspect(references[0])
    matrix = folder / "matrix.yaml"
    matrix.write_text(matrix.read_text().replace("version: v1", "version: v2"))
    assert len(build(engine, folder).stdout.split()) == 2


@pytest.mark.long
def test_a_new_version_takes_over_what_has_not_changed(engine, project):
    folder = project(CPU, image="raised")
    first = build(engine, folder).stdout.split()
    template = folder / "templates/training/Dockerfile.j2"
    line = "{% if march == 'x86-64-v3' %}ENV CHANGED=yes\n{% endif %}CMD"
    template.write_text(template.read_text().replace('CMD ["train"]', f'{line} ["train"]'))
    bumped = engine.imagematrix("bump", "-f", folder / "matrix.yaml")
    assert (bumped.returncode, bumped.stdout) == (0, "raised:v2\n")
    # The build cache could hide that a step runs again.
    engine.docker("buildx", "prune", "--all", "--force")
    done = build(engine, folder, "--json")
    assert done.returncode == 0, done.stderr
    assert statuses(done) == {"cpu-x86-64-v2": "adopted", "cpu-x86-64-v3": "built"}
    kept, _ = (cell["reference"] for cell in json.loads(done.stdout)["cells"])
    (old,) = (reference for reference in first if "cpu-x86-64-v2" in reference)
    assert engine.inspect(kept)["RootFS"] == engine.inspect(old)["RootFS"]
    assert engine.inspect(kept)["Id"] != engine.inspect(old)["Id"]
    assert engine.imagematrix("verify", kept).returncode == 0
    ran = engine.docker("run", "--rm", kept, "train", "--steps", "1")
    assert ran.returncode == 0, ran.stderr
    engine.docker("image", "rm", old)
    assert engine.docker("run", "--rm", kept, "train", "--steps", "1").returncode == 0


@pytest.mark.long
def test_changes_during_a_build_do_not_affect_it(engine, project):
    folder = project({"cuda": ["none"], "march": ["x86-64-v2"]}, image="steady")
    template = folder / "templates/training/Dockerfile.j2"
    template.write_text("FROM debian:trixie\nRUN sleep 5; cat /etc/debian_version > /base\nCOPY note /note\n")
    matrix, note = folder / "matrix.yaml", folder / "templates/training/note"
    matrix.write_text(
        matrix.read_text().replace("march:\n", "march:\n    x86-64-v2: {compiler: gcc-14}\n", 1)
    )
    note.write_text("one")
    (note.parent / ".dockerignore").unlink()
    own = engine.inspect("debian:trixie")["Id"]
    process = subprocess.Popen(
        [ROOT / ".venv/bin/imagematrix", "build", "-f", matrix],
        env={**engine.environment, "EXPERIMENTAL_BUILDKIT_SOURCE_POLICY": "/nowhere"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for line in process.stderr:
            if "building" in line:
                break
        time.sleep(2)
        engine.docker("tag", "debian:bookworm", "debian:trixie")
        note.write_text("two")
        out, err = process.communicate(timeout=120)
    finally:
        engine.docker("tag", own, "debian:trixie")
    assert process.returncode == 0, err
    shown = engine.docker("run", "--rm", out.strip(), "cat", "/base", "/note").stdout
    assert re.fullmatch(r"(13\S*|trixie\S*)\none", shown)
    refused = build(engine, folder)
    assert refused.returncode == 7
    assert "context changed: note" in refused.stderr
    # Size and, in a snapshot, time are the same; BuildKit still has to send the file again.
    matrix.write_text(matrix.read_text().replace("version: v1", "version: v2"))
    second = build(engine, folder).stdout.strip()
    assert engine.docker("run", "--rm", second, "cat", "/note").stdout == "two"


def test_cells_may_be_added_to_a_version(engine, project):
    build(engine, project({"cuda": ["none"], "march": ["x86-64-v2"]}, image="grows"))
    added = build(engine, project(CPU, image="grows"))
    assert [name.rpartition("-")[0] for name in added.stdout.split()] == ["grows:v1-cpu-x86-64-v3"]


def test_a_version_under_development_is_replaced(engine, project):
    folder = project(CPU, image="dev", extra="    development: true\n")
    old = build(engine, folder).stdout.split()
    add_to_template(folder, "ENV CHANGED=yes")
    new = build(engine, folder).stdout.split()
    assert len(set(old + new)) == 4
    listed = json.loads(engine.imagematrix("ls", "dev", "--json").stdout)["versions"][0]["variants"]
    assert [variant["reference"] for variant in listed] == sorted(new)


@pytest.mark.long
def test_images_built_on_a_version_under_development_stay(engine, project):
    """Images built on a variant inherit its labels, and containers keep its name."""
    folder = project(
        {"cuda": ["none"], "march": ["x86-64-v2"]}, image="dev2", extra="    development: true\n"
    )
    (old,) = build(engine, folder).stdout.split()
    mine = {"text": True, "input": f"FROM {old}\nENV MINE=yes\n", "env": engine.environment}
    subprocess.run(["docker", "build", "-t", "dev2:mine", "-"], check=True, capture_output=True, **mine)
    engine.docker("tag", old, "dev2:kept")
    container = engine.docker("run", "-d", old, "sleep", "60").stdout.strip()
    add_to_template(folder, "ENV CHANGED=yes")
    done = build(engine, folder)
    assert done.returncode == 0, done.stderr
    tags = engine.docker("images", "dev2", "--format", "{{.Tag}}").stdout.split()
    assert sorted(f"dev2:{tag}" for tag in tags) == sorted(["dev2:mine", "dev2:kept", done.stdout.strip()])
    assert engine.docker("rm", "-f", container).stdout.strip() == container
    assert "MINE=yes" in engine.inspect("dev2:mine")["Config"]["Env"]


def test_a_failed_cell_does_not_stop_others(engine, project):
    folder = project(CPU, image="partly")
    add_to_template(folder, "{% if march == 'x86-64-v2' %}\nRUN echo this goes wrong && false\n{% endif %}")
    done = build(engine, folder, "--json")
    assert done.returncode == 6
    assert statuses(done) == {"cpu-x86-64-v2": "failed", "cpu-x86-64-v3": "built"}
    assert "this goes wrong" in done.stderr
    (log,) = [Path(cell["log"]) for cell in json.loads(done.stdout)["cells"] if cell["status"] == "failed"]
    assert "this goes wrong" in log.read_text()


def test_the_error_for_a_missing_base_names_it(engine, project):
    folder = project(CPU, image="baseless")
    matrix = folder / "matrix.yaml"
    matrix.write_text(matrix.read_text().replace("debian:trixie", "imagematrix-tests/nowhere:1"))
    done = build(engine, folder)
    assert done.returncode in (2, 8)
    assert "imagematrix-tests/nowhere:1" in done.stderr


def test_an_interrupted_build_stops_and_can_be_resumed(engine, project):
    folder = project(CPU, image="resumed")
    add_to_template(folder, "{% if march == 'x86-64-v3' %}\nRUN sleep 287.5\n{% endif %}")
    process = subprocess.Popen(
        [ROOT / ".venv/bin/imagematrix", "build", "-f", folder / "matrix.yaml"],
        env=engine.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Background processes of a script inherit an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    for line in process.stderr:
        if "built cpu-x86-64-v2" in line:
            break
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    for _ in range(100):
        processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
        if "sleep 287.5" not in processes.stdout:
            break
        time.sleep(0.1)
    else:
        pytest.fail("the build's step still runs")
    planned = engine.imagematrix("plan", "--json", "-f", folder / "matrix.yaml")
    assert statuses(planned) == {"cpu-x86-64-v2": "up-to-date", "cpu-x86-64-v3": "build"}


@pytest.mark.long
def test_logs_of_a_build_are_not_in_the_context_of_the_next(engine, project):
    """Logs go beside the matrix, which may be the context itself."""
    folder = project(CPU, image="inside")
    matrix = folder / "matrix.yaml"
    matrix.write_text(matrix.read_text().replace("context: templates/training", "context: ."))
    template = folder / "templates/training/Dockerfile.j2"
    text = (
        template.read_text()
        .replace("COPY ", "COPY templates/training/")
        .replace("COPY templates/training/--", "COPY --")
    )
    text = text.replace("isa.sh *.hpp {{ sources }} ./", "isa.sh *.hpp *.cpp ./", 1).replace(
        "templates/training/isa.sh *.hpp *.cpp",
        "templates/training/isa.sh templates/training/*.hpp templates/training/*.cpp",
    )
    template.write_text(text.replace('CMD ["train"]', 'COPY . /all\nCMD ["train"]'))
    first = build(engine, folder)
    assert first.returncode == 0, first.stderr
    assert (folder / ".imagematrix/logs").is_dir()
    assert "2 images up to date" in build(engine, folder).stderr
    listed = engine.docker("run", "--rm", first.stdout.split()[0], "ls", "-A", "/all").stdout
    assert listed.split() == ["matrix.yaml", "templates"]
