# SPDX-License-Identifier: Apache-2.0
"""Roles of the arguments of a user-supplied function: by name, or by position where no
name is known.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from upref.errors import InputError
from upref.pages import located
from upref.user_code.guard import one_line
from upref.user_code.names import CALLED, may_be_old, not_given, older_of, sampler_of

WRAP_PAGE = "docs/howto/wrap-your-loss.md"
# an argument with a default of these types is not a tensor,
SETTINGS = bool | int | float | str
COUNTED = ("ranks", "n")  # unless it is a count


@dataclass(frozen=True)
class Reading:
    """The roles read from a signature."""

    roles: dict[str, str]  # argument -> role
    placed: frozenset[str]  # of these, the arguments read by position
    own: dict[str, inspect.Parameter]  # the other arguments: its settings
    # arguments that can only be passed by position, in order
    positional: tuple[str, ...]
    accepts_kwargs: bool  # it has **kwargs
    star: tuple[str, ...] = ()  # roles that go into *args, in order
    # arguments with a default, of a role that another must be given
    left: tuple[str, ...] = ()
    # the error where the order of the policies decides and nothing but their position
    # tells it; empty where their names do
    order_unknown: str = ""

    def __str__(self) -> str:
        """Empty where every argument is called as upref calls it."""
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
        """fn on the inputs by role, with these settings by name.

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

    @property
    def needed(self) -> list[str]:
        """Settings without a default."""
        return [p.name for p in self.own.values() if p.default is p.empty]


