# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
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
    more: dict[str, Any] = {}
    own = o.hyperparameters
    more |= {"c": 3.0} if "c" in own else {}
    more |= {"beta": 0.04} if "beta" in own else {}
    others = {"eps": 0.15, "eps_low": own.get("eps_low", 1) * 0.9, "eps_high": own.get("eps_high", 1) * 1.1,
              "tau_neg": 1.4, "tau": 0.03, "cap": 2.5, "lam": 0.3, "delta": 0.1}  # fmt: skip
    more |= {k: v for k, v in others.items() if k in own}
    return [Config(o)] + ([Config(o, tuple(more.items()))] if more else [])


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
        return style in ("ratio", "verl", "weights") or (
            style == "loop" and not o.batch_coupled
        )
    return style != "logs" or any(
        w in " ".join(core(c, "fn")[1]) + core(c, "fn")[2]
        for w in ("clamp", "<=", ">=")
    )


def core(c: Config, of: str) -> tuple[list[str], list[str], str]:
    """Return (helpers, statements, expression of J or of the weight) of the objective
    as torch, with its hyperparameters as numbers. of: "fn" for J, anything else for the
    weight.
    """
    given = {k: v for k, v in c.all_hp.items() if k != "beta"}
    return body(c.o.fn if of == "fn" else c.o.closed_form, given)


def arguments(c: Config, style: str) -> list[str]:
    """Return the names of the loss's arguments: four, and ref_log_prob, entropy and
    group where it needs them.
    """
    more = {
        "ref_log_prob": c.all_hp.get("beta"),
        "entropy": "entropy" in c.o.reads,
        "group": style == "groups",
    }
    return [
        "log_prob",
        "old_log_prob",
        "advantages",
        "mask",
        *(k for k, on in more.items() if on),
    ]


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
    aids, lines, J = core(c, of)
    # the branch not taken must not overflow
    if c.o.name.startswith("up_") and of == "fn":
        lines = [
            s.replace(
                "torch.exp(lp - old)", "torch.exp(torch.where(A > 0, 0.0, lp - old))"
            )
            for s in lines
        ]
    if style == "loop" and c.o.level == "custom":
        lines = [_local(line) for line in lines]
        J = _local(J)
    beta = c.all_hp.get("beta")
    rowwise, packed = style == "loop", style == "packed"
    inner = _inputs(c, style)
    if of == "weights":
        known = {"r": "torch.exp(lp - old)", "s": "torch.exp(lp - old)", "S": "torch.exp(lp - old)", "log_r": "lp - old",
                 "mu": "torch.exp(old)", "log_mu": "old"}  # fmt: skip
        said = " ".join([*lines, J])
        names = (
            {n.id for n in ast.walk(ast.parse(said)) if isinstance(n, ast.Name)}
            if not lines
            else set()
        )
        names |= {
            n.id
            for s in lines
            for n in ast.walk(ast.parse(s))
            if isinstance(n, ast.Name)
        }
        names |= {n.id for n in ast.walk(parsed(J)) if isinstance(n, ast.Name)}
        inner += [f"{k} = {v}" for k, v in known.items() if k in names]
        inner += [*lines, f"w = {J}"]
        J = "w.detach() * lp"
    else:
        inner += lines
    inner.append(f"J = {J}")
    if beta:
        inner += [f"kl = {KL[c.o.kl]}", f"J = J - {beta} * kl"]
    # J of each token
    tokens = c.o.level not in REDUCE and not (c.o.agg == "seq-mean" and of == "fn")
    final = _reduced(c, style, tokens)
    if rowwise:
        start = ["total = 0.0"]
        if c.o.agg.endswith("token-mean") and not c.o.agg.startswith("seq"):
            start.append("count = 0")
        lines = [
            *start,
            "for i in range(len(mask)):",
            *("    " + s.replace("\n", "\n    ") for s in inner + final[:-1]),
        ]
        lines += final[-1:]
    else:
        lines = (
            inner
            + (
                ["J = torch.where(mask, J, 0.0)"]
                if tokens and not packed and style != "verl"
                else []
            )
            + final
        )
    if style == "logs":
        lines = logs(lines)
    text = [
        *aids,
        f"def loss({', '.join(arguments(c, style))}):",
        *("    " + s.replace("\n", "\n    ") for s in lines),
    ]
    return "import math\nimport torch\n" + "\n".join(text)


