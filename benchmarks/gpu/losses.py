# SPDX-License-Identifier: Apache-2.0
"""Each objective's loss and gradient on the GPU, eager and compiled, against float64 on
the CPU; and Liger's Triton GRPO loss through upref.check.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import upref
from benchmarks.gpu.place import SEED, PartSetup, moved
from upref.weights.batches import OFF_EDGES, batch

SHARDS = 6  # processes
SLOW = ("bandpo_kl", "aspo_code", "bandpo_chi2")  # to compile


def main(place: PartSetup, which: str) -> None:
    """Write the rows of one part: those of Liger if `which` is "liger", else those of
    every sixth objective from the number `which` on. A trial takes two objectives.
    """
    if which == "liger":
        liger(place)
        return
    # what compiles longest comes last
    names = sorted(upref.names(), key=lambda n: n in SLOW)[int(which) :: SHARDS]
    for name in names[:2] if place.small else names:
        with place.row(objective=name) as row:
            row |= one(name, place.device)


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
    optional = {
        "lp_ref": b.logp_ref,
        "entropy": b.entropy,
        "lp_sampler": b.logp_sampler,
    }
    keywords = {k: v for k, v in optional.items() if v is not None}
    inputs = (b.logp_old, b.adv, b.mask, b.group)

    def loss_and_gradient(
        J: Callable[..., Tensor], dtype: torch.dtype, device: str
    ) -> list[Tensor]:
        """Return -J and its gradient by lp, in float64 on the CPU, computed in the
        dtype on the device.
        """
        lp = moved(b.logp, device, dtype).detach().requires_grad_()
        here = {k: moved(v, device, dtype) for k, v in keywords.items()}
        loss = -J(lp, *(moved(x, device, dtype) for x in inputs), **here)
        loss.backward()
        return [loss.detach().double().cpu(), lp.grad.double().cpu()]

    exact = loss_and_gradient(o.J, torch.float64, "cpu")

    def errors(J: Callable[..., Tensor], dtype: torch.dtype) -> list[float]:
        """Return the relative errors of loss and gradient against `exact`."""
        return [
            float((x - y).abs().max() / y.abs().max().clamp(min=1e-12))
            for x, y in zip(loss_and_gradient(J, dtype, device), exact, strict=True)
        ]

    torch.compiler.reset()
    compiled = torch.compile(o.J, fullgraph=True)
    traced = torch.compile(o.J, fullgraph=True, backend="aot_eager")
    return {
        "traced": errors(traced, torch.float64),
        "float64": errors(o.J, torch.float64),
        "float32": errors(o.J, torch.float32),
        "compiled": errors(compiled, torch.float32),
    }


def through_logits(loss_type: str, device: str, **settings: Any) -> Callable[..., Any]:
    """Make Liger's Triton GRPO loss a function of log-probabilities.

    Each token has a vocabulary of two logits, of which the first has the token's
    log-probability and the second has the rest.

    Args:
        loss_type: of Liger.
        device: where it computes.
        **settings: further arguments of Liger's function.

    Returns:
        A loss that `upref.check` takes, of tensors on the CPU.
    """
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    def loss(
        log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, mask: Tensor
    ) -> Tensor:
        """Return Liger's loss, a scalar on the CPU. Of the advantages it reads the
        first of each row.
        """
        # Two finite logits cannot have a log-probability of 0, so it is at most -1e-6.
        # The clamp is detached, so that the gradient passes unchanged.
        lp = log_prob - (log_prob - log_prob.clamp(max=-1e-6)).detach()
        lp = lp.float().to(device)
        other = torch.log1p(-lp.double().exp()).float()
        z = torch.stack([lp, other], -1)
        z = torch.nn.functional.pad(z, (0, 0, 0, 1)).contiguous()
        out = triton_grpo_loss(
            z,
            old_log_prob.float().to(device).contiguous(),
            None,
            torch.zeros_like(mask, dtype=torch.long).to(device),
            advantages[:, 0].float().to(device).contiguous(),
            mask.long().to(device),
            temperature=1.0,
            beta=0.0,
            loss_type=loss_type,
            inplace=False,
            reduce=True,
            **settings,
        )
        return (out[0] if isinstance(out, tuple) else out).cpu()

    loss.__name__ = f"Liger triton_grpo_loss, {loss_type}"
    return loss


# loss_type of Liger -> the objective, and both sides' numbers
LIGER: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("grpo", "grpo", {"eps_low": 0.2, "eps_high": 0.2}, {}),
    ("dapo", "dapo", {"eps_low": 0.2, "eps_high": 0.28}, {}),
    ("dapo", "dapo", {"eps_low": 0.2, "eps_high": 0.28, "delta": 3.0}, {}),
    ("cispo", "cispo", {"eps_low": 0.2, "eps_high": 5.0}, {}),
    ("sapo", "sapo", {}, {}),
    (
        "grpo",
        "gspo",
        {"eps_low": 3e-4, "eps_high": 4e-4, "importance_sampling_level": "sequence"},
        {},
    ),
    ("luspo", "luspo", {"importance_sampling_level": "sequence"}, {}),
]


def liger(place: PartSetup) -> None:
    """Check each loss_type of Liger against its objective, and identify it; write a row
    of each.
    """
    torch.manual_seed(SEED)
    for loss_type, name, settings, hp in LIGER:
        with place.row(liger=loss_type, objective=name, settings=settings) as row:
            loss = through_logits(loss_type, place.device, **settings)
            report = upref.check(loss, name, **hp)
            row |= {"agrees": bool(report), "text": str(report)}
        with place.row(liger=loss_type, objective="identify", settings=settings) as row:
            row |= {"text": str(upref.identify(loss))}
