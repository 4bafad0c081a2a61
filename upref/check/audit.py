# SPDX-License-Identifier: Apache-2.0
"""Does verl compute what the names of its losses promise? Gradients of the installed verl against the reference.

Every comparison is a row of COMPARISONS. Where gradients differ, the row's reasons are put into the reference one after
the other, and the difference that remains is the proof: at most TOL, or the row is unexplained and the audit fails.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from upref.aggregate import Totals, row_weights
from upref.check.regimes import EDGES, LOG_R, at, batch, grad, kinks, words
from upref.check.verl import verl, verl_loss, verl_weights
from upref.objectives.dppo_kl import binary_kl
from upref.registry import Objective, get
from upref.rollouts import Rollouts

TOL = 1e-7
MICRO = 8


@dataclass(frozen=True)
class Reason:
    """What verl does otherwise: words, and a change to the reference, to the batch it sees or to its gradient."""

    words: str
    objective: str | None = None
    hp: dict[str, Any] = field(default_factory=dict)
    agg: str | None = None
    view: Callable[[Rollouts], Rollouts] = lambda b: b
    scale: Callable[[Rollouts], Tensor | float] = lambda b: 1.0
    skip: Callable[[Rollouts], Tensor] = lambda b: torch.zeros_like(
        b.mask
    )  # tokens too near to a bound that rounding moves


@dataclass(frozen=True)
class Comparison:
    """verl's loss_mode with these settings, the objective it is held against, and how they are known to differ."""

    setting: str  # default | paper
    mode: str
    agg: str
    actor: dict[str, Any]
    objective: str
    hp: dict[str, Any]
    reasons: tuple[Reason, ...] = ()


def _clip(low: float, high: float, c: float | None = None) -> dict[str, float]:
    return {"clip_ratio_low": low, "clip_ratio_high": high} | ({"clip_ratio_c": c} if c else {})


def _clamp_tokens(b: Rollouts) -> Rollouts:
    return replace(b, logp=b.logp_old + (b.logp - b.logp_old).clamp(-20, 20))


def _clamp_responses(b: Rollouts) -> Rollouts:
    log_s = torch.where(b.mask, b.logp - b.logp_old, 0).sum(1, keepdim=True) / b.mask.sum(1, keepdim=True)
    return replace(b, logp=torch.where(log_s > 10, b.logp_old + 10, b.logp))


def _micro_means(b: Rollouts) -> Tensor:
    """B over the size of the micro-batch a response is in."""
    return torch.cat([torch.full((len(m.mask), 1), len(b.mask) / len(m.mask)) for m in b.split(MICRO)]).to(b.logp)


NO_DUAL_CLIP = 1e10  # verl cannot switch it off; its ratio never exceeds e^20
E20 = math.exp(20)
GROUPS = Reason("one denominator for the batch, not one per prompt", view=lambda b: replace(b, group=None))
CLAMP = Reason("log r clamped to ±20", view=_clamp_tokens)
CLAMP_S = Reason("log s clamped to 10", view=_clamp_responses)
MICRO_MEAN = Reason("torch.mean of each micro-batch, global_batch_info unread", scale=_micro_means)


def _with(**hp: float) -> Reason:
    return Reason(", ".join(f"{k} = {v:g}" for k, v in hp.items()), hp=hp)


def _agg(name: str) -> Reason:
    return Reason(f"aggregated by {name}", agg=name)


def _dppo(kind: str, delta: float, trunc: float) -> tuple[Reason, ...]:
    name = f"dppo_{kind}_verl"
    said = f"delta = {delta:g}, ratio cut at {trunc:.4g} outside the derivative ({name})"
    near = lambda b: (binary_kl(b.logp, b.logp_old) - delta).abs() < 1e-5
    near_kl = Reason("1e-8 inside the logarithms moves the bound by < 1e-5 (tokens there left out)", skip=near)
    cut = Reason(said, objective=name, hp={"delta": delta, "trunc": trunc})
    return (cut, near_kl) if kind == "kl" else (cut,)


