"""A layer of caches on a real engine: the same from its tar as from a folder, and of use to any user."""

import io
import json
import subprocess
import sys
from pathlib import Path

import staging
from cache_folders import read_folder
from staging import MATCH

from imagematrix.images.warm.tools import ROOT
from imagematrix.images.warm.warm_file import read_archive

DOUBLES = Path(staging.__file__).parent
SOURCE = f"{ROOT}/numba/app_{'a' * 40}"
MATRIX = """\
schema: imagematrix.matrix/v1
images:
  {image}: {{version: v1, template: it.j2, warm_up: {{command: [warm], gpus: none}}}}
axes:
  part: [one]
"""
TEMPLATE = f"FROM debian:trixie\nRUN install -d -m 1777 {ROOT}\nENV NUMBA_CACHE_DIR={ROOT}/numba\n"
# As caches are written: by an ordinary user with a narrow umask, with a hard link, a link and a lock.
FILL = f"""
umask 077
mkdir -p {SOURCE} {ROOT}/inductor/locks
cd {SOURCE}
echo index > m.f-3.py311.nbi
head -c 300000 /dev/urandom > m.f-3.py311.1.nbc
chmod 700 m.f-3.py311.1.nbc
ln m.f-3.py311.1.nbc m.f-3.py311.2.nbc
ln -s m.f-3.py311.nbi n.f-3.py311.nbi
touch {ROOT}/inductor/locks/x.lock m.tmp.0
"""


def test_caches_of_a_container_become_a_layer_that_any_user_can_use(engine, registry, tmp_path):
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates/it.j2").write_text(TEMPLATE)
    image = f"{registry.address}/ml/warm"
    (tmp_path / "matrix.yaml").write_text(MATRIX.format(image=f'"{image}"'))

    def run(*words):
        done = engine.imagematrix(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    run("build", "--push")
    run("publish", f"{image}:v1")
    (variant,) = json.loads(run("ls", "--json", f"{image}:v1"))["variants"]
    name = f"{image}@{variant['digest']}"
    engine.docker("pull", name)
    container = engine.docker("run", "-d", "--user", "4321:4321", name, "sh", "-ec", FILL).stdout.strip()
    assert engine.docker("wait", container).stdout.strip() == "0"

    copying = ["docker", "cp", f"{container}:{ROOT}", "-"]
    tar = subprocess.run(copying, check=True, capture_output=True, env=engine.environment).stdout
    engine.docker("cp", f"{container}:{ROOT}", str(tmp_path / "folder"))
    with read_archive(io.BytesIO(tar), 1 << 30) as files:
        assert staging.packed(files) == staging.packed(read_folder(tmp_path / "folder"))

    staged = f"{registry.address}/ml/staging"
    command = [*engine.inside, sys.executable, DOUBLES / "staging.py", staged, variant["digest"], "warm"]
    subprocess.run(command, check=True, input=tar, env=engine.environment, cwd=DOUBLES)
    document = json.loads(run("publish", f"{image}:v1", "--warm", f"{staged}:w", "--yes", "--json"))
    (warm,) = document["warm"]
    assert warm["match"] == MATCH
    started = ("run", "--rm", "--user", "12345", f"{image}@{warm['digest']}")
    shown = engine.docker(
        *started, "sh", "-ec", f"cd {SOURCE}; cat n.f-3.py311.nbi; touch new; stat -c '%a %u %h' *"
    )
    assert shown.stdout.splitlines() == [
        "index",
        *["755 0 2"] * 2,  # two names of one file
        "644 0 1",
        "777 0 1",
        "644 12345 1",
    ]
    assert engine.docker(*started, "find", ROOT, "-name", "*.lock", "-o", "-name", "*.tmp.*").stdout == ""
    inspected = engine.inspect(f"{image}@{warm['digest']}")
    assert f"NUMBA_CACHE_DIR={ROOT}/numba" in inspected["Config"]["Env"]
    engine.docker("rmi", "--force", *engine.images(), check=False)
