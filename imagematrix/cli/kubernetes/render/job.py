"""`imagematrix kubernetes render job`: a Job for each class."""

from __future__ import annotations

from imagematrix.cli.kubernetes.render.workload import counted

__all__ = ["command"]

command = counted("job", "Write a Job for each class, or for those that --class names.")
