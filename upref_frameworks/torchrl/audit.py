# SPDX-License-Identifier: Apache-2.0
"""TorchRL's losses for language models, GRPOLoss, DAPO and CISPOLoss, as the audit
compares them with the papers.
"""

import importlib
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from upref.advantages import get as advantage
from upref.kl import k3
from upref.ops import clip, exp, where
from upref.registry import get
from upref.rollouts import Rollouts
from upref.verify.faults import Fault
from upref.verify.faults.losses import GROUPS, LossFault, aggregated, fault, with_hp
from upref_frameworks.audits.framework import Comparison, Component, Framework, Pin
from upref_frameworks.audits.shared import BETA, MICRO_MEAN, NO_KL
from upref_frameworks.audits.sources import arguments

PIN = Pin(
    packages=(
        "torchrl==0.14.1",
        "tensordict==0.14.3",
        "pyvers==0.2.3",
        "hoptorch==0.1.4",
        "packaging==25.0",
        "cloudpickle==3.1.2",
    ),
    files={"torchrl/objectives/llm/grpo.py": "911dd854d601aa88afe6e57340898012"},
)


def _llm() -> ModuleType:
    """Return TorchRL's module of losses, imported where an audit runs."""
    return importlib.import_module("torchrl.objectives.llm.grpo")


def _modes() -> list[str]:
    """Return the names of GRPOLoss and of the classes that derive from it."""
    base = _llm().GRPOLoss
    return sorted(
        n
        for n, c in vars(_llm()).items()
        if isinstance(c, type) and issubclass(c, base)
    )


def _defaults(mode: str) -> dict[str, Any]:
    """Return the defaults of the class, with clip_epsilon as the two bounds that it
    becomes.
    """
    class_defaults = arguments(
        getattr(_llm(), mode).__init__, "actor_network", "kwargs"
    )
    low, high = _llm()._validate_clip_epsilon(class_defaults.pop("clip_epsilon"))  # noqa: SLF001
    return class_defaults | {"clip_epsilon_low": low, "clip_epsilon_high": high}


def _full(x: Tensor) -> dict[str, Tensor]:
    """Return x where TorchRL's loss looks for whole sequences."""
    return {"full": x}


def _loss(
    mode: str,
    config: dict[str, Any],
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref_log_prob: Tensor,
    num_micro_batches: int,
) -> Tensor:
    """Return the value of TorchRL's loss in this mode on tensors: the sum of its terms,
    divided by the number of micro-batches.
    """
    bounds = (config["clip_epsilon_low"], config["clip_epsilon_high"])
    settings = {k: v for k, v in config.items() if not k.startswith("clip_epsilon")}
    dist = SimpleNamespace(mask=mask, log_prob=lambda action: log_prob)
    actor = SimpleNamespace(get_dist=lambda td, logits_key: dist, in_keys=[])
    module = getattr(_llm(), mode)(actor, clip_epsilon=bounds, **settings)
    data = {
        "tokens": _full(torch.zeros_like(mask, dtype=torch.int64)),
        "log_probs": _full(old_log_prob.detach()),
        "advantage": advantages[..., None],
        "next": {"ref_log_probs": _full(ref_log_prob)},
    }
    out = module(
        importlib.import_module("tensordict").TensorDict(data, batch_size=[len(mask)])
    )
    # what begins with loss_ is added up, as by its trainers
    terms = [v for k, v in out.items() if k.startswith("loss_") and v is not None]
    return sum(t.sum() for t in terms) / num_micro_batches


def _clipped_ratio_fault(low: float, high: float) -> LossFault:
    """Return the fault of a clipped ratio that is differentiated, so that tokens
    outside of [low, high] have no gradient.
    """
    objective = replace(
        get("cispo"),
        name=f"clip(r, {low:g}, {high:g}) A, differentiated",
        fn=lambda lp, lp_old, A: clip(exp(lp - lp_old), low, high) * A,
        closed_form=lambda r, A: where(r <= high, where(r >= low, A * r, 0 * r), 0 * r),
    )
    words = "the clipped ratio itself is multiplied by A, without a stop-gradient: no gradient is left beyond the bounds"
    return fault(words, "stop-gradient", objective=objective)


def _padded_kl(batch: Rollouts) -> Tensor:
    """Return minus the KL term: the sum of k3 over trained tokens, divided by all
    slots.
    """
    assert batch.logp_ref is not None
    return (
        -BETA
        * torch.where(batch.mask, k3(batch.logp, batch.logp_ref), 0).sum()
        / batch.mask.numel()
    )


