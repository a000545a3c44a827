"""`imagematrix kubernetes render chart`: a Helm chart with everything that `install` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.shared.output import print_info, report_write_errors
from imagematrix.common.text import quote_word
from imagematrix.errors import UsageError


def command(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Write the chart to this folder.")
    ],
) -> None:
    """Write a Helm chart that installs what `render install` writes, with a value for each of its options."""
    from imagematrix.integrations.kubernetes.install.chart.files import make_chart_files

    with report_write_errors():
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            # Helm would also install what an earlier chart has left there.
            raise UsageError(f"{output} is not an empty folder", remedy="remove it, or choose another folder")
        for name, text in make_chart_files().items():
            path = output / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    print_info(f"wrote {output}")
    print_info(
        f"next: `helm install imagematrix {quote_word(output)} --namespace imagematrix --create-namespace "
        "-f VALUES.yaml`"
    )
