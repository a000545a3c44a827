"""Builds the recipes that are too large for every test run, and uses what they make.

    .venv/bin/python ci/recipes.py [--compute 9.0]

An engine has to answer, and the Python Package Index has to be in reach. If PIP_CERT is set, builds get these
certificates. It prints times, and what a training run on the CPU says.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMAGEMATRIX = ROOT / ".venv/bin/imagematrix"
TRAIN = """
import torch
torch.manual_seed(0)
product = torch.ones(64, 32) @ torch.ones(32, 16)
assert product.shape == (64, 16) and bool((product == 32).all())
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
inputs = torch.randn(256, 8)
wanted = inputs.sum(dim=1, keepdim=True)
losses = []
for _ in range(200):
    loss = torch.nn.functional.mse_loss(model(inputs), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 10, losses
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}: loss {losses[0]:.3f} to {losses[-1]:.3f}")
"""


def main() -> None:
    """Build and try each recipe; the first that fails ends it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compute", default="9.0")
    compute = parser.parse_args().compute
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        _run([IMAGEMATRIX, "init", "--template", "pytorch", name])
        certificates = os.environ.get("PIP_CERT")
        secrets = ["--secret", f"id=ca,src={certificates}"] if certificates else []
        if secrets:
            matrix = Path(name, "matrix.yaml")
            context = "    context: templates/pytorch "
            matrix.write_text(matrix.read_text().replace(context, f"    secrets: [ca]\n{context}"))
        started = time.monotonic()
        built = _run([IMAGEMATRIX, "build", "--json", "--only", f"compute={compute}", *secrets], name)
        (cell,) = json.loads(built)["cells"]
        print(f"pytorch: {cell['reference']}, built in {time.monotonic() - started:.0f} s")
        started = time.monotonic()
        print(_run(["docker", "run", "--rm", cell["reference"], "python3", "-c", TRAIN]).strip())
        print(f"  started, imported and trained in {time.monotonic() - started:.0f} s")


def _run(words: list[str | Path], folder: str | None = None) -> str:
    return subprocess.run(words, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


main()
