"""Run some hundred operators of PyTorch on a device, and print a hash of each result as JSON.

    python operators.py cuda
    python operators.py cuda sparse.mm      # only these, with the hashes of many runs of each

Inputs come from fixed seeds, so two runs on a device agree, except for operators that add in any order.
For these, `size` is the mean of the absolute values. An operator that fails has the name of its error.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Case = Callable[[], Any]

REAL = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int32, torch.int64, torch.uint8)
UNARY = """
    abs acos acosh asin asinh atan atanh ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 floor
    frac i0 isfinite isnan lgamma log log10 log1p log2 logit neg rad2deg reciprocal relu round rsqrt sigmoid
    sign signbit sin sinc sinh sqrt square tan tanh trunc sort argsort fliplr flipud nonzero unique
    sum mean prod std var amax amin argmax argmin median norm all any
"""
BINARY = """
    add sub mul div pow atan2 fmod remainder maximum minimum fmax fmin hypot copysign logaddexp logaddexp2
    nextafter eq ne lt le gt ge isclose cdist
"""
ALONG = "cumsum cumprod cummax cummin logcumsumexp logsumexp softmax topk"  # these need a number
OF_INTEGERS = """
    bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift gcd lcm add mul floor_divide
"""
ACTIVATIONS = """
    celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 selu silu
    softplus softshrink softsign tanhshrink
"""
LINEAR = "inv det slogdet pinv qr svd eigvalsh cholesky_ex matrix_norm cond matrix_exp"
FOURIER = "fft ifft fft2 rfft irfft fftn hfft"
SIZE = 67  # not a multiple of a kernel's block size
REPEATS = 300


def main() -> None:
    """Run the operators named in the arguments, or all, on the device given as the first argument."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    device, names = torch.device(sys.argv[1]), sys.argv[2:]
    if names:
        print(json.dumps({name: _hashes(case) for name, case in _cases(device) if name in names}))
    else:
        print(json.dumps({name: _attempt(case) for name, case in _cases(device)}))


def _hashes(case: Case) -> list[str]:
    return sorted({str(_attempt(case).get("hash")) for _ in range(REPEATS)})


def _attempt(case: Case) -> dict[str, object]:
    torch.manual_seed(0)
    try:
        return _result(case())
    except Exception as error:  # noqa: BLE001 - whatever it is, it is to be the same before and after
        return {"error": type(error).__name__}


def _result(value: object) -> dict[str, object]:
    digest, sizes = hashlib.sha256(), []
    for tensor in _tensors(value):
        own = tensor.detach().cpu().contiguous()
        digest.update(f"{own.dtype} {tuple(own.shape)}".encode())
        digest.update(ctypes.string_at(own.data_ptr(), own.numel() * own.element_size()))
        sizes.append(
            own.to(torch.complex128).abs().nan_to_num(posinf=1.0).mean().item() if own.numel() else 0.0
        )
    return {"hash": digest.hexdigest(), "size": sum(sizes)}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for one in value:
            yield from _tensors(one)


