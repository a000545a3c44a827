"""`imagematrix init --from Dockerfile`: a matrix and a template from a Dockerfile."""

from __future__ import annotations

import contextlib
import os.path
import shlex
import shutil
from pathlib import Path

from imagematrix.cli.shared.output import print_info, report_write_errors, warn
from imagematrix.common.text import quote_word
from imagematrix.errors import REPLACED, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LARGEST = 1 << 20  # bytes of a Dockerfile


def find_dockerfile(paths: Sequence[Path]) -> str | None:
    """Return the text of the one Dockerfile among `paths`; None if all are hosts.

    Raises UsageError if there are other files beside it.
    """
    from imagematrix.build.proposal.dockerfile import is_dockerfile

    for path in paths:
        if not path.is_file():
            continue
        with report_write_errors(path), path.open("rb") as file:
            raw = file.read(LARGEST + 1)
        text = raw.decode("utf-8-sig", "replace")
        if not is_dockerfile(path.name, text):
            continue
        if len(paths) > 1:
            raise UsageError(
                f"{path} is a Dockerfile, which is taken over alone", remedy="leave out the others"
            )
        if len(raw) > LARGEST or REPLACED in text:
            raise UsageError(f"{path} is not UTF-8 text, or exceeds {LARGEST // 2**10} KiB")
        return text.replace("\r\n", "\n")
    return None


def write_converted(path: Path, text: str, folder: Path) -> None:
    """Write a Dockerfile as a template with a matrix, and print what could not be taken over."""
    from imagematrix.build.plan.context_files import ContextFiles
    from imagematrix.build.proposal.dockerfile import convert_dockerfile
    from imagematrix.build.proposal.dockerfile_matrix import format_matrix
    from imagematrix.build.proposal.matrix_text import TEMPLATE
    from imagematrix.common import files

    context = path.parent
    try:
        conversion = convert_dockerfile(text, ContextFiles(context).find_complaint)
    except UsageError as error:
        raise UsageError(f"{path}: {error}", remedy=error.remedy) from error
    context_path = os.path.relpath(context.resolve(), folder.resolve())
    template = folder / "templates" / TEMPLATE
    with refuse_write_errors():
        for file in (folder / "matrix.yaml", template):
            require_absent(file)
        template.parent.mkdir(parents=True, exist_ok=True)
        files.write_output(template, conversion.template.encode())
        files.write_output(
            folder / "matrix.yaml",
            format_matrix(conversion, context_path if conversion.copies else None).encode(),
        )
    print_info(f"wrote {folder / 'matrix.yaml'} and {template}")
    for remark in conversion.remarks:
        warn(f"{path}:{remark.line}: {remark.message}", remark.remedy)
    if conversion.copies:
        _exclude_from_context(path, folder)
    is_outside = conversion.copies and context_path.startswith("..")
    print_next_commands(folder, context_path if is_outside else None)


def _exclude_from_context(path: Path, folder: Path) -> None:
    """Keep a matrix out of the context of its images."""
    context = path.parent
    unread = path.with_name(f"{path.name}.dockerignore")
    if unread.exists():
        warn(f"{unread} has no effect: builds read {context / '.dockerignore'}", "rename it to .dockerignore")
    if folder.resolve().is_relative_to(context.resolve()):
        below = folder.resolve().relative_to(context.resolve())
        lines = [str(below / name) for name in ("matrix.yaml", "templates")]
        ignore = context / ".dockerignore"
        if ignore.exists():
            present = ignore.read_text(encoding="utf-8", errors="replace").splitlines()
            missing = [line for line in lines if line not in present]
            if missing:
                warn(
                    f"{ignore} does not exclude the matrix: each change of it would change the images",
                    f"run `printf '\\n%s' {shlex.join(missing)} >> {quote_word(ignore)}`",
                )
        else:
            with refuse_write_errors():
                ignore.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            print_info(f"wrote {ignore}, because a change of the matrix is no change of the images")


def print_next_commands(folder: Path, outside: str | None = None) -> None:
    """Print the commands that come after `init`; `outside` is a context that is not in the folder."""
    # cd takes a name that begins with a dash for an option.
    place = f"./{folder}" if str(folder).startswith("-") else folder
    enter = "" if folder.resolve() == Path.cwd() else f"`cd {quote_word(place)}`, "
    if outside is None:
        print_info(f"next: {enter}`imagematrix plan`, then `imagematrix build`")
    else:
        plan = f"`imagematrix plan --allow-context {quote_word(outside)}`"
        print_info(f"next: {enter}{plan}, then `imagematrix build --allow-context {quote_word(outside)}`")


def require_absent(path: Path) -> None:
    """Raise UsageError for a file or folder that would be overwritten."""
    if path.exists():
        raise UsageError(f"{path} already exists", remedy="choose an empty folder")


@contextlib.contextmanager
def refuse_write_errors() -> Iterator[None]:
    """Raise UsageError for a file that cannot be written."""
    try:
        yield
    except shutil.Error as error:  # a list with source, target and reason of each file
        (_, target, reason), *_ = error.args[0]
        raise UsageError(f"{target}: {reason}") from error
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from error
