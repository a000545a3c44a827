"""Train a small model for one step on the GPU, as torch.compile compiles it."""

from __future__ import annotations

import sys

import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.LayerNorm(256)).cuda()
x = torch.randn(32, 64, device="cuda")
result = torch.compile(model)(x)
result.square().mean().backward()
if not torch.allclose(result, model(x), rtol=1e-2, atol=1e-2):
    sys.exit("the result is not that of the model as it was")