def _inputs(c: Config, style: str) -> list[str]:
    """Return the lines that define lp, old and A (and ref, H, m, n where the style
    needs them) from the arguments.
    """
    o = c.o
    pairs = {"lp": "log_prob", "old": "old_log_prob", "A": "advantages"} | (
        {"ref": "ref_log_prob"} if c.all_hp.get("beta") else {}
    )
    out = []
    if style == "loop" and o.level == "custom":
        take = {k: f"{v}[i:i + 1]" for k, v in pairs.items()} | {"m": "mask[i:i + 1]"}
        out += [f"{k} = {v}" for k, v in take.items()] + (
            ["H = entropy[i:i + 1]"] if "entropy" in o.reads else []
        )
        out += [f"{k} = torch.where(m, {k}, 0.0)" for k in pairs]
        return out + (
            ["A = A.sum(-1, keepdim=True) / m.sum()"] if o.agg == "seq-mean" else []
        )
    if style == "loop":
        out += ["m = mask[i]", *(f"{k} = {v}[i][m]" for k, v in pairs.items())]
        how = {"sequence_mean": ".mean()", "sequence_product": ".sum()"}.get(o.level)
        return out + ([f"lp, old, A = (lp{how}, old{how}, A[0])"] if how else [])
    if style == "packed":
        out += [f"{k} = {v}[mask]" for k, v in pairs.items()]
        if o.level in REDUCE:
            per = "torch.zeros(len(mask), dtype=lp.dtype).index_add(0, rows, {})"
            if o.level == "sequence_mean":
                per += " / n"
            out += [
                "rows = mask.nonzero()[:, 0]",
                "n = mask.sum(-1)",
                "first = n.cumsum(0) - n",
            ]
            out += [f"lp, old, A = ({per.format('lp')}, {per.format('old')}, A[first])"]
        return out
    if style == "verl":
        out += ["response_mask = mask.to(log_prob.dtype)"]
    shape = (
        "advantages[:, None]"
        if style == "trl" and o.level not in REDUCE
        else "advantages"
    )
    out += [f"{k} = torch.where(mask, {v}, 0.0)" for k, v in pairs.items() if k != "A"]
    if o.level in REDUCE:
        n = " / n" if o.level == "sequence_mean" else ""
        out += ["n = mask.sum(-1)", f"lp, old = (lp.sum(-1){n}, old.sum(-1){n})"]
        return out + (["A = advantages"] if style == "trl" else
                      ["A = advantages.gather(1, mask.int().argmax(1, keepdim=True))[:, 0]"])  # fmt: skip
    out += [
        f"A = torch.where(mask, {shape}, 0.0)" if style != "trl" else f"A = {shape}"
    ]
    return out + (
        ["A = A.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)"]
        if o.agg == "seq-mean"
        else []
    )