def parameters(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    """Of a function, a method, a partial, an instance with __call__, a module with
    forward; [] for a builtin.

    A keyword that a partial has bound is an argument no more.

    Args:
        fn: any callable.
    """
    try:
        if hasattr(fn, "forward") and hasattr(fn, "register_buffer"):
            f = fn.forward
        else:
            f = fn
        bound = getattr(f, "keywords", None) or {}
        return [
            p
            for p in inspect.signature(f).parameters.values()
            if p.name not in bound or p.kind is p.VAR_KEYWORD
        ]
    except ValueError:  # a builtin does not say
        return []
    except Exception as e:  # what anybody's __getattr__ or __signature__ does
        raise InputError(
            f"the arguments of a {type(fn).__name__} cannot be read ({type(e).__name__}: {one_line(e)}). Check a "
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
    """Which argument has which role.

    By name, by the rule `role`. Where no name says anything the first arguments are
    `main`, in that order; where all but one are named, the one left is the role left.
    Everything else is refused in one sentence.

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
    plain = [
        p for p in all_parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    accepts_kwargs = any(p.kind is p.VAR_KEYWORD for p in all_parameters)
    if not plain:
        if not all_parameters or any(
            p.kind is p.VAR_POSITIONAL for p in all_parameters
        ):
            unknown = _order_unknown(name, all_parameters, main, {})
            return Reading(
                {},
                frozenset(),
                {},
                (),
                accepts_kwargs,
                tuple(main),
                order_unknown=unknown,
            )
        raise InputError(
            f"{_shown(name, all_parameters)} has no named argument. {wrapper(name, main)}"
        )
    counted = (
        (*COUNTED, "parts") if any(role(p.name) == "totals" for p in plain) else COUNTED
    )

    def told(parameter: inspect.Parameter, r: str) -> bool:
        """Whether the argument may have the role: a setting has none but a count."""
        return r in counted or not isinstance(parameter.default, SETTINGS)

    roles = {p.name: r for p in plain if (r := role(p.name)) and told(p, r)}
    if "logp_old" in main and "logp_old" not in roles.values():
        news = [p for p, r in roles.items() if r == "logp"]
        if len(news) == 2 and (behind := older_of(*news)):
            roles[behind] = "logp_old"
    olds = [p for p in plain if roles.get(p.name) == "logp_old"]
    engine = sampler_of(*(p.name for p in olds)) if len(olds) == 2 else ""
    if any(p.name == engine and (third or p.default is p.empty) for p in olds):
        roles[engine] = "logp_sampler"
    must = {
        (p.name, roles[p.name])
        for p in plain
        if p.name in roles and p.default is p.empty
    }
    unread = tuple(
        p
        for p, r in roles.items()
        if r in main and (p, r) not in must and r in {r for _, r in must}
    )
    # `rollout_log_probs=None` beside old_log_prob
    roles = {p: r for p, r in roles.items() if p not in unread}
    twice = [p for p in roles if list(roles.values()).count(roles[p]) > 1]
    if twice and roles[twice[0]] in main:
        raise InputError(
            f"{_shown(name, all_parameters)}: upref cannot tell "
            f"which of {' and '.join(twice)} is {CALLED[roles[twice[0]]]}. "
            + wrapper(name, main, all_parameters, roles)
        )
    missing = [r for r in main if r not in roles.values()]
    free = [
        p
        for p in plain
        if p.name not in roles and p.default is p.empty and p.kind is not p.KEYWORD_ONLY
    ]
    placed: list[tuple[str, str]] = []
    if missing and (free or not set(missing) <= set(spare)):
        if odd := [p.name for p in free if not_given(p.name)]:
            shown = _shown(name, all_parameters)
            raise InputError(
                f"{shown}: upref has no value for the argument {odd[0]!r}. {wrapper(name, main, all_parameters, roles)}"
            )
        is_one_pair = len(missing) == len(free) == 1 and (
            missing[0] != "logp_old" or may_be_old(free[0].name)
        )
        if is_one_pair or (len(missing) == len(main) and len(free) >= len(main)):
            placed = list(zip((p.name for p in free), missing, strict=False))
        else:
            which = " and which ".join(CALLED[r] for r in missing)
            said = f"{_shown(name, all_parameters)}: upref cannot tell which argument is {which}."
            raise InputError(f"{said} {wrapper(name, main, all_parameters, roles)}")
    unknown = (
        _order_unknown(name, all_parameters, main, roles) if len(placed) > 1 else ""
    )
    roles |= dict(placed)
    ordered = {p.name: roles[p.name] for p in plain if p.name in roles}
    optional = {p.name: p for p in plain if p.name not in roles}
    only = tuple(p.name for p in plain if p.kind is p.POSITIONAL_ONLY)
    # in order, up to the first argument that is not handed over
    if _passes_on(fn, ordered):
        only = tuple(
            takewhile(
                ordered.__contains__,
                (p.name for p in plain if p.kind is not p.KEYWORD_ONLY),
            )
        )
    return Reading(
        ordered,
        frozenset(p for p, _ in placed),
        optional,
        only,
        accepts_kwargs,
        left=unread,
        order_unknown=unknown,
    )


def _order_unknown(
    name: str,
    every: Sequence[inspect.Parameter],
    main: Sequence[str],
    roles: Mapping[str, str],
) -> str:
    """The error for a function of two policies that is read by position alone, where
    their order matters.
    """
    if "logp" not in main or "logp_old" not in main:
        return ""
    said = f"upref cannot tell which argument is {CALLED['logp']} and which {CALLED['logp_old']}"
    return f"{_shown(name, every)}: {said}. {wrapper(name, main, every, roles)}"


def _passes_on(fn: Callable[..., Any], names: Iterable[str]) -> bool:
    """Whether it is wrapped in a function that hands on what it gets by position, and
    does not know all these names.
    """
    try:
        outer = inspect.signature(fn, follow_wrapped=False).parameters
    except (TypeError, ValueError):
        return False
    return any(p.kind is p.VAR_POSITIONAL for p in outer.values()) and not all(
        n in outer for n in names
    )


def _shown(name: str, every: Sequence[inspect.Parameter]) -> str:
    return f"{name}({', '.join(_stars(p) + p.name for p in every)})"


def _stars(parameter: inspect.Parameter) -> str:
    """What stands before the argument's name in a signature."""
    if parameter.kind is parameter.VAR_POSITIONAL:
        return "*"
    return "**" if parameter.kind is parameter.VAR_KEYWORD else ""


def wrapper(
    name: str,
    main: Sequence[str],
    every: Sequence[inspect.Parameter] = (),
    roles: Mapping[str, str] | None = None,
) -> str:
    """What to do about a function whose arguments cannot be read.

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
    given, unfilled, remark = _handed_over(main, every, roles or {})
    takes = ", ".join([called, *unfilled])
    code = f"`def {inner_name}({takes}): return {inner}({given})`"
    how = f"Use the names {called}, or check a wrapper: {code}{remark}."
    return f"{how} {located(WRAP_PAGE)} has examples."


def _handed_over(
    main: Sequence[str], every: Sequence[inspect.Parameter], roles: Mapping[str, str]
) -> tuple[str, list[str], str]:
    """What a wrapper passes on, the settings that it takes beside the roles, and what
    to put right in it, in words.
    """
    stars = [p for p in every if p.kind is p.VAR_POSITIONAL]
    plain = [p for p in every if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if stars and not plain:
        return ", ".join(CALLED[r] for r in main), [], _TURN
    required = [p for p in plain if p.default is p.empty]
    if not required:
        return "...", [], ""
    alone = {p: r for p, r in roles.items() if list(roles.values()).count(r) == 1}
    missing = [r for r in main if r not in alone.values()]
    unknown = [p.name for p in required if p.name not in alone]
    free = [p for p in unknown if not not_given(p)]
    pairs = dict(zip(free, missing, strict=False)) if len(free) >= len(missing) else {}
    unfilled = []
    values = []
    for p in required:
        role = alone.get(p.name) or pairs.get(p.name, "")
        value = CALLED[role] if role in main else "..."
        if not role and pairs and p.name in free:  # a setting
            unfilled.append(p.name)
            value = p.name
        by_name = "" if p.kind is p.POSITIONAL_ONLY else f"{p.name}="
        values.append(f"{by_name}{value}")
    if any("..." in value for value in values):
        remark = " with values in place of the dots"
    else:
        remark = ""
    if len(free) > 1 and pairs:
        remark += _TURN
    return ", ".join(values), unfilled, remark


_TURN = " (exchange what is in another order)"
