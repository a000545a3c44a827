"""A warm image with 100,000 files: it is warmed up, published, pulled and started without a daemon."""

import pytest
from engines import Registry
from warming import publish_images

FILES = 100_000
# It compiles so many functions, of a hundred source files.
PROGRAM = f"""\
set -e
name() {{ echo $NUMBA_CACHE_DIR/app$1_{"0" * 40}; }}
[ ! -d $(name 0) ] || {{ [ -z "$NUMBA_DEBUG_CACHE" ] || echo "[cache] data loaded from '$(name 0)'"; exit; }}
n=0
while [ $n -lt {FILES} ]; do
  [ $((n % {FILES // 100})) != 0 ] || {{ folder=$(name $((n / {FILES // 100}))); mkdir -p $folder; }}
  echo "code of $n" > $folder/app.f$n-1.py313.1.nbc
  n=$((n + 1))
done
"""
LOOK = f"cd /var/cache/warm/numba; find . -name '*.nbc' | wc -l; cat */app.f{FILES - 1}-*.nbc"

pytestmark = pytest.mark.long


@pytest.fixture
def version(engine, tmp_path):
    """The name of a published version, whose warm-up runs the program in its input."""
    registry = Registry(engine, 5000)
    (tmp_path / "project").mkdir()
    yield publish_images(engine, registry, tmp_path / "project")["usual"]
    registry.remove()


def test_all_are_there(engine, version, tmp_path):
    (tmp_path / "program").mkdir()
    (tmp_path / "program/run").write_text(PROGRAM)
    environment = {**engine.environment, "IMAGEMATRIX_STORE": str(tmp_path / "store")}

    def call(*words):
        done = engine.imagematrix(*words, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    warm = ("warm", "--engine", "oci", version, "--input", f"program={tmp_path}/program")
    call(*warm, "--to", tmp_path / "layout")
    call("publish", version, "--warm", f"oci:{tmp_path}/layout", "--yes")
    for kind, options in (("squashfs", ()), ("folder", ("--unpacked",))):
        store = tmp_path / kind
        assert "-warm-" in call("pull", version, "--to", store, *options)
        shown = call("run", "--engine", "oci", "--store", store, version, "sh", "-c", LOOK)
        assert shown == f"{FILES}\ncode of {FILES - 1}\n"
