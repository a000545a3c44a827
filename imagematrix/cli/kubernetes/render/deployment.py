"""`imagematrix kubernetes render deployment`: a Deployment for each class."""

from __future__ import annotations

from imagematrix.cli.kubernetes.render.workload import make_counted_command

command = make_counted_command(
    "deployment", "Write a Deployment for each class, or for those that --class names."
)
