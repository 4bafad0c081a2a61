# SPDX-License-Identifier: Apache-2.0
"""What several frameworks do alike, as faults: the ledger of each says it of its own
code.
"""

import ast
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from upref.aggregation import aggregate
from upref.kl import k1
from upref.ops import exp, minimum, sg
from upref.registry import Objective, get
from upref.rollouts import Rollouts, per_response
from upref.verify.faults import Fault
from upref.verify.faults.losses import LossFault, aggregated, fault
from upref_frameworks.audits.compare import MICRO


def _clamp_log_ratio(batch: Rollouts) -> Rollouts:
    return replace(
        batch, logp=batch.logp_old + (batch.logp - batch.logp_old).clamp(-20, 20)
    )


def _clamp_log_sequence_ratio(most: float) -> Callable[[Rollouts], Rollouts]:
    def view(batch: Rollouts) -> Rollouts:
        log_s = torch.where(batch.mask, batch.logp - batch.logp_old, 0).sum(
            1, keepdim=True
        ) / batch.mask.sum(1, keepdim=True)
        return replace(
            batch, logp=torch.where(log_s > most, batch.logp_old + most, batch.logp)
        )

    return view


def _clamp_k3(batch: Rollouts) -> Rollouts:
    """k3's gradient is 0 where it is clamped: as if the reference were the policy
    there.
    """
    assert batch.logp_ref is not None
    d = batch.logp_ref - batch.logp
    return replace(
        batch,
        logp_ref=torch.where(d.exp() - d - 1 > 10, batch.logp.detach(), batch.logp_ref),
    )


def _masked_slots_term(batch: Rollouts) -> Tensor:
    """What LUSPO's tokens in masked slots add; its other faults then scale it."""
    r = exp(batch.logp - batch.logp_old)
    A = per_response(batch.adv, batch.mask)[:, None]
    return torch.where(
        batch.mask, 0, minimum(r * A, r.clamp(0.8, 1.2) * A)
    ).sum() / len(batch.mask)


def _micro_batch_mean_scale(batch: Rollouts) -> Tensor:
    """All tokens over MICRO times those of the micro-batch a response is in."""
    share = [batch.mask.sum() / (MICRO * m.mask.sum()) for m in batch.split(MICRO)]
    return torch.cat(
        [
            s.expand(len(m.mask), 1)
            for s, m in zip(share, batch.split(MICRO), strict=True)
        ]
    ).to(batch.logp)


BETA = 0.04
NO_KL = {"beta": 0.0}


def kl_term(
    words: str,
    k: Callable[[Tensor, Tensor, Tensor], Tensor],
    beta: float = BETA,
    agg: str = "seq-mean-token-mean",
    instead: bool = True,
) -> LossFault:
    """-beta k(log π_θ, log π_ref, log π_old), in place of the objective's own KL term
    or beside it.
    """

    def term(batch: Rollouts) -> Tensor:
        assert batch.logp_ref is not None
        return -beta * aggregate(
            k(batch.logp, batch.logp_ref, batch.logp_old), batch.mask, agg
        )

    return fault(words, "term", hp=NO_KL if instead else {}, term=term)


K1 = kl_term(
    "the KL term is k1, whose gradient has mean 0 on policy",
    lambda lp, ref, old: k1(lp, ref),
)
CLAMP = fault("log r clamped to ±20", "clip", view=_clamp_log_ratio)
CLAMP_S = fault("log s clamped to 10", "clip", view=_clamp_log_sequence_ratio(10))
CLAMP_S20 = fault("log s clamped to ±20", "clip", view=_clamp_log_sequence_ratio(20))
CLAMP_K3 = fault("k3 clamped to 10", "term", view=_clamp_k3)
MICRO_MEAN = fault(
    "the token mean of each micro-batch, then their mean",
    "batches",
    scale=_micro_batch_mean_scale,
)
BNPO = replace(MICRO_MEAN, words=f"{MICRO_MEAN.words}: bnpo by definition")
ALWAYS = replace(
    aggregated("token-mean"),
    words="aggregated by token-mean, and no setting gives another",
)
LUSPO = fault(
    "the ratio of each token (importance_sampling_level), eps = 0.2",
    "objective",
    objective=replace(get("grpo"), agg="seq-mean-token-sum"),
)
SLOTS = fault("masked slots have a gradient", "term", term=_masked_slots_term)
WIDTH = fault(
    "divided by the padded width",
    "aggregation",
    scale=lambda batch: batch.mask.sum(1, keepdim=True) / batch.mask.shape[1],
)
LENGTH = fault(
    "divided by max_completion_length = 512", "aggregation", scale=lambda batch: 1 / 512
)
F32 = fault(
    "1.05 held in float32", "rounding", hp={"tau_neg": torch.tensor(1.05).item()}
)
BY_TOKENS = fault(
    "every token weighs alike, as in the authors' code of VESPO",
    "aggregation",
    agg="token-mean",
)


