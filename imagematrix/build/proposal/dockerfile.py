"""A matrix and a template from a Dockerfile: what in it names hardware or a release becomes an axis.

Nothing else in it changes: with the values that it had, the template gives the Dockerfile again.
"""

from __future__ import annotations

import bisect
import re
from dataclasses import dataclass

from imagematrix.build.dockerfile import dockerfile as dockerfiles
from imagematrix.build.dockerfile.arguments import with_bases_written_out
from imagematrix.build.dockerfile.instructions import parse_instructions
from imagematrix.build.matrix import axis_values
from imagematrix.build.matrix.matrix_facts import MatrixFacts
from imagematrix.build.plan.flags import STAGE
from imagematrix.build.proposal.cells import COMPILER
from imagematrix.errors import UsageError, sanitize_line
from imagematrix.hardware.vendors import installers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from imagematrix.build.dockerfile.instructions import Instruction

# Names of variables, of the environment, of builds or of CMake, whose value is a list of GPUs, and the
# variable of templates that has it for one cell.
GPU_LISTS = {
    "CMAKE_CUDA_ARCHITECTURES": "cudaarchs",
    "CUDAARCHS": "cudaarchs",
    "CUDA_ARCHITECTURES": "cudaarchs",
    "CUDA_DOCKER_ARCH": "cudaarchs",
    "HERMETIC_CUDA_COMPUTE_CAPABILITIES": "tf_cuda_compute_capabilities",
    "TF_CUDA_COMPUTE_CAPABILITIES": "tf_cuda_compute_capabilities",
    "TORCH_CUDA_ARCH_LIST": "torch_cuda_arch_list",
}
# Beginnings of the names of ARGs whose value is a release, and the axes of these.
RELEASES = {
    "CUDA": "cuda",
    "JAX": "jax",
    "PYTHON": "python",
    "PYTORCH": "torch",
    "TENSORFLOW": "tensorflow",
    "TORCH": "torch",
    "VLLM": "vllm",
}
# A word without blanks may be the value of very many names in it, so no value is read beyond what is usual.
VALUE = r"""(?:"(?P<double>[^"$\n]*)"|'(?P<single>[^'$\n]*)'|(?P<plain>[^\s"'$]{1,400})(?=\s|$))"""
GPU_LIST = re.compile(
    rf"(?:\b|(?<=-D))(?P<name>{'|'.join(GPU_LISTS)})(?:=|(?<=[A-Z])[ \t]+){VALUE}", re.ASCII
)
RELEASE = re.compile(rf"(?<=[ \t\n])(?P<name>{'|'.join(RELEASES)})(?:_VER(?:SION)?)?={VALUE}", re.ASCII)
MARCH = re.compile(rf"(?<=[ \t\n])(?P<name>MARCH)={VALUE}", re.ASCII)
MARCH_OPTION = re.compile(r"(?<![\w-])-march=(?P<plain>[\w.+-]+)", re.ASCII)
GENCODE = re.compile(r"(?<![\w-])(?:-gencode|--generate-code|-arch=sm_)", re.ASCII)
CUDA_IMAGE = re.compile(r"\bnvidia/cuda:(?P<plain>\d+\.\d+(?:\.\d+)?)", re.ASCII)
CUDA_TAG = re.compile(r"[:-]cuda(?P<plain>\d+\.\d+)(?=-|\s|$)", re.ASCII)
TORCH_INDEX = re.compile(r"\bdownload\.pytorch\.org/whl/(?P<plain>cu\d{3})\b", re.ASCII)
MOUNT = re.compile(r"--mount=(?P<fields>\S{0,400}\btype=(?P<kind>secret|ssh)\b\S*)", re.ASCII)
MOUNT_ID = re.compile(r"(?:^|,)id=(?P<id>[^,\s]+)", re.ASCII)
GPU = re.compile(r"(?:sm_|compute_)?(\d{1,2})\.?(\d)([af]?)(?:-real|\+PTX)?", re.ASCII)
RELEASE_WORD = re.compile(r"\d+(?:\.\d+){1,3}", re.ASCII)
COMMENT = re.compile(r"^[^\S\n]*#", re.MULTILINE)
JINJA = re.compile(r"\{[{%#]")  # what begins an expression, a tag or a comment of Jinja
NAMES = re.compile(r"(?:docker|container)file(?:\..*)?|.*\.(?:docker|container)file", re.IGNORECASE)
BASELINE = "x86-64"  # what compilers make code for without an option
NO_PTX = "add a value to the axis compute for each newer GPU"
SAME = "it stays as it is; write a variable of the template where it should follow the axis"


