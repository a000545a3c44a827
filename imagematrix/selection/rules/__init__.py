"""The rules, in the order in which `explain` shows them."""

from imagematrix.selection.rules import (
    cpu,
    device_code,
    driver_compat,
    driver_cuda,
    driver_exact,
    driver_gpu,
    driver_host,
    fatbin,
    memory,
    nvidia_require,
    platform,
)

# `platform` has to be the first: see `VariantIndex.find_nearest`. Of the others, the last ones count most for
# what is nearest (`rank_candidates`), so those about hardware follow those about drivers.
RULES = (
    platform.RULE,
    driver_exact.RULE,
    driver_compat.RULE,
    driver_host.RULE,
    driver_gpu.RULE,
    driver_cuda.RULE,
    device_code.RULE,
    fatbin.RULE,
    memory.RULE,
    cpu.RULE,
    nvidia_require.RULE,
)
