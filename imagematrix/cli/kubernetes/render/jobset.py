"""`imagematrix kubernetes render jobset`: a JobSet, with one image for all ranks."""

from __future__ import annotations

from imagematrix.cli.kubernetes.render.workload import make_counted_command

command = make_counted_command(
    "jobset",
    "Write a JobSet, with one image for all ranks of all or some classes.",
)
