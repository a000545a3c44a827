"""The CPU flags that a march needs, from the compiler in the image, while the first images are built.

A template's stage named `compiler` contains the compiler of its code. It is run once to print the predefined
macros (`cc -march=M -dM -E`) of all marches that it is used with; labels contain the result. The stage of a
cross build may have a `cc` for the machine that builds, and the compiler of the code beside it: the first
that makes code for the cell's architecture answers.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from imagematrix.build.dockerfile.dockerfile import truncate_after_stage
from imagematrix.build.matrix.feasibility import ARCHES
from imagematrix.build.plan.flags import STAGE, look_up_flags
from imagematrix.errors import BuildError
from imagematrix.hardware.vendors import macros, marches, vector_length

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from imagematrix.build.plan.plan import Planned
    from imagematrix.build.plan.protocols import BuildSources

    Export = Callable[[str, BuildSources], Mapping[str, str]]

COMPILERS = ("cc", "{arch}-linux-gnu-gcc")  # the second is the name of GCC's compilers for one architecture


class Compilers:
    """The compilers of a build's items; thread-safe.

    `export` builds a Dockerfile and returns the text files in its last stage, as a Builder does.
    """

    def __init__(self, items: Iterable[Planned], export: Export) -> None:
        self._compilers: dict[Hashable, _Compiler] = {}
        self._by_reference: dict[str, _Compiler] = {}  # by the references of items
        for item in items:
            stage = truncate_after_stage(item.dockerfile, STAGE)
            march = item.cell.axes.get("march")
            if stage and march:
                image = item.cell.image  # a stage can use its files, arguments and secrets
                key = stage, item.cell.platform, image.context, image.build_args, image.secrets, image.ssh
                compiler = self._compilers.setdefault(key, _Compiler(item, stage, export))
                compiler.options.add(item.cell.facts.get_option(march))
                if not item.needs:
                    compiler.item = compiler.item or item
                self._by_reference[item.reference] = compiler

    @property
    def dockerfiles(self) -> dict[str, Planned]:
        """What is built to run the compilers, each with an item that uses it."""
        return {compiler.dockerfile: compiler.user for compiler in self._compilers.values()}

    def choose_representatives(self) -> list[Planned]:
        """Return for each compiler an item that uses it and builds on no other image of the matrix."""
        return [compiler.item for compiler in self._compilers.values() if compiler.item]

    def explain_failure(self, item: Planned, error: BuildError) -> BuildError:
        """Return why a build failed: `error`, or that the compiler does not support the march."""
        compiler = self._by_reference.get(item.reference)
        if compiler is None or compiler.known is None:
            return error
        option = item.cell.facts.get_option(item.cell.axes["march"])
        return error if option in compiler.known else _make_unknown_flags_error(item, option)

    def is_querying(self, item: Planned) -> bool:
        """Whether the flags of `item` come from a compiler, which takes a build."""
        return item.reference in self._by_reference

    def get_flags(self, item: Planned, sources: BuildSources) -> frozenset[str]:
        """Return the flags that `item`'s code needs; raise BuildError if they are unknown.

        `sources` are those of its build. If a template has no stage `compiler`, the shipped table is used
        with the property `compiler`. Flags stated in the matrix are always needed: they may be of an
        instruction set whose macro this release does not know.
        """
        march = item.cell.axes.get("march")
        if march is None:
            return frozenset()
        compiler = self._by_reference.get(item.reference)
        if compiler is None:
            return look_up_flags(item.cell, march)
        option = item.cell.facts.get_option(march)
        text = compiler.query_macros(sources).get(option)
        if text is None:
            raise _make_unknown_flags_error(item, option)
        if bits := vector_length.get_bits_from_macros(text):
            raise BuildError(
                f"the compiler of {item.cell.id} makes code for vectors of {bits} bits, "
                "which computes wrong results on CPUs with another length",
                remedy=f"let cc compile with {vector_length.OPTION}=scalable",
            )
        stated = item.cell.facts.get_flags(march) or frozenset()
        return marches.get_flags_from_macros(text, ARCHES[item.cell.platform], march) | stated


class _Compiler:
    """The compiler of one stage, run once for all its marches when the first result is needed."""

    def __init__(self, user: Planned, stage: str, export: Export) -> None:
        self.user = user
        self.options: set[str] = set()
        self.item: Planned | None = None
        self._arch = ARCHES[user.cell.platform]
        self._names = tuple(name.format(arch=self._arch) for name in COMPILERS)
        self._stage = stage
        self._export = export
        self._lock = threading.Lock()
        self._answer: Mapping[str, str] | BuildError | None = None

    def query_macros(self, sources: BuildSources) -> Mapping[str, str]:
        """Return the macros by option, without options that the compiler does not know.

        Raises BuildError if no compiler of the stage makes code for the architecture of its cells.
        """
        with self._lock:
            if self._answer is None:
                try:
                    self._answer = self._choose_answer(self._export(self.dockerfile, sources))
                except BuildError as error:
                    self._answer = error  # the next cell would fail in the same way
            if isinstance(self._answer, BuildError):
                raise self._answer
            return self._answer

    @property
    def known(self) -> Mapping[str, str] | None:
        """The compiler's output, if it has run by now."""
        return self._answer if isinstance(self._answer, Mapping) else None

    @property
    def dockerfile(self) -> str:
        """What is built to run it: for each compiler a file with its macros, and one for each option."""
        options = " ".join(["''", *sorted(self.options)])
        script = (
            f"for cc in {' '.join(self._names)}; do for option in {options}; do "
            '"$cc" $option -dM -E -x c /dev/null > "/macros/$cc$option" || rm "/macros/$cc$option"; '
            "done; done"
        )
        return (
            f"{self._stage}\nFROM {STAGE} AS imagematrix-macros\nRUN mkdir /macros; {script}\n"
            "FROM scratch\nCOPY --from=imagematrix-macros /macros /\n"
        )

    def _choose_answer(self, files: Mapping[str, str]) -> Mapping[str, str]:
        """Return the macros of the first compiler for the architecture; raise BuildError if there is none."""
        arches = {name: macros.find_arch(files[name]) for name in self._names if name in files}
        for name, arch in arches.items():
            if arch == self._arch:
                return {option: files[name + option] for option in self.options if name + option in files}
        command, cross_command = self._names
        if arches:
            found = ", ".join(f"{name} makes code for {arch or 'another'}" for name, arch in arches.items())
            message = f"the template's stage {STAGE!r} has no compiler for {self._arch}: its {found}"
            wrapper = f'#!/bin/sh\\nexec clang --target={self._arch}-linux-gnu "$@"\\n'
            remedy = (
                f"install {cross_command} in it; or with clang, a {command} that calls it: "
                f"RUN printf '{wrapper}' > /usr/local/bin/{command} && chmod +x /usr/local/bin/{command}"
            )
        else:
            message = f"the template's stage {STAGE!r} has no command {command}"
            remedy = f"install a compiler in it, and link it: ln -s /usr/bin/gcc-14 /usr/local/bin/{command}"
        raise BuildError(message, remedy=remedy)


def _make_unknown_flags_error(item: Planned, option: str) -> BuildError:
    return BuildError(
        f"the compiler of {item.cell.id} does not support {option}",
        remedy="exclude these cells, or use a base image with a newer compiler",
    )
