"""The typer application: all commands with their options."""

from __future__ import annotations

import contextlib
import os
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from imagematrix.cli.shared import completion
from imagematrix.cli.shared.message_commands import remember_parameters
from imagematrix.cli.shared.options import resolve_options
from imagematrix.common.extras import find_missing_extra, make_install_command
from imagematrix.errors import UsageError, sanitize_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}

# By what one wants to do, in the order of --help, the commands of every day first. Each names a module with a
# function `command`, and perhaps an EXAMPLE of its use, or a package that lists its subcommands in COMMANDS.
GROUPS = {
    "Every day": ("init", "build", "publish", "select", "run"),
    "Build": ("validate", "plan", "render", "lock", "outdated", "bump", "report", "trim", "export", "schema"),
    "Publish and keep": ("warm", "copy", "verify", "adopt", "ls", "prune", "retire"),
    "Choose and run": ("explain", "needs", "pull"),
    "Nodes and fleets": ("probe", "gpus", "doctor", "coverage"),
    "Clusters": ("kubernetes", "slurm", "swarm", "resolver", "oci-task"),
    "Help": ("help",),
}
COMMANDS = {name: group for group, names in GROUPS.items() for name in names}


def make_app(words: Sequence[str] = ()) -> typer.Typer:
    """Return the application; if the first of `words` is a command, with that command only.

    Loading the others takes longer than many commands run. For completion, the words come from the shell.
    """
    application = typer.Typer(
        cls=_Commands,
        name="imagematrix",
        help=_unfold(_declare_common_options.__doc__),
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings=HELP,
    )
    application.callback()(_declare_common_options)
    _add_commands(application, "imagematrix.cli", COMMANDS, words or completion.split_line(os.environ))
    return application


def _add_commands(
    application: typer.Typer, package: str, groups: Mapping[str, str | None], words: Sequence[str]
) -> None:
    """Add the commands of a package, each in its group; only one if it is the first of `words`."""
    chosen = [name for name in words[:1] if name in groups]
    for name in chosen or groups:
        module = import_module(f"{package}.{name.replace('-', '_')}")
        if commands := getattr(module, "COMMANDS", ()):
            group = typer.Typer(
                cls=_Commands, help=_unfold(module.__doc__), no_args_is_help=True, context_settings=HELP
            )
            _add_commands(group, module.__name__, dict.fromkeys(commands), words[1:])
            application.add_typer(group, name=name, rich_help_panel=groups[name])
        else:
            settings = {"help": _unfold(module.command.__doc__), **getattr(module, "SETTINGS", {})}
            if example := getattr(module, "EXAMPLE", None):
                settings["epilog"] = f"Example: {example}"
            command = application.command(name, cls=_Command, rich_help_panel=groups[name], **settings)
            command(resolve_options(module.command))


def _unfold(docstring: str | None) -> str:
    """Return a docstring with each paragraph on one line, which the terminal folds."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in (docstring or "").split("\n\n"))


def _hide_types(parameters: list[Any]) -> list[Any]:
    """Make help show no Python types, such as list[Path], beside arguments and options without a value."""
    for parameter in parameters:
        if isinstance(parameter, TyperArgument) or parameter.is_flag:
            parameter.display_type_rich = lambda **_: None
    return parameters


class _Command(TyperCommand):
    """A command that messages repeat with its options, and that names an extra which it lacks."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _hide_types(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line, with arguments as the manuals of Unix commands write them."""
        arguments = filter(lambda parameter: isinstance(parameter, TyperArgument), self.get_params(ctx))
        return [self.options_metavar or "", *map(_format_argument, arguments)]

    def invoke(self, ctx: Any) -> Any:
        typed = (name for name in ctx.params if ctx.get_parameter_source(name).name == "COMMANDLINE")
        remember_parameters({name: ctx.params[name] for name in typed})
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            extra = find_missing_extra(error, ctx.command_path)
            if extra is None:
                raise
            what = f"{ctx.command_path} needs the extra [{extra}]"
            raise UsageError(f"{what}: {make_install_command(extra)}") from error


def _format_argument(argument: Any) -> str:
    name = argument.metavar or str(argument.name).upper()
    return name if argument.required else f"[{name}]"


class _Commands(TyperGroup):
    """Commands whose errors escape words of the command line, such as names of files, as other errors do."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _hide_types(super().get_params(ctx))

    def make_context(self, *words: Any, **named: Any) -> Any:
        with _sanitize_errors():
            return super().make_context(*words, **named)

    def invoke(self, ctx: Any) -> Any:
        with _sanitize_errors():
            return super().invoke(ctx)


@contextlib.contextmanager
def _sanitize_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(
            message := getattr(error, "message", None), str
        ):  # typer's, whose base has no public name
            error.message = sanitize_text(message)  # type: ignore[attr-defined]
        raise


def _print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        print(version("imagematrix"))
        raise typer.Exit


def _declare_common_options(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Build one immutable image for each hardware configuration, and run the one that fits.

    matrix.yaml lists the values of each axis, such as CUDA release, driver, GPU and CPU. A cell is one
    combination of them. The image that is built from a cell is a variant, and the variants of one version,
    such as training:v1, are the catalog from which a node gets the one that fits.
    """
