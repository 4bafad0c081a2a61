# SPDX-License-Identifier: Apache-2.0
"""The list of docs/sharp-bits.md: wrong losses of the tests' zoo, each with the first
finding of `upref check`.
"""

import importlib
import inspect
from pathlib import Path

import upref

ROOT = Path(__file__).parent.parent
SUPPORT = ROOT / "tests" / "support"
ENTRIES = {  # name in the zoo: title, and why it is wrong
    "clipping.clamps_the_product": (
        "The product r A is clamped, not the ratio",
        "The bounds then move with the size of A: at A = 0.5 the upper one is r = 2.4, and where A < 0 "
        "nothing is clipped.",
    ),
    "clipping.outside_the_window_is_dead": (
        "The clip drops tokens on both sides, whatever the sign of A",
        "DAPO's minimum removes a token's gradient only where the token has already moved in the direction of A. "
        "Where it has moved the other way, the gradient stays and brings it back.",
    ),
    "aggregation.mean_of_response_means": (
        "Each response counts the same, where each token should",
        "A token of a long response then counts less than one of a short response, which is what DAPO's token "
        "mean avoids.",
    ),
    "aggregation.mean_of_all_tokens": (
        "Each token counts the same, where each response should",
        "A long response then counts more than a short one; GRPO divides by the length of each response first.",
    ),
    "aggregation.empty_rows_count_a_token": (
        "A response without a token enters the denominator",
        "Each row of padding then counts as one token, which makes the gradient of the batch smaller.",
    ),
    "aggregation.groups_by_stride": (
        "Groups are taken to be contiguous and of one size",
        "The code cuts the batch into blocks of equal size. After rows are filtered or shuffled, a block holds "
        "responses to several prompts, which are averaged together.",
    ),
    "aggregation.divided_again_by_accumulation": (
        "A global mean is divided again by the accumulation steps",
        "The denominator counts the whole batch already; the second division makes the gradient smaller by "
        "the number of steps.",
    ),
    "masking.shifted_by_one": (
        "The mask is shifted by one token",
        "Log-probabilities are often one token shorter than the input. A mask that is shifted once too often "
        "drops one token of each response.",
    ),
    "gradients.ratio_of_itself": (
        "The old log-probabilities come from the current weights",
        "The ratio is then always 1, so that no bound acts, however far the policy moves.",
    ),
    "gradients.detached_negatives": (
        "The ratio is detached, and negatives lose their gradient",
        "Where A > 0, UP has no ratio: log π carries the gradient. Where A < 0, only the ratio carries it. A detached "
        "ratio leaves a constant there, and a constant has no gradient.",
    ),
    "gradients.ratio_twice": (
        "The importance ratio is applied twice",
        "V-trace has corrected the advantage with r already. With r once more, the weight is r² A, and its "
        "variance grows.",
    ),
    "sequence.product_of_ratios": (
        "The ratio of a response is a product, not a geometric mean",
        "A product grows or vanishes exponentially with the length, so that long responses leave GSPO's "
        "narrow bounds at once.",
    ),
    "sequence.summed_over_tokens": (
        "A term per response is summed over its tokens",
        "The term of a response is then counted once per token, and long responses count more.",
    ),
    "family.cispo_cap_is_absolute": (
        "An offset from 1 is taken for the bound itself",
        "CISPO caps the ratio at 1 + eps_high; code that caps it at eps_high trains with another bound.",
    ),
    "hygiene.whitened_again": (
        "Advantages are whitened again in each micro-batch",
        "The gradient of a response then depends on which others share its micro-batch, and a micro-batch of "
        "one has none.",
    ),
}


def text() -> str:
    """A section for each: why it is wrong, where it was discussed in public, the code,
    the first finding.
    """
    cases = {str(c): c for c in importlib.import_module("tests.support.zoo").WRONG}
    parts = []
    for number, (name, (title, why)) in enumerate(ENTRIES.items(), 1):
        parts.append(section(number, title, why, cases[name]))
    return "\n\n".join(parts)


def section(number: int, title: str, why: str, case) -> str:
    """The section of a wrong loss.

    Args:
        number: of the section.
        title: what is wrong.
        why: what follows from it.
        case: the loss in the zoo.
    """
    report = upref.check(case.function, case.objective, **case.hp)
    assert not report, case
    repo, issue = case.source.split("#")
    thread = f"[{case.source}](https://github.com/{repo}/issues/{issue})"
    parts = [
        f"## {number}. {title}",
        f"{why} Meant as `{case.objective}`. Discussed in {thread}.",
        f"```py\n{inspect.getsource(case.function).rstrip()}\n```",
        f"```text\n{report.failures[0].text()}\n```",
    ]
    return "\n\n".join(parts)
