"""Contents of images: driver, device code, labels, and bytes that always come out the same."""

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

GPU = {"cuda": ["12.4"], "driver": ["550.163.01"], "compute": ['"8.9"'], "march": ["x86-64-v2"]}


@pytest.fixture(scope="module")
def variants(engine):
    """Three variants of an image of its own: CPU-only, 11.8 with 535, 12.4 with 550."""
    wanted = {
        "cpu": "cuda=none",
        "old": "cuda=11.8,driver=535.261.03,compute=7.0",
        "new": "cuda=12.4,driver=550.163.01,compute=8.9",
    }
    built = engine.build_shipped(*(f"{only},march=x86-64-v3" for only in wanted.values()))
    return dict(zip(wanted, built, strict=True))


def run(engine, reference, *command):
    return engine.docker("run", "--rm", reference, *command)


@pytest.mark.parametrize(
    ("name", "driver", "answer", "cubin"),
    [("old", "535.261.03", 12020, "sm_70"), ("new", "550.163.01", 12040, "sm_89")],
)
def test_the_program_finds_the_baked_driver_and_trains(engine, variants, name, driver, answer, cubin):
    document = json.loads(run(engine, variants[name], "train", "--steps", "300").stdout)
    assert document["libcuda"] == driver
    assert document["driver_cuda"] == answer
    assert document["cubin"] == cubin
    assert document["cuinit"]["code"] == 100  # CUDA_ERROR_NO_DEVICE: the driver works, but there is no GPU
    assert document["backend"] == "cpu"
    assert document["final_loss"] < document["initial_loss"]


def test_a_cpu_image_has_no_driver(engine, variants):
    document = json.loads(run(engine, variants["cpu"], "train", "--steps", "300").stdout)
    assert (document["libcuda"], document["cuda"], document["cubin"]) == (None, None, None)
    assert "libcuda" not in run(engine, variants["cpu"], "ldconfig", "-p").stdout


@pytest.mark.parametrize(("name", "driver"), [("old", "535.261.03"), ("new", "550.163.01")])
def test_the_linker_knows_exactly_one_libcuda(engine, variants, name, driver):
    listed = [
        line
        for line in run(engine, variants[name], "ldconfig", "-p").stdout.splitlines()
        if "libcuda" in line
    ]
    assert len(listed) == 1
    path = listed[0].rpartition("=> ")[2]
    assert run(engine, variants[name], "readlink", "-f", path).stdout.strip().endswith(f"libcuda.so.{driver}")


def test_labels_have_all_facts_for_the_selector(engine, variants):
    labels = engine.inspect(variants["new"])["Config"]["Labels"]
    entry = json.loads(labels["io.imagematrix.variant"])
    assert entry["cubins"] == ["89"]
    assert entry["driver"] == {"mode": "exact", "version": "550.163.01"}
    # The flags that the compiler in the image reports for -march=x86-64-v3, without ignored ones.
    assert {"avx2", "bmi2", "fma", "movbe"} <= set(entry["cpu_flags"])
    assert not {"avx512f", "aes", "pku"} & set(entry["cpu_flags"])
    assert labels["com.nvidia.cuda.version"] == "12.4"
    assert labels["org.opencontainers.image.base.name"] == "debian:trixie"
    assert labels["org.opencontainers.image.base.digest"] == engine.inspect("debian:trixie")["Id"]
    assert labels["io.imagematrix.input"].removeprefix("sha256:")[:12] == variants["new"].rpartition("-")[2]


def test_the_driver_is_the_last_layer_and_shared(engine, project):
    folder = project(
        GPU | {"compute": ['"8.6"', '"8.9"'], "march": ["x86-64-v2", "x86-64-v3"]}, image="layers"
    )
    done = engine.imagematrix("build", "-f", folder / "matrix.yaml")
    assert done.returncode == 0, done.stderr
    references = done.stdout.split()
    assert len(references) == 4
    assert len({engine.inspect(name)["RootFS"]["Layers"][-1] for name in references}) == 1