@dataclass(frozen=True, slots=True, order=True)
class Remark:
    """What could not be taken over from a line of a Dockerfile, and what to do about it."""

    line: int
    message: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedDockerfile:
    """The template that a Dockerfile becomes, the axes of its matrix with their values, and the remarks.

    `properties` are those of the values of axes. `secrets` and `ssh` are the ids that its mounts name.
    `copies` is whether it copies files of its context.
    """

    template: str
    axes: Mapping[str, tuple[str, ...]]
    properties: Mapping[str, Mapping[str, str]]
    secrets: tuple[str, ...]
    ssh: tuple[str, ...]
    copies: bool
    remarks: tuple[Remark, ...]


def is_dockerfile(name: str, text: str) -> bool:
    """Whether a file with this name and content is meant as a Dockerfile, and not as a document."""
    if NAMES.fullmatch(name):
        return True
    is_document = text.lstrip().startswith(("{", "[", "<"))
    return not is_document and any(step.stage is not None for step in parse_instructions(text)[0])


def convert_dockerfile(
    text: str, find_complaint: Callable[[str], tuple[str, str] | None]
) -> ConvertedDockerfile:
    """Return what a Dockerfile becomes; `find_complaint` returns what is wrong with a path that it copies.

    Raises UsageError if it begins no stage.
    """
    steps, _ = parse_instructions(text)
    if not any(step.stage is not None for step in steps):
        raise UsageError("there is no FROM in it", remedy="name a Dockerfile, or saved hosts")
    conversion = _DockerfileConversion(text)
    conversion.find_axes(steps)
    plain = with_bases_written_out(text, {})
    faults = [*dockerfiles.find_faults(plain), *dockerfiles.find_missing_sources(plain, find_complaint)]
    remarks = [Remark(fault.locate(plain).line, fault.message, fault.remedy) for fault in faults]
    axes = conversion.axes or {"march": BASELINE}
    properties = {"cuda": {"cuda_version": conversion.release}} if conversion.release else {}
    if "march" in axes and not any(step.stage == STAGE for step in steps):
        properties["march"] = {"compiler": COMPILER}
    return ConvertedDockerfile(
        template=conversion.make_template(),
        axes={axis: values if isinstance(values, tuple) else (values,) for axis, values in axes.items()},
        properties=properties,
        secrets=tuple(sorted(conversion.list_ids("secret"))),
        ssh=tuple(sorted(conversion.list_ids("ssh"))),
        copies=any(step.copied for step in steps),
        remarks=tuple(sorted({*conversion.remarks, *remarks})),
    )


