# SPDX-License-Identifier: Apache-2.0
"""What docs/make.py writes into docs/what-check-sees.md: axes, tolerances and habits, from where they are decided."""

import json
from pathlib import Path


def axes() -> str:
    """The axes of the input, from upref.weights.batches."""
    from upref.verify.oracles.batches import ONE_RESPONSE
    from upref.weights.batches import AXES, LOG_R, MU, MU_READ, NAMED, OVERFLOW, SIGNS

    said = lambda xs: ", ".join(f"{x:g}" for x in xs)
    first: dict[str, str] = {}
    for name, axis in AXES.items():
        first.setdefault(axis.words, "sizes and compositions" if axis.width else name)
    rows = [
        ("the grid", f"A of {said(SIGNS)}; π_old of {said(MU)} (of {said(MU_READ)} too where bounds depend on it); "
                     "every bound from below, on it and from above; "
                     f"{len(LOG_R)} more ratios with |log r| up to {max(LOG_R):g}; masks with holes, NaN in padding"),
        ("one response", ONE_RESPONSE),
        ("far ratios", f"|log r| of {said(OVERFLOW)} in float64, float32 and bfloat16"),
        *((name, words) for words, name in first.items()),
        ("group ids", f"{', '.join(NAMED)}; from `every two` on mixed with each level of each axis"),
    ]  # fmt: skip
    return _rows("axis | what is asked", rows)


def tolerances() -> str:
    """Every tolerance of a verdict, from where it is used."""
    from upref.verify.advantages.case import SINGLE_TOL
    from upref.verify.measure import EXACT, HABIT, ROUND, SINGLE
    from upref.verify.oracles.reach import TOO_LONG
    from upref.weights.batches import EDGES, GUARD, SINGLE_EDGES

    rows = [
        (f"{EXACT:g}", "a weight in float64, nothing said", "rounding over a few hundred terms stays below"),
        (f"{HABIT:g}", "a weight in float64, with a note", "1e-6 beside a length of one token is the largest habit"),
        (f"{SINGLE:g}", "a weight of what computes in float32", f"beside what rounding log-probabilities by {ROUND:g} "
                                                               "of themselves moves, which is taken off first"),
        (f"{max(EDGES):g}", "how near to a bound both sides are asked, relative to r", "a bound that is off shows"),
        (f"{max(SINGLE_EDGES):g}", "the same in float32", "narrower than the narrowest bound, 3e-4 of GSPO"),
        ("10 times these", "on random batches and unusual inputs", "long sums round more"),
        (f"{GUARD['token']:g}", "log r of a token from which a clamp is a note", "a ratio of 5e8 is a guard's"),
        (f"{GUARD['sequence']:g}", "log s of a response from which a clamp is a note", "a mean over its tokens"),
        (f"{SINGLE_TOL:g}", "an advantage in float32", "a variance loses half its digits"),
        (f"{TOO_LONG:g} s", "a loss that would need longer for a batch is not asked for it", "the report says so"),
    ]  # fmt: skip
    return _rows(" | of what | why", rows)


def _rows(head: str, rows: list[tuple[str, ...]]) -> str:
    cells = (" | ".join(x.replace("|", "\\|") for x in row) for row in rows)
    return "\n".join([f"| {head} |", "|---" * len(rows[0]) + "|", *(f"| {row} |" for row in cells)])


def habits() -> str:
    """The table of tests/support/zoo/habits.py; a test judges a function with each."""
    from tests.support.zoo.habits import HABITS

    return _rows("habit | verdict | why", [(h.words, h.verdict, h.why) for h in HABITS])


def fuzzed() -> str:
    """What tests/support/fuzz.json says of the whole runs of the fuzzer."""
    text = (Path(__file__).parent.parent / "tests/support/fuzz.json").read_text(encoding="utf-8")
    return "\n".join(map(_run, json.loads(text)["runs"]))


def _run(run: dict) -> str:
    counts, broke = run["counts"], sum(map(len, run["found"].values()))
    verbs = {kind.split()[1] for kind in counts if kind.startswith("command ") and kind != "command "}
    functions = [kind for kind in counts if kind.startswith("upref.")]
    return (
        f"* {sum(counts.values()):,} inputs of seed {run['seed']} over {len(counts)} entry points, {len(verbs)} verbs "
        f"of the command and {len(functions)} public functions and methods among them: {broke} broke a rule, of which "
        f"{run['again']} still do on the code as it is now."
    )
