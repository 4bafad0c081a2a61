# SPDX-License-Identifier: Apache-2.0
"""The one boundary for a user-supplied loss: `read` makes it a `Loss`. Nothing here
judges.

A loss is a plain callable `(log_prob, old_log_prob, advantages, mask)`, by these names
or their usual variants (upref.user_code.names), by position where no name says anything;
by name also ref_log_prob, group, entropy, totals (the mini-batch's `Totals`, for a
micro-batch), num_micro_batches, dp_size and hyperparameters. Or an `Objective`; a
trainer class of TRL's; a name: package.module:function, path/to/file.py:function, or
what an installed package knows (frameworks.py), as verl:LOSS_MODE and trl:LOSS_TYPE. It
answers with a scalar, with a tuple or dict that holds one, or with an unreduced [B, T]
or [B]. A training step, which calls .backward() itself, is judged by the gradient that
it leaves, and by that of the loss that it returns where this has one: a trainer that
calls backward on it trains with the sum.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from upref import catalog, plugins
from upref.errors import InputError
from upref.pages import locate_page
from upref.registry import Objective, get
from upref.rollouts import Rollouts
from upref.user_code import names
from upref.user_code.frameworks import framework_plugins, provider as find_provider
from upref.user_code.load import load, name_of, no_function
from upref.user_code.loss import (
    FIRST,
    MAIN,
    PER_RESPONSE,
    ROWS,
    SHAPES,
    UNREDUCED,
    Loss,
    LossOutcome,
)
from upref.user_code.settings import Shipped
from upref.user_code.shapes import infer_shapes
from upref.user_code.signature import (
    WRAP_PAGE,
    Reading,
    parameters,
    read as read_signature,
    wrapper,
)

__all__ = [
    "ENTROPY_COEF",
    "FIRST",
    "MAIN",
    "PER_RESPONSE",
    "ROWS",
    "SHAPES",
    "UNREDUCED",
    "Loss",
    "LossOutcome",
    "accepts",
    "infer_shapes",
    "load",
    "no_objective",
    "read",
]


def no_objective() -> Objective:
    """Return an objective without hyperparameters, for a loss that is compared with none.

    Returns:
        The objective, with the name "nothing".
    """
    return replace(get("reinforce"), name="nothing", agg="token-mean")


def read(
    loss: Any, objective: Objective | None = None, hp: Mapping[str, Any] | None = None
) -> Loss:
    """Read a loss, and find the shapes in which it takes its mask and advantages; see
    the module for what it may be.

    Args:
        loss: a function, a name, an Objective or a framework's object.
        objective: what it is compared with; None: with nothing.
        hp: hyperparameters of the objective, which the loss gets where it takes them;
            others go to the loss's own arguments of that name.

    Returns:
        The Loss.

    Raises:
        InputError: it cannot be read, or does not run on a good batch.
    """
    o = objective or no_objective()
    read_loss = (
        loss if isinstance(loss, Loss) else from_signature(loss, o, dict(hp or {}))
    )
    try:
        return infer_shapes(read_loss)
    except InputError:
        if read_loss.order_unknown and _runs(read_loss.exchanged()):
            raise InputError(read_loss.order_unknown) from None
        raise


def _runs(loss: Loss) -> bool:
    """Return whether the loss runs on a good batch."""
    try:
        infer_shapes(loss)
    except InputError:
        return False
    return True


@dataclass(frozen=True)
class Target:
    """What is to be read as a Loss, and what it is compared with.

    Attributes:
        given: what the user passed: an object, or its name.
        value: the object itself.
        o: the objective.
        hp: its hyperparameters, as the user gave them.
    """

    given: Any
    value: Any
    o: Objective
    hp: dict[str, Any]

    @property
    def name(self) -> str:
        """The name for messages."""
        return name_of(self.given)


def from_signature(
    loss: Any, objective: Objective, hp: dict[str, Any], alone: bool = False
) -> Loss:
    """Make the Loss that a signature describes, before its first call.

    Args:
        loss: a function, its name, or an object that a framework's package recognizes.
        objective: the objective that it is compared with.
        hp: its hyperparameters, resolved.
        alone: nothing else runs in this process, so that the imports of a framework may
            restrict those that follow.

    Returns:
        The Loss.

    Raises:
        InputError: it cannot be read as a loss.
    """
    value = resolve(loss, objective, hp, alone) if isinstance(loss, str) else loss
    target = Target(loss, value, objective, hp)
    losses = (read_kind(target) for read_kind in READERS)
    return next(candidate for candidate in losses if candidate is not None)


def resolve(
    name: str, objective: Objective, hp: dict[str, Any], alone: bool = False
) -> Any:
    """Return what a name stands for: a Loss, an Objective, a function or another object.

    Args:
        name: FRAMEWORK:LOSS, FILE.py:FUNCTION, MODULE:FUNCTION or an objective.
        objective: what it is compared with.
        hp: the hyperparameters of that.
        alone: as of `from_signature`.

    Raises:
        InputError: nothing has this name.
    """
    framework, _, mode = name.partition(":")
    is_matched = mode.partition(",")[0].endswith("@matched")
    if is_matched and objective.name == no_objective().name:
        raise InputError(
            f"{name} is matched to no objective here: name the loss as shipped, and its fields."
        )
    if provider := find_provider(framework):
        if provider.needs_process(framework) and not alone:
            how = f"its losses need a process of their own: `upref check {name} --as NAME`"
            raise InputError(f"{framework} is not imported here, {how}.")
        return provider.find(name, objective, hp)
    return _load_function(name, framework) if ":" in name else _get_objective(name)


# ---- the kinds of objects: each reader returns None for those of other kinds ---------
def _read_loss(target: Target) -> Loss | None:
    """Return a Loss as it is."""
    return target.value if isinstance(target.value, Loss) else None


def _read_objective(target: Target) -> Loss | None:
    """Read an Objective of the user."""
    if not isinstance(target.value, Objective):
        return None
    return _loss_of_objective(target.value, target.o, target.hp)


def _read_object_of_framework(target: Target) -> Loss | None:
    """Read an object that an installed package recognizes, such as a trainer's class."""
    for plugin in framework_plugins():
        loss = plugin.recognize(target.name, target.value, target.o, target.hp)
        if loss is not None:
            return loss
    return None