class _DockerfileConversion:
    """What was found in a Dockerfile so far: axes, remarks, and places that take a variable of templates.

    `release` is the CUDA release with its patch, as base images have it, or None.
    """

    def __init__(self, text: str) -> None:
        self.axes: dict[str, str | tuple[str, ...]] = {}
        self.release: str | None = None
        self.remarks: list[Remark] = []
        self._text = text
        self._line_starts = [0, *(newline.end() for newline in re.finditer("\n", text))]
        self._comment_starts = {comment.start() for comment in COMMENT.finditer(text)}
        self._variables: dict[tuple[int, int], str] = {}

    def find_axes(self, steps: Sequence[Instruction]) -> None:
        """Look for axes in all instructions; GPUs come last, as they need a CUDA release."""
        finders = (
            (CUDA_IMAGE, ("from",), self._find_cuda),
            (CUDA_TAG, ("from",), self._find_cuda),
            (RELEASE, ("arg",), self._find_release),
            (TORCH_INDEX, (), self._find_torch_index),
            (MARCH, ("arg", "env"), self._find_march),
            (MARCH_OPTION, (), self._find_march),
            (GPU_LIST, (), self._find_gpus),
            (GENCODE, (), self._find_gencode),
        )
        ends = [*(step.start for step in steps[1:]), len(self._text)]
        for pattern, commands, take_match in finders:
            for step, end in zip(steps, ends, strict=True):
                if commands and step.command not in commands:
                    continue
                for match in pattern.finditer(self._text, step.start, end):
                    line = self._find_line(match)
                    if self._line_starts[line - 1] not in self._comment_starts:
                        take_match(match)

    def make_template(self) -> str:
        """Return the text with variables in their places, and everything else safe from Jinja."""
        parts: list[str] = []
        end = 0
        for (start, following), variable in sorted(self._variables.items()):
            parts += [_escape_jinja(self._text[end:start]), f"{{{{ {variable} }}}}"]
            end = following
        return "".join([*parts, _escape_jinja(self._text[end:])])

    def list_ids(self, kind: str) -> set[str]:
        """Return the ids of secrets or of SSH agents that mounts name."""
        ids = set()
        for mount in MOUNT.finditer(self._text):
            name = MOUNT_ID.search(mount["fields"])
            word = name["id"] if name else "default"
            if mount["kind"] == kind and axis_values.GIVEN_ID.fullmatch(word):
                ids.add(word)
        return ids

    def _find_release(self, match: re.Match[str]) -> None:
        axis, value = RELEASES[match["name"]], _get_value(match)
        if axis == "cuda":
            self._find_cuda(match)
        elif RELEASE_WORD.fullmatch(value) and self._has_axis(match, axis, value):
            self._replace_value(match, axis)

    def _find_cuda(self, match: re.Match[str]) -> None:
        value = _get_value(match)
        release = ".".join(value.split(".")[:2])
        if not RELEASE_WORD.fullmatch(value) or not self._has_axis(match, "cuda", release):
            return
        if value == release:
            self._replace_value(match, "cuda")
        elif self.release in (None, value):
            self.release = value
            self._replace_value(match, "cuda_version")
        else:
            self._add_remark(match, f"{value} is another patch of CUDA {release} than {self.release}", SAME)

    def _find_torch_index(self, match: re.Match[str]) -> None:
        value = _get_value(match)
        release = f"{value[2:4]}.{value[4:]}"
        if installers.get_torch_backend(release) == value and self._has_axis(match, "cuda", release):
            self._replace_value(match, "torch_backend")

    def _find_gencode(self, match: re.Match[str]) -> None:
        self._add_remark(match, f"{match[0]} names GPUs itself", "write {{ nvcc_gencode }} in its place")

    def _find_march(self, match: re.Match[str]) -> None:
        if self._has_axis(match, "march", _get_value(match)):
            self._replace_value(match, "march")

    def _find_gpus(self, match: re.Match[str]) -> None:
        gpus = [GPU.fullmatch(word) for word in re.split(r"[;,\s\\]+", _get_value(match).strip()) if word]
        assignment = f"{match['name']}={sanitize_line(_get_value(match))}"
        variable = f"{{{{ {GPU_LISTS[match['name']]} }}}}"
        if not gpus or None in gpus:
            remedy = f"list GPUs in the axis compute, and write {variable}"
            self._add_remark(match, f"{assignment} is no list of compute capabilities", remedy)
            return
        values = tuple(dict.fromkeys(f"{gpu[1]}.{gpu[2]}{gpu[3]}" for gpu in gpus if gpu))
        if "cuda" not in self.axes:
            remedy = f"add the axes cuda and compute to matrix.yaml, and write {variable}"
            self._add_remark(match, f"{assignment} names GPUs, but nothing the CUDA release", remedy)
        elif self._has_axis(match, "compute", values):
            self._replace_value(match, GPU_LISTS[match["name"]])
            if "+PTX" in _get_value(match):
                message = f"{assignment} asks for PTX, and images have code for their GPUs only"
                self._add_remark(match, message, NO_PTX)

    def _has_axis(self, match: re.Match[str], axis: str, values: str | tuple[str, ...]) -> bool:
        """Whether an axis has these values, or has none yet and gets them; add a remark if it cannot."""
        for value in values if isinstance(values, tuple) else (values,):
            complaint = axis_values.check_value(axis, value, MatrixFacts())
            if complaint:
                self._add_remark(match, complaint[0], complaint[1] or SAME)
                return False
        if self.axes.setdefault(axis, values) != values:
            here = " ".join(values) if isinstance(values, tuple) else values
            self._add_remark(match, f"{here} differs from an earlier value for the axis {axis}", SAME)
            return False
        return True

    def _replace_value(self, match: re.Match[str], variable: str) -> None:
        self._variables[match.span(match.lastgroup or 0)] = variable

    def _add_remark(self, match: re.Match[str], message: str, remedy: str) -> None:
        self.remarks.append(Remark(self._find_line(match), message, remedy))

    def _find_line(self, match: re.Match[str]) -> int:
        return bisect.bisect_right(self._line_starts, match.start())


def _get_value(match: re.Match[str]) -> str:
    return match[match.lastgroup or 0]


def _escape_jinja(text: str) -> str:
    """Return a template that gives `text`."""
    return JINJA.sub(lambda match: f'{{{{ "{match[0]}" }}}}', text)
