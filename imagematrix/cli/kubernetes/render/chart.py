"""`imagematrix kubernetes render chart`: a Helm chart with everything that `install` writes."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.shared.output import print_info, report_write_errors
from imagematrix.common.text import quote_word
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

CHART = "integrations/kubernetes/install/chart"  # in the package


def command(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Write the chart to this folder.")
    ],
) -> None:
    """Write a Helm chart that installs what `render install` writes, with a value for each of its options."""
    with report_write_errors():
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            # Helm would also install what an earlier chart has left there.
            raise UsageError(f"{output} is not an empty folder", remedy="remove it, or choose another folder")
        _copy_folder(files("imagematrix") / CHART, output)
    print_info(f"wrote {output}")
    print_info(
        f"next: `helm install imagematrix {quote_word(output)} --namespace imagematrix --create-namespace "
        "-f VALUES.yaml`"
    )


def _copy_folder(source: Traversable, target: Path) -> None:
    """Copy a folder of the package, which may be in the file of `make zipapp`."""
    target.mkdir(parents=True, exist_ok=True)
    for entry in source.iterdir():
        if entry.is_dir():
            _copy_folder(entry, target / entry.name)
        else:
            (target / entry.name).write_bytes(entry.read_bytes())