def _refuse_class(target: Target) -> Loss | None:
    """Raise InputError for a class; return None for anything else."""
    if not isinstance(target.value, type):
        return None
    instance = f"`loss = {target.name.rpartition(':')[2]}(...)` with its settings"
    raise InputError(
        f"{target.name} is a class: construct an instance, {instance}, and check that. {locate_page(WRAP_PAGE)} shows how."
    )


# words in the names of a critic's inputs
CRITIC = {"value", "values", "vpred", "vpreds", "returns", "critic"}


def _read_function(target: Target) -> Loss:
    """Read a function, or raise InputError for what cannot be called: the last reader."""
    if not callable(target.value):
        raise InputError(no_function(target.name, target.value))
    return _read_by_parameters(target.name, target.value, target.o, target.hp)


READERS: tuple[Callable[[Target], Loss | None], ...] = (
    _read_loss,
    _read_objective,
    _read_object_of_framework,
    _refuse_class,
    _read_function,
)


def _load_function(name: str, framework: str) -> Any:
    """Load the function of a name. Where no installed package knows frameworks, the error
    names the one that does.
    """
    try:
        return load(name)
    except InputError as e:
        if not framework.isidentifier() or framework_plugins():
            raise
        which = f"Names of frameworks' losses need another package: {plugins.absent('upref_frameworks')}."
        raise InputError(f"{e} {which}") from e


def _get_objective(name: str) -> Objective:
    """Return the objective of a name; InputError with the nearest names."""
    try:
        return get(name)
    except InputError as e:
        raise catalog.no_loss(name, e) from e


