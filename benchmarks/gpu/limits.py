# SPDX-License-Identifier: Apache-2.0
"""What upref.hidden needs of a GPU in bfloat16: the operations of its matrix products and
the bytes that its passes over the tiles read and write, counted without a GPU.

    python -m benchmarks.gpu.limits

One forward and backward of log-probability and entropy runs on torch's device `meta`,
which has shapes and no numbers, at the sizes of sizes.py. Each operation of torch reads
its tensors once and writes its results once; topk may read more often, so the bytes are the
least. The times are those of an H100 that does nothing else: dense bfloat16 products and
memory by NVIDIA's data sheet of the H100 SXM.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import upref.hidden
from upref.hidden import _Head, _LogProbs
from upref.markdown import table

V = 151_936
PRODUCTS = 989e12  # FLOP/s
PRODUCTS_OF_FLOAT32 = 67e12  # without tensor cores, whose TF32 is not float32
MEMORY = 3.35e12  # bytes/s
SIZES = [
    (896, 512),
    (896, 4096),
    (896, 16384),
    (4096, 512),
    (4096, 4096),
    (4096, 16384),
]
TRITON = _Head(0.8, 1.0, None, 2**26, in_triton=True)
KEPT = replace(TRITON, keeps_logits=True)
# the names are those of sizes.py
WAYS = {
    "upref.hidden": _Head(0.8, 1.0, None, 2**23),
    "upref.hidden, chunk 2^26": _Head(0.8, 1.0, None, 2**26),
    "upref.hidden, Triton": TRITON,
    "upref.hidden, Triton, logits kept": KEPT,
}
TOUCH_FEW = (
    "scatter_add",
    "gather",
    "index",
)  # they read and write as much as they move


@dataclass
class Work:
    """What a forward and backward pass needs.

    Attributes:
        flop: operations of the matrix products.
        passes: bytes that everything else reads and writes.
    """

    flop: float = 0.0
    passes: float = 0.0


class _Counter(TorchDispatchMode):
    """Adds the bytes of each operation that is no view to `work`."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        written = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if function.is_view or not read:
            return result
        if function.__name__.startswith(TOUCH_FEW):
            read = written = [min([*read, *written], key=Tensor.numel)]
        self.work.passes += sum(map(_bytes, [*read, *written]))
        return result


def _bytes(x: Tensor) -> int:
    """Return the bytes of a tensor's numbers; one that was expanded is read once."""
    return x.untyped_storage().nbytes() if 0 in x.stride() else x.nbytes


@contextmanager
def _on_meta(work: Work) -> Iterator[None]:
    """Let upref.hidden take the path of a GPU in bfloat16, on the device `meta`, inside."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        out = torch.empty(len(a), b.shape[1], device="meta")
        work.flop += 2 * out.numel() * a.shape[1]
        return out

    def every_token(x: Tensor) -> Tensor:
        return torch.arange(x.numel(), device="meta")[:, None]

    def sum_tile(x: Tensor, _: float, *sums: Tensor) -> tuple[Tensor, Tensor]:
        """Each number of the tile is read once; the rest is small."""
        work.passes += _bytes(x) + 2 * sum(map(_bytes, sums))
        blocks = torch.empty(len(x), -(-x.shape[1] // 1024), device="meta")
        return blocks, blocks.long()

    def gradient_of_tile(x: Tensor, *_: Any) -> list[Tensor]:
        """Each number of the tile is read once, and its parts are written."""
        parts = [
            torch.empty(x.shape, dtype=torch.bfloat16, device="meta") for _ in range(2)
        ]
        work.passes += sum(map(_bytes, [x, *parts]))
        return parts

    kernels = SimpleNamespace(sum_tile=sum_tile, gradient_of_tile=gradient_of_tile)
    with (
        # Triton need not be there
        patch.dict(sys.modules, {"upref.hidden_triton": kernels}),
        patch.object(upref.hidden, "_multiplies_bfloat16", lambda *_: True),
        patch.object(upref.hidden, "_product", product),
        patch.object(upref.hidden, "check_tokens", lambda *_: None),
        patch.object(Tensor, "nonzero", every_token),
        patch.object(torch, "autocast", lambda *_, **__: nullcontext()),
    ):
        yield


def count(hidden_size: int, tokens: int, head: _Head, words: int = V) -> Work:
    """Return the work of one forward and backward of log-probability and entropy.

    Args:
        hidden_size: H.
        tokens: N.
        head: the settings.
        words: V.
    """
    work = Work()

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    h = meta(tokens, hidden_size, dtype=torch.bfloat16)
    weight = meta(words, hidden_size, dtype=torch.bfloat16)
    ids = meta(tokens, dtype=torch.long)
    with _on_meta(work), torch.no_grad(), _Counter(work):
        _, _, *of_tiles = _LogProbs.forward(h, weight, None, ids, head)
        saved = (h, weight, None, ids, *of_tiles)
        upstream = meta(tokens), meta(tokens)
        _LogProbs._gradients(head, (True, True, False), saved, *upstream)  # noqa: SLF001
    return work


def least_milliseconds(dtype: str, hidden_size: int, tokens: int) -> float:
    """Return the time that no head can beat on that card: the products for logits, dh and
    dW, or the memory's time for one reading of the states and W and one writing of both
    gradients, whichever is longer.

    Args:
        dtype: of the states and of W: bfloat16 or float32.
        hidden_size: H.
        tokens: N.
    """
    operations = PRODUCTS if dtype == "bfloat16" else PRODUCTS_OF_FLOAT32
    size = getattr(torch, dtype).itemsize
    products = 3 * 2 * tokens * V * hidden_size / operations
    memory = 2 * size * (tokens + V) * hidden_size / MEMORY
    return 1e3 * max(products, memory)


def counted(measured: dict[tuple[str, int, int], float]) -> str:
    """Return a table: the limits beside the recorded times.

    Args:
        measured: milliseconds of (who, H, N) in bfloat16.
    """
    body = []
    for H, N in SIZES:
        for who, settings in WAYS.items():
            work = count(H, N, settings)
            products, passes = work.flop / PRODUCTS, work.passes / MEMORY
            trl = measured.get(("TRL ChunkedLogProbFunction", H, N))
            ms = measured.get((who, H, N))
            kept = 4 * N * V if settings.keeps_logits else 0
            body.append(
                [
                    f"{H:,}",
                    f"{N:,}",
                    who.removeprefix("upref.hidden").removeprefix(", ") or "as it is",
                    f"{work.flop / (2 * H * N * V):.0f}",
                    f"{1e3 * products:.1f}",
                    f"{work.passes / (N * V):.0f}",
                    f"{1e3 * passes:.1f}",
                    f"{1e3 * (products + passes):.1f}",
                    f"{kept / 1e9:.1f}",
                    "not run" if ms is None else f"{ms:.1f}",
                    "" if trl is None else f"{trl:.1f}",
                ]
            )
    head = [
        "H",
        "tokens",
        "upref.hidden",
        "products",
        "their ms at the limit",
        "bytes a logit",
        "their ms at the limit",
        "both, ms",
        "GB of kept logits",
        "measured ms",
        "TRL chunked, ms",
    ]
    return table(head, body)


if __name__ == "__main__":
    print(counted({}))
