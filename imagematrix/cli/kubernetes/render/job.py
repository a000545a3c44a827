"""`imagematrix kubernetes render job`: a Job for each class."""

from __future__ import annotations

from imagematrix.cli.kubernetes.render.workload import make_counted_command

command = make_counted_command("job", "Write a Job for each class, or for those that --class names.")