def _read_by_parameters(
    name: str, fn: Callable[..., Any], objective: Objective, hp: dict[str, Any]
) -> Loss:
    """Read a function by its parameters' names; or, where it has one parameter without a
    default whose name tells no role, as one that takes the whole batch.
    """
    required = [
        p
        for p in parameters(fn)
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if len(required) == 1 and not names.role(required[0].name):
        return _read_by_batch(name, fn, required[0], objective, hp)
    spare = () if _reads_old(objective) else ("logp_old",)
    reading = read_signature(
        fn, name, names.role, MAIN, objective.sampler is not None, spare
    )

    def by_role(full: dict[str, Any], settings: dict[str, Any]) -> Any:
        """Return what the loss returns when it gets each input as the argument of its
        role.
        """
        return reading.call(fn, full, settings)

    reads = frozenset(reading.roles.values()) or frozenset(MAIN)
    loss = replace(
        _loss_with_hyperparameters(
            name, by_role, reading, objective, hp, reads, str(reading)
        ),
        order_unknown=reading.order_unknown,
    )
    if isinstance(how := getattr(fn, "__upref__", None), Shipped):
        plain = how.plain and _read_by_parameters(
            name_of(how.plain), how.plain, objective, hp
        )
        loss = replace(loss, fields=how.fields, defaults=how.defaults, shipped=plain)
    return loss


def _read_by_batch(
    name: str,
    fn: Callable[..., Any],
    batch: inspect.Parameter,
    objective: Objective,
    hp: dict[str, Any],
) -> Loss:
    """Read a function that takes everything in one argument, as Rollouts.

    Args:
        name: of the function, for messages.
        fn: the function.
        batch: this argument.
        objective: what the function is compared with.
        hp: its hyperparameters.

    Raises:
        InputError: neither the argument's type nor its name is of Rollouts.
    """
    is_annotated = batch.annotation is Rollouts or batch.annotation == "Rollouts"
    if not is_annotated and batch.name not in ("b", "rollouts"):
        raise InputError(
            f"{name}({batch.name}) takes everything in one argument. {wrapper(name, MAIN)}"
        )
    others = [p for p in parameters(fn) if p.name != batch.name]
    settings = {p.name: p for p in others if p.kind is not p.VAR_KEYWORD}
    accepts_kwargs = len(settings) < len(others)
    reading = Reading({}, frozenset(), settings, (), accepts_kwargs)

    def on_rollouts(full: Mapping[str, Any], settings: dict[str, Any]) -> Any:
        """Return what the loss returns when it gets everything in one argument."""
        return fn(rollouts(full), **settings)

    reads = frozenset({*MAIN, *ROLLOUTS})
    read_as = f"{batch.name} -> Rollouts"
    return replace(
        _loss_with_hyperparameters(
            name, on_rollouts, reading, objective, hp, reads, read_as
        ),
        takes_batch=True,
    )


def _reads_old(objective: Objective) -> bool:
    """Return whether the objective's weight depends on the ratio, or on more than the
    ratio and A; that of REINFORCE does not.
    """
    if objective.reads or objective.sampler:
        return True
    return any(
        float(objective.weight(0.5, A)) != float(objective.weight(2.0, A))
        for A in (1.0, -1.0)
    )


def _loss_with_hyperparameters(
    name: str,
    call: Callable[..., Any],
    reading: Reading,
    objective: Objective,
    hp: dict[str, Any],
    reads: Any,
    read_as: str,
) -> Loss:
    """Return the Loss of a function, bound to the hyperparameters that it takes: by the
    objective's name for each, or by the argument's own.

    Args:
        name: of the function, for messages.
        call: from inputs by role and settings by argument to what the function returns.
        reading: the arguments of the function.
        objective: what it is compared with.
        hp: what the user set.
        reads: the roles that it takes.
        read_as: which argument was taken for what, in words.

    Raises:
        InputError: one argument is set twice, a setting is unknown, or an argument without
            a default has no value.
    """
    arguments = _arguments_of_each(reading, objective)
    hp = _without_bonus(name, reading, objective, reads, hp)
    hp, passed = _separate_settings(name, reading, objective, hp)
    _refuse_set_twice(name, arguments, hp, passed)
    resolved = objective.resolve(hp)
    given = set(passed)
    for arguments_of_one in arguments.values():
        given.update(arguments_of_one)
    _refuse_unbound(name, reading, [p for p in reading.needed if p not in given])

    bound = {}
    unbound = {}
    for key, value in hp.items():
        if key in arguments or reading.accepts_kwargs:
            bound[key] = value
        else:
            unbound[key] = value
    # an argument without a default gets the objective's default
    for key, arguments_of_one in arguments.items():
        if any(argument in reading.needed for argument in arguments_of_one):
            bound[key] = resolved[key]

    renamed = []
    for key, value in hp.items():
        arguments_of_one = arguments.get(key, (key,))
        if arguments_of_one != (key,):
            renamed.append(f"{key} = {value} -> {', '.join(arguments_of_one)}")
    if objective.name != no_objective().name:
        renamed += _of_the_loss_alone(objective, arguments, passed)

    def call_with_settings(full: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
        """Return what the loss returns with these hyperparameters, each given as the
        argument that means it, and with what only the loss has.
        """
        by_argument = {}
        for key, value in settings.items():
            for argument in arguments.get(key, (key,)):
                by_argument[argument] = value
        return call(full, passed | by_argument)

    return Loss(
        name,
        call_with_settings,
        objective,
        reads,
        accepts=frozenset(arguments),
        accepts_kwargs=reading.accepts_kwargs,
        bound_args=bound,
        read_as="; ".join(filter(None, (read_as, *renamed))),
        assumptions=_assumptions_on_settings(reading),
        unfed=_unfed_arguments(reading, given),
        unbound=unbound,
        own_defaults=_own_defaults(reading, arguments, {*bound}, {*passed}),
    )


def _refuse_set_twice(
    name: str,
    arguments: Mapping[str, Sequence[str]],
    hp: Mapping[str, Any],
    passed: Mapping[str, Any],
) -> None:
    """Raise InputError where the user set one argument of the loss by the objective's name
    for it, in `hp`, and by its own name, in `passed`.
    """
    for key in hp:
        for argument in arguments.get(key, ()):
            if argument not in passed:
                continue
            if len(arguments[key]) > 1:
                sets = f"{key} sets {' and '.join(arguments[key])} of {name}"
            else:
                sets = f"{key} and {argument} are one argument of {name}"
            raise InputError(f"{sets}: give {key} alone.")


def _own_defaults(
    reading: Reading,
    arguments: Mapping[str, Sequence[str]],
    bound: set[str],
    passed: set[str],
) -> dict[str, float]:
    """Return the hyperparameters that stay at a number that is the loss's own default,
    with this number.

    Args:
        reading: the arguments of the loss.
        arguments: hyperparameter -> the arguments that mean it.
        bound: the hyperparameters that the loss gets.
        passed: the arguments that the user set by their own names.
    """
    own_defaults = {}
    for key, arguments_of_one in arguments.items():
        if key in bound or passed.intersection(arguments_of_one):
            continue
        default = _common_default(reading, arguments_of_one)
        if isinstance(default, int | float) and not isinstance(default, bool):
            own_defaults[key] = default
    return own_defaults


def _common_default(reading: Reading, arguments: Sequence[str]) -> Any:
    """Return the default that all of these arguments have; None where they differ."""
    first, *others = (reading.settings[argument].default for argument in arguments)
    return first if all(other == first for other in others) else None


def _of_the_loss_alone(
    objective: Objective,
    arguments: Mapping[str, Sequence[str]],
    passed: dict[str, Any],
) -> list[str]:
    """Return in words the arguments that were set by the loss's own name for a
    hyperparameter, which the objective does not get.
    """
    meaning = {p: k for k, pair in arguments.items() for p in pair}
    return [
        f"{p} = {value} -> only the loss, not {objective.name} (set {meaning[p]} for both)"
        for p, value in passed.items()
        if p in meaning
    ]


ENTROPY_COEF = "entropy_coef"  # declares an entropy bonus


def _without_bonus(
    name: str, reading: Reading, objective: Objective, reads: Any, hp: dict[str, Any]
) -> dict[str, Any]:
    """Return what the user set without the coefficient of the entropy bonus, if the loss
    has no argument for it.

    Raises:
        InputError: it has none for the entropy either, so that it can have no bonus.
    """
    is_declared = ENTROPY_COEF in hp and ENTROPY_COEF not in objective.hyperparameters
    if not is_declared or names.argument(ENTROPY_COEF, reading.settings):
        return hp
    if "entropy" not in reads:
        raise InputError(
            f"entropy_coef declares an entropy bonus, and {name} has no argument for the entropy: "
            "give it one, `entropy` [B, T], or check the bonus in the step by upref.check_step."
        )
    return {k: v for k, v in hp.items() if k != ENTROPY_COEF}


def _arguments_of_each(
    reading: Reading, objective: Objective
) -> dict[str, tuple[str, ...]]:
    """Return hyperparameter -> the arguments of the loss that mean it: one, or the two
    halves of a clip that the objective has one `eps` for. Other arguments of which two
    could mean one hyperparameter are left out, unless one has its name. So are an `eps`
    that guards a division, and a bound of the ratio itself, as `clip_max=1.28`.
    """
    known = set(objective.hyperparameters)
    defaults = _defaults(reading.settings)
    may_mean = [
        argument
        for argument, default in defaults.items()
        if not names.guards_division(argument, default)
    ]
    meaning = {argument: names.hyperparameter(argument, known) for argument in may_mean}
    for argument, meant in meaning.items():
        if (
            argument not in known
            and meant in ("eps", "eps_low", "eps_high")
            and names.is_bound(defaults[argument])
            and not names.is_bound(objective.hyperparameters[meant])
        ):
            meaning[argument] = ""
    count_of = Counter(meaning.values())
    arguments: dict[str, tuple[str, ...]] = {}
    for argument, meant in meaning.items():
        if meant and count_of[meant] == 1:
            arguments[meant] = (argument,)
    for argument in may_mean:
        if argument in known:
            arguments[argument] = (argument,)
    has_one_eps = "eps" in known and not known & {"eps_low", "eps_high"}
    if has_one_eps and count_of["eps"] == 0:
        halves = names.halves(defaults)
        if halves:
            arguments["eps"] = halves
    return arguments


def _defaults(arguments: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Return the default of each argument by its name; `inspect.Parameter.empty` without
    one.
    """
    return {name: parameter.default for name, parameter in arguments.items()}


def _separate_settings(
    name: str, reading: Reading, objective: Objective, hp: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate what the user set into hyperparameters of the objective, and what only
    the loss has.

    Args:
        name: the loss in messages.
        reading: its arguments.
        objective: the objective.
        hp: what the user set.

    Returns:
        The hyperparameters by name; the other settings by the loss's own arguments.

    Raises:
        InputError: neither has a setting of this name.
    """
    of_objective = {}
    of_loss = {}
    for key, value in hp.items():
        if key in objective.hyperparameters:
            of_objective[key] = value
            continue
        own_arguments = names.arguments(key, _defaults(reading.settings))
        if own_arguments:
            of_loss.update(dict.fromkeys(own_arguments, value))
        elif not reading.accepts_kwargs:
            of_objective[key] = value  # the objective refuses it with its own sentence
        elif objective.name == no_objective().name:
            of_loss[key] = value
        else:
            raise InputError(
                f"{key!r} is not a hyperparameter of {objective.name} or a named argument of {name}."
            )
    return of_objective, of_loss


def _refuse_unbound(name: str, reading: Reading, unbound: list[str]) -> None:
    """Raise InputError where the loss needs arguments that have no value. It says what to
    do about a method, a critic's input, a count of tokens, or any other argument.
    """
    if not unbound:
        return
    if unbound[0] == "self":
        raise InputError(
            f"{name} is a method: in its file make an object, write `loss = Trainer(...).method` and check that; "
            f"{locate_page(WRAP_PAGE)} has examples."
        )
    of_critic = [p for p in unbound if set(names.words(p)) & CRITIC]
    if of_critic:
        raise InputError(
            f"{name} needs {of_critic[0]!r}, which a critic has: check the policy's term without it, by a wrapper, and "
            "the critic's loss by `--as-value`."
        )
    if all(map(names.counts_tokens, unbound)):
        raise InputError(
            f"{name} needs {unbound[0]!r}, by its name a number of tokens, which changes with the batch: "
            f"check a wrapper in its file, `{_wrapper_with_totals(name, reading, unbound)}`; "
            f"{locate_page(WRAP_PAGE)} has examples."
        )
    raise InputError(
        f"{name} needs {unbound[0]!r}, which upref does not know: bind it, `--hp {unbound[0]}=VALUE` or "
        f"functools.partial({name.rpartition(':')[2]}, {unbound[0]}=VALUE); if it changes with the batch, write a "
        f"wrapper: {locate_page(WRAP_PAGE)} has examples."
    )


def _wrapper_with_totals(name: str, reading: Reading, counts: Sequence[str]) -> str:
    """Write a wrapper that gives the loss the tokens of its mini-batch, `totals.tokens`,
    as each of the arguments `counts`.
    """
    inner = name.rpartition(":")[2]
    outer = "wrapped" if inner == "loss" else "loss"
    values = {argument: names.CALLED[role] for argument, role in reading.roles.items()}
    values |= dict.fromkeys(counts, "totals.tokens")
    given = ", ".join(f"{argument}={value}" for argument, value in values.items())
    # each once, in order: `totals` of `totals.tokens`
    inputs = dict.fromkeys(value.partition(".")[0] for value in values.values())
    return f"def {outer}({', '.join(inputs)}): return {inner}({given})"


def _assumptions_on_settings(reading: Reading) -> tuple[str, ...]:
    """Return in words the arguments of the loss that stay at their defaults."""
    return tuple(
        f"{p} is left at its default, {reading.settings[p].default!r:.40}"
        for p in reading.left_at_default
    )


def _unfed_arguments(reading: Reading, given: set[str]) -> tuple[str, ...]:
    """Return the arguments for the sampler's log-probs that are left at None."""
    return tuple(
        p
        for p, parameter in reading.settings.items()
        if parameter.default is None and p not in given and names.is_of_sampler(p)
    )


def accepts(loss: Any, key: str) -> bool:
    """Return whether a loss that is compared with nothing has an argument for this
    hyperparameter, or takes **kwargs. False for the name of a framework's loss.

    Args:
        loss: a function or its name.
        key: of the hyperparameter.
    """
    if isinstance(loss, str) and find_provider(loss.partition(":")[0]):
        return False
    all_parameters = {
        p.name: p for p in parameters(load(loss) if isinstance(loss, str) else loss)
    }
    return bool(names.arguments(key, _defaults(all_parameters))) or any(
        p.kind is p.VAR_KEYWORD for p in all_parameters.values()
    )


# what Rollouts has beside MAIN
ROLLOUTS = ("group", "logp_ref", "entropy", "totals", "logp_sampler")


def rollouts(full: Mapping[str, Any]) -> Rollouts:
    """Make a batch of inputs that upref made. They are checked only where Rollouts would
    refuse them: for a mask of numbers, or a response without tokens.

    Args:
        full: tensors by the roles of a loss's arguments.

    Returns:
        The batch.
    """
    adv = full["adv"]
    fields = {k: full[k] for k in ("logp", "logp_old", "mask", *ROLLOUTS)}
    fields["adv"] = adv if adv.ndim == 2 else adv[:, None]
    mask = fields["mask"]
    is_surely_valid = mask.dtype is torch.bool and bool(mask.any(1).all())
    return Rollouts.unchecked(**fields) if is_surely_valid else Rollouts(**fields)


def _loss_of_objective(
    theirs: Objective, objective: Objective, hp: dict[str, Any]
) -> Loss:
    """Return an Objective of the user as a Loss."""
    known = frozenset(theirs.hyperparameters)

    def call_objective(full: Mapping[str, Any], settings: dict[str, Any]) -> Any:
        """Return the loss of the user's objective, a scalar."""
        return theirs.loss(rollouts(full), **settings)

    reads = frozenset({*MAIN, *ROLLOUTS})
    bound = {k: v for k, v in hp.items() if k in known}
    accepts = known & set(objective.hyperparameters)
    read_as = "an Objective"
    return Loss(
        theirs.name,
        call_objective,
        objective,
        reads,
        accepts,
        takes_batch=True,
        bound_args=bound,
        read_as=read_as,
    )
