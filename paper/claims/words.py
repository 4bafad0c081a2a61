# SPDX-License-Identifier: Apache-2.0
"""The words for what became of a statement: one vocabulary for claims, derivations,
experiments and pages.

The registered rules of the experiments have words of their own. Their records have these
words beside them.
"""

PROVED, NUMERIC, CONDITION = "proved", "holds numerically", "holds under a condition"
REPRODUCED, EXCLUDED, UNDECIDED, CONTRADICTED = (
    "reproduced",
    "excluded",
    "undecided",
    "contradicted",
)
NOT_SEEN = "not seen here"
FALSE, NOT_TESTABLE, UNSPECIFIED = "false as written", "not testable", "unspecified"

MEANINGS = {
    PROVED: "sympy derives it from the functions that train; where it needs a policy, of a softmax over three or four "
    "tokens",
    NUMERIC: "a test computes it",
    CONDITION: "it holds where the condition does. Elsewhere a counterexample is shown, an effect of the opposite sign, "
    "a bound that is not reached, or an excluded size",
    REPRODUCED: "the miniature shows it: tiny transformers by a rule registered before the runs, or exact expectations. "
    "One experiment that shows it is enough, where none that decides shows the opposite or excludes it; the evidence "
    "says where it is undecided",
    UNDECIDED: "the miniature shows neither the effect nor its absence: the seeds are too few, the result is too close "
    "to call, or several comparisons disagree",
    EXCLUDED: "the miniature does not show the effect. Its seeds were counted for an effect of a stated size, and the "
    "interval that decides leaves out this size",
    NOT_SEEN: "the reading names a bound or a size, or says what one method does by itself, and the miniature does not "
    "show it: the bound is not reached, or the method does the opposite. A large model may behave otherwise",
    CONTRADICTED: "the miniature shows the opposite of a comparison: the other of two methods has more. Or exact "
    "expectations, in which nothing is sampled, differ from the reading. A large model may behave otherwise",
    FALSE: "a counterexample to the reading, with its numbers",
    UNSPECIFIED: "a search of the paper's printed text finds nothing",
    NOT_TESTABLE: "the miniature has nothing that corresponds, its baseline does not learn there, or the statement is of "
    "runs of the authors that nobody can read",
}
VERDICTS = tuple(MEANINGS)