COMPARISONS = (
    Comparison("default", "vanilla", "token-mean", {}, "ppo_clip", {}, (_with(c=3.0),)),
    Comparison("default", "gspo", "token-mean", {}, "gspo", {}, (
        _with(eps_low=0.2, eps_high=0.2), _agg("token-mean"), CLAMP_S)),
    Comparison("default", "cispo", "token-mean", {}, "cispo", {}, (
        Reason("two-sided, weights in [0.8, 1.2] (cispo_verl)", objective="cispo_verl"), GROUPS)),
    Comparison("default", "sapo", "token-mean", {}, "sapo", {}),
    Comparison("default", "geo_mean", "token-mean", {}, "gmpo", {}, (_with(eps=0.2),)),
    Comparison("default", "dppo_tv", "token-mean", {}, "dppo_tv", {}, (
        *_dppo("tv", 0.2, 3.0), _agg("token-mean"))),
    Comparison("default", "dppo_kl", "token-mean", {}, "dppo_kl", {}, (
        *_dppo("kl", 0.2, 3.0), _agg("token-mean"))),
    Comparison("default", "gpg", "token-mean", {}, "reinforce_off_policy", {}, (GROUPS,)),
    Comparison("paper", "vanilla", "token-mean", _clip(0.2, 0.28, NO_DUAL_CLIP), "dapo", {}, (GROUPS, CLAMP)),
    Comparison("paper", "vanilla", "token-mean", _clip(0.2, 0.28, 10.0), "dapo", {"c": 10.0}, (GROUPS,)),
    Comparison("paper", "vanilla", "seq-mean-token-mean", _clip(0.2, 0.2, NO_DUAL_CLIP), "grpo", {}, (CLAMP,)),
    Comparison("paper", "vanilla", "seq-mean-token-sum", _clip(0.2, 0.2, NO_DUAL_CLIP), "dr_grpo", {}, (CLAMP,)),
    Comparison("paper", "gspo", "seq-mean-token-mean", _clip(3e-4, 4e-4), "gspo", {}, (CLAMP_S,)),
    Comparison("paper", "cispo", "token-mean", _clip(1.0, 4.0), "cispo", {}, (GROUPS,)),
    Comparison("paper", "sapo", "seq-mean-token-mean", {"tau_pos": 1.0, "tau_neg": 1.05}, "sapo", {}),
    Comparison("paper", "geo_mean", "token-mean", _clip(0.4, 0.4), "gmpo", {}),
    Comparison("paper", "dppo_tv", "seq-mean-token-sum", _clip(0.15, 0.15, NO_DUAL_CLIP), "dppo_tv", {},
               _dppo("tv", 0.15, E20)),
    Comparison("paper", "dppo_kl", "seq-mean-token-sum", _clip(0.05, 0.05, NO_DUAL_CLIP), "dppo_kl", {},
               _dppo("kl", 0.05, E20)),
    Comparison("paper", "gpg", "seq-mean-token-sum", {}, "reinforce", {}),
)  # fmt: skip
SPLIT_REASONS = {"geo_mean": MICRO_MEAN}  # why a mini-batch in 8 parts has another gradient
OUT_OF_SCOPE = {
    "clip_cov": "clips a random subset of tokens, so two calls differ",
    "kl_cov": "no objective of the registry: a penalty on the tokens of largest covariance",
    "dro": "no objective of the registry: a squared log-ratio penalty",
    "bypass_mode": "a dispatcher: it recomputes mask and weights and calls vanilla or a REINFORCE",
}


@dataclass(frozen=True)
class Spot:
    """A token on which two gradients differ most: its regime, and its weight dJ_t/dlp by the one and by the other.

    Differences are relative to max(1, |expected|). Tokens within |log r| <= 5 go before the farther ones.
    """

    difference: float
    where: str
    expected: float
    found: float

    def __str__(self) -> str:
        return f"{self.where}: {self.expected:.4g} -> {self.found:.4g}"


@dataclass(frozen=True)
class Row:
    """One comparison: the difference before any reason, the change each reason makes, the difference after all."""

    setting: str
    mode: str
    agg: str
    actor: dict[str, Any]
    objective: str
    hp: dict[str, Any]
    micro_batches: int
    difference: float
    spot: Spot
    reasons: list[tuple[str, Spot]]
    remains: float

    @property
    def agrees(self) -> bool:
        return self.difference <= TOL

    @property
    def ok(self) -> bool:
        """Agrees, or differs for reasons that leave no difference."""
        return self.remains <= TOL

    @property
    def verdict(self) -> str:
        if self.agrees:
            return "agrees exactly" if self.difference == 0 else f"agrees to {self.difference:.0e}"
        return "differs, explained" if self.ok else "differs, UNEXPLAINED"


