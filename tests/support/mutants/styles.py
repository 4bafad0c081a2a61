# SPDX-License-Identifier: Apache-2.0
"""The styles in which people write losses: each turns an objective at some
hyperparameters into a module's source.

ratio     log-probabilities, ratio, clip, torch.where for the mask
logs      the same with every bound on log r
verl      losses instead of objectives, a mask of numbers, 1e-8 in the denominators
trl       coef_1, one advantage per response, denominators clamped at 1
loop      one response after the other
packed    padding dropped, tokens end to end
weights   the gradient written down: a constant weight times log π_θ
groups    a denominator for each prompt

`write` makes a module, here of GRPO in the style `loop`:

    def loss(log_prob, old_log_prob, advantages, mask):
        total = 0.0
        for i in range(len(mask)):
            m = mask[i]                              # `_inputs`
            lp = log_prob[i][m]
            old = old_log_prob[i][m]
            A = advantages[i][m]
            r = torch.exp(lp - old)                  # `core`, from the objective's code
            J = torch.minimum(r * A, torch.clamp(r, 1 - 0.2, 1 + 0.2) * A)
            total = total + J.sum() / m.sum()        # `_reduced`
        return -total / len(mask)
"""

import ast
import math
import re
from dataclasses import dataclass
from typing import Any

import torch

from upref.registry import REDUCE, Objective

from .words import body, number, parsed

STYLES = ("ratio", "logs", "verl", "trl", "loop", "packed", "weights", "groups")
KL = {
    "k1": "lp - ref",
    "k2": "(lp - ref) ** 2 / 2",
    "k3": "torch.exp(ref - lp) - (ref - lp) - 1",
}


@dataclass(frozen=True)
class Config:
    """An objective at hyperparameters that are written into the loss."""

    o: Objective
    hp: tuple[tuple[str, Any], ...] = ()

    @property
    def all_hp(self) -> dict[str, Any]:
        """Return every hyperparameter, defaults included."""
        return self.o.resolve(dict(self.hp))

    def __str__(self):
        return f"{self.o.name}({', '.join(f'{k}={v:g}' for k, v in self.hp)})"


def configs(o: Objective) -> list[Config]:
    """Return the objective at its defaults; and, if it has any of these
    hyperparameters, with optional terms switched on and other bounds.
    """
    own = o.hyperparameters
    others = {
        "c": 3.0,
        "beta": 0.04,
        "eps": 0.15,
        "eps_low": own.get("eps_low", 1) * 0.9,
        "eps_high": own.get("eps_high", 1) * 1.1,
        "tau_neg": 1.4,
        "tau": 0.03,
        "cap": 2.5,
        "lam": 0.3,
        "delta": 0.1,
    }
    changed = tuple((k, v) for k, v in others.items() if k in own)
    if not changed:
        return [Config(o)]
    return [Config(o), Config(o, changed)]


def fits(style: str, c: Config) -> bool:
    """Return whether an objective can be written in the style.

    `groups` is for objectives with a mean for each prompt. An objective with a level of
    its own has three styles, and `loop` where a response does not depend on the others.
    `logs` needs a bound.
    """
    o = c.o
    if style == "groups":
        return o.agg == "group-token-mean"
    if o.level == "custom":
        if style == "loop":
            return not o.batch_coupled
        return style in ("ratio", "verl", "weights")
    if style != "logs":
        return True
    _, statements, J = core(c, "fn")
    code = " ".join(statements) + J
    return any(bound in code for bound in ("clamp", "<=", ">="))


def core(c: Config, of: str) -> tuple[list[str], list[str], str]:
    """Return (helpers, statements, expression of J or of the weight) of the objective
    as torch, with its hyperparameters as numbers. of: "fn" for J, anything else for the
    weight.
    """
    given = {k: v for k, v in c.all_hp.items() if k != "beta"}
    function = c.o.fn if of == "fn" else c.o.closed_form
    return body(function, given)


def arguments(c: Config, style: str) -> list[str]:
    """Return the names of the loss's arguments: four, and ref_log_prob, entropy and
    group where it needs them.
    """
    names = ["log_prob", "old_log_prob", "advantages", "mask"]
    if c.all_hp.get("beta"):
        names.append("ref_log_prob")
    if "entropy" in c.o.reads:
        names.append("entropy")
    if style == "groups":
        names.append("group")
    return names


def _local(line: str) -> str:
    """Return a line of code in which `entropy` is called H, and `mask` m."""
    return re.sub(r"\bentropy\b", "H", re.sub(r"\bmask\b", "m", line))


