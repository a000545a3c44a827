"""CI: shards on one engine, merged reports, and the same images from bake."""

import json
import re
import subprocess
import tarfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from imagematrix.images.catalog import labels

pytestmark = pytest.mark.long

CPU = {"cuda": ["none"], "march": ["x86-64-v2", "x86-64-v3", "x86-64-v4"]}
GPU = {"cuda": ["12.4"], "driver": ["550.163.01"], "compute": ['"8.9"'], "march": ["x86-64-v2"]}


def build(engine, folder):
    done = engine.imagematrix("build", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["cells"]


def test_concurrent_shards_build_every_cell_once(engine, project):
    folder = project(CPU, image="sharded")
    files = [folder / "build-1.json", folder / "build-2.json"]

    def build_shard(number):
        shard = ("--shard", f"{number}/2", "-f", folder / "matrix.yaml")
        return engine.imagematrix("build", "--json", *shard)

    with ThreadPoolExecutor() as pool:
        for file, done in zip(files, pool.map(build_shard, (1, 2)), strict=True):
            assert done.returncode == 0, done.stderr
            file.write_text(done.stdout)
    done = engine.imagematrix("report", "--json", *files)
    assert done.returncode == 0, done.stderr
    cells = json.loads(done.stdout)["cells"]
    assert [cell["status"] for cell in cells] == ["built"] * 3
    assert all(engine.inspect(cell["reference"])["Id"] == cell["digest"] for cell in cells)
    alone = engine.imagematrix("report", files[0])
    assert alone.returncode == 6
    assert "no document for the shards: 2/2" in alone.stderr


def test_bake_builds_the_same_image_from_an_empty_cache(engine, project, tmp_path):
    folder = project(GPU, image="baked")
    (first,) = build(engine, folder)
    engine.docker("rmi", "--force", first["reference"])
    engine.docker("builder", "prune", "--all", "--force")
    done = engine.imagematrix("export", "bake", cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "docker-bake.json").write_text(done.stdout)
    (target,) = json.loads(done.stdout)["target"].values()
    base = engine.inspect("debian:trixie")["Id"]
    assert f"FROM imagematrix-base:{base[7:]}" in target["dockerfile-inline"], "no registry has it"
    archive = tmp_path / "image.tar"
    output = f"*.output=type=oci,dest={archive},rewrite-timestamp=true"
    bake = ["docker", "buildx", "bake", "--file", "docker-bake.json", "--set", output]
    subprocess.run(bake, check=True, capture_output=True, cwd=folder, env=engine.environment)
    with tarfile.open(archive) as image:

        def blob(digest):
            return json.load(image.extractfile(f"blobs/sha256/{digest[7:]}"))

        (baked,) = json.load(image.extractfile("index.json"))["manifests"]
        manifest = blob(baked["digest"])
        config = blob(manifest["config"]["digest"])
    (again,) = build(engine, folder)  # from the cache of bake's steps
    assert again["digest"] == first["digest"]
    ours = engine.inspect(again["reference"])
    # The contents are equal, whether BuildKit or imagematrix rewrites the times; the compression differs.
    assert ours["RootFS"]["Layers"] == config["rootfs"]["diff_ids"]
    own = dict(ours["Config"]["Labels"])
    assert own.pop(labels.CONTENT), "set when all other labels are known"
    variant = json.loads(own[labels.VARIANT])
    assert variant.pop("facts") == {"cubins": "bytes", "driver": "bytes"}, "bake does not audit"
    assert variant.pop("libraries") == {}
    assert own | {labels.VARIANT: json.dumps(variant, separators=(",", ":"))} == config["config"]["Labels"]
    assert manifest["annotations"] == {
        key: value for key, value in config["config"]["Labels"].items() if key in labels.ANNOTATED
    }


def test_output_of_a_hostile_build_is_escaped(engine, project):
    folder = project({"cuda": ["none"], "march": ["x86-64-v2"]}, image="hostile")
    template = folder / "templates/training/Dockerfile.j2"
    words = r"RUN printf '\n::error::pwned\n##[error]x\n]]>\001\033[31m' && false"
    template.write_text(template.read_text().replace('CMD ["train"]', f'{words}\nCMD ["train"]'))
    done = engine.imagematrix(
        *("build", "--junit", folder / "junit.xml", "-f", folder / "matrix.yaml"),
        env={
            **engine.environment,
            "GITHUB_ACTIONS": "true",
            "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
        },
    )
    assert done.returncode == 6
    before, group, after = done.stderr.partition("\n::group::cpu-x86-64-v2: failed\n")
    inside, ended, rest = after.partition("\n::endgroup::\n::error title=cpu-x86-64-v2::ERROR: ")
    assert group
    assert ended
    assert "[error]x" in inside
    assert "\x1b" not in inside
    assert not re.search(r"##\[|^\s*::", f"{before}\n{inside}", re.MULTILINE)
    assert "exit code: 1\nimagematrix: 1 of 1 builds failed" in rest
    assert "| hostile:v1 | cpu-x86-64-v2 | failed |" in (folder / "summary.md").read_text()
    assert "]]&gt;" in (folder / "junit.xml").read_text()
