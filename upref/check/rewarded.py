# SPDX-License-Identifier: Apache-2.0
"""A foreign advantage function as one thing: rewards and prompts in, one number per response out."""

import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upref.check.adapters import load
from upref.check.rationals import UNGROUPED
from upref.errors import InputError

ROLES = {
    "rewards": "rewards reward scores score returns outcome_rewards sequence_rewards R r token_level_rewards "
    "token_level_scores",
    "group": "group groups group_id group_ids index indices uid uids prompt_id prompt_ids prompt_index",
    "mask": "mask response_mask completion_mask loss_mask action_mask eos_mask",
    "n": "n num_generations group_size n_samples num_samples n_samples_per_prompt rollout_n G k",
}
ROLE = {name: role for role, all_ in ROLES.items() for name in all_.split()}
LENGTHS = (3, 1, 4, 2, 5)
KINDS = ("tensor", "strings", "array", "list")  # what rewards and group arrive as


class Rewarded:
    """Call it on (rewards, group), rows of numbers, for one float per response. `contract` says how it was called."""

    def __init__(self, name: str, fn: Callable, roles: dict[str, str], given: dict[str, Any], square: bool):
        self.name, self.fn, self.roles, self.given, self.square = name, fn, roles, given, square
        by_token = any(p.startswith("token_level") for p in roles)
        ids = {p for p, r in roles.items() if r == "group"}
        self.kinds = ("strings", *KINDS) if ids & {"index", "uid", "uids"} else KINDS  # verl's names for them
        said = " ".join(str(x) for x in getattr(fn, "__annotations__", {}).values())
        hinted = [k for k, word in (("array", "ndarray"), ("list", "list")) if word in said.lower() and not by_token]
        self.kinds = (*hinted, *self.kinds)
        self.kind, self.tol = self.kinds[0], 1e-9
        self.mutated: set[str] = set()
        self.tokens = by_token
        self.n = 4 if square or "n" in roles.values() else 0  # contiguous groups of four, where it takes no ids
        self.said: dict[str, str] = {}

    @property
    def contract(self) -> list[str]:
        kinds = {"strings": "numpy strings", "array": "numpy numbers", "list": "Python lists"}
        if self.kind in kinds:
            self.said["kind"] = f"it takes {'prompts' if self.tokens else 'rewards and prompts'} as {kinds[self.kind]}"
        if self.n:
            how = "as [prompts, n]" if self.square else "with n"
            self.said["n"] = f"it takes rewards {how}, no group ids: groups are contiguous and of one size"
        if self.tol > 1e-6:
            self.said["tol"] = "it computes in float32: compared to 1e-4"
        return list(self.said.values())

    def choose(self, good: Callable[[], bool]) -> bool:
        """Settle on the first kind of input for which `good` holds, else on the first that runs at all."""
        errors: list[InputError] = []
        ran = []
        for tol in (1e-9, 1e-4):  # float64, and whatever goes through float32 on the way
            for kind in self.kinds:
                self.kind, self.tol = kind, max(tol, self.tol)
                try:
                    if good():
                        return True
                    ran.append(kind)
                except InputError as e:
                    errors.append(e)
        if not ran:
            raise errors[0]
        self.kind = ran[0]
        return False

    def lengths(self, R: Sequence, group: Sequence[int]) -> list[int]:
        """Of each response in tokens; it travels with the row."""
        if not self.tokens and "mask" not in self.roles.values():
            return [1] * len(R)
        return [LENGTHS[(int(4 * (x or 0)) + g if x == x else g) % 5] for x, g in zip(R, group, strict=True)]

    def __call__(self, R: Sequence, group: Sequence[int]) -> list[float]:
        full = self._inputs(R, group)
        before = {k: _copy(v) for k, v in full.items()}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                got = self.fn(**{p: full[r] for p, r in self.roles.items()}, **self.given)
        except InputError:
            raise
        except Exception as e:
            raise InputError(f"{self.name} raised {type(e).__name__}: {' '.join(str(e).split())[:200]}") from e
        self.mutated |= {k for k, v in before.items() if not _equal(v, full[k])}
        return self._numbers(got, len(R), self.lengths(R, group))

    def _inputs(self, R: Sequence, group: Sequence[int]) -> dict[str, Any]:
        N, lengths = len(R), self.lengths(R, group)
        width = max(lengths) + 1
        mask = torch.arange(width) < torch.tensor(lengths)[:, None]
        rows = [None if x is None else float(x) for x in R]
        rewards: Any = rows
        if self.tokens:
            rewards = torch.zeros(N, width, dtype=torch.float64)
            rewards[torch.arange(N), torch.tensor(lengths) - 1] = torch.tensor(
                [math.nan if x is None else x for x in rows], dtype=torch.float64
            )
        elif self.kind in ("tensor", "strings"):
            rewards = torch.tensor(rows, dtype=torch.float64)
        elif self.kind == "array":
            rewards = np.array(rows, dtype=float)
        if self.square:
            if N % self.n:
                raise InputError(f"{self.name} takes rewards as [prompts, n].")
            rewards = (
                rewards.reshape(-1, self.n)
                if not isinstance(rewards, list)
                else [rewards[i : i + self.n] for i in range(0, N, self.n)]
            )
        ids: dict[str, Any] = {
            "tensor": torch.tensor(list(group)),
            "strings": np.array([f"prompt-{g}" for g in group], dtype=object),
            "array": np.array(list(group)),
            "list": list(group),
        }
        n = list(group).count(group[0])
        return {"rewards": rewards, "group": ids[self.kind], "mask": mask, "n": n}

    def _numbers(self, got: Any, N: int, lengths: list[int]) -> list[float]:
        if isinstance(got, tuple) and got:
            got = got[0]
        if isinstance(got, dict) and "advantages" in got:
            got = got["advantages"]
        try:
            A = got.detach() if isinstance(got, Tensor) else torch.as_tensor(np.asarray(got, dtype=float))
        except (TypeError, ValueError) as e:
            raise InputError(
                f"{self.name} answers with {type(got).__name__}: return one advantage per response."
            ) from e
        if A.dtype in (torch.float32, torch.float16, torch.bfloat16):
            self.tol = 1e-4
        if A.ndim == 2 and A.shape != (N, 1) and A.shape[0] == N and not self.square:
            mask = torch.arange(A.shape[1]) < torch.tensor(lengths)[:, None]
            if not mask.shape == A.shape:
                raise InputError(f"{self.name} answers with shape {list(A.shape)} for {N} responses.")
            uneven = (A - A[:, :1]).abs().masked_fill(~mask, 0) > 1e-6
            if uneven.any():
                self.said["token"] = "its advantages differ between the tokens of a response: the first is compared"
            A = A[:, 0]
        if A.numel() != N:
            raise InputError(f"{self.name} answers with shape {list(A.shape)} for {N} responses: return [N] or [N, T].")
        return A.double().reshape(-1).tolist()


