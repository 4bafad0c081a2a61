# SPDX-License-Identifier: Apache-2.0
"""A user's log-probability function as one frozen type:
`(hidden, weight, tokens, temperature)` or `(logits, tokens, temperature)` in,
log-probabilities and maybe entropies out, with their gradients."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from upref.errors import InputError
from upref.user_code import names
from upref.user_code.guard import call_guarded
from upref.user_code.load import load, name_of
from upref.user_code.signature import Reading, parameters, read as read_signature

MAIN = {"hidden": ("hidden", "weight", "tokens"), "logits": ("logits", "tokens")}
SETTINGS = {
    "temperature": {"temperature", "tau", "temp"},
    "bias": {"bias"},
    "logit_scale": {"scale"},
    "softcap": {"softcap", "softcapping", "cap"},
}
ROLES = {
    "weight": {"weight", "weights", "w", "head", "vocab", "unembedding", "embedding"},
    "tokens": {
        "tokens",
        "token",
        "ids",
        "labels",
        "label",
        "target",
        "targets",
        "index",
        "actions",
    },
    "logits": {"logits", "logit"},
    "hidden": {"hidden", "states", "h", "input", "x", "features"},
}


@dataclass(frozen=True)
class Problem:
    """One call. x: hidden states [B, T, H], or logits [B, T, V] where weight is None.

    g, g_H: what the log-probs and entropies are multiplied by before they are added and
    differentiated; None: not used.
    frozen: the input that needs no gradient. keep: the tokens that are compared; None:
    all.
    """

    x: Tensor
    weight: Tensor | None
    tokens: Tensor
    g: Tensor | None = None
    g_H: Tensor | None = None
    temperature: float = 1.0
    bias: Tensor | None = None
    softcap: float | None = None
    logit_scale: float = 1.0
    frozen: str = ""
    keep: Tensor | None = None

    def to(self, dtype: torch.dtype) -> "Problem":
        """Cast every tensor of real numbers.

        Args:
            dtype: of floating-point numbers.

        Returns:
            The same problem in that dtype; tokens and masks are as before.
        """

        def cast(value: Any) -> Any:
            """A real tensor in the dtype; everything else as it is."""
            real = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(dtype) if real else value

        return Problem(**{k: cast(v) for k, v in vars(self).items()})

    @property
    def leaves(self) -> dict[str, Tensor]:
        """What is differentiated for, by the reader's name.

        Returns:
            {"logits": [.., V]}, or {"hidden": [.., H], "weight": [V, H]}.
        """
        if self.weight is None:
            return {"logits": self.x}
        return {"hidden": self.x, "weight": self.weight}


@dataclass(frozen=True)
class KernelOutcome:
    """What one call did, in float64: numbers by name (log-prob, entropy, gradient of
    hidden, ...).
    """

    numbers: dict[str, Tensor]
    wrote: frozenset[str] = frozenset()
    printed: bool = False
    # of a second backward: "" alike, "other numbers", or what it raised
    again: str = ""


@dataclass(frozen=True)
class Kernel:
    """Call it on a Problem. dtype: what it is given; flat: its tokens are [N], not [B,
    T].
    """

    name: str
    fn: Callable[..., Any]
    reading: Reading
    kind: str  # hidden | logits
    # temperature, bias, softcap, logit_scale -> its argument
    settings: Mapping[str, str]
    dtype: torch.dtype = torch.float64
    flat: bool = False
    has_entropy: bool = True
    softcap: float | None = None  # what it is expected to apply
    logit_scale: float = 1.0
    on_gpu: bool = False  # whether it computes there

    def __call__(self, problem: Problem, twice: bool = False) -> KernelOutcome:
        """twice: the backward is run again."""
        problem = (
            problem.to(self.dtype) if problem.x.dtype == torch.float64 else problem
        )
        leaves = {
            k: v.detach().requires_grad_(k != problem.frozen)
            for k, v in problem.leaves.items()
        }
        shape = problem.tokens.shape

        def flat(x: Tensor) -> Tensor:
            """[N, ...] for [B, T, ...], where the function takes its tokens so."""
            return x.flatten(0, len(shape) - 1) if self.flat else x

        full = {
            k: v if k == "weight" else flat(v.clone()) for k, v in leaves.items()
        } | {"tokens": flat(problem.tokens)}
        extra = {
            arg: getattr(problem, k)
            for k, arg in self.settings.items()
            if getattr(problem, k) is not None
        }
        before = {k: v.detach().clone() for k, v in full.items()}
        answer, printed = call_guarded(
            self.name, lambda: self.reading.call(self.fn, full, extra)
        )
        out = self._outputs(answer, full["tokens"].shape)
        numbers = {k: v.detach().double().reshape(shape) for k, v in out.items()}
        given = {
            k: u
            for k, u in (("log-prob", problem.g), ("entropy", problem.g_H))
            if k in out and u is not None
        }
        ups = {
            f"the upstream gradient of the {k}": flat(u).to(out[k].dtype)
            for k, u in given.items()
        }
        full, before, again = (
            full | ups,
            before | {k: u.clone() for k, u in ups.items()},
            "",
        )
        if ups:
            wanted = {k: v for k, v in leaves.items() if k != problem.frozen}

            def back() -> dict[str, Tensor]:
                """The gradients, by a backward pass that may be run again."""
                ys = [out[k] for k in given]
                return _backward(ys, list(ups.values()), wanted, twice)

            try:
                grads, more = call_guarded(f"the backward of {self.name}", back)
            except InputError as e:
                if not twice:
                    raise
                # a compiled backward may refuse to keep what a second one needs
                return KernelOutcome(numbers, frozenset(), printed, str(e))
            numbers |= {f"gradient of {k}": v.double() for k, v in grads.items()}
            printed |= more
            try:
                if twice:
                    second = call_guarded(f"the second backward of {self.name}", back)[
                        0
                    ]
                else:
                    second = grads
                if all(torch.equal(second[k], v) for k, v in grads.items()):
                    again = ""
                else:
                    again = "other numbers"
            except InputError as e:
                again = str(e)

        def same(name: str) -> bool:
            """Whether an input is as it was before the call."""
            now = full[name].detach()
            return torch.equal(before[name].nan_to_num(), now.nan_to_num())

        return KernelOutcome(
            numbers, frozenset(k for k in before if not same(k)), printed, again
        )

    def _outputs(self, answer: Any, shape: torch.Size) -> dict[str, Tensor]:
        """The tensors of an answer by name, checked for shape and type."""
        if isinstance(answer, Mapping):
            answer = (_entry(answer, "logp", "log_p"), _entry(answer, "entrop"))
        parts = list(answer) if isinstance(answer, tuple | list) else [answer]
        out = dict(
            zip(("log-prob", "entropy"), parts[: 1 + self.has_entropy], strict=False)
        )
        if out.get("entropy", 0) is None:
            del out["entropy"]
        for k, v in out.items():
            if (
                not isinstance(v, Tensor)
                or v.shape != shape
                or not v.is_floating_point()
                or v.is_meta
            ):
                if isinstance(v, Tensor) and v.shape != shape:
                    got = str(list(v.shape))
                else:
                    got = type(v).__name__
                told = f"{self.name} returns {got} for the {k} of tokens {list(shape)}"
                raise InputError(f"{told}: return one each.")
        return out


def _entry(answer: Mapping[Any, Any], *parts: str) -> Any:
    """The value whose key has one of these parts, the first part first; or None."""
    return next(
        (v for s in parts for k, v in answer.items() if s in str(k).lower()), None
    )


def _backward(
    ys: list[Tensor], ups: list[Tensor], leaves: dict[str, Tensor], keep: bool
) -> dict[str, Tensor]:
    """Gradients by leaf; upstream gradients are handed over as they are, so that their
    layout reaches the function.
    """
    live = [(y, u) for y, u in zip(ys, ups, strict=True) if y.requires_grad]
    if not live:
        return {k: torch.zeros_like(v) for k, v in leaves.items()}
    ys, ups = map(list, zip(*live, strict=True))
    grads = torch.autograd.grad(
        ys, list(leaves.values()), ups, retain_graph=keep, allow_unused=True
    )
    return {
        k: torch.zeros_like(v) if gradient is None else gradient
        for (k, v), gradient in zip(leaves.items(), grads, strict=True)
    }


# ---- reading -------------------------------------------------------------------------
def read(fn: Any, softcap: float | None = None, logit_scale: float = 1.0) -> Kernel:
    """A Kernel from a callable or its name, in the dtype and shape in which it runs;
    InputError where none does.

    Args:
        fn: a function of logits, or of hidden states and a weight; or its name.
        softcap: of the logits, where it has one.
        logit_scale: what it multiplies logits by.
    """
    name = name_of(fn)
    fn = load(fn) if isinstance(fn, str) else fn
    if not callable(fn) or isinstance(fn, type):
        raise InputError(
            f"a {type(fn).__name__} is not a log-probability function: pass a function or its name."
        )
    all_parameters = [
        p for p in parameters(fn) if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if not all_parameters:
        raise InputError(
            f"{name} names no arguments: check `def f(hidden, weight, tokens, temperature): ...`."
        )
    settings = {s: p.name for p in all_parameters if (s := _said(p.name, SETTINGS))}
    roles = {p.name: r for p in all_parameters if (r := _role(p.name))}
    free = [
        p.name
        for p in all_parameters
        if p.default is p.empty and p.name not in (*roles, *settings.values())
    ]
    timed = [] if "temperature" in settings else ["temperature"]
    must = [
        p
        for p in all_parameters
        if p.default is p.empty or _said(p.name, SETTINGS) == "temperature"
    ]
    # (logits, tokens, temperature)
    takes_few = (
        len([p for p in must if _said(p.name, SETTINGS) in ("", "temperature")]) < 4
    )
    said = set(roles.values())
    if "logits" in said or (takes_few and not {"hidden", "weight"} & said):
        kind = "logits"
    else:
        kind = "hidden"
    missing = [r for r in MAIN[kind] if r not in said] + timed
    # what no name says, in order; the last is the temperature
    if len(free) == len(missing):
        settings |= {"temperature": free.pop()} if timed else {}
        roles |= dict(zip(free, missing, strict=False))
    reading = read_signature(fn, name, lambda n: roles.get(n, ""), MAIN[kind])
    if unknown := [p for p in reading.needed if p not in settings.values()]:
        raise InputError(
            f"{name} needs {unknown[0]!r}, which upref cannot give: bind it with functools.partial."
        )
    return _running(
        Kernel(
            name, fn, reading, kind, settings, softcap=softcap, logit_scale=logit_scale
        )
    )


def _said(name: str, table: Mapping[str, set[str]]) -> str:
    """The first entry of the table that shares a word with the name, or ""."""
    return next((k for k, told in table.items() if told & set(names.words(name))), "")


def _role(name: str) -> str:
    odd = _said(name, SETTINGS) or any(
        w.startswith(("mask", "chunk", "ignore")) for w in names.words(name)
    )
    return "" if odd else _said(name, ROLES)


def probe(kernel: Kernel) -> Problem:
    """Values that float32 does not hold exactly.

    Args:
        kernel: whose kind of inputs is made.
    """
    n = torch.arange(48, dtype=torch.float64)
    x = (1.7 * n[:24]).sin().reshape(2, 3, 4)
    W = (2.3 * n[:28]).cos().reshape(7, 4)
    tokens = torch.tensor([[0, 6, 2], [3, 3, 5]])
    gradient = (n[:6] - 2.5).reshape(2, 3)
    bias = n[:7].sin() if "bias" in kernel.settings else None
    p = Problem(
        x,
        W,
        tokens,
        gradient,
        bias=bias,
        softcap=kernel.softcap,
        logit_scale=kernel.logit_scale,
    )
    return p if kernel.kind == "hidden" else replace(p, x=x @ W.T, weight=None)


def _running(kernel: Kernel) -> Kernel:
    """With tokens [B, T] or else [N], in float64 or else in float32, whichever it takes
    first.
    """
    errors = []
    for dtype, flat in itertools.product((torch.float64, torch.float32), (False, True)):
        candidate = replace(kernel, dtype=dtype, flat=flat)
        before = gpu_allocations()
        try:
            has_entropy = "entropy" in candidate(probe(kernel)).numbers
        except InputError as e:
            errors.append(e)
            continue
        return replace(
            candidate, has_entropy=has_entropy, on_gpu=gpu_allocations() > before
        )
    raise errors[0]


def gpu_allocations() -> int:
    """How often this process has asked for memory of a GPU."""
    if not torch.cuda.is_initialized():
        return 0
    devices = range(torch.cuda.device_count())
    name = "allocation.all.allocated"
    return sum(torch.cuda.memory_stats(d).get(name, 0) for d in devices)
