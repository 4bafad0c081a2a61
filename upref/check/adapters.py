# SPDX-License-Identifier: Apache-2.0
"""Any loss as one thing: a function of Rollouts to the scalar that an optimiser would minimise.

A plain callable takes `(log_prob, old_log_prob, advantages, mask)`, by these names or their usual variants, else by
position. By name it may also take ref_log_prob, group, entropy, totals (the mini-batch's `Totals`, for a micro-batch)
and hyperparameters. It answers with a scalar, a (scalar, metrics) tuple, or an unreduced [B, T] or [B].
"""

import contextlib
import difflib
import functools
import importlib
import importlib.util
import inspect
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from upref.aggregate import Totals, aggregate
from upref.errors import InputError
from upref.registry import Objective
from upref.rollouts import Rollouts, per_response

ROLES = {
    "logp": "log_prob log_probs logprob logprobs logp logps lp new_log_prob new_log_probs new_logprobs "
    "cur_log_prob curr_log_probs per_token_logps token_logps policy_logps log_pi",
    "logp_old": "old_log_prob old_log_probs old_logprob old_logprobs old_logp old_logps logp_old lp_old old_lp "
    "logprobs_old log_probs_old old_per_token_logps behavior_log_prob log_pi_old",
    "adv": "advantages advantage adv advs A",
    "mask": "mask response_mask loss_mask completion_mask action_mask token_mask response_masks masks",
    "logp_ref": "ref_log_prob ref_log_probs ref_logprobs ref_logp ref_logps logp_ref lp_ref ref_per_token_logps",
    "group": "group groups group_id group_ids",
    "entropy": "entropy entropies",
    "totals": "totals",
    "ranks": "dp_size world_size num_ranks",
}
ROLE = {name: role for role, all_ in ROLES.items() for name in all_.split()}
MAIN = ("logp", "logp_old", "adv", "mask")
SHAPES = {"BT": "[B, T]", "B1": "[B, 1]", "B": "[B]"}


