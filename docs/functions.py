# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/howto/tokens-teachers-critics.md: what each estimator of tokens and
turns, each divergence and each value loss is, read from the code.
"""

from collections.abc import Callable, Mapping

from upref import critic, distillation, markdown
from upref.token_advantages import TOKEN_ADVANTAGES
from upref.verify.formulas.token_faults import SETTINGS
from upref.verify.formulas.tokens import OPTIONAL, READS

RESTS = {
    "": "the rest is left out",
    "_tail": "the rest is one more token",
    "_renormalized": "both are normalized over these tokens",
}


def _summary(function: Callable) -> str:
    """The first line of a docstring, without its verb."""
    return (function.__doc__ or "").partition("\n")[0].removeprefix("Return ")


def _summaries(functions: Mapping[str, Callable]) -> list[list[str]]:
    """A row for each function: its name and its first line."""
    return [[f"`{name}`", _summary(function)] for name, function in functions.items()]


def token_advantages() -> str:
    """Each estimator with the arguments and settings that it has."""
    rows = []
    for name, estimator in TOKEN_ADVANTAGES.items():
        arguments = ", ".join(
            f"`{role}`" + (" (optional)" if role in OPTIONAL else "")
            for role in READS[name]
        )
        settings = ", ".join(f"`{key}`" for key in SETTINGS[name])
        rows.append([f"`{name}`", _summary(estimator), arguments, settings])
    return markdown.table(["`--as-advantage`", "A", "arguments", "settings"], rows)


def divergences() -> str:
    """Each divergence with its formula, and each truncation in words."""
    rows = _summaries(distillation.DIVERGENCES | distillation.SAMPLED)
    for name in distillation.TRUNCATIONS:
        whose, _, rest = name.partition("_top_k")
        text = f"X over the {whose}'s `k` most likely tokens; {RESTS[rest]}"
        rows.append([f"`{name}(X)`", text])
    return markdown.table(["`--as-distillation`", "the loss of a token"], rows)


def value_losses() -> str:
    """Each value loss with its formula."""
    rows = _summaries(critic.VALUE_LOSSES)
    return markdown.table(["`--as-value`", "the loss of a token"], rows)
