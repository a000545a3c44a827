"""The platforms of a Dockerfile's stages: that of the image, or that of the machine that builds."""

from __future__ import annotations

from imagematrix.build.dockerfile.arguments import expand_word, find_values
from imagematrix.build.dockerfile.instructions import Fault, parse_by_paragraph

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from imagematrix.build.dockerfile.instructions import Instruction

FLAG = "--platform"  # few Dockerfiles have it, and the others need not be read for platforms
BUILDER = "$BUILDPLATFORM"  # BuildKit's name for the platform of the machine that builds
TARGET = "$TARGETPLATFORM"  # and for the platform of the image, which is the default of a stage
# The values that BuildKit gives to variables in FROM, as far as every build has the same.
GIVEN = {
    "BUILDPLATFORM": BUILDER,
    "BUILDOS": "linux",
    "BUILDARCH": "$BUILDARCH",
    "TARGETPLATFORM": TARGET,
    "TARGETOS": "linux",
    "TARGETARCH": "$TARGETARCH",
}
SPELLINGS = {
    "linux/$BUILDARCH": BUILDER,
    "linux/$TARGETARCH": TARGET,
    "amd64": "linux/amd64",
    "arm64": "linux/arm64",
    "linux/arm64/v8": "linux/arm64",
}


def list_builder_bases(dockerfile: str) -> tuple[str, ...]:
    """Return the external images that are used for the machine that builds, in order, each once."""
    begins = find_stage_platforms(parse_by_paragraph(dockerfile))
    names = (step.names[0].text for step, platform, external in begins if external and platform == BUILDER)
    return tuple(dict.fromkeys(names))


def find_builder_image_faults(steps: Sequence[Instruction]) -> list[Fault]:
    """Return the fault of a last stage that is for the machine that builds, not for the image."""
    begins = list(find_stage_platforms(steps))
    if not begins or begins[-1][1] != BUILDER:
        return []
    message = "the last stage is for the platform of the machine that builds, not for that of the image"
    remedy = "begin it without --platform, and copy what was built into it: COPY --from=STAGE"
    return [Fault(message, begins[-1][0].start, remedy)]


def find_stage_platforms(
    steps: Sequence[Instruction], arguments: Mapping[str, str | None] | None = None
) -> Iterator[tuple[Instruction, str, bool]]:
    """Yield each FROM with the platform of its stage, and whether it names an external image.

    The platform is `BUILDER`, `TARGET`, the name of one, or text with a variable whose value is not known.
    A stage that starts from another has its platform. `arguments` are build arguments that replace the
    values in the Dockerfile; None if it is not known by which value.
    """
    values = find_values(steps, arguments or {}, GIVEN)
    platforms: dict[str, str] = {}
    for step in steps:
        if step.stage is None:
            continue
        base = step.names[0].text.lower()
        stated = expand_word(step.platform, values, GIVEN)
        if stated is None:
            platform = step.platform
        else:
            platform = SPELLINGS.get(stated, stated) or platforms.get(base, TARGET)
        yield step, platform, base != "scratch" and base not in platforms
        if step.stage:
            platforms[step.stage] = platform
