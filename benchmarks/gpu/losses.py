# SPDX-License-Identifier: Apache-2.0
"""Each objective's loss and gradient on the GPU, eager and compiled, against float64 on
the CPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import upref
from benchmarks.gpu.place import PartSetup, moved
from upref.weights.batches import OFF_EDGES, batch

SHARDS = 6  # processes
SLOW = ("bandpo_kl", "aspo_code", "bandpo_chi2")  # to compile


def main(place: PartSetup, which: str) -> None:
    """Write the rows of every sixth objective from the number `which` on. A trial takes
    two objectives.
    """
    # what compiles longest comes last
    names = sorted(upref.names(), key=lambda n: n in SLOW)[int(which) :: SHARDS]
    for name in names[:2] if place.small else names:
        with place.row(objective=name) as row:
            row |= one(name, place.device)


def loss_and_gradient(
    J: Callable[..., Tensor], b: upref.Rollouts, dtype: torch.dtype, device: str
) -> list[Tensor]:
    """Return -J of a batch and its gradient by lp, in float64 on the CPU.

    Args:
        J: of an objective.
        b: the batch; what it lacks is not passed.
        dtype: in which both are computed.
        device: on which both are computed.
    """
    lp = moved(b.logp, device, dtype).detach().requires_grad_()
    inputs = [moved(x, device, dtype) for x in (b.logp_old, b.adv, b.mask, b.group)]
    optional = {
        "lp_ref": b.logp_ref,
        "entropy": b.entropy,
        "lp_sampler": b.logp_sampler,
    }
    by_name = {
        name: moved(x, device, dtype) for name, x in optional.items() if x is not None
    }
    loss = -J(lp, *inputs, **by_name)
    loss.backward()
    return [loss.detach().double().cpu(), lp.grad.double().cpu()]


def one(name: str, device: str) -> dict[str, Any]:
    """Compute an objective in four ways; compare each with float64 on the CPU.

    Args:
        name: of the objective.
        device: where the four compute.

    Returns:
        traced (float64, compiled without code generation), float64, float32 and
        compiled (float32) -> [error of the loss, error of its gradient], each the
        largest absolute difference over the largest absolute entry.
    """
    o = upref.get(name)
    b = batch(o, edges=OFF_EDGES)
    exact = loss_and_gradient(o.J, b, torch.float64, "cpu")

    def errors(J: Callable[..., Tensor], dtype: torch.dtype) -> list[float]:
        """Return the relative errors of loss and gradient against `exact`."""
        computed = loss_and_gradient(J, b, dtype, device)
        relative = []
        for x, y in zip(computed, exact, strict=True):
            largest = y.abs().max().clamp(min=1e-12)
            relative.append(float((x - y).abs().max() / largest))
        return relative

    torch.compiler.reset()
    compiled = torch.compile(o.J, fullgraph=True)
    traced = torch.compile(o.J, fullgraph=True, backend="aot_eager")
    return {
        "traced": errors(traced, torch.float64),
        "float64": errors(o.J, torch.float64),
        "float32": errors(o.J, torch.float32),
        "compiled": errors(compiled, torch.float32),
    }
