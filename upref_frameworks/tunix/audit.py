# SPDX-License-Identifier: Apache-2.0
"""Tunix's policy losses, in JAX, as the audit compares them with the papers, and why
they differ.
"""

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upref.ops import sg
from upref.registry import get
from upref.rollouts import Rollouts
from upref.verify.faults.losses import GROUPS, fault, with_hp
from upref_frameworks.audits.framework import Comparison, Component, Framework, Pin
from upref_frameworks.audits.shared import BETA, CLAMP, CLAMP_S, K1, MICRO_MEAN, NO_KL

HOME = "tunix/rl/"
PIN = Pin(
    packages=(
        "google-tunix==0.1.7",
        "jax==0.10.2",
        "jaxlib==0.10.2",
        "flax==0.12.8",
        "ml-dtypes==0.6.0",
        "opt-einsum==3.4.0",
        "scipy==1.17.1",
        "absl-py==2.3.1",
        "pyyaml==6.0.3",
    ),
    files={
        HOME + "algo_core.py": "f9563f2a3eb193dabf57233f493ada1f",
        HOME + "common.py": "5c8947bb5c393eb0e62c25bb356a887f",
        HOME + "grpo/grpo_learner.py": "a7f43b0eb3b715e4803039816d48049f",
    },
    skip_init=("tunix", "tunix.rl", "tunix.sft"),
    stubs=(
        "orbax",
        "tensorstore",
        "msgpack",
        "humanize",
        "treescope",
        "optax",
        "tunix.generate",
        "tunix.oss",
        "tunix.rl.rl_cluster",
        "tunix.rl.rl_learner",
    ),
    env={"JAX_PLATFORMS": "cpu"},
)


def _module(name: str) -> ModuleType:
    """Return this module of Tunix, imported where an audit runs."""
    return importlib.import_module(f"tunix.rl.{name}")


