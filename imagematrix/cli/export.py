"""`imagematrix export`: the same matrix, or the GPUs of this node, for another tool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagematrix.build.plan.plan import REFUSED_REMEDY, PlanStatus
from imagematrix.cli.shared.build_session import BuildOptions, open_build_session, plan_with_lock
from imagematrix.cli.shared.host_filter import load_host_needs
from imagematrix.cli.shared.inputs import load_host
from imagematrix.cli.shared.options import (
    AllowContext,
    AtMost,
    File,
    ForHosts,
    HostFile,
    NvidiaSmi,
    Only,
    Platforms,
    Root,
    list_typed_options,
)
from imagematrix.cli.shared.output import print_document, print_info, report_write_errors, warn
from imagematrix.common import files
from imagematrix.common.suggestions import require_known
from imagematrix.common.text import format_count, quote_word
from imagematrix.errors import TagMovedError, UsageError
from imagematrix.integrations.export.targets import TARGETS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from imagematrix.build.matrix.matrix import Cell
    from imagematrix.build.plan.plan import Plan, PlanContext
    from imagematrix.build.plan.protocols import BuildRequest
    from imagematrix.cli.shared.host_filter import HostNeeds
    from imagematrix.hardware.host.host import Host

CDI = "cdi"  # the only target that is not the matrix, but a node
HELP = {name: target.help for name, target in TARGETS.items()} | {CDI: "the GPUs of a node as CDI devices"}
OF_NODES = {"host", "root", "nvidia_smi"}  # the options of this target
OF_ALL = {"target", "output"}
ELSEWHERE = "write it to a file with -o"


def command(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help=f"{'; '.join(f'{name}: {text}' for name, text in HELP.items())}.",
            autocompletion=lambda: list(HELP),
        ),
    ],
    file: File = Path("matrix.yaml"),
    only: Only = None,
    platform: Platforms = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            min=1,
            metavar="N",
            help="At most N jobs, each a shard; default: one job per cell, up to the CI system's limit.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Write to files in DIR; for cdi, it may also be a file whose name ends in .json.",
        ),
    ] = None,
    allow_context: AllowContext = None,
    hosts: ForHosts = None,
    at_most: AtMost = None,
    host: HostFile = None,
    root: Root = None,
    nvidia_smi: NvidiaSmi = None,
) -> None:
    """Write the matrix for another tool, or with `cdi` the GPUs of this node for container engines.

    --host, --root and --nvidia-smi belong to `cdi` and describe another node; all others but -o belong to the
    matrix.
    """
    require_known(target, HELP, "export target")
    for name, option in list_typed_options(context).items():
        if name not in OF_ALL and (name in OF_NODES) is not (target == CDI):
            raise UsageError(
                f"`imagematrix export {quote_word(target)}` does not have the option {option}",
                remedy=f"it describes {'a node, not a matrix' if target == CDI else 'a matrix, not a node'}",
            )
    if target == CDI:
        _write_cdi(load_host(host, root, nvidia_smi), output)
        return
    needs = load_host_needs(hosts, at_most)
    source = _MatrixFile(file, only, platform or (), allow_context or (), needs)
    texts = TARGETS[target].files(source, jobs)
    if output is None:
        if len(texts) > 1:
            remedy = "write them to a folder with -o DIR, or select fewer cells with --only"
            raise UsageError(f"cannot write {len(texts)} files to stdout", remedy=remedy)
        print_document("".join(texts.values()), ELSEWHERE)
    else:
        with report_write_errors():
            output.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                with files.name_file_in_errors(output / name):
                    (output / name).write_text(text, encoding="utf-8")
        print_info(f"wrote {format_count(len(texts), 'file')} to {output}")
    if needs and (unserved := needs.find_unserved_error()):
        raise unserved


def _write_cdi(host: Host, output: Path | None) -> None:
    """Write the GPUs of a host as a CDI spec; warn of those that it lacks, and of absent device nodes."""
    from imagematrix.integrations import cdi
    from imagematrix.integrations.export.cdi import FILE, make_gpu_spec
    from imagematrix.launcher.docker.devices import find_absent_nodes

    gpus = make_gpu_spec(host)
    if output is None:
        print_document(cdi.dump_spec(gpus.document), ELSEWHERE)
    else:
        path = output if output.suffix == ".json" and not output.is_dir() else output / FILE
        with report_write_errors(path):
            cdi.write_spec(path, gpus.document)
        print_info(f"wrote {format_count(len(gpus.document['devices']), 'device')} to {path}")
    for reason in gpus.excluded:
        warn(reason)
    for problem in find_absent_nodes(path for path in gpus.paths if path not in host.devices):
        warn(str(problem), problem.remedy)


class _MatrixFile:
    """A matrix file as an ExportSource."""

    def __init__(
        self,
        file: Path,
        only: str | None,
        platforms: Sequence[str],
        contexts: Sequence[Path],
        needs: HostNeeds | None,
    ) -> None:
        self.expression = only or ""
        self._file = file
        self._only = only
        self._platforms = platforms
        self._contexts = contexts
        self._needs = needs

    def _plan_cells(self, context: PlanContext) -> Plan:
        return plan_with_lock(
            self._file,
            context,
            self._only,
            platforms=self._platforms,
            contexts=self._contexts,
            needs=self._needs,
        )

    def list_cells(self) -> list[Cell]:
        from imagematrix.build.plan.plan import PlanContext

        plan = self._plan_cells(PlanContext())
        # A cell that fails here may be built elsewhere; if it fails there, its job reports that.
        return [item.cell for item in plan.with_status(PlanStatus.BUILD, PlanStatus.FAILED)]

    def make_requests(self, find_source: Callable[[str], str]) -> list[BuildRequest]:
        from imagematrix.build.executor import labels
        from imagematrix.build.executor.compiler import Compilers
        from imagematrix.build.matrix import promised_variants
        from imagematrix.build.plan.build_inputs import BuildInputs
        from imagematrix.build.plan.protocols import BuildRequest

        with open_build_session(BuildOptions(push=False, inputs=BuildInputs())) as session:
            plan = self._plan_cells(session.plan_context)
            refused = plan.with_status(PlanStatus.REFUSED)
            if refused:
                message = f"a version would change in {format_count(len(refused), 'cell')}"
                raise TagMovedError(message, remedy=f"see `imagematrix plan`; {REFUSED_REMEDY}")
            for item in plan.with_status(PlanStatus.FAILED):
                if item.error:
                    raise type(item.error)(f"{item.cell.id}: {item.error}", remedy=item.error.remedy)
            items = plan.with_status(PlanStatus.BUILD, PlanStatus.ADOPT, PlanStatus.UP_TO_DATE)
            for item in items:
                if item.trims:
                    raise UsageError(f"{item.cell.id}: only `imagematrix build` can trim device code")
                if item.driver:
                    raise UsageError(
                        f"{item.cell.id}: only `imagematrix build` can take a driver from a folder"
                    )
            if not items:
                raise UsageError("nothing to export: no cell can be built")
            if tested := dict.fromkeys(item.cell.image.name for item in items if item.cell.image.test):
                warn(
                    f"builds of other tools do not run the tests of {', '.join(tested)}",
                    "run `imagematrix build --retest` where the images are",
                )
            compilers = Compilers(items, session.builder.export)
            pins = {base: session.pin_permanently(base, digest) for base, digest in plan.bases.items()}
            requests = []
            for item in items:
                images = {base: pins[base] for base in item.bases}
                images |= {need: find_source(need) for need in item.needs}
                sources = plan.build_inputs.make_sources(
                    item.cell, item.cell.image.context or self._file.parent, images
                )
                entry = promised_variants.make_variant(
                    item.cell, compilers.get_flags(item, sources), item.reference
                )
                requests.append(
                    BuildRequest(
                        reference=item.reference,
                        dockerfile=item.dockerfile,
                        sources=sources,
                        labels=labels.compose_labels(item, entry),
                        compression=item.cell.image.compression,
                    )
                )
            return requests
