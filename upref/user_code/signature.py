# SPDX-License-Identifier: Apache-2.0
"""Roles of the arguments of a user-supplied function: by name, or by position where no
name is known.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import PurePath
from typing import Any, NamedTuple

from upref.errors import InputError, describe_kind
from upref.pages import locate_page
from upref.user_code.guard import one_line
from upref.user_code.names import (
    CALLED,
    may_be_mask,
    may_be_old,
    not_given,
    older_of,
    reward_role,
    sampler_of,
    tells_mask,
    words,
)

WRAP_PAGE = "docs/howto/wrap-your-loss.md"
# an argument with a default of these types is not a tensor,
SETTINGS = bool | int | float | str
COUNTED = ("ranks", "n")  # unless it is a count


@dataclass(frozen=True)
class Reading:
    """The roles read from a signature."""

    roles: dict[str, str]  # argument -> role
    placed: frozenset[str]  # of these, the arguments read by position
    settings: dict[str, inspect.Parameter]  # the other arguments
    # arguments that can only be passed by position, in order
    positional: tuple[str, ...]
    accepts_kwargs: bool  # it has **kwargs
    star: tuple[str, ...] = ()  # roles that go into *args, in order
    # arguments with a default, of a role that another must be given
    left_at_default: tuple[str, ...] = ()
    # the error where the order of the policies decides and nothing but their position
    # tells it; empty where their names do
    order_unknown: str = ""

    def __str__(self) -> str:
        """Return the arguments with their roles, in words; "" where every argument has the
        name that upref uses.
        """
        if self.star:
            return f"*args -> {', '.join(CALLED[r] for r in self.star)}, by position"
        how = {p: ", by position" if p in self.placed else "" for p in self.roles}
        return "; ".join(
            f"{p} -> {CALLED[r]}{how[p]}"
            for p, r in self.roles.items()
            if p != CALLED[r]
        )

    def call(
        self, fn: Callable[..., Any], full: dict[str, Any], settings: dict[str, Any]
    ) -> Any:
        """Call the function with inputs by role and settings by name.

        Args:
            fn: the function that was read.
            full: role -> input.
            settings: argument -> value.
        """
        if self.star:
            return fn(*(full[r] for r in self.star), **settings)
        given = {p: full[r] for p, r in self.roles.items()} | settings
        placed = [given.pop(p) for p in self.positional if p in given]
        return fn(*placed, **given)

    def passed(
        self, full: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return what a call passes, by the names of the arguments.

        Args:
            full: role -> input.
            settings: argument -> value.
        """
        if self.star:
            return {f"*args[{i}]": full[r] for i, r in enumerate(self.star)}
        return {p: full[r] for p, r in self.roles.items()} | dict(settings)

    @property
    def needed(self) -> list[str]:
        """Settings without a default."""
        return [p.name for p in self.settings.values() if p.default is p.empty]