@dataclass
class Loss:
    """A foreign loss: call it on Rollouts for the scalar to minimise, `gradient` for dJ/dlp = -d loss/d logp."""

    name: str
    call: Callable[["Loss", dict[str, Any], dict[str, Any]], Any]  # (self, inputs by role, hyperparameters)
    objective: Objective
    reads: frozenset[str]  # roles it takes
    takes: frozenset[str]  # hyperparameters of the objective that it takes by name
    swallows: bool  # it has **kwargs
    given: dict[str, Any]  # hyperparameters handed to it
    framework: str = ""
    adv_shape: str = "BT"
    float_mask: bool = False
    unreduced: bool = False
    first_of: bool = False  # it answers with a tuple
    contract: list[str] = field(default_factory=list)
    mutated: set[str] = field(default_factory=set)
    printed: bool = False
    ranks: int = 1  # data-parallel ranks that it is told of
    parts: tuple[int, ...] = (2, 3, 8)  # into how many micro-batches the split oracle cuts a mini-batch

    @property
    def reads_ranks(self) -> bool:
        """Whether it scales itself by their number."""
        return self.framework == "verl" or "ranks" in self.reads

    @property
    def splits(self) -> bool:
        """Whether it says how the micro-batches of a mini-batch add up."""
        return self.unreduced or "totals" in self.reads

    def view(self, b: Rollouts) -> Rollouts:
        """The batch as this loss can know it: without groups where it takes none."""
        return b if "group" in self.reads else replace(b, group=None, totals=b.totals or Totals.of(b.mask))

    def inputs(self, b: Rollouts, logp: Tensor, **free: Tensor) -> dict[str, Any]:
        """Fresh tensors by role; masked slots as they are."""
        adv = b.adv.expand_as(b.mask)
        if self.adv_shape != "BT":
            adv = per_response(adv, b.mask)
            adv = adv[:, None] if self.adv_shape == "B1" else adv
        ref = b.logp_old if b.logp_ref is None else b.logp_ref
        full: dict[str, Any] = {
            "logp_old": b.logp_old.clone(),
            "adv": adv.clone(),
            "mask": b.mask.to(b.logp.dtype) if self.float_mask else b.mask.clone(),
            "logp_ref": ref.clone(),
            "group": torch.zeros(len(b.mask), dtype=torch.int64) if b.group is None else b.group.clone(),
            "entropy": torch.ones_like(b.logp_old) if b.entropy is None else b.entropy.clone(),
        } | free
        return full | {"logp": logp, "totals": b.totals or Totals.of(b.mask, b.group), "ranks": self.ranks}

    def run(self, full: dict[str, Any], b: Rollouts, **moved) -> Tensor:
        """The scalar; InputError in one sentence for whatever the loss does instead."""
        before = {k: v.detach().clone() for k, v in full.items() if isinstance(v, Tensor)}
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                got = self.call(self, full, self.given | moved)
        except InputError:
            raise
        except Exception as e:
            said = " ".join(str(e).split())[:200]
            raise InputError(f"{self.name} raised {type(e).__name__}: {said}") from e
        self.printed |= bool(out.getvalue())
        self.mutated |= {k for k, v in before.items() if not _same(v, full[k])}
        return self._scalar(got, b)

    def _scalar(self, got: Any, b: Rollouts) -> Tensor:
        if isinstance(got, dict) and "loss" in got:
            got = got["loss"]
        if isinstance(got, tuple | list) and got and isinstance(got[0], Tensor):
            got, self.first_of = got[0], True
        if not isinstance(got, Tensor):
            raise InputError(f"{self.name} answers with {type(got).__name__}, not a tensor: return the loss itself.")
        if got.ndim and got.shape in {b.mask.shape, b.mask.shape[:1]} and (got.ndim == 2 or len(b.mask) > 1):
            self.unreduced = True
            o = self.objective
            x, agg = got, o.agg
            if x.ndim == 2 and agg == "seq-mean":
                agg = "seq-mean-token-sum" if o.level == "trajectory" else "seq-mean-token-mean"
            elif x.ndim == 1 and agg != "seq-mean":
                agg = "seq-mean"
            v = self.view(b)
            return aggregate(x, b.mask, agg, v.group, v.totals)
        if got.numel() != 1 or got.ndim:
            raise InputError(
                f"{self.name} answers with shape {list(got.shape)} for inputs of shape {list(b.mask.shape)}: "
                "return a scalar, or an unreduced [B, T] or [B]."
            )
        return got

    def __call__(self, b: Rollouts, **moved) -> Tensor:
        return self.run(self.inputs(b, b.logp.detach().clone()), b, **moved).detach()

    def both(self, b: Rollouts, **moved) -> tuple[Tensor, Tensor]:
        """(value, dJ/dlp)."""
        x = b.logp.detach().clone().requires_grad_()
        value = self.run(self.inputs(b, x), b, **moved)
        if not value.requires_grad:
            return value, torch.zeros_like(x)
        (g,) = torch.autograd.grad(value, x, allow_unused=True)
        return value.detach(), torch.zeros_like(x) if g is None else -g

    def gradient(self, b: Rollouts, **moved) -> Tensor:
        return self.both(b, **moved)[1]


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.equal(x.nan_to_num(nan=12345.0), y.detach().nan_to_num(nan=12345.0))


# ---- from a name to a callable ---------------------------------------------------------------------------------------
def load(target: str) -> Callable:
    """The callable at `package.module:function` or `path/to/file.py:function`; InputError where there is none."""
    where, colon, attr = target.rpartition(":")
    if not colon or not where or not attr:
        raise InputError(
            f"{target!r} names no loss: write package.module:function, path/to/file.py:function, verl:loss_mode or "
            "trl:loss_type."
        )
    module = _file(Path(where)) if where.endswith(".py") else _module(where)
    found: Any = module
    for part in attr.split("."):
        if not hasattr(found, part):
            known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            near = difflib.get_close_matches(part, known, 3, 0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(known[:8]) or 'no function'}."
            raise InputError(f"{where} has no {part!r}: {hint}")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"{target} is a {type(found).__name__}, not a function.")
    return found


