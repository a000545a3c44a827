"""Cells to Dockerfiles, with jinja2: to write an unknown variable, or one without a value, is an error."""

from __future__ import annotations

from functools import lru_cache

import jinja2
import jinja2.sandbox

from imagematrix.errors import ImagematrixError, UsageError
from imagematrix.facts import device_code
from imagematrix.matrix.feasibility import ARCHES
from imagematrix.matrix.problems import nearest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping
    from pathlib import Path
    from typing import Any

    from imagematrix.matrix.matrix import Cell

__all__ = ["Renderer", "variables"]


class Renderer:
    """Renders the templates of one folder; a template is compiled once for all its cells.

    Templates come with the matrix, perhaps from a pull request, so they run in jinja's sandbox: rendering
    can't touch this machine.
    """

    def __init__(self, templates: Path) -> None:
        self._environment = _Environment(
            loader=jinja2.FileSystemLoader(templates),
            undefined=_Unknown,
            finalize=_present,
            autoescape=False,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            auto_reload=False,
        )
        self._environment.tests["none"] = lambda value: value is None or isinstance(value, _NoValue)
        self._folder = templates

    def render(self, cell: Cell, images: Mapping[str, str]) -> str:
        """Return the Dockerfile of `cell`; raise UsageError naming template and line.

        `images` are the references of the other images of the same cell, by name.
        """
        name = cell.image.template
        try:
            return self._environment.get_template(name).render(_named(variables(cell)), images=images)
        except ImagematrixError:  # of an image that this one builds on
            raise
        except jinja2.TemplateNotFound as error:
            raise UsageError(f"{self._folder / name}: no template {error.name!r}") from error
        except jinja2.TemplateSyntaxError as error:
            where = f"{error.filename or self._folder / name}:{error.lineno}"
            raise UsageError(f"{where}: {error.message}") from error
        except Exception as error:  # what a template does with filters can end in any of Python's errors
            raise self._error(cell, error) from error

    def _error(self, cell: Cell, error: Exception) -> UsageError:
        where = self._where(error, cell.image.template)
        message = f"{where}: {error} (in the cell {cell.id})"
        known = variables(cell)
        words = str(error).split("'")
        name = words[1] if isinstance(error, jinja2.UndefinedError) and len(words) > 1 else None
        if isinstance(error, _NoValueError):
            remedy = f"ask for it first: {{% if {name} %}}...{{% endif %}}"
        else:
            remedy = (nearest(name, known) if name else None) or f"templates see {', '.join(sorted(known))}"
        return UsageError(message, remedy=remedy)

    def _where(self, error: Exception, name: str) -> str:
        """Return file and line of the innermost template frame."""
        place = str(self._folder / name)
        trace = error.__traceback__
        while trace:
            file = trace.tb_frame.f_code.co_filename
            if file.startswith(str(self._folder)):
                place = f"{file}:{trace.tb_lineno}"
            trace = trace.tb_next
        return place


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, where a template's globals are a plain dictionary.

    Jinja copies them for every rendering, and to copy its own ChainMap takes a quarter of all the time.
    """

    def make_globals(self, d: MutableMapping[str, Any] | None) -> MutableMapping[str, Any]:
        return {**self.globals, **(d or {})}


class _NoValueError(jinja2.UndefinedError):
    """What has no value in this cell was used as if it had one."""


class _Unknown(jinja2.StrictUndefined):
    """A name that templates don't have: nothing can be done with it, nor with a list that holds it."""

    __slots__ = ()
    __repr__ = jinja2.Undefined._fail_with_undefined_error  # noqa: SLF001 - what jinja's own kinds do


class _NoValue(jinja2.Undefined):
    """A name without a value in this cell: a template may ask for it, but can't write it or compute with it.

    None would not do: `"x" ~ cuda` would write xNone.
    """

    __slots__ = ()
    __str__ = __repr__ = __iter__ = __len__ = jinja2.Undefined._fail_with_undefined_error  # noqa: SLF001

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, _NoValue)

    def __hash__(self) -> int:
        return hash(None)


@lru_cache(maxsize=64)
def _no_value(name: str) -> _NoValue:
    return _NoValue(hint=f"'{name}' has no value here", name=name, exc=_NoValueError)


def _named(found: dict[str, object]) -> dict[str, object]:
    """Return `found` with something that knows its name in place of each None."""
    return {name: _no_value(name) if value is None else value for name, value in found.items()}


def _present(value: object) -> object:
    if value is None:  # a template's own, such as what a dict has not
        raise jinja2.TemplateRuntimeError("none would be written here")
    return value


def variables(cell: Cell) -> dict[str, object]:
    """Return what a template sees of `cell`.

    Every axis by its name (None where it means nothing in this cell), the properties of the cell's values,
    `image`, `version`, `arch` (as uname says it), `march_option` (how the compiler wants the march) and
    `cflags`, and the GPU's target in the words of build systems (`_build_words`).
    """
    compute, march = cell.axes.get("compute"), cell.axes.get("march")
    option = cell.facts.option(march) if march else None
    return {
        "image": cell.image.name,
        "version": cell.image.version,
        "compute": None,
        "driver": None,
        "march": None,
        **cell.axes,
        **cell.properties,
        "cuda": cell.cuda,
        "platform": cell.platform,
        "arch": ARCHES[cell.platform],
        "march_option": option,
        # What a build system takes from CFLAGS replaces its own default, and that is -O2 almost everywhere.
        "cflags": f"-O2 {option}" if option else "-O2",
        **_build_words(compute),
    }


@lru_cache(maxsize=256)
def _build_words(compute: str | None) -> dict[str, str | None]:
    """Return a GPU target as build systems write it, each without PTX: a catalog promises cubins only.

    Sources: CMake's manual for CUDAARCHS, PyTorch's cmake/Modules_CUDA_fix for TORCH_CUDA_ARCH_LIST,
    TensorFlow's configure.py for TF_CUDA_COMPUTE_CAPABILITIES, nvcc's manual for -gencode.
    """
    target = device_code.target(compute) if compute else None
    return {
        "sm": target,
        "cudaarchs": target and f"{target}-real",
        "torch_cuda_arch_list": compute,
        "tf_cuda_compute_capabilities": target and f"sm_{target}",
        "nvcc_gencode": target and f"-gencode=arch=compute_{target},code=sm_{target}",
    }