def _reduced(c: Config, style: str, tokens: bool) -> list[str]:
    """Return the lines that turn J into the loss, by the objective's aggregation in the
    style. tokens: J has a value for each token, not one for each response.

    The last line returns the loss. In the style `loop` those before it are of the
    loop's body, and add to `total` and `count`, which `write` has begun.
    """
    agg = c.o.agg
    if style == "loop":
        m = "m"
        if not tokens:
            return ["total = total + J.sum()", "return -total / len(mask)"]
        masked = ["J = torch.where(m, J, 0.0)"] if c.o.level == "custom" else []
        if agg == "seq-mean-token-mean":
            return [
                *masked,
                f"total = total + J.sum() / {m}.sum()",
                "return -total / len(mask)",
            ]
        if agg in ("seq-mean-token-sum", "seq-mean"):
            return [*masked, "total = total + J.sum()", "return -total / len(mask)"]
        return [
            *masked,
            "total = total + J.sum()",
            f"count = count + {m}.sum()",
            "return -total / count",
        ]
    if not tokens:
        return (
            ["pg_losses = -J", "return pg_losses.mean()"]
            if style == "verl"
            else ["return -J.mean()"]
        )
    if style == "packed":
        if agg == "seq-mean-token-mean":
            return ["rows = mask.nonzero()[:, 0]",
                    "per = torch.zeros(len(mask), dtype=J.dtype).index_add(0, rows, J) / mask.sum(-1)",
                    "return -per.mean()"]  # fmt: skip
        return [
            "return -J.sum() / len(mask)"
            if agg.startswith("seq")
            else "return -J.mean()"
        ]
    if style == "groups":
        return ["total, ids = (0.0, group.unique())", "for g in ids:", "    pick = group == g",
                "    total = total + J[pick].sum() / mask[pick].sum()", "return -total / len(ids)"]  # fmt: skip
    if style == "verl":
        m, J = "response_mask", "pg_losses"
        sums = {"seq-mean-token-mean": f"({J}.sum(-1) / ({m}.sum(-1) + 1e-08)).mean()",
                "seq-mean-token-sum": f"{J}.sum(-1).mean()", "seq-mean": f"{J}.sum(-1).mean()"}  # fmt: skip
        masked = (
            "torch.where(mask, -J, 0.0)"
            if c.o.reads_mu or c.o.level == "custom"
            else f"-J * {m}"
        )
        return [
            f"{J} = {masked}",
            "return " + sums.get(agg, f"{J}.sum() / ({m}.sum() + 1e-08)"),
        ]
    low = ".clamp(min=1.0)" if style == "trl" else ""
    if style == "trl":
        sums = {"seq-mean-token-mean": f"(per_token_loss.sum(-1) / mask.sum(-1){low}).mean()",
                "seq-mean-token-sum": "per_token_loss.sum(-1).mean()", "seq-mean": "per_token_loss.sum(-1).mean()"}  # fmt: skip
        return [
            "per_token_loss = -J",
            "return " + sums.get(agg, f"per_token_loss.sum() / mask.sum(){low}"),
        ]
    sums = {"seq-mean-token-mean": "(J.sum(-1) / mask.sum(-1)).mean()", "seq-mean-token-sum": "J.sum(-1).mean()",
            "seq-mean": "J.sum(-1).mean()"}  # fmt: skip
    return ["return -" + sums.get(agg, "J.sum() / mask.sum()")]


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
        if (
            isinstance(name, ast.Name)
            and name.id in ("r", "s", "S")
            and ast.unparse(node.value).startswith("torch.exp(")
        ):
            self.of.add(name.id)
            inside = node.value.args[0]
            return [ast.Assign([ast.Name(f"log_{name.id}", ast.Store())], inside), node]
        return self.generic_visit(node)

    def visit_Call(self, node):
        """Turn torch.clamp(r, ...) into torch.exp(torch.clamp(log_r, ...)) with
        logarithms of the bounds. Leave it if a bound is not a positive number.
        """
        node = self.generic_visit(node)
        if (
            ast.unparse(node.func) != "torch.clamp"
            or ast.unparse(node.args[0]) not in self.of
        ):
            return node
        bounds = [*node.args[1:], *(k.value for k in node.keywords)]
        if not all(
            number(b) and eval(ast.unparse(b), {"math": math}) > 0 for b in bounds
        ):
            return node
        node.args = [
            parsed("log_" + ast.unparse(node.args[0])),
            *(_log(b) for b in node.args[1:]),
        ]
        node.keywords = [ast.keyword(k.arg, _log(k.value)) for k in node.keywords]
        return ast.Call(parsed("torch.exp"), [node], [])

    def visit_Compare(self, node):
        """Turn `r < number` into `log_r < math.log(number)`, and so for the other
        comparisons.
        """
        node = self.generic_visit(node)
        if ast.unparse(node.left) in self.of and number(node.comparators[0]):
            return ast.Compare(
                parsed("log_" + ast.unparse(node.left)),
                node.ops,
                [_log(node.comparators[0])],
            )
        return node


def _log(b: ast.expr) -> ast.expr:
    return ast.Call(parsed("math.log"), [b], [])


def logs(lines: list[str]) -> list[str]:
    """Return the lines with every bound on a ratio put on its logarithm."""
    tree = ast.parse(
        "def f():\n" + "\n".join("    " + s.replace("\n", "\n    ") for s in lines)
    )
    tree = ast.fix_missing_locations(_Logs().visit(tree))
    return [ast.unparse(s) for s in tree.body[0].body]  # type: ignore[attr-defined]


def compiled(text: str):
    """Run a module's source and return its function `loss`. It raises what the source
    raises.
    """
    scope: dict[str, Any] = {"torch": torch, "math": math}
    exec(compile(text, "<mutant>", "exec"), scope)
    return scope["loss"]