def _file(path: Path):
    if not path.is_file():
        raise InputError(f"there is no file {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    with _as_input_error(str(path)):
        spec.loader.exec_module(module)
    return module


def _module(name: str):
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    with _as_input_error(name):
        return importlib.import_module(name)


@contextlib.contextmanager
def _as_input_error(what: str):
    try:
        yield
    except Exception as e:
        raise InputError(f"{what} does not import: {type(e).__name__}: {' '.join(str(e).split())[:200]}.") from e


# ---- from a callable to a Loss ---------------------------------------------------------------------------------------
def adapt(loss: Any, objective: Objective, hp: dict[str, Any]) -> Loss:
    """A Loss from a callable, an Objective, a trainer class of TRL's, or a name (see `load` and frameworks.py)."""
    from upref.check import frameworks
    from upref.check.trl import is_trainer

    if isinstance(loss, str) and loss.startswith(("verl:", "trl:")):
        return frameworks.named(loss, objective, hp)
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", None) or type(loss).__name__
    if isinstance(loss, str):
        loss = load(loss)
    if isinstance(loss, Objective):
        return _objective(loss, objective, hp)
    if is_trainer(loss):
        return frameworks.trl(name, loss, objective, hp)
    if isinstance(loss, type):
        raise InputError(f"{name} is a class: pass an instance of it, or its function.")
    if not callable(loss):
        raise InputError(f"a {type(loss).__name__} is not a loss: pass a function or its name.")
    parameters = _parameters(loss)
    names = {p.name for p in parameters}
    if {"old_log_prob", "log_prob", "advantages", "response_mask"} <= names and names & {"loss_agg_mode", "config"}:
        return frameworks.verl(name, loss, objective, hp)
    return _plain(name, loss, parameters, objective, hp)


def _parameters(loss) -> list[inspect.Parameter]:
    try:
        f = loss.forward if isinstance(loss, torch.nn.Module) else loss
        return list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):  # a builtin
        return []


def _plain(name, fn, parameters, objective: Objective, hp) -> Loss:
    takes_args = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    bound = set(getattr(fn, "keywords", ())) if isinstance(fn, functools.partial) else set()
    role = {p.name: ROLE[p.name] for p in takes_args if p.name in ROLE and p.name not in bound}
    positional = [p.name for p in takes_args if p.kind is not p.KEYWORD_ONLY and p.name not in bound]
    one = positional if len(positional) == 1 and positional[0] not in ROLE else []
    by_position = not takes_args
    if not one and not by_position and not set(MAIN) <= set(role.values()):
        for p, r in zip(positional, MAIN, strict=False):
            if role.setdefault(p, r) != r or list(role.values()).count(r) > 1:
                break
        if missing := [r for r in MAIN if r not in role.values()]:
            said = ", ".join(p.name for p in parameters)
            raise InputError(
                f"{name}({said}) has no argument that upref can read as {ROLES[missing[0]].split()[0]}: it must take "
                "(log_prob, old_log_prob, advantages, mask)."
            )
    resolved = objective.resolve(hp)
    swallows = any(p.kind is p.VAR_KEYWORD for p in parameters)
    own = {p.name for p in takes_args} - role.keys() - set(one)
    needed = {p.name for p in takes_args if p.default is p.empty} - role.keys() - set(one) - bound
    if unknown := sorted(needed - resolved.keys()):
        raise InputError(
            f"{name} needs {unknown[0]!r}, which {objective.name} does not have: bind it with functools.partial."
        )
    given = {k: v for k, v in hp.items() if k in own or swallows} | {k: resolved[k] for k in needed}
    contract = [
        f"{k} is not an argument of the loss: {k} = {v} is expected of it"
        for k, v in hp.items()
        if k not in own and not swallows
    ]
    only_positional = {p.name for p in takes_args if p.kind is p.POSITIONAL_ONLY}

    def call(self: Loss, full, moved):
        if one:
            return fn(full["rollouts"], **moved)
        if by_position:
            return fn(*(full[r] for r in MAIN), **moved)
        args = [full[role[p]] for p in positional if p in only_positional]
        return fn(*args, **{p: full[r] for p, r in role.items() if p not in only_positional}, **moved)

    reads = frozenset(role.values()) or frozenset(MAIN)
    if one:
        inner = call
        call = lambda self, full, moved: inner(self, full | {"rollouts": _rollouts(full)}, moved)
        reads |= {"group", "totals", "logp_ref", "entropy"}
    return Loss(name, call, objective, reads, frozenset(own & resolved.keys()), swallows, given, contract=contract)


def _rollouts(full) -> Rollouts:
    adv = full["adv"]
    keys = ("logp_old", "mask", "group", "logp_ref", "entropy", "totals")
    return Rollouts(logp=full["logp"], adv=adv if adv.ndim == 2 else adv[:, None], **{k: full[k] for k in keys})


def _objective(theirs: Objective, objective: Objective, hp) -> Loss:
    known = frozenset(theirs.hyperparameters)
    call = lambda self, full, moved: theirs.loss(_rollouts(full), **moved)
    reads = frozenset({*MAIN, "group", "logp_ref", "entropy", "totals"})
    return Loss(
        theirs.name,
        call,
        objective,
        reads,
        known & set(objective.hyperparameters),
        False,
        {k: v for k, v in hp.items() if k in known},
    )