def write(c: Config, style: str) -> str:
    """Return the source of a module with the function `loss`: the objective at its
    hyperparameters in the style.

    Its parts, in order: helpers, the lines of `_inputs`, the statements and the
    expression J of `core` (in `weights` the weight, times lp), the KL term if beta is
    not 0, and the lines of `_reduced`.
    """
    of = "weights" if style == "weights" else "fn"
    aids, statements, J = core(c, of)
    # the branch not taken must not overflow
    if c.o.name.startswith("up_") and of == "fn":
        guarded = "torch.exp(torch.where(A > 0, 0.0, lp - old))"
        statements = [s.replace("torch.exp(lp - old)", guarded) for s in statements]
    if style == "loop" and c.o.level == "custom":
        statements = [_local(s) for s in statements]
        J = _local(J)
    lines = _inputs(c, style)
    if of == "weights":
        lines += _variables_of(statements, J)
        lines += [*statements, f"w = {J}"]
        J = "w.detach() * lp"
    else:
        lines += statements
    lines.append(f"J = {J}")
    beta = c.all_hp.get("beta")
    if beta:
        lines += [f"kl = {KL[c.o.kl]}", f"J = J - {beta} * kl"]
    J_of_responses = c.o.agg == "seq-mean" and of == "fn"
    tokens = c.o.level not in REDUCE and not J_of_responses
    *reduction, last = _reduced(c, style, tokens)
    if style == "loop":
        start = ["total = 0.0"]
        if c.o.agg.endswith("token-mean") and not c.o.agg.startswith("seq"):
            start.append("count = 0")
        body_of_loop = _indented(lines + reduction)
        lines = [*start, "for i in range(len(mask)):", *body_of_loop, last]
    else:
        if tokens and style not in ("packed", "verl"):
            lines.append("J = torch.where(mask, J, 0.0)")
        lines += [*reduction, last]
    if style == "logs":
        lines = logs(lines)
    head = f"def loss({', '.join(arguments(c, style))}):"
    text = "\n".join([*aids, head, *_indented(lines)])
    return f"import math\nimport torch\n{text}"


def _indented(statements: list[str]) -> list[str]:
    """Return the statements with four spaces before each of their lines."""
    return ["    " + s.replace("\n", "\n    ") for s in statements]


# variables of a weight, as every objective defines them
OF_WEIGHTS = {
    "r": "torch.exp(lp - old)",
    "s": "torch.exp(lp - old)",
    "S": "torch.exp(lp - old)",
    "log_r": "lp - old",
    "mu": "torch.exp(old)",
    "log_mu": "old",
}


def _variables_of(statements: list[str], weight: str) -> list[str]:
    """Return the lines that define those of OF_WEIGHTS that the statements or the
    expression of a weight name.
    """
    names = set()
    for code in (*statements, weight):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Name):
                names.add(node.id)
    return [f"{name} = {value}" for name, value in OF_WEIGHTS.items() if name in names]


def _inputs(c: Config, style: str) -> list[str]:
    """Return the lines that define lp, old and A (and ref, H, m, n where the style
    needs them) from the arguments.
    """
    pairs = {"lp": "log_prob", "old": "old_log_prob", "A": "advantages"}
    if c.all_hp.get("beta"):
        pairs["ref"] = "ref_log_prob"
    if style == "loop" and c.o.level == "custom":
        return _inputs_of_row(c, pairs)
    if style == "loop":
        return _inputs_of_response(c, pairs)
    if style == "packed":
        return _packed_inputs(c, pairs)
    return _padded_inputs(c, style, pairs)


def _inputs_of_row(c: Config, pairs: dict[str, str]) -> list[str]:
    """Return the lines that define the inputs of row i, padding included, [1, T]: for
    the style `loop` of an objective with a level of its own.

    Args:
        c: the configuration.
        pairs: argument of the loss by variable.
    """
    out = [f"{name} = {argument}[i:i + 1]" for name, argument in pairs.items()]
    out.append("m = mask[i:i + 1]")
    if "entropy" in c.o.reads:
        out.append("H = entropy[i:i + 1]")
    out += [f"{name} = torch.where(m, {name}, 0.0)" for name in pairs]
    if c.o.agg == "seq-mean":
        out.append("A = A.sum(-1, keepdim=True) / m.sum()")
    return out


