"""Claim a GPU as a launch does, and run a command that holds the claim: claim.py INDEX COMMAND..."""

from __future__ import annotations

import os
import sys

from imagematrix import ImagematrixError, probe
from imagematrix.hardware.gpu_request.choice import Choice
from imagematrix.hardware.gpu_request.spec import select_gpus
from imagematrix.launcher.gpu_claims.gpu_claim import ClaimRequest, claim_gpus
from imagematrix.launcher.gpu_claims.survey import query_nvml, survey_usage


def main() -> int:
    """Claim the GPU, or print its users."""
    host = probe()
    try:
        gpus = select_gpus(host.gpus, f"device={sys.argv[1]}")
        choice = Choice(gpus=gpus, count=1)
        taken = claim_gpus(
            ClaimRequest(choices=[choice]), lambda _: survey_usage(host.gpus, lambda: (), query_nvml)
        )
    except ImagematrixError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    taken.pass_on()
    return os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - without a shell, on purpose


if __name__ == "__main__":
    sys.exit(main())
