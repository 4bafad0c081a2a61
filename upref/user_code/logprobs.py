# SPDX-License-Identifier: Apache-2.0
"""A user's log-probability function as one frozen type:
`(hidden, weight, tokens, temperature)` or `(logits, tokens, temperature)` in,
log-probabilities and maybe entropies out, with their gradients."""

import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from upref.errors import InputError
from upref.user_code import names
from upref.user_code.function import (
    Snapshot,
    UserFunction,
    first_that_runs,
    load_function,
    refuse_needed,
)
from upref.user_code.guard import call_guarded
from upref.user_code.signature import Reading, parameters, read as read_signature

MAIN = {"hidden": ("hidden", "weight", "tokens"), "logits": ("logits", "tokens")}
SETTINGS = {
    "temperature": {"temperature", "tau", "temp"},
    "bias": {"bias"},
    "logit_scale": {"scale"},
    "softcap": {"softcap", "softcapping", "cap"},
}
# arguments of the cuts of a sampler
CUTS = {"top_p": "top_p", "topp": "top_p", "top_k": "top_k", "topk": "top_k"}
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
    top_k: int | None = None  # of the sampler; None: it does not cut
    top_p: float | None = None

    def to(self, dtype: torch.dtype) -> "Problem":
        """Cast every tensor of real numbers.

        Args:
            dtype: of floating-point numbers.

        Returns:
            The same problem in that dtype; tokens and masks are as before.
        """

        def cast(value: Any) -> Any:
            """Return a real tensor in the dtype, and everything else as it is."""
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
    # what differs in a second backward: "" nothing, "different numbers", or what it raised
    second_backward: str = ""


