"""Blocks of a transformer that PyTorch compiles for the CPU, with their gradients: transformer.py [BLOCKS].

It prints the seconds from its start, imports included, to its first result.
"""

import sys
import time

started = time.monotonic()

import torch
from torch import Tensor, nn

BLOCKS = int(sys.argv[1]) if len(sys.argv) > 1 else 1
HEADS, WIDTH, LENGTH, BATCH = 4, 64, 32, 8


class Block(nn.Module):
    """A block that attends, and then mixes channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, HEADS, batch_first=True)
        self.between = nn.LayerNorm(width)
        self.mix = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape: batch, length, width."""
        normed = self.before(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.mix(self.between(x))


torch.manual_seed(14)
model = torch.compile(nn.Sequential(*(Block(WIDTH) for _ in range(BLOCKS)), nn.LayerNorm(WIDTH), nn.GELU()))
loss = model(torch.randn(BATCH, LENGTH, WIDTH)).square().mean()
loss.backward()
print(f"result {loss.item():.4f} after {time.monotonic() - started:.1f} s", flush=True)
