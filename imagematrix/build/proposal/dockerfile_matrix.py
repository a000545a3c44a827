"""The text of matrix.yaml for a template that a Dockerfile has become."""

from __future__ import annotations

import json

from imagematrix.build.proposal.matrix_text import IMAGE, TEMPLATE, VERSION, quote_yaml

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.build.proposal.dockerfile import ConvertedDockerfile

COMMENTS = {
    "cuda": "with none as a value, there are images without CUDA, too",
    "compute": "one image for each of these GPUs",
    "march": "add x86-64-v3 or znver4, and write {{ cflags }} where the Dockerfile compiles",
}


def format_matrix(converted: ConvertedDockerfile, context: str | None) -> str:
    """Return the text of matrix.yaml; `context` is the folder with the files that it copies, or None."""
    lines = [
        "# One image for each combination of the values of the axes. `imagematrix plan` shows them.",
        "schema: imagematrix.matrix/v1",
        "",
        "images:",
        f"  {IMAGE}:",
        f"    version: {VERSION}                  # frozen: to change an image, raise the version",
        f"    template: {TEMPLATE}  # in the folder templates/",
    ]
    if context is not None:
        lines.append(
            f"    context: {json.dumps(context)}                 # the files that the Dockerfile can COPY"
        )
    for key, ids in (("secrets", converted.secrets), ("ssh", converted.ssh)):
        if ids:
            lines.append(f"    {key}: [{', '.join(map(json.dumps, ids))}]")

    lines += ["", "axes:"]
    if "cuda" in converted.axes:
        lines.append("  # Without an axis driver, images use the driver of the node.")
    for axis, values in converted.axes.items():
        comment = f"  # {COMMENTS[axis]}" if axis in COMMENTS else ""
        lines.append(f"  {axis}: [{', '.join(map(quote_yaml, values))}]{comment}")

    if converted.properties:
        lines += ["", "# Properties of values. Templates see them as variables.", "properties:"]
    for axis, properties in converted.properties.items():
        fields = ", ".join(f"{name}: {quote_yaml(value)}" for name, value in properties.items())
        value = '"*"' if axis == "march" else quote_yaml(converted.axes[axis][0])
        lines.append(f"  {axis}:")
        lines.append(f"    {value}: {{{fields}}}")
    return "\n".join(lines) + "\n"