def read(fn: Any, estimator: str, hp: dict[str, Any]) -> Rewarded:
    """A Rewarded from a callable or its name (also verl:grpo and the like); InputError where it takes other things."""
    name = fn if isinstance(fn, str) else getattr(getattr(fn, "func", fn), "__name__", type(fn).__name__)
    if isinstance(fn, str):
        fn = _verl(fn.removeprefix("verl:")) if fn.startswith("verl:") else load(fn)
    if not callable(fn):
        raise InputError(f"a {type(fn).__name__} is not an advantage function: pass a function or its name.")
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError) as e:
        raise InputError(f"{name} has no signature that can be read: wrap it in a function (rewards, group).") from e
    bound = getattr(fn, "keywords", {})
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name not in bound]
    roles = {p.name: ROLE[p.name] for p in named if p.name in ROLE}
    if "rewards" not in roles.values():
        for p, role in zip((p for p in named if p.default is p.empty), ("rewards", "group"), strict=False):
            roles[p.name] = role
    own = {p.name for p in named} - roles.keys()
    given = {k: v for k, v in hp.items() if k in own}
    missing = [p.name for p in named if p.default is p.empty and p.name not in {*roles, *given}]
    if missing or "rewards" not in roles.values():
        raise InputError(
            f"{name} needs {missing[0]!r}, which upref cannot give: bind it with functools.partial."
            if missing
            else f"{name}() takes no rewards: it must take (rewards, group)."
        )
    reads_groups = {"group", "n"} & set(roles.values())
    square = estimator not in UNGROUPED and not reads_groups and not any(p.startswith("token_") for p in roles)
    if "group" in roles.values():
        roles = {p: r for p, r in roles.items() if r != "n"}
    return Rewarded(name, fn, roles, given, square)


def _verl(name: str) -> Callable:
    from upref.check.verl import verl

    core_algos, _, _ = verl()
    try:
        return core_algos.get_adv_estimator_fn(name)
    except ValueError as e:
        raise InputError(f"verl has no advantage estimator {name!r}: {e}") from e


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x.copy() if isinstance(x, list | np.ndarray) else x


def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor):
        return x.shape == y.shape and torch.equal(x.double().nan_to_num(12345.0), y.double().nan_to_num(12345.0))
    if isinstance(x, np.ndarray) and x.dtype == float:
        return np.array_equal(x, y, equal_nan=True)
    return bool(np.array_equal(x, y)) if isinstance(x, np.ndarray) else repr(x) == repr(y)