def _inputs_of_response(c: Config, pairs: dict[str, str]) -> list[str]:
    """Return the lines that define the inputs of response i without padding, for the
    style `loop`: a number for each token, or one of the response.

    Args:
        c: the configuration.
        pairs: argument of the loss by variable.
    """
    out = ["m = mask[i]"]
    out += [f"{name} = {argument}[i][m]" for name, argument in pairs.items()]
    how = {"sequence_mean": ".mean()", "sequence_product": ".sum()"}.get(c.o.level)
    if how:
        out.append(f"lp, old, A = (lp{how}, old{how}, A[0])")
    return out


def _packed_inputs(c: Config, pairs: dict[str, str]) -> list[str]:
    """Return the lines that define the inputs with tokens end to end, or with one
    number for each response.

    Args:
        c: the configuration.
        pairs: argument of the loss by variable.
    """
    out = [f"{name} = {argument}[mask]" for name, argument in pairs.items()]
    if c.o.level in REDUCE:
        per = "torch.zeros(len(mask), dtype=lp.dtype).index_add(0, rows, {})"
        if c.o.level == "sequence_mean":
            per += " / n"
        out += [
            "rows = mask.nonzero()[:, 0]",
            "n = mask.sum(-1)",
            "first = n.cumsum(0) - n",
            f"lp, old, A = ({per.format('lp')}, {per.format('old')}, A[first])",
        ]
    return out


def _padded_inputs(c: Config, style: str, pairs: dict[str, str]) -> list[str]:
    """Return the lines that define the inputs [B, T] with 0 in masked slots, or [B] with
    one number for each response.

    Args:
        c: the configuration.
        style: any but `loop` and `packed`; `trl` has one advantage for each response.
        pairs: argument of the loss by variable.
    """
    out = []
    if style == "verl":
        out.append("response_mask = mask.to(log_prob.dtype)")
    for name, argument in pairs.items():
        if name != "A":
            out.append(f"{name} = torch.where(mask, {argument}, 0.0)")
    if c.o.level in REDUCE:
        n = " / n" if c.o.level == "sequence_mean" else ""
        out += ["n = mask.sum(-1)", f"lp, old = (lp.sum(-1){n}, old.sum(-1){n})"]
        if style == "trl":
            out.append("A = advantages")
        else:
            first = "mask.int().argmax(1, keepdim=True)"
            out.append(f"A = advantages.gather(1, {first})[:, 0]")
        return out
    if style == "trl":
        out.append("A = advantages[:, None]")
    else:
        out.append("A = torch.where(mask, advantages, 0.0)")
    if c.o.agg == "seq-mean":
        out.append("A = A.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)")
    return out


def _reduced(c: Config, style: str, tokens: bool) -> list[str]:
    """Return the lines that turn J into the loss, by the objective's aggregation in the
    style. tokens: J has a value for each token, not one for each response.

    The last line returns the loss. In the style `loop` those before it are of the
    loop's body, and add to `total` and `count`, which `write` has begun.
    """
    agg = c.o.agg
    if style == "loop":
        return _reduced_in_loop(c, tokens)
    if not tokens:
        if style == "verl":
            return ["pg_losses = -J", "return pg_losses.mean()"]
        return ["return -J.mean()"]
    if style == "packed":
        if agg == "seq-mean-token-mean":
            sums = "torch.zeros(len(mask), dtype=J.dtype).index_add(0, rows, J)"
            return [
                "rows = mask.nonzero()[:, 0]",
                f"per = {sums} / mask.sum(-1)",
                "return -per.mean()",
            ]
        if agg.startswith("seq"):
            return ["return -J.sum() / len(mask)"]
        return ["return -J.mean()"]
    if style == "groups":
        return [
            "total, ids = (0.0, group.unique())",
            "for g in ids:",
            "    pick = group == g",
            "    total = total + J[pick].sum() / mask[pick].sum()",
            "return -total / len(ids)",
        ]
    if style == "verl":
        mask = "response_mask"
        masked = f"-J * {mask}"
        if c.o.reads_mu or c.o.level == "custom":
            masked = "torch.where(mask, -J, 0.0)"
        scalar = _scalar(
            agg,
            "pg_losses",
            tokens=f"({mask}.sum() + 1e-08)",
            tokens_of_response=f"({mask}.sum(-1) + 1e-08)",
        )
        return [f"pg_losses = {masked}", f"return {scalar}"]
    if style == "trl":
        scalar = _scalar(
            agg,
            "per_token_loss",
            tokens="mask.sum().clamp(min=1.0)",
            tokens_of_response="mask.sum(-1).clamp(min=1.0)",
        )
        return ["per_token_loss = -J", f"return {scalar}"]
    scalar = _scalar(agg, "J", tokens="mask.sum()", tokens_of_response="mask.sum(-1)")
    return [f"return -{scalar}"]