class Inputs(NamedTuple):
    """Makes inputs on a device."""

    device: torch.device

    def real(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return normally distributed numbers."""
        return torch.randn(*shape).to(self.device, dtype)

    def whole(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Return numbers from 1 to 6."""
        return torch.randint(1, 7, shape).to(self.device, dtype)

    def positive(self, size: int) -> torch.Tensor:
        """Return a positive definite matrix."""
        matrix = self.real(size, size)
        return matrix @ matrix.mT + torch.eye(size, device=self.device)


def _cases(device: torch.device) -> Iterator[tuple[str, Case]]:
    """Yield names of operators with functions that call them; the calls create the inputs."""
    inputs = Inputs(device)
    for dtype in REAL:
        short = str(dtype).removeprefix("torch.")
        for name, case in (*_of_elements(inputs, dtype), *_of_layers(device, dtype)):
            yield f"{name} {short}", case
    for dtype in WHOLE:
        square = partial(inputs.whole, SIZE, SIZE, dtype=dtype)
        for name in OF_INTEGERS.split():
            yield f"{name} {str(dtype).removeprefix('torch.')}", partial(_called, torch, name, square, square)
    for name in LINEAR.split():
        yield f"linalg.{name}", partial(_called, torch.linalg, name, partial(inputs.positive, 17))
    for name in FOURIER.split():
        yield f"fft.{name}", partial(_called, torch.fft, name, partial(inputs.real, SIZE, SIZE))
    yield from _others(inputs)
    yield "training", partial(_trained, device)


def _of_elements(inputs: Inputs, dtype: torch.dtype) -> Iterator[tuple[str, Case]]:
    square = partial(inputs.real, SIZE, SIZE, dtype=dtype)
    for name in UNARY.split():
        yield name, partial(_called, torch, name, square)
    for name in ALONG.split():
        yield name, partial(_called, torch, name, square, lambda: 1)
    for name in BINARY.split():
        yield name, partial(_called, torch, name, square, square)
    for name in ACTIVATIONS.split():
        yield name, partial(_called, functional, name, partial(inputs.real, SIZE, 8, dtype=dtype))


def _called(module: Any, name: str, *inputs: Callable[[], object]) -> Any:
    return getattr(module, name)(*(make() for make in inputs))


def _others(inputs: Inputs) -> Iterator[tuple[str, Case]]:
    yield "linalg.solve", lambda: torch.linalg.solve(inputs.positive(17), inputs.real(17, 5))
    yield "gather", lambda: inputs.real(SIZE, SIZE).gather(1, inputs.whole(SIZE, 5))
    yield (
        "scatter",
        lambda: inputs.real(SIZE, SIZE).scatter(
            1, torch.arange(5, device=inputs.device).repeat(SIZE, 1), 2.0
        ),
    )
    yield (
        "scatter_add",
        lambda: inputs.real(SIZE, SIZE).scatter_add(1, inputs.whole(SIZE, SIZE), inputs.real(SIZE, SIZE)),
    )
    yield (
        "index_add",
        lambda: inputs.real(SIZE, SIZE).index_add(0, inputs.whole(SIZE), inputs.real(SIZE, SIZE)),
    )
    yield "index_select", lambda: inputs.real(SIZE, SIZE).index_select(0, inputs.whole(SIZE))
    yield "masked_select", lambda: torch.masked_select(inputs.real(SIZE, SIZE), inputs.real(SIZE, SIZE) > 0)
    yield (
        "where",
        lambda: torch.where(inputs.real(SIZE, SIZE) > 0, inputs.real(SIZE, SIZE), inputs.real(SIZE, SIZE)),
    )
    yield "bincount", lambda: torch.bincount(inputs.whole(1000))
    yield "histc", lambda: torch.histc(inputs.real(1000))
    yield "searchsorted", lambda: torch.searchsorted(inputs.real(SIZE).sort().values, inputs.real(1000))
    yield "tril", lambda: (inputs.real(SIZE, SIZE).tril(), inputs.real(SIZE, SIZE).triu())
    yield (
        "einsum",
        lambda: torch.einsum("bij,bjk->bik", inputs.real(3, SIZE, SIZE), inputs.real(3, SIZE, SIZE)),
    )
    yield "embedding", lambda: functional.embedding(inputs.whole(SIZE), inputs.real(10, SIZE))
    yield "embedding_bag", lambda: functional.embedding_bag(inputs.whole(SIZE, 3), inputs.real(10, SIZE))
    yield "cross_entropy", lambda: functional.cross_entropy(inputs.real(SIZE, 10), inputs.whole(SIZE))
    yield (
        "ctc_loss",
        lambda: functional.ctc_loss(
            inputs.real(50, 3, 20).log_softmax(2),
            inputs.whole(3, 10),
            torch.full((3,), 50),
            torch.full((3,), 10),
        ),
    )
    yield "rand", lambda: torch.rand(SIZE, SIZE, device=inputs.device)
    yield "randn", lambda: torch.randn(SIZE, SIZE, device=inputs.device)
    yield "randperm", lambda: torch.randperm(1000, device=inputs.device)
    yield "multinomial", lambda: torch.multinomial(inputs.real(SIZE, 10).abs(), 3)
    yield "dropout", lambda: functional.dropout(inputs.real(SIZE, SIZE))
    yield "bernoulli", lambda: torch.bernoulli(torch.full((SIZE, SIZE), 0.3, device=inputs.device))
    yield (
        "sparse.mm",
        lambda: torch.sparse.mm(inputs.real(SIZE, SIZE).relu().to_sparse(), inputs.real(SIZE, 5)),
    )
    yield "sparse_csr", lambda: inputs.real(SIZE, SIZE).relu().to_sparse_csr() @ inputs.real(SIZE, 5)
    yield (
        "complex",
        lambda: (
            torch.view_as_complex(inputs.real(SIZE, SIZE, 2))
            @ torch.view_as_complex(inputs.real(SIZE, SIZE, 2))
        ),
    )


def _of_layers(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Case]]:
    """Yield layers of networks, each forwards and backwards."""

    def backward(call: Callable[..., Any], *shapes: tuple[int, ...]) -> Case:
        def both() -> Any:
            inputs = [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]
            output = call(*inputs)
            return output, torch.autograd.grad(output.float().square().sum(), inputs)

        return both

    image = (2, 8, 17, 19)
    yield "matmul", backward(torch.matmul, (129, 65), (65, 33))
    yield "bmm", backward(torch.bmm, (3, 33, 65), (3, 65, 17))
    yield "linear", backward(functional.linear, (33, 64), (32, 64), (32,))
    yield "conv1d", backward(functional.conv1d, (2, 8, 33), (16, 8, 3))
    yield "conv2d", backward(functional.conv2d, image, (16, 8, 3, 3))
    yield "conv3d", backward(functional.conv3d, (2, 4, 9, 9, 9), (8, 4, 3, 3, 3))
    yield "conv_transpose2d", backward(functional.conv_transpose2d, image, (8, 4, 3, 3))
    bilinear = partial(functional.interpolate, scale_factor=2.0, mode="bilinear")
    yield "depthwise", backward(lambda a, b: functional.conv2d(a, b, groups=8), image, (8, 1, 3, 3))
    yield "max_pool2d", backward(lambda a: functional.max_pool2d(a, 3), image)
    yield "avg_pool2d", backward(lambda a: functional.avg_pool2d(a, 3), image)
    yield "adaptive_avg_pool2d", backward(lambda a: functional.adaptive_avg_pool2d(a, 5), image)
    yield (
        "batch_norm",
        backward(lambda a: functional.batch_norm(a, None, None, training=True), image),
    )
    yield "group_norm", backward(lambda a: functional.group_norm(a, 4), image)
    yield "layer_norm", backward(lambda a: functional.layer_norm(a, a.shape[-1:]), (33, 64))
    yield "log_softmax", backward(lambda a: functional.log_softmax(a, 1), (33, 1000))
    yield (
        "interpolate",
        backward(bilinear, image),
    )
    yield "pad", backward(lambda a: functional.pad(a, (1, 2, 3, 4), "reflect"), image)
    yield (
        "attention",
        backward(functional.scaled_dot_product_attention, (2, 4, 65, 64), (2, 4, 65, 64), (2, 4, 65, 64)),
    )
    for layer in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
        yield layer.__name__, partial(_recurrent, layer, device, dtype)


def _recurrent(layer: Callable[..., torch.nn.Module], device: torch.device, dtype: torch.dtype) -> Any:
    return layer(33, 17, 2).to(device, dtype)(torch.randn(9, 3, 33).to(device, dtype))[0]


def _trained(device: torch.device) -> list[torch.Tensor]:
    """Return the weights of a small network after some steps."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 14 * 14, 10)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, labels = torch.randn(32, 3, 16, 16).to(device), torch.randint(0, 10, (32,)).to(device)
    for _ in range(10):
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return [*model.parameters()]


if __name__ == "__main__":
    main()