@dataclass(frozen=True)
class Kernel(UserFunction):
    """A log-probability function, to be called on a Problem."""

    reading: Reading
    kind: str  # hidden | logits
    # temperature, bias, softcap, logit_scale -> its argument
    settings: Mapping[str, str]
    dtype: torch.dtype = torch.float64  # of its inputs
    flat: bool = False  # its tokens are [N], not [B, T]
    has_entropy: bool = True  # whether it may return the entropy too
    softcap: float | None = None  # what it is expected to apply
    logit_scale: float = 1.0  # what it is expected to multiply logits by
    on_gpu: bool = False  # whether it computes on a GPU

    def needs(self, setting: str) -> bool:
        """Tell whether the function has an argument without a default for a setting.

        Args:
            setting: a key of `settings`.
        """
        return self.settings.get(setting) in self.reading.needed

    def __call__(
        self, problem: Problem, twice: bool = False, before: Tensor | None = None
    ) -> KernelOutcome:
        """Call the function, and differentiate what it returns.

        Args:
            problem: the inputs, and the upstream gradients.
            twice: run the backward pass again, and compare.
            before: numbers of the weight in a call that is made first. They are then
                replaced in place, as an optimizer replaces them.

        Returns:
            What the call did.
        """
        if problem.x.dtype == torch.float64:
            problem = problem.to(self.dtype)
        leaves = {
            name: tensor.detach().requires_grad_(name != problem.frozen)
            for name, tensor in problem.leaves.items()
        }
        shape = problem.tokens.shape
        inputs = self._inputs(problem, leaves)
        settings = {}
        for setting, argument in self.settings.items():
            value = getattr(problem, setting)
            if value is not None:
                settings[argument] = value
        if before is not None:
            self._call_with_weight(inputs, settings, before)
        before_call = Snapshot(inputs)
        answer, printed = call_guarded(
            self.name,
            lambda: self.reading.call(self.fn, inputs, settings),
            passed=self.reading.passed(inputs, settings),
        )
        outputs = self._outputs(answer, inputs["tokens"].shape)
        numbers = {
            name: output.detach().double().reshape(shape)
            for name, output in outputs.items()
        }
        upstream = {}
        for name, g in (("log-prob", problem.g), ("entropy", problem.g_H)):
            if name in outputs and g is not None:
                upstream[name] = self._flattened(g, shape).to(outputs[name].dtype)
        before_backward = Snapshot(
            {f"the upstream gradient of the {name}": g for name, g in upstream.items()}
        )
        second_backward = ""
        if upstream:
            differentiated = {
                name: leaf for name, leaf in leaves.items() if name != problem.frozen
            }
            values = [outputs[name] for name in upstream]

            def go_back() -> dict[str, Tensor]:
                """Return the gradients by leaf, by a backward pass that may be run again if
                `twice` is set.
                """
                return _backward(values, list(upstream.values()), differentiated, twice)

            try:
                grads, backward_printed = call_guarded(
                    f"the backward of {self.name}", go_back
                )
            except InputError as e:
                if not twice:
                    raise
                # a compiled backward may refuse to keep what a second one needs
                return KernelOutcome(numbers, frozenset(), printed, str(e))
            numbers |= {
                f"gradient of {name}": gradient.double()
                for name, gradient in grads.items()
            }
            printed |= backward_printed
            if twice:
                second_backward = self._compare_second_backward(go_back, grads)
        wrote = before_call.changed() | before_backward.changed()
        return KernelOutcome(numbers, wrote, printed, second_backward)

    def _inputs(
        self, problem: Problem, leaves: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the tensors of one call by role: copies of the leaves, but the leaf of
        the weight itself, and the tokens.
        """
        shape = problem.tokens.shape
        inputs = {}
        for name, leaf in leaves.items():
            if name == "weight":
                inputs[name] = leaf
            else:
                inputs[name] = self._flattened(leaf.clone(), shape)
        inputs["tokens"] = self._flattened(problem.tokens, shape)
        return inputs

    def _flattened(self, tensor: Tensor, shape: torch.Size) -> Tensor:
        """Return [N, ...] for [B, T, ...] where the function takes flat tokens; else the
        tensor as it is.

        Args:
            tensor: of one entry for each token, or more.
            shape: of the tokens.
        """
        return tensor.flatten(0, len(shape) - 1) if self.flat else tensor

    def _call_with_weight(
        self, inputs: dict[str, Tensor], settings: dict[str, Any], numbers: Tensor
    ) -> None:
        """Call the function while its weight holds other numbers; the weight is the same
        tensor, and has its own numbers again afterwards.
        """
        weight = inputs["weight"]
        own = weight.detach().clone()
        with torch.no_grad():
            weight.copy_(numbers)
        try:
            call_guarded(
                self.name, lambda: self.reading.call(self.fn, inputs, settings)
            )
        finally:
            with torch.no_grad():
                weight.copy_(own)

    def _compare_second_backward(
        self, go_back: Callable[[], dict[str, Tensor]], grads: dict[str, Tensor]
    ) -> str:
        """Run the backward pass again, and return what differs: "" where it gives the
        same gradients, "different numbers", or what it raises.
        """
        try:
            second, _ = call_guarded(f"the second backward of {self.name}", go_back)
        except InputError as e:
            return str(e)
        is_same = all(torch.equal(second[name], first) for name, first in grads.items())
        return "" if is_same else "different numbers"

    def _outputs(self, answer: Any, shape: torch.Size) -> dict[str, Tensor]:
        """Return the tensors of an answer by name: "log-prob", and "entropy" if there is one.

        Raises:
            InputError: one of them is no tensor of real numbers in this shape.
        """
        if isinstance(answer, Mapping):
            answer = (_entry(answer, "logp", "log_p"), _entry(answer, "entrop"))
        values = list(answer) if isinstance(answer, tuple | list) else [answer]
        outputs = dict(
            zip(("log-prob", "entropy"), values[: 1 + self.has_entropy], strict=False)
        )
        if outputs.get("entropy", 0) is None:
            del outputs["entropy"]
        for name, output in outputs.items():
            if (
                not isinstance(output, Tensor)
                or output.shape != shape
                or not output.is_floating_point()
                or output.is_meta
            ):
                if isinstance(output, Tensor) and output.shape != shape:
                    got = str(list(output.shape))
                else:
                    got = type(output).__name__
                words = (
                    f"{self.name} returns {got} for the {name} of tokens {list(shape)}: "
                    "return one each."
                )
                if got == str([*shape[:-1], shape[-1] - 1]):
                    words += self._unshifted()
                raise InputError(words)
        return outputs

    def _unshifted(self) -> str:
        """Say how a function that shifts the labels itself is checked: a wrapper puts
        one slot more in front of the tokens and behind the logits, which it drops.
        """
        inner = self.name.rpartition(":")[2].rpartition(".")[2]
        arguments = [*self.reading.roles, *self.settings.values()]
        values = {p: p for p in arguments}
        for argument, role in self.reading.roles.items():
            if role == "tokens":
                values[argument] = f"torch.cat([{argument}[:, :1], {argument}], 1)"
            elif role in ("hidden", "logits"):
                values[argument] = f"torch.cat([{argument}, {argument}[:, :1]], 1)"
        given = ", ".join(f"{p}={value}" for p, value in values.items())
        return (
            " If it shifts the labels itself, check a wrapper: "
            f"`def unshifted({', '.join(arguments)}): return {inner}({given})`."
        )


def _entry(answer: Mapping[Any, Any], *parts: str) -> Any:
    """Return the value whose key has one of these parts, the first part first; or None."""
    for part in parts:
        for key, value in answer.items():
            if part in str(key).lower():
                return value
    return None


def _backward(
    values: list[Tensor],
    upstream: list[Tensor],
    leaves: dict[str, Tensor],
    keep_graph: bool,
) -> dict[str, Tensor]:
    """Return gradients by leaf. Upstream gradients are handed over as they are, so that
    their layout reaches the function.
    """
    attached = [
        (value, g)
        for value, g in zip(values, upstream, strict=True)
        if value.requires_grad
    ]
    if not attached:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    values, upstream = map(list, zip(*attached, strict=True))
    grads = torch.autograd.grad(
        values,
        list(leaves.values()),
        upstream,
        retain_graph=keep_graph,
        allow_unused=True,
    )
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), grads, strict=True)
    }


# ---- reading -------------------------------------------------------------------------
def read(fn: Any, softcap: float | None = None, logit_scale: float = 1.0) -> Kernel:
    """Make a Kernel from a callable or its name, in the dtype and shape in which it
    runs.

    Args:
        fn: a function of logits, or of hidden states and a weight; or its name.
        softcap: of the logits, where it has one.
        logit_scale: what it multiplies logits by.

    Raises:
        InputError: its arguments cannot be read, or it runs in no dtype and shape.
    """
    name, fn = load_function(fn, "a log-probability function")
    all_parameters = [
        p for p in parameters(fn) if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if not all_parameters:
        raise InputError(
            f"{name} names no arguments: check `def f(hidden, weight, tokens, temperature): ...`."
        )
    settings = _settings_by_name(all_parameters)
    roles = _roles_by_name(all_parameters)
    free = [
        p.name
        for p in all_parameters
        if p.default is p.empty and p.name not in (*roles, *settings.values())
    ]
    kind = _kind_of_inputs(all_parameters, set(roles.values()))
    missing = [role for role in MAIN[kind] if role not in roles.values()]
    if "temperature" not in settings:
        missing.append("temperature")
    # as many arguments are left as inputs: they are in this order
    if len(free) == len(missing):
        for argument, meant in zip(free, missing, strict=True):
            if meant == "temperature":
                settings["temperature"] = argument
            else:
                roles[argument] = meant
    if kind == "logits" and "tokens" not in roles.values() and not free:
        raise InputError(
            f"{name} takes no tokens: an entropy is checked beside the log-probabilities. Check "
            f"`def f(logits, tokens): return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0], {name}(logits)`."
        )
    reading = read_signature(fn, name, lambda n: roles.get(n, ""), MAIN[kind])
    refuse_needed(name, (p for p in reading.needed if p not in settings.values()))
    return _find_dtype_and_shape(
        Kernel(
            name, fn, reading, kind, settings, softcap=softcap, logit_scale=logit_scale
        )
    )


def _settings_by_name(all_parameters: list[inspect.Parameter]) -> dict[str, str]:
    """Return the arguments whose names tell a setting or a cut of the sampler, by
    setting.
    """
    settings = {}
    for parameter in all_parameters:
        setting = _entry_named(parameter.name, SETTINGS)
        if setting:
            settings[setting] = parameter.name
    for parameter in all_parameters:
        cut = CUTS.get(parameter.name.lower(), "")
        if cut:
            settings[cut] = parameter.name
    return settings


def _roles_by_name(all_parameters: list[inspect.Parameter]) -> dict[str, str]:
    """Return the roles of the arguments whose names tell one, by argument. What is no
    tensor by its default has none.
    """
    roles = {}
    for parameter in all_parameters:
        role = _role(parameter.name)
        if role and _may_be_tensor(parameter):
            roles[parameter.name] = role
    return roles


def _kind_of_inputs(
    all_parameters: list[inspect.Parameter], roles_told: set[str]
) -> str:
    """Return which inputs a function takes, `logits` or `hidden`: the ones that its
    arguments name, else by their number.
    """
    if "logits" in roles_told:
        return "logits"
    if {"hidden", "weight"} & roles_told:
        return "hidden"
    required = [
        p
        for p in all_parameters
        if p.default is p.empty or _entry_named(p.name, SETTINGS) == "temperature"
    ]
    tensors = [
        p for p in required if _entry_named(p.name, SETTINGS) in ("", "temperature")
    ]
    takes_three = len(tensors) < 4  # (logits, tokens, temperature)
    return "logits" if takes_three else "hidden"


def _entry_named(name: str, table: Mapping[str, set[str]]) -> str:
    """Return the key of the first entry that shares a word with the name, or ""."""
    words_of_name = set(names.words(name))
    return next((key for key, told in table.items() if told & words_of_name), "")


def _may_be_tensor(parameter: inspect.Parameter) -> bool:
    """Return whether an argument may be a tensor by its default: `keep_logits=False`
    and `num_tokens=0` are none.
    """
    return parameter.default is parameter.empty or parameter.default is None


def _role(name: str) -> str:
    """Return the role of an argument with this name, or ""; "" too for a setting, a mask,
    a size of chunks, or an id that is ignored.
    """
    odd = _entry_named(name, SETTINGS) or any(
        w.startswith(("mask", "chunk", "ignore")) for w in names.words(name)
    )
    return "" if odd else _entry_named(name, ROLES)


def probe(kernel: Kernel) -> Problem:
    """Make the problem on which the dtype and the shape of tokens are tried: six tokens of
    seven ids, with numbers that float32 does not hold exactly.

    Args:
        kernel: whose kind of inputs is made.
    """
    numbers = torch.arange(48, dtype=torch.float64)
    x = (1.7 * numbers[:24]).sin().reshape(2, 3, 4)
    weight = (2.3 * numbers[:28]).cos().reshape(7, 4)
    tokens = torch.tensor([[0, 6, 2], [3, 3, 5]])
    gradient = (numbers[:6] - 2.5).reshape(2, 3)
    bias = numbers[:7].sin() if "bias" in kernel.settings else None
    problem = Problem(
        x,
        weight,
        tokens,
        gradient,
        bias=bias,
        softcap=kernel.softcap,
        logit_scale=kernel.logit_scale,
        top_k=len(weight) if kernel.needs("top_k") else None,
        top_p=1.0 if kernel.needs("top_p") else None,
    )
    return (
        problem
        if kernel.kind == "hidden"
        else replace(problem, x=x @ weight.T, weight=None)
    )


def _find_dtype_and_shape(kernel: Kernel) -> Kernel:
    """Return the kernel in the first dtype and shape of tokens in which it runs: float64
    before float32, [B, T] before [N].
    """
    kinds = itertools.product((torch.float64, torch.float32), (False, True))
    ways = (replace(kernel, dtype=dtype, flat=flat) for dtype, flat in kinds)

    def run(way: Kernel) -> tuple[KernelOutcome, bool]:
        """Return what a call did, and whether it asked for memory of a GPU."""
        before = gpu_allocations()
        return way(probe(kernel)), gpu_allocations() > before

    kernel, (outcome, on_gpu) = first_that_runs(ways, run)
    has_entropy = "entropy" in outcome.numbers
    return replace(kernel, has_entropy=has_entropy, on_gpu=on_gpu)


def gpu_allocations() -> int:
    """Return how often this process has asked for memory of a GPU; 0 before it uses one."""
    if not torch.cuda.is_initialized():
        return 0
    devices = range(torch.cuda.device_count())
    name = "allocation.all.allocated"
    return sum(torch.cuda.memory_stats(d).get(name, 0) for d in devices)
