# SPDX-License-Identifier: Apache-2.0
"""Settings of verl's or TRL's clipped loss with which its gradient is that of another
loss: each is run before it is named.
"""

from typing import Any

from upref.errors import InputError
from upref.identification.diff import BESIDE_EMPTY, compare_losses
from upref.user_code import read
from upref.verify.factors import MEAN_OVER_WIDTH
from upref.verify.probe import BlackBox, measure

FAR = 1e9  # a dual clip that never acts
# aggregation -> loss_type
TRL_TYPES = {"token-mean": "dapo", "seq-mean-token-mean": "grpo"}
# aggregation -> loss_agg_mode, where upref has another name for it
VERL_MODES = {MEAN_OVER_WIDTH: "seq-mean-token-sum-norm"}


def closing_settings(a: Any, b: Any) -> list[str]:
    """Find settings of either loss with which nothing differs from the other one.

    Args:
        a, b: two losses that differ; a framework's own by its name.

    Returns:
        A sentence for each loss that has such settings.
    """
    sentences = []
    for mine, other in ((a, b), (b, a)):
        name = _closing_name(mine, other)
        if not name:
            continue
        words = f"{name}, as run: nothing differs from {getattr(other, 'name', other)}"
        if not compare_losses(name, other):
            words += f" but the {BESIDE_EMPTY}"
        sentences.append(words)
    return sentences


def _is_closed(name: str, other: Any) -> bool:
    """Tell whether a loss differs from another one beside a response without a trained
    token at most: frameworks count such a response in several ways, and no setting
    changes it.

    Args:
        name: of a framework's loss, with settings.
        other: the other loss.
    """
    found = compare_losses(name, other)
    return bool(found) or (found.first is not None and found.first.name == BESIDE_EMPTY)


def _closing_name(mine: Any, other: Any) -> str:
    """Return the name of the framework's loss with settings that make it the other one,
    as few as possible; "" where those tried do not, or `mine` is no name of a loss of
    verl or TRL.
    """
    if not isinstance(mine, str):
        return ""
    framework, _, mode = mine.partition(":")
    if framework not in ("verl", "trl"):
        return ""
    base, *given = mode.split(",")
    try:
        wanted = _settings(framework, base, measure(read(other)))
        settings = [s for s in wanted if s not in given]
        if not _is_closed(_name(framework, base, [*given, *settings]), other):
            return ""
        # leave out what is its value already
        for setting in [*settings]:
            fewer = [s for s in settings if s != setting]
            if _is_closed(_name(framework, base, [*given, *fewer]), other):
                settings = fewer
    except InputError:  # no such setting, or a loss without a gradient
        return ""
    return _name(framework, base, [*given, *settings])


def _name(framework: str, mode: str, settings: list[str]) -> str:
    """Return the name of a framework's loss; a setting without `=` replaces the mode."""
    modes = [s for s in settings if "=" not in s]
    fields = [s for s in settings if "=" in s]
    return ",".join([f"{framework}:{modes[-1] if modes else mode}", *fields])


def _settings(framework: str, mode: str, box: BlackBox) -> list[str]:
    """Return settings of a framework's clipped loss that give it the bounds and the
    aggregation of a measured loss. A loss_type of TRL is returned as a word without
    `=`.
    """
    # the ratios at which a token's weight jumps: eps_high's; eps_low's and the dual clip's
    of_positive = box.bounds(1.0)
    of_negative = box.bounds(-1.0)
    high = of_positive[0] if of_positive else FAR
    low = of_negative[0] if of_negative else 0.0
    c = of_negative[1] if len(of_negative) > 1 else FAR
    if framework == "verl":
        numbers = {
            "clip_ratio_low": 1 - low,
            "clip_ratio_high": high - 1,
            "clip_ratio_c": c,
        }
        settings = [f"{name}={value:.6g}" for name, value in numbers.items()]
        if box.agg:
            settings.append(f"loss_agg_mode={VERL_MODES.get(box.agg, box.agg)}")
        return settings
    settings = [f"epsilon={1 - low:.6g}", f"epsilon_high={high - 1:.6g}"]
    if c < FAR:
        settings.append(f"delta={c:.6g}")
    loss_type = TRL_TYPES.get(box.agg, mode)
    if loss_type != mode:
        settings.append(loss_type)
    return settings
