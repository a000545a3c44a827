"""`imagematrix kubernetes render jobset`: a JobSet, with one image for all ranks."""

from __future__ import annotations

from imagematrix.cli.kubernetes.render.workload import counted

__all__ = ["command"]

command = counted(
    "jobset",
    "Write a JobSet, with one image for all ranks of all or some classes.",
)
