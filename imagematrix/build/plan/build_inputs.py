"""Inputs of builds from the command line: secrets and SSH agents by id, build arguments, proxies.

The matrix declares which of them an image uses. Ids, arguments with their values and the names of proxies
are part of the image's identity; the contents of secrets and the addresses of proxies are not. Variables
that would change an image, but not its identity, are kept from buildx.
"""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass, field
from pathlib import Path

from imagematrix.build.plan.protocols import BuildSources
from imagematrix.common.suggestions import suggest_nearest
from imagematrix.common.text import format_csv_line
from imagematrix.errors import UsageError
from imagematrix.hardware.vendors import vector_length

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from imagematrix.build.matrix.matrix import Cell, Image

# Source policies, labels from git, attestations, other frontends: see docs.docker.com, "Build variables".
BUILDX_PREFIXES = (
    "BUILDX_",
    "BUILDKIT_",
    "EXPERIMENTAL_BUILDKIT_",
    "SOURCE_DATE_EPOCH",
    "DOCKER_DEFAULT_PLATFORM",
)
KEPT = ("BUILDX_CONFIG",)  # the location of builders for --builder
# buildx would otherwise ask git about the copy of the context, which is in no repository of its own.
BUILDX_SETTINGS = {"BUILDX_METADATA_PROVENANCE": "disabled", "BUILDX_GIT_INFO": "0"}
# Set in every build by docker's own configuration (config.json, "proxies") unless overridden.
PROXIES = ("ALL_PROXY", "FTP_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildInputs:
    """The inputs: `secrets` and `ssh` by id, in the syntax of buildx; `args` and `proxies` by name."""

    secrets: Mapping[str, str] = field(default_factory=dict)
    ssh: Mapping[str, str] = field(default_factory=dict)
    args: Mapping[str, str] = field(default_factory=dict)
    proxies: tuple[str, ...] = ()

    def get_arguments(self, image: Image) -> dict[str, str] | None:
        """Return the build arguments of an image; None if one has no value."""
        arguments = {name: self.args.get(name, default) for name, default in image.build_args}
        known = {name: value for name, value in arguments.items() if value is not None}
        return known if len(known) == len(arguments) else None

    def list_components(self, image: Image) -> dict[str, str]:
        """Return the components for an image's identity."""
        return {
            **({"secrets": ",".join(image.secrets)} if image.secrets else {}),
            **({"ssh": ",".join(image.ssh)} if image.ssh else {}),
            **({"proxy": ",".join(self.proxies)} if self.proxies else {}),
            **{f"arg {name}": value for name, value in (self.get_arguments(image) or {}).items()},
        }

    def make_sources(self, cell: Cell, context: Path, images: Mapping[str, str]) -> BuildSources:
        """Return the sources of a cell's build, which include the `context` and the `images`."""
        image = cell.image
        return BuildSources(
            context=context,
            platform=cell.platform,
            images=images,
            args=self.get_arguments(image) or {},
            secrets=tuple(self.secrets.get(name, f"id={name}") for name in image.secrets),
            ssh=tuple(self.ssh.get(name, name) for name in image.ssh),
        )

    def read_secret(self, name: str) -> bytes:
        """Return the content of a secret; raise UsageError if it was not given or cannot be read."""
        if name not in self.secrets:
            raise UsageError(f"the secret {name} is missing", remedy=f"pass --secret id={name},src=FILE")
        fields = dict(part.partition("=")[::2] for part in next(csv.reader([self.secrets[name]])))
        if fields["type"] == "env":
            return os.environb[os.fsencode(fields["env"])]
        try:
            return Path(fields["src"]).read_bytes()
        except OSError as error:
            raise UsageError(f"{fields['src']}: {error.strerror}") from error

    def require_known(self, images: Sequence[Image]) -> None:
        """Raise UsageError if an input is declared by no image, or an argument has no value."""
        secrets = [name for image in images for name in image.secrets]
        secrets += [name for image in images if image.test for name in image.test.secrets]
        for option, inputs, declared in (
            ("--secret", self.secrets, {*secrets}),
            ("--ssh", self.ssh, {name for image in images for name in image.ssh}),
            ("--build-arg", self.args, {name for image in images for name, _ in image.build_args}),
        ):
            for name in sorted(inputs.keys() - declared):
                remedy = (
                    suggest_nearest(name, declared) or "declare it in matrix.yaml for the image that uses it"
                )
                raise UsageError(f"{option}: no image declares {name!r}", remedy=remedy)
        for name, value in sorted(self.args.items()):
            for compiler_option in vector_length.find_options(value):
                message = vector_length.explain_option(compiler_option[0])
                raise UsageError(f"--build-arg {name}: {message}", remedy=vector_length.REMEDY)
        for image in images:
            for name, default in image.build_args:
                if default is None and name not in self.args:
                    raise UsageError(
                        f"{image.name} needs a value for the build argument {name}",
                        remedy=f"pass --build-arg {name}=VALUE, or set it in matrix.yaml",
                    )

    def require_all(self, images: Iterable[Image]) -> None:
        """Raise UsageError if a secret or agent that an image needs is missing."""
        for image in images:
            missing = [f"--secret id={name}" for name in image.secrets if name not in self.secrets]
            missing += [f"--ssh {name}" for name in image.ssh if name not in self.ssh]
            if missing:
                remedy = "see `imagematrix build --help` for their values"
                raise UsageError(f"{image.name} cannot be built without {', '.join(missing)}", remedy=remedy)


def parse_build_inputs(
    secrets: Iterable[str] = (), ssh: Iterable[str] = (), args: Iterable[str] = (), *, proxy: bool = False
) -> BuildInputs:
    """Return the inputs in the options of the command line; raise UsageError if one is invalid."""
    names = find_proxy_variables(os.environ) if proxy else ()
    if proxy and not names:
        raise UsageError("--proxy: no proxy variable is set", remedy="such as HTTPS_PROXY=http://proxy:3128")
    return BuildInputs(
        secrets=dict(map(_parse_secret, secrets)),
        ssh=dict(map(_parse_ssh, ssh)),
        args=dict(map(_parse_build_arg, args)),
        proxies=names,
    )


def _parse_secret(text: str) -> tuple[str, str]:
    try:
        fields = dict(part.partition("=")[::2] for part in next(csv.reader([text]), []))
    except csv.Error:
        fields = {}
    name, file, variable = fields.pop("id", ""), fields.pop("src", ""), fields.pop("env", "")
    if not name or fields or (file and variable):
        remedy = "such as --secret id=token,env=TOKEN or --secret id=ca,src=ca.pem"
        raise UsageError(f"--secret {text}: expected id=NAME with src=FILE or env=NAME", remedy=remedy)
    if not file and (variable or name in os.environ):
        variable = variable or name
        if variable not in os.environ:
            raise UsageError(f"--secret {text}: the variable {variable} is not set")
        return name, format_csv_line(f"id={name}", "type=env", f"env={variable}")
    path = Path(file or name)
    # In this order: is_file raises OSError for a name that is too long.
    if not os.access(path, os.R_OK) or not path.is_file():
        raise UsageError(f"--secret {text}: {path} is not a readable file")
    return name, format_csv_line(f"id={name}", "type=file", f"src={path}")


def _parse_ssh(text: str) -> tuple[str, str]:
    name, _, keys = text.partition("=")
    if not keys and not os.environ.get("SSH_AUTH_SOCK"):
        raise UsageError(
            f"--ssh {text}: no SSH agent is running", remedy="start ssh-agent, or pass --ssh ID=KEYFILE"
        )
    return name, text


def _parse_build_arg(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--build-arg {text}: expected NAME=VALUE")
    return name, value


def scrub_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without the variables that change what buildx and BuildKit build."""
    return {
        name: value
        for name, value in environment.items()
        if name in KEPT or not name.startswith(BUILDX_PREFIXES)
    } | BUILDX_SETTINGS


def find_proxy_variables(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the proxy variables in `environment`, in upper case."""
    return tuple(name for name in PROXIES if environment.get(name) or environment.get(name.lower()))
