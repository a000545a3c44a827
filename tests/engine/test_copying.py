"""A version is copied from one real registry to another, and runs from there."""

import base64
import json
import shutil
from pathlib import Path

import pytest

HOST = ("--host", str(Path(__file__).parents[1] / "hosts/laptop.json"))
MATRIX = """\
schema: imagematrix.matrix/v1
images:
  {image}: {{version: v1, template: it.j2}}
axes:
  part: [one, two]
"""


@pytest.fixture
def mirror(start_registry):
    return start_registry(5001, login=("reader", "password"))


def test_copy_by_digest_with_signatures_runs_elsewhere(engine, registry, mirror, tmp_path):
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates/it.j2").write_text("FROM debian:trixie\nRUN echo {{ part }} > /part\n")
    image, copy = f"{registry.address}/ml/copied", f"{mirror.address}/ml/copied"
    (tmp_path / "matrix.yaml").write_text(MATRIX.format(image=f'"{image}"'))
    environment = engine.environment | {"DOCKER_CONFIG": str(tmp_path / ".docker"), "COSIGN_PASSWORD": ""}

    def run(*words, code=0):
        done = engine.imagematrix(*words, cwd=tmp_path, env=environment)
        assert done.returncode == code, done.stderr
        return done.stdout.strip(), done.stderr

    signing: tuple[object, ...] = ()
    if shutil.which("cosign"):
        engine.cosign(tmp_path, "generate-key-pair")
        signing = ("--sign", tmp_path / "cosign.key")
    run("build", "--push")
    published, _ = run("publish", f"{image}:v1", *signing)
    run("copy", f"{image}:v1", copy, code=8)  # without a login
    login = base64.b64encode(b"reader:password").decode()
    (tmp_path / ".docker").mkdir(exist_ok=True)
    auths = {"auths": {mirror.address: {"auth": login}}}
    (tmp_path / ".docker/config.json").write_text(json.dumps(auths))
    before = registry.log.count('"PUT ')
    copied, said = run("copy", f"{image}:v1", copy)
    assert copied == published.replace(registry.address, mirror.address), "the same digest"
    assert said.count("copied v1-") == 2
    assert registry.log.count('"PUT ') == before, "nothing is written to the source"
    sent = mirror.log.count('"POST ')
    assert run("copy", f"{image}:v1", copy)[0] == copied
    assert mirror.log.count('"POST ') == sent, "no blob is sent again"
    registry.kill()
    chosen, _ = run("select", f"{copy}:v1", "--where", "part=two", *HOST)
    assert chosen.startswith(f"{copy}:v1-two-")
    assert run("run", "--rm", "--where", "part=two", f"{copy}:v1", "cat", "/part")[0] == "two"
    if signing:
        options = ("--key", "cosign.pub", "--insecure-ignore-tlog=true", copied.replace(":v1@", "@"))
        engine.cosign(tmp_path, "verify", *options)
    engine.docker("rmi", "--force", *engine.images(), check=False)