KL = fault(
    "the mean of the KL term is over all slots, padding included",
    "term",
    hp=NO_KL,
    term=_padded_kl,
)
OFF = {"entropy_bonus": False}  # on by default; its gradient is of the logits
SEQ = {"aggregation": "prompt_mean"}
COMPARISONS = (
    Comparison("default", "GRPOLoss", OFF, "grpo", {}, (aggregated("token-mean"),)),
    Comparison("default", "DAPO", OFF, "dapo", {}, (with_hp(eps_high=0.2), GROUPS)),
    Comparison(
        "default",
        "CISPOLoss",
        OFF,
        "cispo",
        {},
        (_clipped_ratio_fault(0.8, 1.2), GROUPS),
    ),
    Comparison("default", "GRPOLoss", OFF, "ppo_clip", {}),
    Comparison("paper", "GRPOLoss", OFF | SEQ, "grpo", {}),
    Comparison(
        "paper",
        "GRPOLoss",
        OFF | SEQ | {"kl_to_ref_coeff": BETA},
        "grpo",
        {"beta": BETA},
        (KL,),
    ),
    Comparison("paper", "GRPOLoss", OFF, "ppo_clip", {}),
    Comparison(
        "paper", "DAPO", OFF | {"clip_epsilon_high": 0.28}, "dapo", {}, (GROUPS,)
    ),
    Comparison(
        "paper",
        "CISPOLoss",
        OFF | {"clip_epsilon_high": 4.0},
        "cispo",
        {},
        (_clipped_ratio_fault(0.8, 5.0), GROUPS),
    ),
)


def _advantages(R: Tensor, group: Tensor) -> Tensor:
    """Return the advantages of MCAdvantage, which waits for all responses of a group.
    Each response is a trajectory of one step, and all groups have the size of the
    first.
    """
    td = importlib.import_module("tensordict")
    n = int((group == group[0]).sum())
    transform = _llm().MCAdvantage(grpo_size=n)
    A: list[float] = []
    for r, group_id in zip(R.tolist(), group.tolist(), strict=True):
        step = {
            "reward": torch.tensor([[[r]]], dtype=R.dtype),
            "done": torch.ones(1, 1, dtype=torch.bool),
        }
        queries = {
            "query": torch.tensor([group_id]),
            "next": td.TensorDict(step, [1]),
        }
        out = transform._inv_call(td.TensorDict(queries, [1]))  # noqa: SLF001
        A += [] if out is None else out.get("advantage").reshape(-1).tolist()
    return torch.tensor(A, dtype=R.dtype)


def _normalized_with_floor(R: Tensor, group: Tensor) -> Tensor:
    """Return group-normalized rewards whose standard deviation counts as 1e-6 at least.
    The rows of a group stand together, in the order of the groups.
    """

    def std_with_floor(x: Tensor) -> Tensor:
        """Return the standard deviation, 1e-6 at least."""
        return x.std().clamp_min(1e-6)

    normalized = []
    for group_id in group.unique():
        x = R[group == group_id]
        normalized.append((x - x.mean()) / std_with_floor(x))
    return torch.cat(normalized)


def _without_eps(R: Tensor, group: Tensor) -> Tensor:
    """Return group_norm by the sample's standard deviation (G - 1), without an eps."""
    return advantage("group_norm")(R, group, ddof=1, eps=0.0)


def _parts() -> tuple[Component, ...]:
    """Return the parts of TorchRL that are compared by themselves, such as its
    advantages.
    """
    floor = (
        Fault(
            "1e-6 is a floor of the deviation, not added to it", _normalized_with_floor
        ),
    )
    left_out = ("uneven", "one")  # it waits for grpo_size responses
    rounds = (*left_out, "equal rewards that do not round alike")
    return (
        Component(
            "advantages",
            "MCAdvantage",
            _advantages,
            "group_norm",
            {"ddof": 1, "eps": 1e-6},
            floor,
            left_out,
        ),
        Component(
            "advantages",
            "MCAdvantage, no eps",
            _advantages,
            _without_eps,
            leaves_out=rounds,
            words="group_norm, ddof=1, eps=0",
        ),
    )


REMARKS = (
    "A stand-in for the actor alone, whose distribution has the log-probabilities. The loss takes no count of the "
    "mini-batch: micro-batches are divided by their number, as a caller that accumulates gradients has to do.",
    "Its bounds are float32 buffers: bounds are approached to 3e-5, weights compared to 1e-4.",
    "Not covered: the entropy bonus, which is on by default with 0.01; kl_mask_threshold; trajectory returns.",
)
TORCHRL = Framework(
    "torchrl",
    pin=PIN,
    modes=_modes,
    defaults=_defaults,
    loss_by_names=_loss,
    comparisons=COMPARISONS,
    parts=_parts,
    split_reasons={"GRPOLoss": MICRO_MEAN, "DAPO": MICRO_MEAN, "CISPOLoss": MICRO_MEAN},
    tol=1e-4,
    remarks=REMARKS,
)
