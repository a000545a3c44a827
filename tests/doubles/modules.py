"""Programs of other projects that `ci/modules` builds from Go's published modules."""

import subprocess

from machines import ROOT


def built(name):
    """Return the folder with the programs of ci/modules/NAME, which are built if they are missing."""
    folder = f".cache/modules/{name}"
    subprocess.run(["make", "-s", folder], check=True, cwd=ROOT)
    return ROOT / folder