def _reduced_in_loop(c: Config, tokens: bool) -> list[str]:
    """Return the lines of `_reduced` in the style `loop`, where J is of one response."""
    agg = c.o.agg
    if not tokens:
        return ["total = total + J.sum()", "return -total / len(mask)"]
    masked = ["J = torch.where(m, J, 0.0)"] if c.o.level == "custom" else []
    if agg == "seq-mean-token-mean":
        add = ["total = total + J.sum() / m.sum()"]
        return [*masked, *add, "return -total / len(mask)"]
    add = ["total = total + J.sum()"]
    if agg in ("seq-mean-token-sum", "seq-mean"):
        return [*masked, *add, "return -total / len(mask)"]
    return [*masked, *add, "count = count + m.sum()", "return -total / count"]


def _scalar(agg: str, values: str, tokens: str, tokens_of_response: str) -> str:
    """Return the expression that reduces values [B, T] to a number.

    Args:
        agg: how the objective aggregates; a mean over tokens unless it is of responses.
        values: their name.
        tokens: the expression that counts all tokens.
        tokens_of_response: the expression that counts the tokens of each response.
    """
    match agg:
        case "seq-mean-token-mean":
            return f"({values}.sum(-1) / {tokens_of_response}).mean()"
        case "seq-mean-token-sum" | "seq-mean":
            return f"{values}.sum(-1).mean()"
        case _:
            return f"{values}.sum() / {tokens}"


class _Logs(ast.NodeTransformer):
    """Turn bounds on a ratio into bounds on its logarithm. of: the names that hold a
    ratio so far.
    """

    def __init__(self):
        self.of: set[str] = set()

    def visit_Assign(self, node):
        """Define log_r before a line such as `r = torch.exp(...)`, and remember that r
        is a ratio.
        """
        name = node.targets[0]
        if not isinstance(name, ast.Name) or name.id not in ("r", "s", "S"):
            return self.generic_visit(node)
        if not ast.unparse(node.value).startswith("torch.exp("):
            return self.generic_visit(node)
        self.of.add(name.id)
        log_name = ast.Name(f"log_{name.id}", ast.Store())
        return [ast.Assign([log_name], node.value.args[0]), node]

    def visit_Call(self, node):
        """Turn torch.clamp(r, ...) into torch.exp(torch.clamp(log_r, ...)) with
        logarithms of the bounds. Leave it if a bound is not a positive number.
        """
        node = self.generic_visit(node)
        if ast.unparse(node.func) != "torch.clamp":
            return node
        clamped, *positional = node.args
        name = ast.unparse(clamped)
        if name not in self.of:
            return node
        for bound in (*positional, *(k.value for k in node.keywords)):
            if not number(bound) or eval(ast.unparse(bound), {"math": math}) <= 0:
                return node
        node.args = [parsed(f"log_{name}"), *map(_log, positional)]
        node.keywords = [ast.keyword(k.arg, _log(k.value)) for k in node.keywords]
        return ast.Call(parsed("torch.exp"), [node], [])

    def visit_Compare(self, node):
        """Turn `r < number` into `log_r < math.log(number)`, and so for the other
        comparisons.
        """
        node = self.generic_visit(node)
        name, bound = ast.unparse(node.left), node.comparators[0]
        if name in self.of and number(bound):
            return ast.Compare(parsed(f"log_{name}"), node.ops, [_log(bound)])
        return node


def _log(b: ast.expr) -> ast.expr:
    return ast.Call(parsed("math.log"), [b], [])


def logs(lines: list[str]) -> list[str]:
    """Return the lines with every bound on a ratio put on its logarithm."""
    tree = ast.parse("\n".join(["def f():", *_indented(lines)]))
    tree = ast.fix_missing_locations(_Logs().visit(tree))
    return [ast.unparse(s) for s in tree.body[0].body]  # type: ignore[attr-defined]


def compiled(text: str):
    """Run a module's source and return its function `loss`. It raises what the source
    raises.
    """
    scope: dict[str, Any] = {"torch": torch, "math": math}
    exec(compile(text, "<mutant>", "exec"), scope)
    return scope["loss"]
