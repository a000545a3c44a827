"""`init --from Dockerfile`: what becomes of Dockerfiles such as people have."""

from __future__ import annotations

import shlex
import shutil
import textwrap

import pytest

from imagematrix.build.dockerfile.render import Renderer
from imagematrix.build.matrix.expand import expand_matrix
from imagematrix.build.matrix.load import load_matrix

pytestmark = pytest.mark.usefixtures("no_engine")

SUM = "sha256:" + "0123456789abcdef" * 4

# By name: a Dockerfile, the axes of its matrix, and the lines with remarks.
DOCKERFILES = {
    "multi-stage": (
        """\
        FROM golang:1.22 AS build
        WORKDIR /src
        COPY go.mod main.go ./
        RUN --mount=type=cache,target=/root/.cache go build -o /app .

        FROM gcr.io/distroless/static
        COPY --from=build /app /app
        ENTRYPOINT ["/app"]
        """,
        {"march": ("x86-64",)},
        [],
    ),
    "arguments": (
        """\
        # syntax=docker/dockerfile:1.7
        ARG CUDA_VERSION=12.4.1
        ARG UBUNTU=22.04
        FROM nvidia/cuda:${CUDA_VERSION}-devel-ubuntu${UBUNTU} AS build
        ARG CUDA_VERSION
        RUN echo "$CUDA_VERSION"
        FROM nvidia/cuda:${CUDA_VERSION}-runtime-ubuntu${UBUNTU}
        COPY --from=build /etc/hostname /
        """,
        {"cuda": ("12.4",)},
        [],
    ),
    "literal": (
        """\
        FROM nvidia/cuda:12.6.3-cudnn-devel-ubuntu24.04
        RUN nvcc -gencode arch=compute_90,code=sm_90 a.cu
        """,
        {"cuda": ("12.6",)},
        [2],
    ),
    "heredocs": (
        """\
        FROM debian:trixie-slim
        RUN <<EOF
        set -e
        for f in "${!files[@]}"; do echo "${#files[@]} {{ $f }} {% x %}"; done
        ARG CUDA_VERSION=1.2
        EOF
        COPY <<-"EOT" /etc/app.conf
        \tname = "{{ not_jinja }}"
        \tEOT
        RUN docker inspect --format '{{.State.Status}}' x || true
        """,
        {"march": ("x86-64",)},
        [],
    ),
    "fetched": (
        f"""\
        FROM debian:trixie
        ADD --checksum={SUM} https://example.com/model.bin /model
        ADD https://github.com/owner/name.git#{"a" * 40} /src
        """,
        {"march": ("x86-64",)},
        [],
    ),
    "torch": (
        """\
        ARG PYTHON_VERSION=3.11
        FROM python:${PYTHON_VERSION}-slim
        RUN --mount=type=secret,id=pip-conf,target=/etc/pip.conf \\
            pip install --no-cache-dir torch==2.5.1 \\
            # the index of the CUDA release
            --index-url https://download.pytorch.org/whl/cu124
        COPY requirements.txt .
        RUN pip install -r requirements.txt
        """,
        {"python": ("3.11",), "cuda": ("12.4",)},
        [],
    ),
    "extension": (
        """\
        FROM pytorch/pytorch:2.5.1-cuda12.4-cudnn9-devel
        ARG TORCH_CUDA_ARCH_LIST="8.0;8.6;9.0+PTX"
        ENV TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST}
        RUN --mount=type=ssh pip install git+ssh://git@example.com/ext.git
        """,
        {"cuda": ("12.4",), "compute": ("8.0", "8.6", "9.0")},
        [2],
    ),
    "cmake": (
        """\
        ARG CUDA_VERSION=12.4.1
        FROM nvidia/cuda:${CUDA_VERSION}-devel-ubuntu22.04
        ARG CUDA_ARCHITECTURES=80;90a
        COPY . /src
        RUN cmake -B /build -DCMAKE_CUDA_ARCHITECTURES="80;90a" -DCMAKE_CXX_FLAGS="-march=x86-64-v3 -O2" \\
         && cmake --build /build
        """,
        {"cuda": ("12.4",), "march": ("x86-64-v3",), "compute": ("8.0", "9.0a")},
        [],
    ),
    "environment": (
        """\
        FROM nvidia/cuda:12.4.1-base
        ENV TORCH_CUDA_ARCH_LIST 8.9
        ARG MARCH=znver4
        RUN cc -march=$MARCH x.c
        """,
        {"cuda": ("12.4",), "march": ("znver4",), "compute": ("8.9",)},
        [],
    ),
}
FILES = ("go.mod", "main.go", "requirements.txt")


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """The current folder, with the files that the Dockerfiles copy."""
    monkeypatch.chdir(tmp_path)
    for name in FILES:
        (tmp_path / name).touch()
    return tmp_path


