"""All export targets, by name, in the order of `--help`. A new one is a module and a line here."""

from __future__ import annotations

from imagematrix.integrations.export import bake, github, gitlab

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.integrations.export.export_target import ExportTarget

TARGETS: dict[str, ExportTarget] = {
    target.name: target
    for target in (
        github.TARGET,
        gitlab.TARGET,
        bake.TARGET,
    )
}
