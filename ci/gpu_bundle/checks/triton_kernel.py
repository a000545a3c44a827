"""Add two tensors on the GPU, by a kernel that Triton compiles."""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
import triton.language as tl

Pointer = Any  # of Triton, to the elements of a tensor
SIZE, BLOCK = 10_000, 1024


@triton.jit  # type: ignore[untyped-decorator]
def add(x: Pointer, y: Pointer, result: Pointer, size: int, block: tl.constexpr) -> None:
    """Add two tensors of `size` numbers."""
    places = tl.program_id(0) * block + tl.arange(0, block)
    inside = places < size
    total = tl.load(x + places, mask=inside) + tl.load(y + places, mask=inside)
    tl.store(result + places, total, mask=inside)


x = torch.rand(SIZE, device="cuda")
y = torch.rand(SIZE, device="cuda")
result = torch.empty_like(x)
add[(triton.cdiv(SIZE, BLOCK),)](x, y, result, SIZE, block=BLOCK)
if not torch.equal(result, x + y):
    sys.exit("the sum is wrong")