def parameters(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the arguments of a function, a method, a partial, an instance with
    __call__, or a module with forward; [] for a builtin.

    A keyword that a partial has bound is left out.

    Args:
        fn: any callable.

    Raises:
        InputError: they cannot be read.
    """
    try:
        function = fn
        if hasattr(fn, "forward") and hasattr(fn, "register_buffer"):  # a module
            function = fn.forward
        bound = getattr(function, "keywords", None) or {}  # by a partial
        return [
            p
            for p in inspect.signature(function).parameters.values()
            if p.name not in bound or p.kind is p.VAR_KEYWORD
        ]
    except ValueError:  # a builtin does not say
        return []
    except Exception as e:  # what anybody's __getattr__ or __signature__ does
        raise InputError(
            f"the arguments of {describe_kind(fn)} cannot be read ({type(e).__name__}: {one_line(e)}). Check a "
            "wrapper: `def loss(log_prob, old_log_prob, advantages, mask): return f(...)`."
        ) from e


def read(
    fn: Callable[..., Any],
    name: str,
    role: Callable[[str], str],
    main: Sequence[str],
    third: bool = False,
    spare: Sequence[str] = (),
) -> Reading:
    """Read the role of each argument of a function.

    A role is read by name, by the rule `role`. Where no name says anything the first
    arguments are `main`, in that order; where all but one are named, the one left has
    the role left. Everything else is refused in one sentence.

    Args:
        fn: the function.
        name: what messages call it.
        role: from the name of an argument to its role, or "".
        main: the roles that it must have, in the order of upref's own signature.
        third: it is asked about three policies, so that `rollout_log_probs=None` beside
            old_log_prob is given too.
        spare: roles of `main` that it may do without, if it has no other argument that
            could be one.

    Returns:
        The roles of its arguments.

    Raises:
        InputError: the roles cannot be read.
    """
    all_parameters = parameters(fn)
    named = [
        p for p in all_parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if not named:
        return _read_without_names(name, all_parameters, main)
    roles = _roles_by_name(named, role)
    _tell_policies_apart(named, roles, main, third)
    unread = _doubles_with_default(named, roles, main)
    roles = {p: r for p, r in roles.items() if p not in unread}

    def refusal(words: str) -> InputError:
        """Make the error with these words, and what to do about it."""
        if "logp" in main and _takes_rewards_alone(named, role):
            words = f"it takes rewards and no log-probabilities. {_OF_ADVANTAGES}"
            return InputError(f"{_shown(name, all_parameters)}: {words}")
        how_to_wrap = wrapper(name, main, all_parameters, roles)
        return InputError(f"{_shown(name, all_parameters)}: {words}. {how_to_wrap}")

    count_of = Counter(roles.values())
    repeated = [argument for argument in roles if count_of[roles[argument]] > 1]
    if repeated and roles[repeated[0]] in main:
        which = " and ".join(repeated)
        raise refusal(
            f"upref cannot tell which of {which} is {CALLED[roles[repeated[0]]]}"
        )
    missing = [its_role for its_role in main if its_role not in roles.values()]
    free = [
        p
        for p in named
        if p.name not in roles and p.default is p.empty and p.kind is not p.KEYWORD_ONLY
    ]
    does_without = not free and set(missing) <= set(spare)
    placed: dict[str, str] = {}
    if missing and not does_without:
        if "adv" in missing and (rewards := _rewards_of_groups(free, roles)):
            raise refusal(
                f"{rewards!r} may be the advantages, or rewards that it normalizes by group. upref gives a loss "
                "advantages; `upref check FILE:FUNCTION --as-advantage group_norm` takes the function that computes them"
            )
        if why_not := _why_not_by_position(free, missing, main):
            raise refusal(why_not)
        placed = dict(zip((p.name for p in free), missing, strict=False))
    order_unknown = ""
    if len(placed) > 1:
        order_unknown = _order_unknown(name, all_parameters, main, roles)
    roles |= placed
    ordered = {p.name: roles[p.name] for p in named if p.name in roles}
    return Reading(
        roles=ordered,
        placed=frozenset(placed),
        settings={p.name: p for p in named if p.name not in roles},
        positional=_passed_by_position(fn, named, ordered),
        accepts_kwargs=any(p.kind is p.VAR_KEYWORD for p in all_parameters),
        left_at_default=unread,
        order_unknown=order_unknown,
    )


_OF_ADVANTAGES = (
    "If it is an advantage function, `upref check FILE:FUNCTION --as-advantage group_norm` and `upref prove` with the same "
    "option take it; `upref identify`, `upref diff` and --as take losses alone."
)


def _takes_rewards_alone(
    named: Sequence[inspect.Parameter], role: Callable[[str], str]
) -> bool:
    """Tell whether each argument without a default is one of an advantage function, and
    one of them the rewards, and none of the others is a log-probability.
    """
    roles = {reward_role(p.name) for p in named if p.default is p.empty}
    takes_logp = any(role(p.name).startswith("logp") for p in named)
    return "rewards" in roles and "" not in roles and not takes_logp


# beginnings of words of a name: such rewards are advantages
NORMALIZED = ("normal", "whiten", "standard", "center", "scaled")


def _rewards_of_groups(free: list[inspect.Parameter], roles: Mapping[str, str]) -> str:
    """Return the argument that holds rewards by its name, in a function that takes groups
    too; "" where there is none.

    Args:
        free: the arguments without a role.
        roles: of the others, by name.
    """
    if "group" not in roles.values():
        return ""
    for p in free:
        is_normalized = any(word.startswith(NORMALIZED) for word in words(p.name))
        if reward_role(p.name) == "rewards" and not is_normalized:
            return p.name
    return ""


def _why_not_by_position(
    free: list[inspect.Parameter], missing: list[str], main: Sequence[str]
) -> str:
    """Return why arguments without a role cannot get the missing roles in their order;
    "" where they can: one argument and one role are left, or no argument has a role.

    Args:
        free: the arguments without a role.
        missing: the roles that no argument has.
        main: all roles that the function must have.
    """
    if without_value := [p.name for p in free if not_given(p.name)]:
        return f"upref has no value for the argument {without_value[0]!r}"
    one_is_left = len(missing) == len(free) == 1 and _may_be(missing[0], free[0].name)
    none_is_named = len(missing) == len(main) and len(free) >= len(main)
    if one_is_left or none_is_named:
        return ""
    which = " and which ".join(CALLED[r] for r in missing)
    return f"upref cannot tell which argument is {which}"


def _may_be(role: str, name: str) -> bool:
    """Tell whether an argument without a role may be the one that is left with this
    role.
    """
    may_be = {"logp_old": may_be_old, "mask": may_be_mask}.get(role)
    return may_be is None or may_be(name)


def _read_without_names(
    name: str, all_parameters: Sequence[inspect.Parameter], main: Sequence[str]
) -> Reading:
    """Read a function that has no named argument: it takes `main` by position, unless
    it has **kwargs alone.
    """
    has_star = any(p.kind is p.VAR_POSITIONAL for p in all_parameters)
    if all_parameters and not has_star:
        raise InputError(
            f"{_shown(name, all_parameters)} has no named argument. {wrapper(name, main)}"
        )
    return Reading(
        roles={},
        placed=frozenset(),
        settings={},
        positional=(),
        accepts_kwargs=any(p.kind is p.VAR_KEYWORD for p in all_parameters),
        star=tuple(main),
        order_unknown=_order_unknown(name, all_parameters, main, {}),
    )


def _roles_by_name(
    named: Sequence[inspect.Parameter], role: Callable[[str], str]
) -> dict[str, str]:
    """Return the role of each argument whose name tells it. An argument whose default
    is a setting has no role, unless it is a count: of ranks, of responses to a prompt, or,
    beside totals, of micro-batches.
    """
    counts: tuple[str, ...] = COUNTED
    if any(role(p.name) == "totals" for p in named):
        counts = (*COUNTED, "parts")
    roles = {}
    for p in named:
        role_of_name = role(p.name)
        if role_of_name in counts or not isinstance(p.default, SETTINGS):
            roles[p.name] = role_of_name
    return {p: r for p, r in roles.items() if r}


def _tell_policies_apart(
    named: Sequence[inspect.Parameter],
    roles: dict[str, str],
    main: Sequence[str],
    third: bool,
) -> None:
    """Correct the roles, in place, where two arguments were read as the same policy: of
    two new ones one may be the old policy, and of two old ones one may be the sampler.

    Args:
        named: the arguments.
        roles: argument -> role; changed.
        main: the roles that the function must have.
        third: the function is asked about three policies.
    """
    if "logp_old" in main and "logp_old" not in roles.values():
        new_policies = [p for p, r in roles.items() if r == "logp"]
        if len(new_policies) == 2 and (older := older_of(*new_policies)):
            roles[older] = "logp_old"
    old_policies = [p for p in named if roles.get(p.name) == "logp_old"]
    if len(old_policies) != 2:
        return
    sampler = sampler_of(*(p.name for p in old_policies))
    for p in old_policies:
        if p.name == sampler and (third or p.default is p.empty):
            roles[sampler] = "logp_sampler"


def _doubles_with_default(
    named: Sequence[inspect.Parameter], roles: Mapping[str, str], main: Sequence[str]
) -> tuple[str, ...]:
    """Return the arguments with a default whose role in `main` another argument without
    a default has too, such as `rollout_log_probs=None` beside old_log_prob.
    """
    required = [p.name for p in named if p.name in roles and p.default is p.empty]
    required_roles = {roles[p] for p in required}
    return tuple(
        p
        for p, r in roles.items()
        if p not in required and r in main and r in required_roles
    )


def _passed_by_position(
    fn: Callable[..., Any],
    named: Sequence[inspect.Parameter],
    roles: Mapping[str, str],
) -> tuple[str, ...]:
    """Return the arguments that can only be passed by position, in order.

    Where a wrapper hands its arguments on by position, these are all up to the first
    one without a role.
    """
    if not _passes_on(fn, roles):
        return tuple(p.name for p in named if p.kind is p.POSITIONAL_ONLY)
    positional = (p.name for p in named if p.kind is not p.KEYWORD_ONLY)
    return tuple(takewhile(roles.__contains__, positional))


def _order_unknown(
    name: str,
    every: Sequence[inspect.Parameter],
    main: Sequence[str],
    roles: Mapping[str, str],
) -> str:
    """Return the error for a function of two policies that are told apart by position
    alone; "" for a function of one policy.
    """
    if "logp" not in main or "logp_old" not in main:
        return ""
    said = f"upref cannot tell which argument is {CALLED['logp']} and which {CALLED['logp_old']}"
    return f"{_shown(name, every)}: {said}. {wrapper(name, main, every, roles)}"


def _passes_on(fn: Callable[..., Any], names: Iterable[str]) -> bool:
    """Return whether a function is wrapped in another one that passes arguments on by
    position, and that lacks some of these names.
    """
    try:
        outer = inspect.signature(fn, follow_wrapped=False).parameters
    except (TypeError, ValueError):
        return False
    return any(p.kind is p.VAR_POSITIONAL for p in outer.values()) and not all(
        n in outer for n in names
    )


def _shown(name: str, every: Sequence[inspect.Parameter]) -> str:
    """Return the signature of a function in words, without defaults."""
    return f"{name}({', '.join(_stars(p) + p.name for p in every)})"


def _stars(parameter: inspect.Parameter) -> str:
    """Return what stands before the argument's name in a signature: "", "*" or "**"."""
    if parameter.kind is parameter.VAR_POSITIONAL:
        return "*"
    return "**" if parameter.kind is parameter.VAR_KEYWORD else ""


def wrapper(
    name: str,
    main: Sequence[str],
    every: Sequence[inspect.Parameter] = (),
    roles: Mapping[str, str] | None = None,
) -> str:
    """Say what to do about a function whose arguments cannot be read.

    Args:
        name: of the function.
        main: the roles that it must have.
        every: its arguments; none where they are not known.
        roles: argument -> role, of those that have one; two may have the same one.

    Returns:
        A sentence with code to paste.
    """
    called = ", ".join(CALLED[r] for r in main)
    inner = name.rpartition(":")[2].rpartition(".")[2]
    inner = inner if inner.isidentifier() else "f"
    inner_name = "wrapped" if inner == "loss" else "loss"
    call = _inner_call(main, every, roles or {})
    takes = ", ".join([called, *call.more_taken])
    code = f"`def {inner_name}({takes}): return {inner}({call.arguments})`"
    how = f"Use the names {called}, or check a wrapper: {code}{call.remark}."
    return f"{how}{_where(name)} {locate_page(WRAP_PAGE)} has examples."


def _where(name: str) -> str:
    """Say where a wrapper of a function in a file stands; "" of another function."""
    file, _, function = name.rpartition(":")
    module = PurePath(file).name.removesuffix(".py")
    if not (file.endswith(".py") and module.isidentifier() and function.isidentifier()):
        return ""
    return f" Put it into {PurePath(file).name}, or below `from {module} import {function}`."


class InnerCall(NamedTuple):
    """The call of the user's function within a wrapper.

    Attributes:
        arguments: of the call, as code.
        more_taken: the arguments that the wrapper takes beside the main roles.
        remark: what the user has to correct, in words; "" where nothing is known.
    """

    arguments: str
    more_taken: list[str]
    remark: str


def _inner_call(
    main: Sequence[str], every: Sequence[inspect.Parameter], roles: Mapping[str, str]
) -> InnerCall:
    """Write the call of the user's function within a wrapper.

    Args:
        main: the roles that the function must have.
        every: its arguments; none where they are not known.
        roles: argument -> role, of those that have one; two may have the same one.
    """
    has_star = any(p.kind is p.VAR_POSITIONAL for p in every)
    plain = [p for p in every if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = [p for p in plain if p.default is p.empty]
    if has_star and not required:
        return InnerCall(", ".join(CALLED[role] for role in main), [], _TURN)
    if not required:
        return InnerCall("...", [], "")
    if any(p.name in CONTAINERS for p in required):
        return _call_with_containers(required, roles)
    # a role that two arguments have is missing: the names do not tell which of them has it
    count_of = Counter(roles.values())
    told = {name: role for name, role in roles.items() if count_of[role] == 1}
    return _call_by_role(main, required, told)


def _call_by_role(
    main: Sequence[str],
    required: Sequence[inspect.Parameter],
    told: Mapping[str, str],
) -> InnerCall:
    """Write a call whose arguments get the inputs of their roles. The roles of `main` that
    no argument has go, in order, to the arguments that may have one.

    Args:
        main: the roles that the function must have.
        required: its arguments without a default.
        told: argument -> role, where the name tells it.
    """
    missing = [role for role in main if role not in told.values()]
    unknown = [p.name for p in required if p.name not in told]
    free = [name for name in unknown if not not_given(name)]
    if missing == ["mask"]:
        free = [name for name in free if may_be_mask(name)]
    guessed: dict[str, str] = {}
    if len(free) >= len(missing):
        guessed = dict(zip(free, missing, strict=False))
    takes_no_mask = (
        "mask" in missing
        and "mask" not in guessed.values()
        and not any(map(tells_mask, unknown))
    )
    more_taken = []
    values = []
    for p in required:
        role = told.get(p.name) or guessed.get(p.name, "")
        if role in main:
            value = CALLED[role]
        elif role and "mask" in main:  # upref gives a loss every other role too
            value = CALLED[role]
            more_taken.append(value)
        elif not role and guessed and p.name in free:  # a setting
            value = p.name
            more_taken.append(value)
        else:
            value = "..."
        if takes_no_mask and role in OF_TOKENS:
            value = f"{value}[mask]"
        values.append(f"{_keyword(p)}{value}")
    remark = ""
    if any("..." in value for value in values):
        remark += " with values in place of the dots"
    if takes_no_mask:
        remark += _NO_MASK
    if len(free) > 1 and guessed:
        remark += _TURN
    return InnerCall(", ".join(values), more_taken, remark)


def _keyword(parameter: inspect.Parameter) -> str:
    """Return what stands before an argument's value in a call: "NAME=", or "" where it is
    passed by position.
    """
    if parameter.kind is parameter.POSITIONAL_ONLY:
        return ""
    return f"{parameter.name}="


# what arguments are called that hold tensors by name, and what one is called that holds
# what the model returned
BATCHES = {
    "batch",
    "data",
    "inputs",
    "micro_batch",
    "mini_batch",
    "minibatch",
    "sample",
}
OUTPUTS = {"model_output", "model_outputs", "outputs", "output"}
CONTAINERS = BATCHES | OUTPUTS
_NEW = '"log_probs": log_prob'
_REST = '"old_log_probs": old_log_prob, "advantages": advantages, "response_mask": mask'


def _call_with_containers(
    required: Sequence[inspect.Parameter], roles: Mapping[str, str]
) -> InnerCall:
    """Write the call of a function that reads its tensors from dictionaries, as verl's
    (model_output, data) and slime's (args, batch).
    """
    has_output = any(p.name in OUTPUTS for p in required)
    values = []
    for p in required:
        if p.name in OUTPUTS:
            value = f"{{{_NEW}}}"
        elif p.name in BATCHES and has_output:
            value = f"{{{_REST}}}"
        elif p.name in BATCHES:
            value = f"{{{_NEW}, {_REST}}}"
        else:
            value = CALLED.get(roles.get(p.name, ""), "...")
        values.append(f"{_keyword(p)}{value}")
    remark = " with the keys that it reads"
    if any("=..." in value for value in values):
        remark += ", and values in place of the dots"
    return InnerCall(", ".join(values), [], remark)


# the roles of which a loss without a mask gets the tokens that train
OF_TOKENS = ("logp", "logp_old", "adv", "logp_ref", "logp_sampler", "entropy")
_NO_MASK = (
    " (the tokens that train, in one row; call it for each response, and average, "
    "where responses count equally)"
)
_TURN = " (exchange what is in another order)"
