"""The rules, in the order in which `explain` shows them."""

from imagematrix.selection.rules import (
    cpu,
    device_code,
    driver_compat,
    driver_cuda,
    driver_exact,
    driver_gpu,
    fatbin,
    nvidia_require,
    platform,
)

__all__ = ["RULES"]

RULES = (
    platform.RULE,
    driver_exact.RULE,
    driver_compat.RULE,
    driver_gpu.RULE,
    driver_cuda.RULE,
    device_code.RULE,
    fatbin.RULE,
    cpu.RULE,
    nvidia_require.RULE,
)
