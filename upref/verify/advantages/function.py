# SPDX-License-Identifier: Apache-2.0
"""A user's advantage function as one frozen type: rewards and prompts in, one number
per response out.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upref.errors import InputError, importing
from upref.user_code import names
from upref.user_code.guard import call_guarded
from upref.user_code.load import load, name_of
from upref.user_code.signature import Reading, parameters, read as read_signature
from upref.verify.exact import UNGROUPED, RewardBatch, lengths

KINDS = {
    "tensor": "",
    "strings": "numpy strings",
    "array": "numpy numbers",
    "list": "Python lists",
}
HALVES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class AdvantageOutcome:
    """What one call did. A: one number per response."""

    A: list[float]
    wrote: frozenset[str]  # roles whose values it changed
    printed: bool
    single: bool  # it answered in float32
    # its advantages differ between the tokens of a response: A has the first
    uneven: bool


@dataclass(frozen=True)
class Function:
    """Call it on a RewardBatch for one float per response; `outcome` tells the rest."""

    name: str
    fn: Callable[..., Any]
    reading: Reading
    bound_args: Mapping[str, Any]  # settings handed to it
    square: bool  # rewards arrive as [prompts, n]
    kinds: tuple[str, ...]  # what rewards and group may arrive as, likeliest first
    kind: str = "tensor"
    tol: float = 1e-9
    # of Python that a call may run before it is stopped, 0 for any number
    lines: int = 0

    @property
    def reads(self) -> frozenset[str]:
        return frozenset((*self.reading.roles.values(), *self.reading.star))

    @property
    def tokens(self) -> bool:
        return _by_token(self.reading)

    @property
    def contiguous(self) -> bool:
        """Whether it takes no ids: groups stand one after the other and are of one
        size.
        """
        return self.square or ("group" not in self.reads and "n" in self.reads)

    def assumptions(self) -> list[str]:
        """Say what was assumed about the inputs of the function.

        Returns:
            Sentences; none where rewards and prompt ids are tensors.
        """
        out = []
        if said := KINDS[self.kind]:
            out.append(
                f"it takes {'prompts' if self.tokens else 'rewards and prompts'} as {said}"
            )
        if self.contiguous:
            how = "as [prompts, n]" if self.square else "with n"
            out.append(
                f"it takes rewards {how}, no group ids: groups are contiguous and of one size"
            )
        return out

    def __call__(self, batch: RewardBatch) -> list[float]:
        return self.outcome(batch.R, batch.group).A

    def outcome(self, R: Sequence[Any], group: Sequence[int]) -> AdvantageOutcome:
        """Call the function once.

        Args:
            R: a reward per response.
            group: the prompt id of each response.

        Returns:
            The advantages in float64, and what else the call did.

        Raises:
            InputError: the function raises, or returns something else.
        """
        full = self._inputs(R, group)
        before = {k: _state(v) for k, v in full.items()}
        got, printed = call_guarded(
            self.name,
            lambda: self.reading.call(self.fn, full, dict(self.bound_args)),
            self.lines,
        )
        wrote = frozenset(k for k, v in before.items() if v != _state(full[k]))
        A, uneven = self._numbers(got, len(R), self._lengths(R, group))
        return AdvantageOutcome(
            A.double().reshape(-1).tolist(), wrote, printed, A.dtype in HALVES, uneven
        )

    def _lengths(self, R: Sequence[Any], group: Sequence[int]) -> list[int]:
        return (
            lengths(R, group) if self.tokens or "mask" in self.reads else [1] * len(R)
        )

    def _inputs(self, R: Sequence[Any], group: Sequence[int]) -> dict[str, Any]:
        """The arguments of a call, in the kinds and shapes that the function takes."""
        N = len(R)
        ends = torch.tensor(self._lengths(R, group))
        n = list(group).count(group[0])
        mask = torch.arange(int(ends.max()) + 1) < ends[:, None]
        rows = [None if x is None else float(x) for x in R]
        rewards: Any = rows
        if self.kind in ("tensor", "strings") or self.tokens:
            rewards = torch.tensor(
                [torch.nan if x is None else x for x in rows], dtype=torch.float64
            )
        elif self.kind == "array":
            rewards = np.array(rows, dtype=float)
        if self.tokens:
            rewards = torch.zeros(mask.shape, dtype=torch.float64).index_put(
                (torch.arange(N), ends - 1), rewards
            )
        if self.square:
            if N % n:
                raise InputError(f"{self.name} takes rewards as [prompts, n].")
            slices = [rows[i : i + n] for i in range(0, N, n)]
            rewards = slices if self.kind == "list" else rewards.reshape(-1, n)
        ids: dict[str, Callable[[], Any]] = {
            "tensor": lambda: torch.tensor(list(group)),
            "strings": lambda: np.array(
                [f"prompt-{group_id}" for group_id in group], dtype=object
            ),
            "array": lambda: np.array(list(group)),
            "list": lambda: list(group),
        }
        return {"rewards": rewards, "group": ids[self.kind](), "mask": mask, "n": n}

    def _numbers(self, got: Any, N: int, ends: list[int]) -> tuple[Tensor, bool]:
        """[N], and whether the tokens of a response differ."""
        got = got[0] if isinstance(got, tuple) and got else got
        got = (
            got["advantages"] if isinstance(got, dict) and "advantages" in got else got
        )
        try:
            if isinstance(got, Tensor):
                A = got.detach().cpu().to_dense()
            else:
                A = torch.as_tensor(np.asarray(got))
            if A.dtype == torch.bool or A.is_complex():
                raise TypeError
        except (
            TypeError,
            ValueError,
            RuntimeError,
        ) as e:  # RuntimeError: a meta tensor
            raise InputError(
                f"{self.name} returns a {type(got).__name__}: return one real number per response."
            ) from e
        uneven = False
        if A.ndim == 2 and A.shape != (N, 1) and A.shape[0] == N and not self.square:
            mask = torch.arange(A.shape[1]) < torch.tensor(ends)[:, None]
            if int(mask.sum()) != sum(ends):
                raise InputError(
                    f"{self.name} returns shape {list(A.shape)} for {N} responses."
                )
            uneven = bool(((A - A[:, :1]).abs().masked_fill(~mask, 0) > 1e-6).any())
            A = A[:, 0]
        if A.numel() != N:
            raise InputError(
                f"{self.name} returns shape {list(A.shape)} for {N} responses: return [N] or [N, T]."
            )
        return A, uneven


def read(fn: Any, estimator: str, hp: Mapping[str, Any]) -> Function:
    """A Function from a callable or its name (also verl:grpo and the like).

    Args:
        fn: the function, or its name.
        estimator: the name of the estimator that it is compared with.
        hp: ddof and eps of that estimator.

    Returns:
        The function, which gets the first kind of inputs that it may take.

    Raises:
        InputError: it is a class, is not callable, or needs an argument that upref
            lacks.
    """
    name = name_of(fn)
    if isinstance(fn, str):
        fn = _verl(fn.removeprefix("verl:")) if fn.startswith("verl:") else load(fn)
    if not callable(fn) or isinstance(fn, type):
        what = (
            f"{name} is a class" if isinstance(fn, type) else f"a {type(fn).__name__}"
        )
        raise InputError(
            f"{what}, not an advantage function: pass a function or its name."
        )
    all_parameters = parameters(fn)
    reading = read_signature(fn, name, names.reward_role, _main(all_parameters))
    settings = {
        p: hp[k] for p in reading.own if (k := names.hyperparameter(p, set(hp)))
    }
    if missing := [p for p in reading.needed if p not in settings]:
        raise InputError(
            f"{name} needs {missing[0]!r}, which upref cannot give: bind it with functools.partial."
        )
    # beside ids a group size with a default says nothing
    if "group" in reading.roles.values():
        idle = {
            p.name
            for p in all_parameters
            if names.reward_role(p.name) == "n" and p.default is not p.empty
        }
        reading = replace(
            reading, roles={p: r for p, r in reading.roles.items() if p not in idle}
        )
    kinds = _kinds(all_parameters, reading)
    f = Function(name, fn, reading, settings, False, kinds, kinds[0])
    return replace(
        f,
        square=estimator not in UNGROUPED
        and not {"group", "n"} & f.reads
        and not f.tokens,
    )


def _main(every: Sequence[inspect.Parameter]) -> tuple[str, ...]:
    """What it must take: prompts too, unless its names say that it takes rewards and no
    prompts.
    """
    plain = [p for p in every if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    known = {names.reward_role(p.name) for p in plain}
    free = [
        p
        for p in plain
        if p.default is p.empty
        and not names.reward_role(p.name)
        and not _setting(p.name)
    ]
    takes_group = not {"group", "n"} & known and (len(free) == 1) == (
        "rewards" in known
    )
    return ("rewards", "group") if takes_group else ("rewards",)


def _setting(name: str) -> bool:
    return bool(
        set(names.words(name)) & names.NEVER
        or names.hyperparameter(name, {"eps", "ddof"})
    )


def _by_token(reading: Reading) -> bool:
    return any(names.words(p)[:2] == ["token", "level"] for p in reading.roles)


def _kinds(every: Sequence[inspect.Parameter], reading: Reading) -> tuple[str, ...]:
    """The kinds of arguments to try, those first that names and annotations suggest."""
    hints = " ".join(str(p.annotation) for p in every).lower()
    likely = [
        kind
        for kind, word in (("array", "ndarray"), ("list", "list"))
        if word in hints and not _by_token(reading)
    ]
    words = {
        w for p, r in reading.roles.items() if r == "group" for w in names.words(p)
    }
    # verl's names for them
    likely += ["strings"] if words & {"index", "uid", "uids"} else []
    return tuple(dict.fromkeys((*likely, *KINDS)))


def _verl(name: str) -> Callable[..., Any]:
    with importing("verl"):
        from verl.trainer.ppo import core_algos
    try:
        return core_algos.get_adv_estimator_fn(name)
    except ValueError as e:
        raise InputError(f"verl has no advantage estimator {name!r}: {e}") from e


def _state(x: Any) -> str:
    return repr(x.tolist() if isinstance(x, Tensor | np.ndarray) else x)
