# SPDX-License-Identifier: Apache-2.0
"""The table of docs/faults.md: every known fault by its id, in words, and of what it is
one.
"""

from collections.abc import Iterator

import torch

import upref
from upref import critic, distillation, markdown
from upref.kl import ESTIMATORS
from upref.step.compare.case import build_case, make_goal
from upref.step.explain import causes, normalizers
from upref.step.explain.forwards import model_variants
from upref.step.explain.scores import log_prob_variants
from upref.step.explain.weights import Tokens
from upref.step.inputs.families import tiny
from upref.step.inputs.reference import TorchModel
from upref.user_code.logprobs import Problem
from upref.verify.advantages.tokens import READERS
from upref.verify.faults import known, measured
from upref.verify.finding import Cause
from upref.verify.formulas import (
    distillation as of_distillation,
    token_faults,
    value as of_value,
)
from upref_course.grader import exercises

# bounds at which a wrong loss is seen to change, on both sides of a ratio of 1
BOUNDS = [0.8, 1.28, 3.0]
OTHER = "other-objective-"  # then the name of the objective that a loss is
KINDS = (
    "loss",
    "advantages",
    "tokens",
    "distillation",
    "value",
    "KL",
    "log-probs",
    "step",
    "course",
)


def faults() -> Iterator[tuple[str, str, Cause]]:
    """Yield for each known fault a kind of function (KINDS), the name of the objective
    or exercise ("" for other kinds), and the fault as a cause.

    A fault may come several times: once for each objective that can have it.
    """
    for name in upref.names():
        o = upref.get(name)
        hp = o.resolve({}) | ({"beta": 0.1} if o.kl in ESTIMATORS else {})
        for fault in known("losses", o, hp, BOUNDS):
            yield "loss", name, fault.cause
    for fault in known("advantages"):
        yield "advantages", "", fault.cause
    for words, fault_id, _ in READERS:
        yield "advantages", "", Cause(words, (fault_id,))
    for name in token_faults.SETTINGS:
        for fault in token_faults.known(name):
            yield "tokens", "", fault.cause
    for name in critic.VALUE_LOSSES:
        for fault in of_value.known(name, "token-mean"):
            yield "value", "", fault.cause
    for name in distillation.names():
        for fault in of_distillation.known(name, "token-mean"):
            yield "distillation", "", fault.cause
    for fault in known("kl"):
        yield "KL", "", fault.cause
    for columns in (19, 300):  # less than a tile, and more
        tokens = torch.arange(10) % columns
        problem = Problem(torch.zeros(10, columns), None, tokens)
        for fault in known("logprobs", problem):
            yield "log-probs", "", fault.cause
    for cause in _of_steps():
        yield "step", "", cause
    for exercise in exercises():
        for fault in exercise.faults:
            yield "course", exercise.slug, fault.cause
    for one in measured.every():
        for kind in one.applies_to:
            for name in _objectives(one) if kind == "loss" else [""]:
                yield kind, name, Cause(one.words, (one.id,))


def _objectives(fault: measured.MeasuredFault) -> list[str]:
    """Return the objectives of which a loss can have the fault."""
    own = (measured.OWN_DENOMINATOR_OF_MICRO_BATCH, measured.OWN_DENOMINATOR_OF_RANK)
    if fault not in own:
        return upref.names()
    # micro-batches of an objective that couples its tokens are not compared
    return [name for name in upref.names() if not upref.get(name).batch_coupled]


def _of_steps() -> Iterator[Cause]:
    """Yield the faults of a step: of the forward pass, of the tokens' weights, and of
    the responses' factors.
    """
    model = TorchModel(tiny("qwen3"))
    goal = make_goal("gspo", {}, 0.7, beta=0.1)
    case = build_case(model, goal, None, ())
    right, b = case.forward, case.padded.widened()
    for variants in (log_prob_variants, model_variants):
        for fault in variants(right):
            yield fault.cause
    lp = right.statistics()[0].detach()
    lp = torch.nn.functional.pad(lp, (0, b.mask.shape[1] - lp.shape[1]))
    tokens = Tokens(goal, case.rows, b, lp, lp, [], lp, lp, float(lp.abs().max()))
    for fault in causes.token_faults(tokens, goal.hp | {"beta": goal.beta}):
        yield fault.cause
    factors = torch.ones(len(case.rows), dtype=torch.float64)
    for cause, _ in normalizers.aggregations(goal, case.rows, case.padded, factors, []):
        yield cause


def table() -> str:
    """Return the table of the page, by id: an example in words, and the kinds of
    functions that can have the fault. Faults that are another objective have no row.
    """
    words: dict[str, str] = {}  # id -> the first example
    names_of: dict[str, dict[str, set[str]]] = {}  # id -> kind -> objectives
    for kind, name, cause in faults():
        for fault_id in cause.ids:
            if not fault_id.startswith(OTHER):
                kinds = names_of.setdefault(fault_id, {})
                kinds.setdefault(kind, set()).add(name)
        if len(cause.ids) == 1:
            words.setdefault(cause.ids[0], cause.words)
    rows = []
    for fault_id, kinds in sorted(names_of.items()):
        example = words.get(fault_id, "").replace("|", "\\|")
        where = [_where(kind, kinds[kind]) for kind in KINDS if kind in kinds]
        rows.append([f"`{fault_id}`", example, ", ".join(where)])
    return markdown.table(["id", "for example", "of"], rows)


def _where(kind: str, names: set[str]) -> str:
    """Return a kind of function; of losses also of how many objectives it is a fault,
    unless of all.

    Args:
        kind: one of KINDS.
        names: of the objectives that have it.
    """
    number = len(upref.names())
    if kind != "loss" or len(names) == number:
        return kind
    return f"loss ({len(names)} of {number})"
