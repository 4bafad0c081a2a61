# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/howto/maximizes.md: what estimators, aggregations and KL terms
maximize on average.
"""

from upref import advantages, kl
from upref.aggregation import AGGREGATIONS
from upref.markdown import codes, table
from upref.maximization.expected import USES
from upref.maximization.maximization import Answer, Maximization
from upref.maximization.maximizes import WHERE, maximizes
from upref.registry import get, names

GROUP_SIZE = 4
# of responses; a sum over tokens that is divided by a constant; for rejected tokens
NOT_SHOWN = ("seq-mean", "seq-mean-token-sum-norm", "kept-mean")
SETTINGS = (
    ("0 or 1", "one length"),
    ("0 or 1", "different lengths"),
    ("graded", "one length"),
    ("graded", "different lengths"),
)


def estimators() -> str:
    """Return the table of what each advantage estimator maximizes in the plain policy
    gradient, by kind of rewards.
    """
    rows = []
    for name in advantages.ADVANTAGES:
        answers = _by_setting(maximizes(name, kind="advantage", group_size=GROUP_SIZE))
        cells = [_words(answers.get(setting)) for setting in SETTINGS[::2]]
        objectives = [n for n in names() if get(n).adv == name]
        rows.append((f"`{name}`", *cells, codes(objectives)))
    columns = ("estimator", "rewards 0 or 1", "graded rewards", "objectives with it")
    return table(columns, rows)


def aggregations() -> str:
    """Return the table of what each aggregation of REINFORCE with unbiased advantages
    maximizes, by kind of lengths; NOT_SHOWN are left out.
    """
    rows = []
    for agg in AGGREGATIONS:
        if agg in NOT_SHOWN:
            continue
        objective = get("rloo").aggregated(agg)
        answers = _by_setting(maximizes(objective, group_size=3))
        cells = [_words(answers[setting]) for setting in SETTINGS[2:]]
        objectives = [n for n in names() if get(n).agg == agg]
        rows.append((f"`{agg}`", *cells, codes(objectives)))
    columns = ("aggregation", "one length", "different lengths", "objectives with it")
    return table(columns, rows)


def kl_terms() -> str:
    """Return the table of the expected gradient of each KL estimator in each of the
    places where it may be.
    """
    rows = []
    for name in kl.ESTIMATORS:
        for use in USES:
            answer = maximizes(name, kind=f"kl-{use}").answers[-1]
            rows.append((f"`{name}`", WHERE[use], _words(answer)))
    return table(("term", "where it stands", "its expected gradient"), rows)


def _by_setting(result: Maximization) -> dict[tuple[str, ...], Answer]:
    """Return setting -> answer of a result."""
    return {answer.setting: answer for answer in result.answers}


def _words(answer: Answer | None) -> str:
    """Return an answer as a cell of a table; "refused" for None."""
    if answer is None:
        return "refused"
    words = answer.words().removeprefix("that of ").replace("it is 0", "0")
    if answer.factors and not answer.terms:
        factors = ", ".join(f"{x:.3g} at {p:g}" for p, x in answer.factors.items())
        words += f" ({factors})"
    return words