# the authors'
VESPO = {
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}
ALONE = "one response in a group: its advantage is its reward"
SAMPLE = "the variance is the sample's (N - 1), 1e-8 is added to it and not to std"
NARROW = "log-ratio clamped to ±20, the estimate to ±10"


def keep_singletons(
    f: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[Tensor, Tensor], Tensor]:
    """The estimator, but a response that is alone in its group has its reward for
    advantage.
    """
    return lambda R, g: torch.where(torch.bincount(g)[g] == 1, R, f(R, g))


def sampled(R: Tensor, g: Tensor | None = None) -> Tensor:
    """Whitened by the sample's variance, with 1e-8 under the root."""
    return (R - R.mean()) * torch.rsqrt(R.var(correction=1) + 1e-8)


def _narrow_k3(lp: Tensor, ref: Tensor) -> Tensor:
    d = (ref - lp).clamp(-20, 20)
    return (d.exp() - d - 1).clamp(-10, 10)


NARROW_K3 = Fault(NARROW, _narrow_k3)


def clamped(
    k: Callable[[Tensor, Tensor], Tensor],
) -> Fault[Callable[[Tensor, Tensor], Tensor]]:
    """The KL estimator, its value clamped."""
    return Fault("clamped to ±10", lambda lp, ref: k(lp, ref).clamp(-10, 10))


def capped(cap: float) -> Objective:
    """CISPO whose weights are at most `cap`, where the paper has 1 + ε_high."""
    return replace(
        get("cispo"),
        name=f"cispo, weights at most {cap:g}",
        fn=lambda lp, lp_old, A: sg(minimum(exp(lp - lp_old), cap)) * A * lp,
        closed_form=lambda r, A: A * minimum(r, cap),
    )


FLOOR = fault(
    "weights in [0.8, 1.2], from both sides", "objective", objective="cispo_verl"
)
CAP = fault(
    "epsilon_high is the cap itself: every weight is at most 0.2",
    "objective",
    objective=capped(0.2),
)


def defaults(module: str, names: tuple[str, ...]) -> dict[str, Any]:
    """What these options of a command line are unless given, by the names of their
    fields.
    """
    return {
        name.strip("-").replace("-", "_"): options(module)[name]["default"]
        for name in names
    }


def arguments(f: Callable[..., Any], *but: str) -> dict[str, Any]:
    """The arguments of a function or a constructor with their defaults."""
    return {
        k: p.default
        for k, p in inspect.signature(f).parameters.items()
        if k not in ("self", *but)
    }


def source(module: str, beside: str = ".", up: int = 0) -> str:
    """The text of a module that need not import; beside: of a file, by its path from
    the module or `up` folders up.
    """
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    file = Path(spec.origin)
    return (file if beside == "." else file.parents[up] / beside).read_text(
        encoding="utf-8"
    )


def options(module: str) -> dict[str, dict[str, Any]]:
    """The options of a command line with their literal keywords, read off the source of
    that module.
    """
    found: dict[str, dict[str, Any]] = {}
    for node in ast.walk(ast.parse(source(module))):
        if not isinstance(node, ast.Call):
            continue
        for word in node.args:
            if isinstance(word, ast.Constant) and str(word.value).startswith("--"):
                literal = {
                    k.arg or "": ast.literal_eval(k.value)
                    for k in node.keywords
                    if _is_literal(k.value)
                }
                literal.setdefault(
                    "default", False if literal.get("action") == "store_true" else None
                )
                found.setdefault(str(word.value), literal)
    return found


def _is_literal(node: ast.expr) -> bool:
    kinds = ast.Constant | ast.List | ast.Tuple | ast.Load | ast.UnaryOp | ast.USub
    return all(isinstance(n, kinds) for n in ast.walk(node))