@dataclass(frozen=True)
class Audit:
    """The rows; true when each agrees or is explained. Print it with rich, or take .json()."""

    version: str
    rows: list[Row]
    nan_in_padding: list[str]  # modes whose loss is NaN when a masked slot holds NaN
    unaudited: list[str]  # modes this verl has and this audit does not know

    def __bool__(self) -> bool:
        return all(row.ok for row in self.rows)

    def json(self) -> str:
        rows = [asdict(r) | {"verdict": r.verdict, "ok": r.ok} for r in self.rows]
        return json.dumps(asdict(self) | {"rows": rows, "ok": bool(self), "out_of_scope": OUT_OF_SCOPE}, indent=2)

    def __rich_console__(self, console, options):
        from rich.table import Table

        table = Table(title=f"verl {self.version} against the reference", title_justify="left", show_lines=True)
        for column in ("verl", "held against", "verdict", "why, and where: weight expected -> found", "then remains"):
            table.add_column(column, overflow="fold")
        for r in self.rows:
            actor = ", ".join(f"{k}={v:g}" for k, v in r.actor.items()) or "verl's defaults"
            parts = f", {r.micro_batches} micro-batches" if r.micro_batches > 1 else ""
            hp = "".join(f", {k}={v:g}" for k, v in r.hp.items())
            because = [f"{said}; {spot}" if spot.difference else said for said, spot in r.reasons]
            because = because if r.agrees or r.ok else [f"largest difference; {r.spot}", *because]
            loss, remains = f"{r.mode} ({r.agg}, {actor}{parts})", "" if r.agrees else f"{r.remains:.1e}"
            table.add_row(loss, r.objective + hp, r.verdict, "\n".join(because), remains)
        yield table
        yield f"Split into {MICRO} micro-batches the gradient is the same, except where a row says otherwise."
        if self.nan_in_padding:
            yield f"The loss is NaN when a masked slot holds NaN: {', '.join(self.nan_in_padding)}."
        added = (torch.ones(1, dtype=torch.bool).sum() + 1e-8 - 1).item()  # as agg_loss computes it
        yield f"The 1e-8 in the denominators of seq-mean-token-mean adds {added:g} to a count of 1 (float32)."
        yield "Not covered: several ranks, responses without a token, rollout_is_weights, loss_scale_factor."
        for mode, reason in OUT_OF_SCOPE.items():
            yield f"Not audited: {mode} ({reason})."
        if self.unaudited:
            yield f"Not audited, unknown to this version of upref: {', '.join(self.unaudited)}."

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=160, no_color=True)
        with console.capture() as text:
            console.print(self)
        return text.get()


def audit_verl(comparisons: tuple[Comparison, ...] = COMPARISONS) -> Audit:
    """Compare the installed verl's losses with the reference, at verl's defaults and at the papers' settings."""
    core_algos, _, version = verl()
    rows, poisoned = [], []
    for c in comparisons:
        b = grid(c)
        whole, parts = (
            torch.cat([verl_weights(c.mode, m, c.agg, padding=None, **c.actor) for m in b.split(n)]) for n in (1, MICRO)
        )
        rows.append(_row(c, b, whole, c.reasons, 1))
        if c.setting == "paper" and _difference(parts / _unit(c, b), whole / _unit(c, b)).max() > TOL:
            rows.append(_row(c, b, parts, (*c.reasons, SPLIT_REASONS.get(c.mode, Reason("no reason known"))), MICRO))
        if verl_loss(c.mode, b, c.agg, padding=math.nan, **c.actor).isnan():
            poisoned.append(f"{c.mode} ({c.agg})")
    known = {c.mode for c in comparisons} | OUT_OF_SCOPE.keys()
    new = [m for m in core_algos.POLICY_LOSS_REGISTRY if m not in known and not m.startswith("upref/")]
    return Audit(version, rows, sorted(set(poisoned)), sorted(new))


def grid(c: Comparison) -> Rollouts:
    """The regimes of the objective promised and of the one accounted for, and responses far from π_old."""
    pairs = [(get(c.objective), c.hp), _accounted(c, c.reasons)]
    # verl sums a response's ratio in another order: on a bound, rounding would decide
    edges = tuple(e for e in EDGES if e or get(c.objective).level == "token")
    b = _join(*(batch(o, edges=edges, seed=i, **hp) for i, (o, hp) in enumerate(pairs)), _far())
    # masked slots hold what could pass for tokens, as a tool's answer in a multi-turn response does
    junk = {"logp": -1.0, "logp_old": -2.0, "adv": 0.5}
    return replace(b, **{k: getattr(b, k).masked_fill(~b.mask, v) for k, v in junk.items()})


