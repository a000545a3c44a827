"""The platforms of a Dockerfile's stages: that of the image, or that of the machine that builds."""

from __future__ import annotations

import re

from imagematrix.build.dockerfile.instructions import Fault, parse_by_paragraph

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from imagematrix.build.dockerfile.instructions import Instruction

BUILDER = "$BUILDPLATFORM"  # BuildKit's name for the platform of the machine that builds
BUILDER_VARIABLE = "BUILDPLATFORM"  # few Dockerfiles have it, and the others need not be read for platforms
TARGET = "$TARGETPLATFORM"  # and for the platform of the image, which is the default of a stage
BRACED = re.compile(r"\$\{(\w+)\}", re.ASCII)


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


def find_stage_platforms(steps: Sequence[Instruction]) -> Iterator[tuple[Instruction, str, bool]]:
    """Yield each FROM with the platform of its stage, and whether it names an external image.

    The platform is `BUILDER`, `TARGET`, or as the Dockerfile names it. A stage that starts from another has
    its platform.
    """
    platforms: dict[str, str] = {}
    for step in steps:
        if step.stage is None:
            continue
        base = step.names[0].text.lower()
        stated = BRACED.sub(r"$\1", step.platform)
        platform = stated or platforms.get(base, TARGET)
        yield step, platform, base != "scratch" and base not in platforms
        if step.stage:
            platforms[step.stage] = platform
