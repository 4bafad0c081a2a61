# SPDX-License-Identifier: Apache-2.0
"""A user's advantage function as one frozen type: rewards and prompts in, one number
per response out.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upref.errors import InputError, describe_kind
from upref.user_code import names
from upref.user_code.function import (
    Called,
    UserFunction,
    load_function,
    other_outputs,
    refuse_needed,
)
from upref.user_code.guard import call_guarded
from upref.user_code.load import load, verl_estimator
from upref.user_code.signature import Reading, parameters, read as read_signature
from upref.verify.exact import LENGTHS, UNGROUPED, RewardBatch, lengths
from upref.verify.formulas.tokens import READS, role as role_of_token_input

# what rewards and prompt ids may be passed as, and the words for it in a report
KINDS = {
    "tensor": "",
    "strings": "numpy strings",
    "array": "numpy numbers",
    "list": "Python lists",
}
SAME_TOKENS = 1e-6  # of the advantages of one response's tokens, relative and absolute
BELOW_FLOAT64 = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class AdvantageOutcome:
    """What one call returned and did.

    Attributes:
        A: one advantage for each response.
        wrote: the roles of the inputs whose values it changed.
        printed: whether it printed.
        in_float32: whether it answered in float32 or in half precision.
        differs_within_response: whether the advantages differ between the trained tokens
            of a response. A has the one that is furthest from the first token's.
    """

    A: list[float]
    wrote: frozenset[str]
    printed: bool
    in_float32: bool
    differs_within_response: bool


@dataclass(frozen=True)
class Function(UserFunction):
    """A user's advantage function. Call it on a RewardBatch for one float per response;
    `outcome` has what else the call did.

    Attributes:
        reading: the roles of its parameters.
        bound_args: the settings that every call passes.
        takes_matrix: whether rewards are passed as [prompts, n].
        kinds: the names in KINDS of what it may take, the likeliest first.
        kind: the name in KINDS of what rewards and group are passed as.
        tol: the relative error that is allowed.
        lines: the lines of Python that a call may run; 0 for any number.
        mask_of_numbers: whether a mask of responses is passed as numbers, not as bool.
    """

    reading: Reading
    bound_args: Mapping[str, Any]
    takes_matrix: bool
    kinds: tuple[str, ...]
    kind: str = "tensor"
    tol: float = 1e-9
    lines: int = 0
    mask_of_numbers: bool = False

    @property
    def reads(self) -> frozenset[str]:
        """The roles of the inputs that it reads."""
        return frozenset((*self.reading.roles.values(), *self.reading.star))

    @property
    def takes_tokens(self) -> bool:
        """Whether it takes a reward for each token, not one for each response."""
        return _takes_token_rewards(self.reading)

    @property
    def takes_tensors(self) -> bool:
        """Whether it takes rewards as a tensor."""
        return self.kind in ("tensor", "strings") or self.takes_tokens

    @property
    def groups_are_contiguous(self) -> bool:
        """Whether it takes no prompt ids, so that groups must be contiguous and of one
        size.
        """
        return self.takes_matrix or ("group" not in self.reads and "n" in self.reads)

    def assumptions(self) -> list[str]:
        """Say what was assumed about the inputs of the function.

        Returns:
            Sentences; none where rewards and prompt ids are tensors.
        """
        out = []
        if said := KINDS[self.kind]:
            out.append(
                f"it takes {'prompts' if self.takes_tokens else 'rewards and prompts'} as {said}"
            )
        if self.groups_are_contiguous:
            how = "as [prompts, n]" if self.takes_matrix else "with n"
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
        inputs = self._inputs(R, group)
        called = self._called(inputs)
        A, differs_within_response = self._per_response(
            called.returned, len(R), self._lengths(R, group)
        )
        return AdvantageOutcome(
            A.double().reshape(-1).tolist(),
            called.wrote,
            called.printed,
            A.dtype in BELOW_FLOAT64,
            differs_within_response,
        )

    def other_outputs(self, batch: RewardBatch) -> list[str]:
        """Say which outputs are no advantages, as `upref.user_code.function` does; none
        where the function refuses the batch.

        Args:
            batch: of one call.
        """
        try:
            returned = self._called(self._inputs(batch.R, batch.group)).returned
        except InputError:
            return []
        return other_outputs(returned, _advantages_in(returned))

    def on_tokens(
        self, rewards: Tensor, mask: Tensor, group: Sequence[int]
    ) -> list[float]:
        """Call a function that takes a mask of tokens once.

        Args:
            rewards: of each token, [N, T]. A function that takes one reward per response
                gets their sum over trained tokens.
            mask: True on trained tokens, [N, T].
            group: the prompt id of each response.

        Returns:
            The advantage of the trained tokens of each response; where they differ, the
            one that is furthest from the first one's; 0 without a trained token.

        Raises:
            InputError: the function raises, or returns something else.
        """
        A = self._advantages_of_tokens(rewards, mask, group)
        return _furthest_from_first(A, mask)[0].tolist()

    def differs_within_response(
        self, rewards: Tensor, mask: Tensor, group: Sequence[int]
    ) -> bool:
        """Call a function as `on_tokens` does, and tell whether the advantages of the
        trained tokens of a response differ.

        Args:
            rewards: as of `on_tokens`.
            mask: as of `on_tokens`.
            group: as of `on_tokens`.

        Raises:
            InputError: the function raises, or returns something else.
        """
        A = self._advantages_of_tokens(rewards, mask, group)
        return bool(_furthest_from_first(A, mask)[1].any())

    def _advantages_of_tokens(
        self, rewards: Tensor, mask: Tensor, group: Sequence[int]
    ) -> Tensor:
        """Call a function as `on_tokens` does.

        Returns:
            The advantage of each token, [N, T], in float64.

        Raises:
            InputError: the function raises, or returns something else.
        """
        inputs = self._inputs(torch.where(mask, rewards, 0).sum(1).tolist(), group)
        inputs["mask"] = mask.clone()
        if self.takes_tokens:
            inputs["rewards"] = rewards.clone()
        returned = self._called(inputs).returned
        A = torch.as_tensor(_advantages_in(returned)).detach().cpu().double()
        if A.shape == mask.shape[:1] or A.shape == (len(mask), 1):
            A = A.reshape(-1, 1).expand(mask.shape)
        if A.shape != mask.shape:
            raise InputError(
                f"{self.name} returns shape {list(A.shape)} for a mask {list(mask.shape)}."
            )
        return A

    def on_rows(
        self, R: Sequence[Any], group: Sequence[int], kept: Sequence[bool]
    ) -> list[float]:
        """Call a function that takes a mask of responses once.

        Args:
            R: a reward per response.
            group: the prompt id of each response.
            kept: whether the mask keeps each response.

        Returns:
            One advantage per response.

        Raises:
            InputError: the function raises, or returns something else.
        """
        inputs = self._inputs(R, group)
        row_mask = torch.tensor(list(kept))
        inputs["row_mask"] = row_mask.double() if self.mask_of_numbers else row_mask
        returned = self._called(inputs).returned
        A, _ = self._per_response(returned, len(R), self._lengths(R, group))
        return [float(a) for a in A.double().reshape(-1)]

    def on_tensor(self, rewards: Tensor, group: Sequence[int]) -> Tensor:
        """Call the function once on rewards that stay one tensor, which a proof follows.

        Args:
            rewards: of each response, [N].
            group: the prompt id of each response.

        Returns:
            The advantage of each token, [N, T]: 0 behind the end of a response.

        Raises:
            InputError: the function raises, or takes or returns something else.
        """
        if not self.takes_tensors:
            raise InputError(
                f"{self.name} takes rewards as {KINDS[self.kind]}: a proof needs a tensor"
            )
        N = len(group)
        token_counts = self._fixed_lengths(N)
        inputs = self._inputs_of(rewards, group, token_counts)
        returned, _ = call_guarded(
            self.name,
            lambda: self.reading.call(self.fn, inputs, dict(self.bound_args)),
            self.lines,
            self.reading.passed(inputs, self.bound_args),
        )
        returned = _advantages_in(returned)
        if not isinstance(returned, Tensor):
            kind = describe_kind(returned)
            raise InputError(f"{self.name} returns {kind}: a proof needs a tensor")
        return self.per_token(returned.detach(), len(group))

    def per_token(self, A: Tensor, N: int) -> Tensor:
        """Return advantages as `on_tensor` does.

        Args:
            A: of each response or of each token, as the function returns it.
            N: the number of responses.

        Raises:
            InputError: it has another shape.
        """
        token_counts = self._fixed_lengths(N)
        longest = max(token_counts)
        widths = (longest, longest + 1) if longest > 1 else (1,)
        shape = [int(n) for n in A.shape]  # a proof notes what a size is compared with
        is_of_tokens = len(shape) == 2 and shape[0] == N and not self.takes_matrix
        if is_of_tokens and shape[1] in widths:
            A = A.narrow(1, 0, longest)
        elif math.prod(shape) == N:
            A = A.reshape(N, 1).expand(N, longest)
        else:
            raise InputError(
                f"{self.name} returns shape {shape} for {N} responses: return [N] or [N, T]."
            )
        inside = torch.arange(longest) < torch.tensor(token_counts)[:, None]
        return torch.where(inside, A, 0)

    def _fixed_lengths(self, N: int) -> list[int]:
        """Return a number of tokens for each response, whatever its reward."""
        if self.takes_tokens or "mask" in self.reads:
            return [LENGTHS[i % len(LENGTHS)] for i in range(N)]
        return [1] * N

    def _called(self, inputs: dict[str, Any]) -> Called:
        """Call the function once on inputs by role, and compare these before and after.

        Raises:
            InputError: the function raises.
        """
        return self.watched(
            lambda: self.reading.call(self.fn, inputs, dict(self.bound_args)),
            inputs,
            self.reading.passed(inputs, self.bound_args),
            self.lines,
        )

    def _lengths(self, R: Sequence[Any], group: Sequence[int]) -> list[int]:
        """Return the number of tokens of each response: 1 for a function that does not
        read tokens.
        """
        if self.takes_tokens or "mask" in self.reads:
            return lengths(R, group)
        return [1] * len(R)

    def _inputs(self, R: Sequence[Any], group: Sequence[int]) -> dict[str, Any]:
        """Return the inputs of a call by role, in the kinds and shapes that the
        function takes.
        """
        rows = [None if x is None else float(x) for x in R]
        rewards: Any = rows
        if self.takes_tensors:
            rewards = torch.tensor(
                [torch.nan if x is None else x for x in rows], dtype=torch.float64
            )
        elif self.kind == "array":
            rewards = np.array(rows, dtype=float)
        return self._inputs_of(rewards, group, self._lengths(R, group))

    def _inputs_of(
        self, rewards: Any, group: Sequence[int], token_counts: list[int]
    ) -> dict[str, Any]:
        """Return the inputs of a call by role. A function of tokens gets a response's
        reward at its last token, as in verl.
        """
        N = len(group)
        ends = torch.tensor(token_counts)
        n = list(group).count(group[0])
        mask = torch.arange(int(ends.max()) + 1) < ends[:, None]
        if self.takes_tokens:
            rewards = torch.zeros(mask.shape, dtype=torch.float64).index_put(
                (torch.arange(N), ends - 1), rewards
            )
        if self.takes_matrix:
            if N % n:
                raise InputError(f"{self.name} takes rewards as [prompts, n].")
            if self.kind == "list":
                rewards = [rewards[i : i + n] for i in range(0, N, n)]
            else:
                rewards = rewards.reshape(-1, n)
        ids: dict[str, Callable[[], Any]] = {
            "tensor": lambda: torch.tensor(list(group)),
            "strings": lambda: np.array(
                [f"prompt-{group_id}" for group_id in group], dtype=object
            ),
            "array": lambda: np.array(list(group)),
            "list": lambda: list(group),
        }
        row_mask = torch.ones(N, dtype=torch.bool)
        return {
            "rewards": rewards,
            "group": ids[self.kind](),
            "mask": mask,
            "row_mask": row_mask.double() if self.mask_of_numbers else row_mask,
            "n": n,
        }

    def _per_response(
        self, returned: Any, N: int, token_counts: list[int]
    ) -> tuple[Tensor, bool]:
        """Read one advantage for each response from what the function returned.

        Args:
            returned: a tensor, an array or a list; a tuple with one of them first; or a
                dictionary with one of them as "advantages".
            N: the number of responses.
            token_counts: the tokens of each response.

        Returns:
            [N], and whether the tokens of a response have different advantages. Then
            [N] holds the one that is furthest from the first token's.

        Raises:
            InputError: it returned no real number for each response.
        """
        returned = _advantages_in(returned)
        try:
            if isinstance(returned, Tensor):
                A = returned.detach().cpu().to_dense()
            else:
                A = torch.as_tensor(np.asarray(returned))
            if A.dtype == torch.bool or A.is_complex():
                raise TypeError
        # torch raises a RuntimeError for a meta tensor
        except (TypeError, ValueError, RuntimeError) as e:
            raise InputError(
                f"{self.name} returns {describe_kind(returned)}: return one real number per response."
            ) from e
        has_tokens = A.ndim == 2 and A.shape[0] == N and A.shape != (N, 1)
        differs_within_response = False
        if has_tokens and not self.takes_matrix:
            mask = torch.arange(A.shape[1]) < torch.tensor(token_counts)[:, None]
            if int(mask.sum()) != sum(token_counts):
                raise InputError(
                    f"{self.name} returns shape {list(A.shape)} for {N} responses."
                )
            A, differs = _furthest_from_first(A, mask)
            differs_within_response = bool(differs.any())
        if A.numel() != N:
            raise InputError(
                f"{self.name} returns shape {list(A.shape)} for {N} responses: return [N] or [N, T]."
            )
        return A, differs_within_response


def read(fn: Any, estimator: str, hp: Mapping[str, Any]) -> Function:
    """Make a Function from a callable or its name (also verl:grpo and the like).

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
    name, fn = load_function(fn, "an advantage function", _find)
    all_parameters = parameters(fn)
    reading = read_signature(
        fn, name, names.reward_role, _required_roles(all_parameters)
    )
    for p in reading.roles:
        if p in reading.placed and (meant := role_of_tokens(p)):
            raise InputError(
                f"{name}: {p} is no reward and no prompt: it means {meant}, which an estimator of one reward per "
                f"response does not read. Estimators that read it: {', '.join(readers_of(meant))}."
            )
    settings = {
        p: hp[k] for p in reading.settings if (k := names.hyperparameter(p, set(hp)))
    }
    refuse_needed(name, (p for p in reading.needed if p not in settings))
    # beside prompt ids, a group size with a default is not needed
    if "group" in reading.roles.values():
        optional_sizes = {
            p.name
            for p in all_parameters
            if names.reward_role(p.name) == "n" and p.default is not p.empty
        }
        roles = {p: r for p, r in reading.roles.items() if p not in optional_sizes}
        reading = replace(reading, roles=roles)
    kinds = _kinds(all_parameters, reading)
    function = Function(
        name, fn, reading, settings, takes_matrix=False, kinds=kinds, kind=kinds[0]
    )
    # an estimator of groups that reads no groups must find them in the shape
    takes_matrix = (
        estimator not in UNGROUPED
        and not {"group", "n"} & function.reads
        and not function.takes_tokens
    )
    return replace(function, takes_matrix=takes_matrix)