def test_an_image_that_contradicts_its_labels_is_not_tagged(engine, project):
    folder = project(GPU, image="liar")
    template = folder / "templates/training/Dockerfile.j2"
    template.write_text(template.read_text() + "RUN cp /usr/lib/x86_64-linux-gnu/libcuda.so.5* /opt/\n")
    done = engine.imagematrix("build", "-f", folder / "matrix.yaml")
    assert done.returncode == 9
    assert "but /usr/lib/x86_64-linux-gnu/libcuda.so.550.163.01 has" in done.stderr
    assert engine.imagematrix("ls", "liar").returncode == 4


@pytest.mark.long
@pytest.mark.parametrize("compression", ["zstd", "{type: gzip, level: 1}"])
def test_bytes_depend_neither_on_processors_nor_on_order(engine, tmp_path, compression):
    (tmp_path / "templates").mkdir()
    (tmp_path / "files").mkdir()
    lines = b"".join(b"line %d\n" % number for number in range(2_000_000))  # several jobs of libzstd
    for part in ("one", "two"):
        (tmp_path / "files" / part).write_bytes(part.encode() + lines)
    (tmp_path / "templates/it.j2").write_text("FROM debian:trixie\nCOPY {{ part }} /part\nRUN touch /x\n")

    def built(parts, *prefix, jobs):
        (tmp_path / "matrix.yaml").write_text(
            "schema: imagematrix.matrix/v1\n"
            f"compression: {compression}\n"
            "images: {processors: {version: v1, template: it.j2, context: files}}\n"
            f"axes: {{part: [{parts}]}}\n"
        )
        command = [*engine.inside, *prefix, ROOT / ".venv/bin/imagematrix", "build", "--json", "--jobs", jobs]
        done = subprocess.run(
            command, check=False, cwd=tmp_path, env=engine.environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        cells = {cell["reference"]: cell["digest"] for cell in json.loads(done.stdout)["cells"]}
        engine.docker("rmi", "--force", *cells)
        return cells

    assert built("one, two", "taskset", "--cpu-list", "0", jobs="1") == built("two, one", jobs="2")


def test_steps_that_cells_share_run_once(engine, tmp_path):
    """BuildKit alone runs some again: for cells that begin after another cell that ran them has ended.

    Each step adds a line to a file that the builds of an engine have in common.
    """
    once = f"RUN --mount=type=cache,id={tmp_path.name},target=/runs echo"
    lines = [
        *("FROM debian:trixie AS compiler", f"{once} compiler >> /runs/n; sleep 1"),
        *("FROM compiler AS program", f"{once} program-{{{{ os }}}} >> /runs/n; date +%N > /program"),
        *("FROM {{ base }} AS body", "COPY --link --from=program /program /program"),
        "COPY --link --from=compiler /etc/hostname /compiler",
        f"{once} body-{{{{ os }}}} >> /runs/n; sleep {{{{ seconds }}}}",
        *(
            "FROM body",
            f"{once} {{{{ os }}}}{{{{ number }}}} >> /runs/n; sleep {{{{ 1 + 2 * (number | int) }}}}",
        ),
    ]
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates/it.j2").write_text("\n".join(lines) + "\n")
    (tmp_path / "matrix.yaml").write_text(
        "schema: imagematrix.matrix/v1\n"
        "images: {once: {version: v1, template: it.j2, context: templates}}\n"
        "axes: {os: [a, b], number: ['0', '1', '2']}\n"
        "properties:\n"
        "  os: {a: {base: 'debian:trixie', seconds: 2}, b: {base: 'debian:bookworm', seconds: 9}}\n"
    )
    done = engine.imagematrix("build", "--jobs=4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    programs = {run(engine, reference, "cat", "/program").stdout for reference in done.stdout.split()}
    assert len(programs) == 2
    dockerfile = f"FROM debian:trixie\n{once} {tmp_path} > /new; cat /runs/n > /n\nCMD cat /n\n"
    engine.docker("buildx", "build", "--tag=runs:1", "-", input=dockerfile)
    ran = run(engine, "runs:1", "cat", "/n").stdout.split()
    cells = [f"{name}{number}" for name in "ab" for number in "012"]
    assert sorted(ran) == sorted(["compiler", "program-a", "program-b", "body-a", "body-b", *cells])
