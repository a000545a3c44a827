"""`imagematrix bump`: raise the versions of images that have changed."""

from __future__ import annotations

from codecs import BOM_UTF8
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.build.plan.plan import Planned, PlanStatus
from imagematrix.cli.shared.build_session import BuildOptions, open_build_session, plan_with_lock
from imagematrix.cli.shared.options import AllowContext, BuildArgs, File, Proxy
from imagematrix.cli.shared.output import print_info, print_lines
from imagematrix.common.suggestions import suggest_nearest
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from imagematrix.build.plan.plan import Plan


def command(
    images: Annotated[
        list[str] | None,
        typer.Argument(metavar="IMAGE...", help="Raise the versions of these images, changed or not."),
    ] = None,
    file: File = Path("matrix.yaml"),
    minor: Annotated[
        bool, typer.Option("--minor", help="Raise the second number: v1 to v1.1, v1.1 to v1.2.")
    ] = False,
    to: Annotated[str | None, typer.Option("--to", metavar="VERSION", help="Set this version.")] = None,
    push: Annotated[
        bool, typer.Option("--push", help="Compare with the registry, as `build --push` does.")
    ] = False,
    build_arg: BuildArgs = None,
    proxy: Proxy = False,
    allow_context: AllowContext = None,
) -> None:
    """Raise the versions of images whose cells have changed, or of the named images, in the matrix.

    Nothing else in the file changes. Images that build on an image with a new version change, too. Prints
    each image with its new version.
    """
    from imagematrix.build.matrix.bump import raise_version, replace_versions
    from imagematrix.build.matrix.load import load_matrix, parse_matrix
    from imagematrix.build.plan.build_inputs import parse_build_inputs
    from imagematrix.common import files

    if minor and to is not None:
        raise UsageError("--minor and --to exclude each other")
    contexts = allow_context or ()
    matrix = load_matrix(file, contexts=contexts)
    before = {image.name: image.version for image in matrix.images}
    if images:
        _require_known_images(images, before, file)
        chosen = images
    else:
        inputs = parse_build_inputs(args=build_arg or (), proxy=proxy)
        with open_build_session(BuildOptions(push=push, inputs=inputs)) as session:
            plan = plan_with_lock(file, session.plan_context, None, push=push, contexts=contexts)
            chosen = _find_changed_images(plan)
    new = {name: raise_version(before[name], minor=minor) if to is None else to for name in chosen}
    text = replace_versions(matrix.text, new, str(file))
    after = {image.name: image.version for image in parse_matrix(text, file, contexts).images}
    for name, version in new.items():
        if after[name] != version:  # such as one that YAML reads as a comment
            raise UsageError(f"{version!r} is not a version such as v1")
    if after == before:
        print_info(f"{file}: no version changes")
        return
    if load_matrix(file, contexts=contexts).text != matrix.text:
        raise UsageError(f"{file} was changed meanwhile", remedy="run this again")
    try:
        encoding = "utf-8-sig" if file.read_bytes().startswith(BOM_UTF8) else "utf-8"
        files.write_output(file, text.encode(encoding))
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from error
    for name, version in after.items():
        if version != before[name]:
            print_info(f"{name}: {before[name]} -> {version}")
            print_lines(f"{name}:{version}")


def _require_known_images(images: Sequence[str], versions: Mapping[str, str], file: Path) -> None:
    for name in images:
        if name not in versions:
            remedy = suggest_nearest(name, versions) or f"it has {', '.join(versions)}"
            raise UsageError(f"{file} has no image {name!r}", remedy=remedy)


def _find_changed_images(
    plan: Plan,
) -> list[str]:
    """Return the images that cannot keep their versions: their own cells have changed, or images below them.

    Raises the error of a base whose digest is unknown, because its cells cannot be compared.
    """
    for error in plan.unresolved.values():
        raise error
    unchanged = plan.with_status(PlanStatus.UP_TO_DATE)
    changed = {item.cell.image.name: None for item in plan.with_status(PlanStatus.REFUSED)}
    while True:
        references = {
            item.reference
            for item in plan.items
            if isinstance(item, Planned) and item.cell.image.name in changed
        }
        above = {item.cell.image.name: None for item in unchanged if references.intersection(item.needs)}
        if above.keys() <= changed.keys():
            return list(changed)
        changed |= above