def _advantages_in(returned: Any) -> Any:
    """Return the advantages of what a function returned: the first of a tuple, the entry
    of a dictionary.
    """
    if isinstance(returned, tuple) and returned:
        returned = returned[0]
    if isinstance(returned, dict) and "advantages" in returned:
        returned = returned["advantages"]
    return returned


def _furthest_from_first(A: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the advantage of each response: that of its trained tokens. Where they
    differ, it is the one that is furthest from the first one's.

    Args:
        A: of each token, [N, T].
        mask: True on trained tokens, [N, T].

    Returns:
        [N], 0 for a response without a trained token; and whether the advantages of its
        trained tokens differ, [N].
    """
    first_column = mask.int().argmax(1, keepdim=True)
    numbers = A.double()
    first = numbers.gather(1, first_column)
    is_same = torch.isclose(numbers, first, SAME_TOKENS, SAME_TOKENS, equal_nan=True)
    differs = mask & ~is_same
    # NaN or infinite beside a finite number is furthest
    gap = torch.where(differs, (numbers - first).abs().nan_to_num(torch.inf), 0)
    furthest_column = gap.argmax(1, keepdim=True)
    any_differs = differs.any(1, keepdim=True)
    column = torch.where(any_differs, furthest_column, first_column)
    of_response = A.gather(1, column)[:, 0]
    return torch.where(mask.any(1), of_response, 0), any_differs[:, 0]


def _find(name: str) -> Callable[..., Any]:
    """Return the function of a name: verl's own estimator, as verl:gae, or any other."""
    if name.startswith("verl:"):
        return verl_estimator(name.removeprefix("verl:"))
    return load(name)


def role_of_tokens(name: str) -> str:
    """Return the input of an estimator of tokens that a name means, if an estimator of
    responses does not read it; else "".

    Args:
        name: of an argument.
    """
    meant = role_of_token_input(name)
    return "" if meant in ("", "rewards", "group", "mask") else meant


def readers_of(role: str) -> list[str]:
    """Return the estimators of tokens that read an input.

    Args:
        role: the input.
    """
    return [estimator for estimator, roles in READS.items() if role in roles]


def _required_roles(every: Sequence[inspect.Parameter]) -> tuple[str, ...]:
    """Return the roles that the parameters must have. They include the prompts, unless
    the names show that the function takes rewards and no prompts.
    """
    plain = [p for p in every if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    named_roles = {names.reward_role(p.name) for p in plain}
    if {"group", "n"} & named_roles:
        return ("rewards",)
    unnamed = [
        p
        for p in plain
        if p.default is p.empty
        and not names.reward_role(p.name)
        and not _is_setting(p.name)
    ]
    # beside named rewards, the one other parameter is the prompts; without them the
    # two unnamed parameters are both
    has_one_unnamed = len(unnamed) == 1
    has_named_rewards = "rewards" in named_roles
    if has_one_unnamed == has_named_rewards:
        return ("rewards", "group")
    return ("rewards",)


def _is_setting(name: str) -> bool:
    """Return whether a parameter of this name is a setting, not an input."""
    return bool(
        set(names.words(name)) & names.NEVER
        or names.hyperparameter(name, {"eps", "ddof"})
    )


def _takes_token_rewards(reading: Reading) -> bool:
    """Return whether a parameter is named token_level_..., as in verl."""
    return any(names.words(p)[:2] == ["token", "level"] for p in reading.roles)


def _kinds(every: Sequence[inspect.Parameter], reading: Reading) -> tuple[str, ...]:
    """Return the names in KINDS in the order in which they are tried: those first that
    names and annotations suggest.
    """
    hints = " ".join(str(p.annotation) for p in every).lower()
    likely = [
        kind
        for kind, word in (("array", "ndarray"), ("list", "list"))
        if word in hints and not _takes_token_rewards(reading)
    ]
    words = {
        w for p, r in reading.roles.items() if r == "group" for w in names.words(p)
    }
    # verl's names for them
    likely += ["strings"] if words & {"index", "uid", "uids"} else []
    return tuple(dict.fromkeys((*likely, *KINDS)))