def take_over(cli, workdir, text, *options):
    (workdir / "Dockerfile").write_text(text)
    return cli("init", "--from", "Dockerfile", *options)


def rendered(path):
    """Return what the template of a matrix gives for its first cell."""
    matrix = load_matrix(path)
    with Renderer(matrix.templates) as renderer:
        return renderer.render(expand_matrix(matrix).cells[0], lambda name: name).text


@pytest.mark.parametrize("name", DOCKERFILES)
def test_result_is_valid_has_the_axes_and_gives_the_same_dockerfile(cli, workdir, name):
    text, axes, lines = DOCKERFILES[name]
    text = textwrap.dedent(text)
    result = take_over(cli, workdir, text)
    assert (result.code, result.out) == (0, "")
    remarks = [line for line in result.err.splitlines() if line.startswith("imagematrix: Dockerfile:")]
    assert [int(line.split(":")[2]) for line in remarks] == lines
    assert dict(load_matrix("matrix.yaml").axes) == axes
    for command in ("validate", "plan"):
        assert cli(command).code == 0, cli(command).err
    if len(axes.get("compute", "1")) == 1:
        assert rendered("matrix.yaml") == text
    else:
        assert rendered("matrix.yaml").count("\n") == text.count("\n")


def test_lists_of_gpus_become_one_gpu_for_each_cell(cli, workdir):
    text, _, _ = DOCKERFILES["cmake"]
    take_over(cli, workdir, textwrap.dedent(text))
    one = rendered("matrix.yaml")
    assert "ARG CUDA_ARCHITECTURES=80-real\n" in one
    assert '-DCMAKE_CUDA_ARCHITECTURES="80-real" -DCMAKE_CXX_FLAGS="-march=x86-64-v3 -O2"' in one
    assert "FROM nvidia/cuda:${CUDA_VERSION}-devel" in one
    assert "FROM nvidia/cuda:12.4.1-devel" in cli("render", "--only", "compute=8.0").out


def test_mounted_secrets_and_agents_are_declared(cli, workdir):
    text, _, _ = DOCKERFILES["torch"]
    take_over(
        cli, workdir, textwrap.dedent(text) + "RUN --mount=type=ssh,id=git true\nRUN --mount=type=ssh true\n"
    )
    (image,) = load_matrix("matrix.yaml").images
    assert (image.secrets, image.ssh) == (("pip-conf",), ("default", "git"))


def test_matrix_is_kept_out_of_the_context(cli, workdir):
    result = take_over(cli, workdir, "FROM debian:trixie\nCOPY go.mod /\n")
    assert "wrote .dockerignore, because a change of the matrix is no change of the images\n" in result.err
    assert (workdir / ".dockerignore").read_text() == "matrix.yaml\ntemplates\n"
    assert load_matrix("matrix.yaml").images[0].context.resolve() == workdir


def test_existing_dockerignore_stays_and_the_remedy_works(cli, workdir, shell):
    (workdir / ".dockerignore").write_text("*.log")
    result = take_over(cli, workdir, "FROM debian:trixie\nCOPY go.mod /\n")
    assert (workdir / ".dockerignore").read_text() == "*.log"
    remedy = result.err.partition("  run `")[2].partition("`\n")[0]
    shell(remedy)
    assert (workdir / ".dockerignore").read_text().split() == ["*.log", "matrix.yaml", "templates"]
    (workdir / "matrix.yaml").unlink()
    shutil.rmtree(workdir / "templates")
    assert "  run `" not in take_over(cli, workdir, "FROM debian:trixie\nCOPY go.mod /\n").err


@pytest.fixture
def shell(workdir):
    """Run a command as one would paste it."""
    import subprocess

    return lambda command: subprocess.run(["/bin/sh", "-c", command], cwd=workdir, check=True)


