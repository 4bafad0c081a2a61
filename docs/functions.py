# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/howto/tokens-teachers-critics.md: what each estimator of tokens and
turns, each divergence and each value loss is, and what each option of `upref check`
takes, read from the code.
"""

from collections.abc import Callable, Iterable, Mapping

from upref import critic, distillation, markdown
from upref.token_advantages import TOKEN_ADVANTAGES
from upref.user_code import ENTROPY_COEF, MAIN, logprobs, names
from upref.user_code.logprobs import CUTS
from upref.verify.formulas import distillation as distillation_check, tokens, value
from upref.verify.formulas.case import Problem
from upref.verify.formulas.token_faults import SETTINGS
from upref.verify.formulas.tokens import OPTIONAL, READS

RESTS = {
    "": "the rest is left out",
    "_tail": "the rest is one more token",
    "_renormalized": "both are normalized over these tokens",
}


def _summary(function: Callable) -> str:
    """Return the first line of a docstring, without its "Return", as the cell of a
    table.
    """
    first = (function.__doc__ or "").partition("\n")[0].removeprefix("Return ")
    return first.replace("|", r"\|")


def _summaries(functions: Mapping[str, Callable]) -> list[list[str]]:
    """Return a row for each function: its name and its first line."""
    return [[f"`{name}`", _summary(function)] for name, function in functions.items()]


def token_advantages() -> str:
    """Return the table of the estimators of tokens, with their arguments and
    settings.
    """
    rows = []
    for name, estimator in TOKEN_ADVANTAGES.items():
        arguments = []
        for role in READS[name]:
            is_optional = " (optional)" if role in OPTIONAL else ""
            arguments.append(f"`{role}`{is_optional}")
        cells = [
            f"`{name}`",
            _summary(estimator),
            ", ".join(arguments),
            markdown.codes(SETTINGS[name]),
        ]
        rows.append(cells)
    return markdown.table(["`--as-advantage`", "A", "arguments", "settings"], rows)


def divergences() -> str:
    """Return the table of the divergences with their formulas, then of the
    truncations.
    """
    rows = _summaries(distillation.DIVERGENCES | distillation.SAMPLED)
    for name in distillation.TRUNCATIONS:
        whose, _, rest = name.partition("_top_k")
        text = f"X over the {whose}'s `k` most likely tokens; {RESTS[rest]}"
        rows.append([f"`{name}(X)`", text])
    return markdown.table(["`--as-distillation`", "the loss of a token"], rows)


def value_losses() -> str:
    """Return the table of the value losses with their formulas."""
    rows = _summaries(critic.VALUE_LOSSES)
    return markdown.table(["`--as-value`", "the loss of a token"], rows)


# ---- what each option takes ----------------------------------------------------------
def _called(roles: Iterable[str]) -> str:
    """Return inputs by the names that they have in a signature, with commas between."""
    return markdown.codes(names.CALLED[role] for role in roles)


def _with_shapes(
    roles: Iterable[str], problem: Problem, shapes: Mapping[int, str]
) -> str:
    """Return inputs with their shapes, with commas between.

    Args:
        roles: the inputs.
        problem: a batch of the check; an input that it lacks gets no shape.
        shapes: number of dimensions -> the shape in print.
    """
    words = []
    for role in roles:
        x = problem.inputs.get(role)
        shape = "" if x is None else f" {shapes[x.ndim]}"
        words.append(f"`{role}`{shape}")
    return ", ".join(words)


def _more_of_loss() -> list[str]:
    """Return the inputs that a loss has by name alone, beside those of MAIN: those whose
    name is read as theirs, and the sampler's log-probabilities, whose name is read as
    the old policy's where that has none.
    """
    found = []
    for role, name in names.CALLED.items():
        if role not in MAIN and names.role(name) in (role, "logp_old"):
            found.append(role)
    return found


def options_of_check() -> str:
    """Return the table of what `upref check` passes to a function, for each of its
    options.
    """
    of_rewards = [
        role for role, name in names.CALLED.items() if names.reward_role(name) == role
    ]
    settings_of_tokens: dict[str, None] = {}  # each once, in the order of estimators
    for own in SETTINGS.values():
        settings_of_tokens |= dict.fromkeys(own)
    settings_of_logprobs = [*logprobs.SETTINGS, *dict.fromkeys(CUTS.values())]
    value_roles = value.vocabulary("math:sqrt").roles
    hidden_or_logits = " or ".join(_called(roles) for roles in logprobs.MAIN.values())
    # number of dimensions -> the shape in print
    slots = {1: "[N]", 2: "[N, K]"}
    vocabulary = {2: "[B, T]", 3: "[B, T, V]"}
    rows = [
        [
            "`--as`",
            f"{_called(MAIN)} [B, T]; by name also {_called(_more_of_loss())}",
            f"those of the objective, `{ENTROPY_COEF}`, and others by `--hp`",
            "names, or position",
        ],
        [
            "`--as-advantage`, of responses",
            f"of {_called(of_rewards)} those that it has",
            "`ddof`, `eps`",
            "names, or position",
        ],
        [
            "`--as-advantage`, of tokens and turns",
            _with_shapes(tokens.VOCABULARY.roles, tokens.FULL, slots),
            markdown.codes(settings_of_tokens),
            "names alone",
        ],
        [
            "`--as-distillation`",
            _with_shapes(
                distillation_check.VOCABULARY.roles,
                distillation_check.PLAIN,
                vocabulary,
            ),
            markdown.codes(distillation_check.USUAL),
            "names alone",
        ],
        [
            "`--as-value`",
            _with_shapes(value_roles, value.PLAIN, vocabulary),
            markdown.codes(value.USUAL),
            "names alone",
        ],
        [
            "`--as-kl`",
            _called(("logp", "logp_ref")),
            "",
            "names, or position",
        ],
        [
            "`--as-logprobs`",
            hidden_or_logits,
            markdown.codes(settings_of_logprobs),
            "names, or position",
        ],
    ]
    return markdown.table(["option", "inputs", "settings", "read by"], rows)
