# SPDX-License-Identifier: Apache-2.0
"""The list of docs/sharp-bits.md: wrong losses of the tests' zoo, each with the first finding of `upref check`."""

import importlib
import inspect
import sys
from pathlib import Path

import upref

ROOT = Path(__file__).parent.parent
SUPPORT = ROOT / "tests" / "support"
TITLES = {
    "clipping.clamps_the_product": "The product r A is clamped, and not the ratio",
    "clipping.outside_the_window_is_dead": "The clip drops tokens on both sides, whatever the sign of A",
    "aggregation.mean_of_response_means": "Each response counts the same, where each token should",
    "aggregation.mean_of_all_tokens": "Each token counts the same, where each response should",
    "aggregation.empty_rows_count_a_token": "A response without a token enters the denominator",
    "aggregation.groups_by_stride": "Groups are taken to be contiguous and of one size",
    "aggregation.divided_again_by_accumulation": "A global mean is divided again by the accumulation steps",
    "masking.shifted_by_one": "The mask is shifted by one token",
    "gradients.ratio_of_itself": "The old log-probabilities come from the current weights",
    "gradients.detached_negatives": "The ratio is detached, and negatives lose their gradient",
    "gradients.ratio_twice": "The importance ratio is applied twice",
    "sequence.product_of_ratios": "The ratio of a response is a product, not a geometric mean",
    "sequence.summed_over_tokens": "A term per response is summed over its tokens",
    "family.cispo_cap_is_absolute": "An offset from 1 is taken for the bound itself",
    "hygiene.whitened_again": "Advantages are whitened again in each micro-batch",
}


def text() -> str:
    """A section for each: the code, where it was discussed in public, the first finding."""
    sys.path.insert(0, str(SUPPORT))
    cases = {str(c): c for c in importlib.import_module("zoo").WRONG}
    return "\n\n".join(section(n, title, cases[name]) for n, (name, title) in enumerate(TITLES.items(), 1))


def section(n: int, title: str, case) -> str:
    report = upref.check(case.function, case.objective, **case.hp)
    assert not report, case
    where, number = case.source.split("#")
    met = f"Discussed in [{case.source}](https://github.com/{where}/issues/{number})."
    lines = [f"## {n}. {title}", f"Meant as `{case.objective}`. {met}"]
    lines += [f"```py\n{inspect.getsource(case.function).rstrip()}\n```", f"```text\n{report.failures[0].text()}\n```"]
    return "\n\n".join(lines)