# ---- torch to JAX and back -----------------------------------------------------------
class _Bridge(torch.autograd.Function):
    """A function f(x, *rest) of JAX arrays as a function of tensors. Its gradient by x
    is JAX's.
    """

    @staticmethod
    def forward(ctx: Any, f: Any, x: Tensor, *rest: Tensor) -> Tensor:
        """Return f(x, *rest) in the dtype of x, computed by JAX, and keep JAX's
        pullback.
        """
        jax = importlib.import_module("jax")
        arrays = [jax.numpy.asarray(a.detach().numpy()) for a in (x, *rest)]
        value, ctx.pull = jax.vjp(lambda first: f(first, *arrays[1:]), arrays[0])
        ctx.dtype = x.dtype
        ctx.rest = len(rest)
        return torch.from_numpy(np.array(value)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        """Return the gradient by x; None for f and the rest."""
        (slope,) = ctx.pull(
            importlib.import_module("jax").numpy.asarray(g.numpy(), dtype="float32")
        )
        return None, torch.from_numpy(np.array(slope)).to(ctx.dtype), *[None] * ctx.rest


_bridge: Callable[..., Tensor] = _Bridge.apply


def _padded(x: Tensor) -> Tensor:
    """Return x [B, T] padded with 0 to the next powers of two, at least 8, in both
    directions. The new places are masked. JAX compiles a function for each shape, so
    the shapes are few.
    """
    padding = [max(8, 2 ** (n - 1).bit_length()) - n for n in x.shape]
    return torch.nn.functional.pad(x, (0, padding[1], 0, padding[0]))


# ---- its losses ----------------------------------------------------------------------
@cache
def _settings_classes() -> dict[str, Any]:
    """Find the classes of its learners' settings, in the modules *po/*_learner.py.

    Returns:
        Each class by its default of `algo_variant`, the name of the loss.
    """
    base = _module("algorithm_config").AlgorithmConfig
    classes: dict[str, Any] = {}
    folder = Path(inspect.getfile(_module("common"))).parent
    for file in sorted(folder.glob("*po/*_learner.py")):
        module = _module(f"{file.parent.name}.{file.stem}")
        for value in vars(module).values():
            if inspect.isclass(value) and issubclass(value, base):
                classes[value.__name__] = value
    return {c().algo_variant: c for c in classes.values() if c is not base}


def _modes() -> list[str]:
    """Return the variants, then the other values of loss_algo that GRPO's settings
    allow by their source.
    """
    variants = _settings_classes()
    allowed = re.search(
        r"self.loss_algo not in \[(.*?)\]",
        inspect.getsource(variants["grpo"].__post_init__),
    )
    algorithms = re.findall(r'"([\w-]+)"', allowed[1] if allowed else "")
    return [*variants, *(name for name in algorithms if name not in variants)]


def _settings(mode: str) -> Any:
    """Return the settings of a mode: of a variant, or GRPO's with another loss_algo."""
    variants = _settings_classes()
    return variants[mode]() if mode in variants else variants["grpo"](loss_algo=mode)


@cache
def _compiled_loss(
    mode: str, fields: tuple[tuple[str, Any], ...]
) -> Callable[..., Any]:
    """Return the loss with these fields over its defaults, as a function of arrays. JAX
    compiles it once for each shape.
    """
    common = _module("common")
    settings = _settings(mode)
    jax = importlib.import_module("jax")
    for key, value in fields:
        setattr(settings, key, value)
    if hasattr(settings, "__dict__"):
        settings.temperature = 1.0  # as its learner sets it
    loss = _module("function_registry").get_policy_loss_fn(settings.policy_loss_fn)
    model = importlib.import_module("flax.nnx").Dict()
    absent = dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids"))

    def loss_of_arrays(lp: Any, old: Any, A: Any, mask: Tensor, ref: Any) -> Any:
        """Return the loss, with `lp` in place of what the model would compute."""
        logits = jax.numpy.zeros((*lp.shape, 2))
        # in place of a model
        vars(common)["compute_per_token_logps"] = lambda *_, **__: (lp, logits)
        given = {
            "completion_mask": mask,
            "advantages": A,
            "old_per_token_logps": old,
            "ref_per_token_logps": ref,
        }
        return loss(model, common.TrainExample(**absent, **given), settings, 0, 1)[0]

    return jax.jit(loss_of_arrays)


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
    """Return the value of Tunix's loss in this mode on tensors, divided by the number
    of micro-batches: optax.MultiSteps takes their mean.
    """
    default = asdict(_settings(mode))
    loss = _compiled_loss(
        mode, tuple((k, v) for k, v in config.items() if v != default[k])
    )
    arguments = [log_prob, old_log_prob, advantages, mask.float(), ref_log_prob]
    # that aggregation divides by the width, which must stay
    if config.get("loss_agg_mode") != "sequence-mean-token-scale":
        arguments = [_padded(x) for x in arguments]
    return _bridge(loss, *arguments) / num_micro_batches


# ---- compared with -------------------------------------------------------------------
def _clamp_log_ratio_value(batch: Rollouts) -> Rollouts:
    """Return the batch with the value of log r clamped to [-20, 20], and its gradient
    kept.
    """
    d = batch.logp - batch.logp_old
    return batch.but(logp=batch.logp + sg(d.clamp(-20, 20) - d))


def _grpo_clamped(
    lp: Any, lp_old: Any, A: Any, *, eps: Any = 0.2, c: Any = None
) -> Any:
    """Return GRPO's J with log r clamped to [-20, 20]."""
    return get("grpo").fn(
        lp_old + (lp - lp_old).clamp(-20, 20), lp_old, A, eps=eps, c=c
    )


RATIO = replace(get("grpo"), fn=_grpo_clamped)
# the KL term reads log π_θ itself
CLAMP_KL = fault(CLAMP.words, CLAMP.kind, objective=RATIO, hp={"beta": BETA})
CLAMP_K1 = fault(CLAMP.words, CLAMP.kind, objective=RATIO)
BEFORE = fault(
    "log r of each token clamped to ±20 before the mean",
    "clip",
    view=_clamp_log_ratio_value,
)
WIDTH = fault(
    "divided by the padded width",
    "aggregation",
    scale=lambda batch: 1 / batch.mask.shape[1],
)
SAME = with_hp(eps_high=3e-4)
COMPARISONS = (
    Comparison("default", "grpo", {}, "grpo", {}, (with_hp(beta=BETA), K1, CLAMP_K1)),
    Comparison(
        "default",
        "gspo-token",
        NO_KL,
        "gspo",
        {},
        (with_hp(eps_low=0.2, eps_high=0.2), BEFORE, CLAMP_S),
    ),
    Comparison("default", "dapo", {}, "dapo", {}, (GROUPS, CLAMP)),
    Comparison("default", "drgrpo", NO_KL, "dr_grpo", {}, (WIDTH, CLAMP)),
    Comparison("default", "ppo", {}, "ppo_clip", {}),
    Comparison("paper", "grpo", NO_KL, "grpo", {}, (CLAMP,)),
    Comparison(
        "paper",
        "grpo",
        {"kl_loss_mode": "low_var_kl"},
        "grpo",
        {"beta": BETA},
        (CLAMP_KL,),
    ),
    Comparison(
        "paper",
        "gspo-token",
        NO_KL | {"epsilon": 3e-4},
        "gspo",
        {},
        (SAME, BEFORE, CLAMP_S),
    ),
    Comparison("paper", "dapo", {"epsilon_high": 0.28}, "dapo", {}, (GROUPS, CLAMP)),
    Comparison(
        "paper",
        "drgrpo",
        NO_KL | {"loss_agg_mode": "seq-mean-token-sum"},
        "dr_grpo",
        {},
        (CLAMP,),
    ),
    Comparison("paper", "ppo", {"epsilon_c": 10.0}, "ppo_clip", {"c": 10.0}),
)


def _advantages(name: str) -> Callable[..., Tensor]:
    """Return Tunix's advantages of this name, as a function of rewards and groups."""

    def advantages(rewards: Tensor, group: Tensor) -> Tensor:
        """Return the advantages that Tunix gives these rewards; all groups have the
        size of the first.
        """
        estimator = _module("function_registry").get_advantage_estimator(name)
        group_size = int(torch.bincount(group)[0])
        return torch.from_numpy(np.array(estimator(rewards.numpy(), group_size)))

    return advantages


def _parts() -> tuple[Component, ...]:
    """Return the parts of Tunix that are compared by themselves, such as its
    advantages.
    """
    common = _module("common")
    alone = ("uneven", "one")

    def kl(mode: str) -> Callable[..., Tensor]:
        """Return Tunix's KL term of this name, on torch's tensors."""
        return partial(
            _bridge, lambda lp, ref: common.compute_kl_divergence(lp, ref, mode)
        )

    def mean(mode: str) -> Callable[..., Tensor]:
        """Return Tunix's aggregation of this name, on torch's tensors."""
        return lambda x, m: _bridge(
            lambda x, m: common.aggregate_loss(x, m, mode), x, m.float()
        )

    def log_probs(z: Tensor, tokens: Tensor, t: float) -> Tensor:
        """Return Tunix's log-probabilities at temperature t, on torch's tensors."""
        return _bridge(common.selective_log_softmax, z / t, tokens)

    scale = "sequence-mean-token-scale"
    return (
        Component(
            "advantages", "grpo", _advantages("grpo"), "group_norm", leaves_out=alone
        ),
        Component(
            "advantages",
            "rloo",
            _advantages("rloo"),
            "leave_one_out",
            leaves_out=alone,
            tol=1e-5,
        ),
        Component(
            "advantages",
            "drgrpo",
            _advantages("drgrpo"),
            "group_mean",
            leaves_out=alone,
            tol=1e-5,
        ),
        *(
            Component("kl", mode, kl(mode), k, tol=1e-4)
            for mode, k in (("kl", "k1"), ("mse_kl", "k2"), ("low_var_kl", "k3"))
        ),
        *(
            Component("aggregation", mode, mean(mode), ours, tol=1e-5)
            for mode, ours in (
                ("token-mean", "token-mean"),
                ("sequence-mean-token-mean", "seq-mean-token-mean"),
                ("seq-mean-token-sum", "seq-mean-token-sum"),
            )
        ),
        Component(
            "aggregation",
            scale,
            mean(scale),
            "seq-mean-token-sum-norm",
            hp={"length": 6},
            tol=1e-5,
        ),
        Component(
            "logprobs", "selective_log_softmax", log_probs, "token_log_probs", tol=1e-4
        ),
    )


REMARKS = (
    "The model's log-probabilities are given; JAX computes in float32: compared to 1e-4. Micro-batches are "
    "averaged, as optax.MultiSteps does.",
    "Not covered: several devices, packed sequences, the agentic learners, truncated importance sampling, the "
    "value loss and GAE of PPO.",
)
TUNIX = Framework(
    "tunix",
    pin=PIN,
    modes=_modes,
    defaults=lambda mode: asdict(_settings(mode)),
    loss_by_names=_loss,
    comparisons=COMPARISONS,
    parts=_parts,
    split_reasons={"dapo": MICRO_MEAN, "ppo": MICRO_MEAN},
    remarks=REMARKS,
    tol=1e-4,
)