def _far() -> Rollouts:
    """Two responses of three tokens for each sign of A and log r on both sides of where implementations clamp it."""
    cases = [(A, side * x) for A in (1.0, -1.0) for side in (-1, 1) for x in (9.5, 10.5, 19.5, 20.5, 25) for _ in "ab"]
    adv, log_r = torch.tensor(cases, dtype=torch.float64).T[:, :, None].expand(2, -1, 3)
    old = torch.where(log_r > 0, -30.0, -1.0)
    return Rollouts(old + log_r, old, adv, torch.ones(adv.shape, dtype=torch.bool), torch.arange(len(cases)) // 2)


def _join(*bs: Rollouts) -> Rollouts:
    T = max(b.mask.shape[1] for b in bs)
    wide = lambda name: torch.cat([torch.nn.functional.pad(getattr(b, name), (0, T - b.mask.shape[1])) for b in bs])
    group, n = [], 0
    for b in bs:
        assert b.group is not None
        group.append(b.group + n)
        n = int(group[-1].max()) + 1
    return Rollouts(wide("logp"), wide("logp_old"), wide("adv"), wide("mask"), torch.cat(group))


def _accounted(c: Comparison, reasons: tuple[Reason, ...]) -> tuple[Objective, dict[str, Any]]:
    name, hp = c.objective, c.hp
    for why in reasons:
        name, hp = (why.objective, why.hp) if why.objective else (name, hp | why.hp)
    return get(name), hp


def _unit(c: Comparison, b: Rollouts) -> Tensor:
    """[B, 1], the promised aggregation: a gradient over it is the token's weight dJ_t/dlp."""
    rows = row_weights(get(c.objective).agg, b.mask, Totals.of(b.mask, b.group))
    return torch.as_tensor(rows, dtype=b.logp.dtype).expand(len(b.mask))[:, None]


def _reference(c: Comparison, reasons: tuple[Reason, ...], b: Rollouts) -> Tensor:
    """The gradient of the objective promised, with these reasons put into it."""
    o, hp = _accounted(c, reasons)
    factor: Tensor | float = 1.0
    agg = get(c.objective).agg
    for why in reasons:
        factor = factor * why.scale(b)
        agg = why.agg or agg
    if agg != o.agg:  # as row weights, so that an objective with one term per response can be re-aggregated
        totals, own = Totals.of(b.mask), "seq-mean-token-mean" if o.agg == "seq-mean" else o.agg
        new, old = (row_weights(name, b.mask, totals) for name in (agg, own))
        factor = factor * torch.as_tensor(new / old, dtype=b.logp.dtype).reshape(-1, 1)

    def J(x: Rollouts) -> Tensor:
        for why in reasons:
            x = why.view(x)
        return o(x, **hp)

    return grad(J, b) * factor


def _difference(found: Tensor, expected: Tensor) -> Tensor:
    return (found - expected).abs() / expected.abs().clamp(min=1)


def _row(c: Comparison, b: Rollouts, found: Tensor, reasons: tuple[Reason, ...], micro: int) -> Row:
    unit = _unit(c, b)
    found = found / unit
    steps = [_reference(c, reasons[:n], b) / unit for n in range(len(reasons) + 1)]
    worst = _difference(found, steps[0]).max().item()
    if worst <= TOL:
        reasons, steps = (), steps[:1]
    skip = torch.stack([why.skip(b) for why in reasons] or [torch.zeros_like(b.mask)]).any(0)
    remains = _difference(found, steps[-1]).masked_fill(skip, 0).max().item()
    spot = lambda found, expected: _spot(c, reasons, b, found, expected)
    changes = [(why.words, spot(new, old)) for why, old, new in zip(reasons, steps, steps[1:], strict=False)]
    return Row(
        c.setting, c.mode, c.agg, c.actor, c.objective, c.hp, micro, worst, spot(found, steps[0]), changes, remains
    )  # fmt: skip


def _spot(c: Comparison, reasons: tuple[Reason, ...], b: Rollouts, found: Tensor, expected: Tensor) -> Spot:
    """Of the tokens that differ as much: on the fixed grid of ratios rather than at a bound's edge, near to π_old."""
    off = _difference(found, expected)
    log_r = torch.where(b.mask, b.logp - b.logp_old, 0)
    if get(c.objective).level == "sequence":
        log_r = (log_r.sum(1) / b.mask.sum(1))[:, None].expand_as(log_r)
    near = off.masked_fill(log_r.abs() > 5, 0)
    off = near if near.max() > TOL else off
    edge = (log_r[..., None] - torch.as_tensor(LOG_R)).abs().amin(-1) > 1e-12
    order = torch.where(off >= off.max() * (1 - 1e-6), log_r.abs() + 100 * edge, math.inf)
    i, t = divmod(int(order.argmin()), order.shape[1])
    where = _where(c, reasons, b, i, t, log_r[i, t].exp().item())
    return Spot(off[i, t].item(), where, expected[i, t].item() + 0.0, found[i, t].item() + 0.0)


def _where(c: Comparison, reasons: tuple[Reason, ...], b: Rollouts, i: int, t: int, r: float) -> str:
    """The regime of the token, by the bounds of the objective promised and of the one accounted for."""
    if not b.mask[i, t]:
        return "a masked slot"
    A, _, mu = at(b, i, t)
    o, (accounted, hp) = get(c.objective), _accounted(c, reasons)
    bounds = sorted({*kinks(o, A, mu, **c.hp), *kinks(accounted, A, mu, **hp)}) if A else []
    said = words(A, r, bounds) + (f" (mu = {mu:.2g})" if o.reads_mu else "")
    return said.replace(" r", " s") if o.level == "sequence" else said
