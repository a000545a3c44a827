"""The folder of the caches: what the first start of a program compiles, later starts find there."""

import re

import pytest

CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
FUNCTIONS = 9  # of the program


@pytest.fixture(scope="module")
def numba(engine, tmp_path_factory):
    """The image of the starter for Numba."""
    folder = tmp_path_factory.mktemp("numba")
    assert engine.imagematrix("init", folder / "project", "--template", "numba").returncode == 0
    matrix = folder / "project" / "matrix.yaml"
    matrix.write_text(matrix.read_text().replace("    version: v1", "    secrets: [ca]\n    version: v1"))
    done = engine.imagematrix("build", "--secret", f"id=ca,src={CERTIFICATES}", "-f", matrix)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.long
def test_what_numba_compiles_once_serves_other_users(engine, numba):
    def start(user):
        """Return how many functions were compiled, how many found, the program's output, and its seconds."""
        words = ("-v", "warm:/var/cache/warm", "--user", user, "-e", "NUMBA_DEBUG_CACHE=1")
        done = engine.imagematrix("run", "--rm", "--gpus", "none", *words, "prices:v1")
        assert done.returncode == 0, done.stderr
        results = [line for line in done.stdout.splitlines() if not line.startswith("[cache]")]
        counts = [done.stdout.count(f"data {what}") for what in ("saved to", "loaded from")]
        return *counts, results, float(re.search(r"done after ([\d.]+) s", done.stderr)[1])

    saved, loaded, results, cold = start("root")
    assert (saved, loaded) == (FUNCTIONS, 0)
    # As the folders of a layer are: Numba writes into its own, to see whether it can.
    engine.docker("run", "--rm", "-v", "warm:/warm", numba, "chmod", "-R", "a+rwX", "/warm")
    saved, loaded, again, warm = start("12345")
    assert (saved, loaded, again) == (0, FUNCTIONS, results)
    assert warm < cold / 2, f"{cold} s, then {warm} s"