def test_dockerfile_in_a_folder_below(cli, workdir):
    (workdir / "src").mkdir()
    (workdir / "src" / "a.c").touch()
    (workdir / "src" / "Dockerfile.gpu").write_text("FROM debian:trixie\nCOPY a.c /\n")
    result = cli("init", "--from", "src/Dockerfile.gpu")
    assert result.code == 0
    assert not (workdir / "src" / ".dockerignore").exists()
    assert load_matrix("matrix.yaml").images[0].context.name == "src"
    assert cli("validate").code == 0


def test_context_outside_is_allowed_by_the_command_that_is_told(cli, workdir, monkeypatch):
    (workdir / "src.dockerfile").write_text("FROM debian:trixie\nCOPY go.mod /\n")
    result = cli("init", "my images", "--from", "src.dockerfile")
    assert result.code == 0
    enter, command, _ = result.err.splitlines()[-1].split("`")[1::2]
    assert (enter, command) == ("cd 'my images'", "imagematrix plan --allow-context ..")
    monkeypatch.chdir(workdir / "my images")
    assert cli(*shlex.split(command)[1:]).code == 0
    assert (workdir / ".dockerignore").read_text() == "my images/matrix.yaml\nmy images/templates\n"


def test_what_is_not_taken_over_is_told_with_line_and_remedy(cli, workdir):
    (workdir / "Dockerfile.dockerignore").touch()
    text = textwrap.dedent(
        """\
        FROM nvidia/cuda:12.4.1-devel AS build
        FROM nvidia/cuda:12.4.0-devel AS patch
        FROM nvidia/cuda:11.8.0-devel AS other
        ENV TORCH_CUDA_ARCH_LIST=Ampere CUDAARCHS=80
        RUN cc -march=native x.c && cmake -DCUDAARCHS=90
        # ENV CUDAARCHS=70
        ADD https://example.com/a /
        COPY --from=biuld go.mdo /
        COPY go.mdo /
        """
    )
    result = take_over(cli, workdir, text)
    assert result.code == 0
    told = [line.partition(": Dockerfile:")[2] for line in result.err.splitlines() if ": Dockerfile:" in line]
    assert told == [
        "2: 12.4.0 is another patch of CUDA 12.4 than 12.4.1",
        "3: 11.8 differs from an earlier value for the axis cuda",
        "4: TORCH_CUDA_ARCH_LIST=Ampere is no list of compute capabilities",
        "5: 9.0 differs from an earlier value for the axis compute",
        "5: march native depends on the builder's CPU, so its images are indistinguishable",
        "7: the content of https://example.com/a may change, but not the identity of the image",
        "8: no stage is called biuld",
        "9: go.mdo is not in the context",
    ]
    assert "Dockerfile.dockerignore has no effect: builds read .dockerignore\n" in result.err
    assert cli("validate").code == 2


def test_gpus_without_a_cuda_release_are_told(cli, workdir):
    result = take_over(cli, workdir, "FROM debian:trixie\nENV CUDAARCHS=80\nARG CUDA_VERSION=latest\n")
    assert "Dockerfile:2: CUDAARCHS=80 names GPUs, but nothing the CUDA release\n" in result.err
    assert dict(load_matrix("matrix.yaml").axes) == {"march": ("x86-64",)}


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("RUN true\n", [], "Dockerfile: there is no FROM in it"),
        ("", [], "Dockerfile: there is no FROM in it"),
        ("FROM a\n", ["--cuda", "12.4"], "--drivers and --cuda need hosts, not a Dockerfile"),
        ("FROM a\n", ["--from", "Dockerfile"], "Dockerfile is a Dockerfile, which is taken over alone"),
        ("FROM a\n", ["--template", "cpu"], "--from and --template exclude each other"),
        ("FROM a\n# \ufffd\n", [], "is not UTF-8 text"),
    ],
)
def test_refused(cli, workdir, text, options, message):
    take_over(cli, workdir, text, *options).refuses(2, message)
    assert not (workdir / "matrix.yaml").exists()


def test_existing_files_are_kept(cli, workdir):
    (workdir / "matrix.yaml").write_text("mine")
    take_over(cli, workdir, "FROM a\n").refuses(2, "matrix.yaml already exists")
    assert (workdir / "matrix.yaml").read_text() == "mine"
    assert not (workdir / "templates").exists()


def test_lines_may_end_as_on_windows(cli, workdir):
    (workdir / "Dockerfile").write_bytes(b"\xef\xbb\xbfFROM debian:trixie\r\nRUN true\r\n")
    assert cli("init", "--from", "Dockerfile").code == 0
    assert rendered("matrix.yaml") == "FROM debian:trixie\nRUN true\n"
