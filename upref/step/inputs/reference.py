# SPDX-License-Identifier: Apache-2.0
"""A model as the reference computes it: one row at a time, float64, eager attention, no
padding, dropout or cache.
"""

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from upref.errors import InputError
from upref.step.inputs.model_errors import as_input_error
from upref.step.inputs.routes import RefusedChoices, Routes, routes_in

# operations whose factors, weights among them, are rounded too
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
NARROW_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FLOAT32_UNIT = 2.0**-24  # the relative error of a number that is rounded to float32
NARROWING_METHODS = frozenset(
    (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)
)
NARROW_TENSOR_TYPES = ("FloatTensor", "HalfTensor", "BFloat16Tensor")
NUMBERS_AT_ONCE = 2_000_000  # numbers of a batch of gradients
CPU = torch.device("cpu")
WITHOUT_FLOAT64 = ("mps",)  # kinds of devices; the reference computes on the CPU there
# name of a parameter -> float64; elsewhere one vector [P], in the order of `shapes`
Gradient = dict[str, Tensor]


def _widen_dtype(argument: Any) -> Any:
    """Return float64 for a narrower dtype; every other argument as it is."""
    is_narrow = isinstance(argument, torch.dtype) and argument in NARROW_DTYPES
    return torch.float64 if is_narrow else argument


def _widen_tensor(argument: Any) -> Any:
    """Return an empty tensor of float64 in place of a narrower tensor, on its device; every
    other argument as it is. `to` and `type_as` take a dtype and a device from it alone.
    """
    if not isinstance(argument, Tensor) or argument.dtype not in NARROW_DTYPES:
        return argument
    return torch.empty(0, dtype=torch.float64, device=argument.device)


def _widen_tensor_type(argument: Any) -> Any:
    """Return `torch.DoubleTensor`, as a name, for `torch.FloatTensor` or its name, and
    for other narrow types of tensors; every other argument as it is.
    """
    name = argument if isinstance(argument, str) else torch.typename(argument)
    module, _, kind = name.rpartition(".")
    return f"{module}.DoubleTensor" if kind in NARROW_TENSOR_TYPES else argument


# method that converts a tensor -> what widens its arguments, beside a dtype
WIDENED_ARGUMENTS = {
    torch.Tensor.to: _widen_tensor,
    torch.Tensor.type_as: _widen_tensor,
    torch.Tensor.type: _widen_tensor_type,
}


class WideOperations(TorchFunctionMode):
    """Computes in float64 where a model converts tensors to a narrower dtype, as in
    RMSNorm, softmax and rotary embeddings.

    It widens `.float()`, `.half()` and `.bfloat16()`, each dtype that is an argument of
    a function of torch, the tensor whose dtype `.to()` or `.type_as()` takes, and the
    tensor type of `.type()`. It leaves out dtypes inside of lists, which no function of
    torch takes, the constructor `torch.FloatTensor()`, and numpy.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call `func` with float64 for each narrower dtype that it is given."""
        args = [_widen_dtype(argument) for argument in args]
        kwargs = {k: _widen_dtype(argument) for k, argument in (kwargs or {}).items()}
        if func in NARROWING_METHODS:
            func = torch.Tensor.double
        elif widen := WIDENED_ARGUMENTS.get(func):
            converted, *others = args
            args = [converted, *map(widen, others)]
            kwargs = {k: widen(argument) for k, argument in kwargs.items()}
        return func(*args, **kwargs)


def _returns_an_input(func: Any) -> bool:
    """Tell whether an operation works in place, or returns a view. Its result is memory
    of an input, which cannot be replaced by another tensor.
    """
    return any(result.alias_info for result in func._schema.returns)  # noqa: SLF001


class RoundedOperations(TorchDispatchMode):
    """The result of every operation, forward and backward, rounded to a half precision."""

    def __init__(self, dtype: torch.dtype):
        """Round to this dtype."""
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, and round its result, unless that is memory of an input. Products
        get rounded arguments too.
        """

        def rounded(x: Any) -> Any:
            """Return a real tensor rounded to the half precision, in its own dtype;
            everything else as it is.
            """
            real = isinstance(x, Tensor) and x.is_floating_point()
            return x.to(self.dtype).to(x.dtype) if real else x

        if func.overloadpacket.__name__ in PRODUCTS:
            args = tree_map(rounded, args)
        out = func(*args, **(kwargs or {}))
        return out if _returns_an_input(func) else tree_map(rounded, out)


class PerturbedOperations(TorchDispatchMode):
    """The result of every operation, forward and backward, moved at random by as much
    as rounding to float32 may move it.
    """

    def __init__(self, seed: int):
        """Draw the errors with this seed."""
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, and move its result, unless that is memory of an input."""

        def perturbed(x: Any) -> Any:
            """Return a tensor of float64 moved by up to half a unit in float32's last
            place; everything else as it is.
            """
            if not isinstance(x, Tensor) or x.dtype != torch.float64:
                return x
            noise = torch.rand(x.shape, generator=self.generator, dtype=x.dtype)
            return x * (1 + FLOAT32_UNIT * (2 * noise.to(x.device) - 1))

        out = func(*args, **(kwargs or {}))
        return out if _returns_an_input(func) else tree_map(perturbed, out)


class _NotCheckpointed:
    """Replaces torch.utils.checkpoint.CheckpointFunction: it calls the function, and
    keeps its activations.
    """

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Call the function on its arguments."""
        return function(*args)


def _keep_activations(*_: Any, **__: Any) -> Iterator[None]:
    """Replace what torch.utils.checkpoint does around a function by nothing."""
    yield


@contextmanager
def in_float64(device: torch.device = CPU) -> Iterator[None]:
    """Compute in float64, without checkpoints, autocast and cuDNN.

    The mode is off while a checkpoint recomputes, and cuDNN has no backward pass for a
    recurrent layer in evaluation mode.

    Args:
        device: where the model is.
    """
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    module: Any = torch.utils.checkpoint
    replacements = {
        "CheckpointFunction": _NotCheckpointed,
        "_checkpoint_without_reentrant_generator": _keep_activations,
        # its name in newer versions, such as torch 2.15
        "_checkpoint_without_reentrant_generator_impl": _keep_activations,
    }
    originals = {
        name: getattr(module, name) for name in replacements if hasattr(module, name)
    }
    try:
        for name in originals:
            setattr(module, name, replacements[name])
        with ExitStack() as stack:
            stack.enter_context(WideOperations())
            for kind in {"cpu", device.type}:
                if torch.amp.is_autocast_available(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            if device.type == "cuda":
                stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)
        torch.set_default_dtype(default_dtype)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module itself, without the wrappers of torch.compile and
    DistributedDataParallel.

    Args:
        model: as the step trains it.
    """
    while True:
        inner = getattr(model, "_orig_mod", None) or (
            model.module
            if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel)
            else None
        )
        if inner is None:
            return model
        model = inner


class Model(ABC):
    """What the reference needs of a model: `logits(ids)`, and `pull`, the gradient of Σ
    logits · dz.
    """

    vocabulary: int
    end: int | None = None
    shapes: dict[str, torch.Size]
    takes_mask = False  # whether its forward takes an attention mask
    # whether `logits` returns the critic's value of each place behind its logits: [S, V + 1]
    reads_values = False

    @abstractmethod
    def logits(self, ids: Sequence[int], **how: Any) -> Tensor:
        """Return the logits of one unpadded sequence, in float64 and with a graph.

        Args:
            ids: the tokens.
            how: attention_mask, position_ids and the like, which a forward pass with a
                fault passes.

        Returns:
            [S, V].

        Raises:
            TypeError: the model takes no such argument.
        """

    @abstractmethod
    def pull(self, z: Tensor, dz: Tensor, ids: Sequence[int]) -> Tensor:
        """Return the gradient of Σ z · dz by the parameters.

        Args:
            z: logits of these ids, [S, V].
            dz: of the same shape.
            ids: token ids, [S].

        Returns:
            [P].
        """

    def pull_each(self, z: Tensor, dz: Tensor, ids: Sequence[int]) -> Iterator[Tensor]:
        """Yield the gradients of n sums Σ z · dz by the parameters.

        Args:
            z: logits, [S, V].
            dz: [n, S, V].
            ids: token ids, [S].

        Yields:
            [m, P], n rows in all.
        """
        for dz_row in dz:
            yield self.pull(z, dz_row, ids)[None]

    def without_values(self, z: Tensor) -> Tensor:
        """Return the logits in what `logits` returned.

        Args:
            z: [S, V], or [S, V + 1] if the model reads values.
        """
        return z[:, :-1] if self.reads_values else z

    def of_row(self, i: int) -> "Model":
        """Return the model of which the gradient of this row is a part: itself, but in
        a subclass that keeps rows apart.

        Args:
            i: the number of the row.
        """
        return self

    def split(self, g: Tensor) -> Gradient:
        """Split a gradient into those of the parameters, each of them flat.

        Args:
            g: a gradient, [P].

        Returns:
            Parameter -> its part.
        """
        return dict(
            zip(
                self.shapes,
                g.split([s.numel() for s in self.shapes.values()]),
                strict=True,
            )
        )

    def flat(self, g: Gradient) -> Tensor:
        """Join gradients to one vector on the CPU; 0 where a parameter has none.

        Args:
            g: parameter -> gradient.

        Returns:
            [P].

        Raises:
            InputError: a gradient has another number of entries than its parameter.
        """
        for n, shape in self.shapes.items():
            if n in g and g[n].numel() != shape.numel():
                raise InputError(
                    f"the gradient of {n} has {g[n].numel()} entries, and the parameter "
                    f"{shape.numel()}. FSDP1 hands out a shard, which is not gathered: "
                    "use FSDP2 or DDP for the check."
                )
        return torch.cat(
            [
                to_dense(g.get(n, _zeros(shape))).reshape(-1).cpu()
                for n, shape in self.shapes.items()
            ]
        )


def _zeros(shape: torch.Size) -> Tensor:
    """Return the gradient of a parameter that has none."""
    return torch.zeros(shape, dtype=torch.float64)


class TorchModel(Model):
    """A float64 copy of an nn.Module, in evaluation mode. Any forward that takes ids
    [1, S] and answers [1, S, V].

    The copy stays on the model's device. Token ids go there, one row at a time, and
    logits and gradients come back: all that is compared is on the CPU.
    """

    def __init__(self, model: nn.Module):
        """Copy the model in float64, and read what the check needs of it: its trained
        parameters, vocabulary, output layer, end token and arguments.

        Attention and experts are computed eagerly, and checkpoints are off, where the
        model has switches for that.

        Raises:
            InputError: it is no module, cannot be copied, trains no parameter, or does
                not tell the size of its vocabulary.
        """
        if not isinstance(model, nn.Module):
            raise InputError(
                f"model must be an nn.Module, or upref.step.Functions, got {type(model).__name__}."
            )
        model = unwrapped(model)
        try:
            copied: Any = copy.deepcopy(model)
            if _device(copied).type in WITHOUT_FLOAT64:
                copied = copied.cpu()
            self.net = copied.double().eval()
        except (RuntimeError, TypeError) as e:
            raise InputError(
                f"the model cannot be copied ({type(e).__name__}: {str(e)[:120]}): "
                "pass the plain module, before FSDP or a trainer wraps it."
            ) from e
        self.device = _device(self.net)
        for p in self.net.parameters():
            p.grad = None
        config = getattr(self.net, "config", None)
        for name in ("set_attn_implementation", "set_experts_implementation"):
            # the model has one implementation only
            with suppress(AttributeError, ValueError, KeyError, ImportError):
                getattr(self.net, name)("eager")
        # its name from transformers 5.24 on, and before
        for name in (
            "activation_checkpointing_disable",
            "gradient_checkpointing_disable",
        ):
            if hasattr(self.net, name):
                getattr(self.net, name)()
                break
        self.params = {n: p for n, p in self.net.named_parameters() if p.requires_grad}
        if not self.params:
            raise InputError(
                "no parameter of the model requires a gradient: unfreeze what the step trains."
            )
        self.shapes = {n: p.shape for n, p in self.params.items()}
        self.vocabulary = _vocabulary(self.net)
        self.head_names = _head_names(self.net, self.vocabulary, self.params)
        self.head = [self.params[n] for n in self.head_names]
        end = getattr(config, "eos_token_id", None)
        end = end[0] if isinstance(end, list) else end
        self.end = end if end is not None and 0 <= end < self.vocabulary else None
        self._takes_cache = config is not None and hasattr(config, "use_cache")
        arguments = inspect.signature(self.net.forward).parameters
        self.takes_mask = "attention_mask" in arguments
        # tokens -> the experts that they take; other tokens take what the model chooses
        self.routes: dict[tuple[int, ...], Routes] = {}
        self._position_argument = next(
            (name for name in arguments if name.startswith("pos")), None
        )

    def run(self, ids: Sequence[int], **how: Any) -> Any:
        """Run the module on token ids [1, S], on its device, in float64.

        Args:
            ids: the tokens.
            how: attention_mask and the like; tensors are moved to the device.

        Returns:
            What the module returns.

        Raises:
            TypeError: the module takes no such argument.
        """
        on_device = {
            k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in how.items()
        }
        routes = routes_in(self.routes, ids)
        with in_float64(self.device), routes.replayed() if routes else nullcontext():
            return self.net(torch.tensor([list(ids)]).to(self.device), **on_device)

    def logits(self, ids: Sequence[int], **how: Any) -> Tensor:
        """Run the model on one row, in float64.

        Args:
            ids: the tokens, S of them.
            **how: arguments of its forward beside the tokens, such as position_ids.

        Returns:
            [S, V], with a graph; [S, V + 1] if the model reads values.

        Raises:
            InputError: the model returns something else.
        """
        how = ({"use_cache": False} if self._takes_cache else {}) | how
        if self._position_argument and "position_ids" in how:
            how[self._position_argument] = how.pop("position_ids")
        with torch.enable_grad():
            out = self.run(ids, **how)
        z = getattr(out, "logits", out)
        z = z[0] if isinstance(z, tuple) else z
        if not isinstance(z, Tensor) or z.ndim != 3 or z.shape[1] != len(ids):
            raise InputError(
                "the model must return logits [1, S, V], or an object with .logits, "
                "for token ids [1, S]."
            )
        if z.shape[2] < self.vocabulary:
            raise InputError(
                f"the model returns {z.shape[2]} numbers for each token, and its "
                f"vocabulary has {self.vocabulary}: it must return logits, "
                "not hidden states."
            )
        if self.reads_values:
            z = torch.cat([z, _values(out, z)[..., None]], -1)
        return z[0].cpu()

    def pull(self, z: Tensor, dz: Tensor, ids: Sequence[int]) -> Tensor:
        """Pull a gradient by the logits back to the parameters.

        Args:
            z: logits that `logits` returned.
            dz: the gradient by them, of the same shape.
            ids: the tokens of the row, for the text of an error.

        Returns:
            [P], in the order of the parameters.
        """
        refusal = RefusedChoices() if self.routes else nullcontext()
        with as_input_error(ids), in_float64(self.device), refusal:
            gradients = torch.autograd.grad(
                z, [*self.params.values()], dz, retain_graph=True, allow_unused=True
            )
        return self.flat(
            {n: x for n, x in zip(self.params, gradients, strict=True) if x is not None}
        )

    def like(self, net: nn.Module) -> "TorchModel":
        """Return the same reference of another module, whose gradients have the same
        form.

        Args:
            net: the module.
        """
        other = type(self)(net)
        other.reads_values = self.reads_values
        other.routes = self.routes
        return other

    def pull_head(self, z: Tensor, dz: Tensor) -> Tensor:
        """Return the part of `pull` that the head alone has, which costs no pass
        through the layers below.

        Args:
            z: logits, [S, V].
            dz: of the same shape.

        Returns:
            [H].
        """
        with in_float64(self.device):
            gradients = torch.autograd.grad(
                z, self.head, dz, retain_graph=True, materialize_grads=True
            )
        return torch.cat([x.flatten().cpu() for x in gradients])

    def pull_head_each(self, z: Tensor, dz: Tensor) -> Tensor:
        """Return the parts of n gradients that the head alone has.

        Args:
            z: logits, [S, V].
            dz: [n, S, V].

        Returns:
            [n, H].
        """
        with in_float64(self.device):
            gradients = torch.autograd.grad(
                z,
                self.head,
                dz,
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=True,
            )
        gradients_of_parameters = [
            dz.new_zeros(len(dz), p.numel()) if x is None else x.flatten(1).cpu()
            for p, x in zip(self.head, gradients, strict=True)
        ]
        return torch.cat(gradients_of_parameters, 1)

    def pull_each(self, z: Tensor, dz: Tensor, ids: Sequence[int]) -> Iterator[Tensor]:
        """Pull several gradients by the logits back, as many at once as memory allows.

        Args:
            z: logits that `logits` returned, [S, V].
            dz: the gradients by them, [n, S, V].
            ids: the tokens of the row.

        Yields:
            [m, P], n rows in all.
        """
        params = [*self.params.values()]
        for chunk in dz.split(
            max(1, NUMBERS_AT_ONCE // sum(p.numel() for p in params))
        ):
            try:
                with in_float64(self.device):
                    gradients = torch.autograd.grad(
                        z,
                        params,
                        chunk,
                        retain_graph=True,
                        allow_unused=True,
                        is_grads_batched=True,
                    )
            except RuntimeError:
                # an operation that cannot be batched
                yield from super().pull_each(z, chunk, ids)
                continue
            gradients_of_parameters = [
                chunk.new_zeros(len(chunk), p.numel())
                if x is None
                else x.flatten(1).cpu()
                for p, x in zip(params, gradients, strict=True)
            ]
            yield torch.cat(gradients_of_parameters, 1)


@dataclass
class Functions(Model):
    """A model that is not torch's, by two functions.

    logits: (params, ids) -> [S, V] for one unpadded sequence; pull: (params, ids, dz)
    -> {name: array}, its vector-Jacobian product. Both in float64 where the framework
    has it.
    """

    forward: Callable[[Any, list[int]], Any]
    vjp: Callable[[Any, list[int], Any], dict[str, Any]]
    params: Any
    vocabulary: int
    end: int | None = None
    # of `pull`'s first answer
    shapes: dict[str, torch.Size] = field(default_factory=dict)

    def logits(self, ids: Sequence[int], **how: Any) -> Tensor:
        """Call the user's forward function on one row.

        Args:
            ids: the tokens, S of them.
            **how: none is possible.

        Returns:
            [S, V], without a graph.

        Raises:
            TypeError: an argument beside the tokens was given.
        """
        import numpy as np

        if how:
            raise TypeError(f"functions of (params, ids) take no {', '.join(how)}")
        return torch.tensor(
            np.asarray(self.forward(self.params, list(ids))), dtype=torch.float64
        )

    def pull(self, z: Tensor, dz: Tensor, ids: Sequence[int]) -> Tensor:
        """Call the user's vjp, which pulls a gradient by the logits back to the
        parameters.

        Args:
            z: not read: the function computes its own logits.
            dz: the gradient by the logits, [S, V].
            ids: the tokens of the row.

        Returns:
            [P], in the order of the parameters.
        """
        gradients = {
            k: as_float64(v)
            for k, v in self.vjp(self.params, list(ids), dz.numpy()).items()
        }
        self.shapes = self.shapes or {k: v.shape for k, v in gradients.items()}
        return self.flat(gradients)


def gather_tensor(x: Tensor) -> Tensor:
    """Return a tensor without its graph, gathered if FSDP2 shards it.

    Args:
        x: a tensor of any kind.
    """
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach()


def to_dense(x: Tensor) -> Tensor:
    """Return a gradient as a table of all its entries: that of an embedding may be
    sparse.

    Args:
        x: a gradient.
    """
    return x.to_dense() if x.is_sparse else x


def as_float64(x: Any) -> Tensor:
    """Return a copy of a gradient, whatever array it is, dense and on the CPU.

    Args:
        x: a tensor or an array.
    """
    import numpy as np

    if isinstance(x, Tensor):
        x = gather_tensor(x)
        return to_dense(x).to("cpu", torch.float64, copy=True)
    return torch.tensor(np.asarray(x), dtype=torch.float64)


def text_config(net: nn.Module) -> Any:
    """Return the configuration of transformers of its language model; None if it has
    none.

    Args:
        net: any module.
    """
    config: Any = getattr(net, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _values(out: Any, z: Tensor) -> Tensor:
    """Return the critic's values, [1, S], in what a model returned beside its logits z.

    Raises:
        InputError: there are none, or several tensors could be the values.
    """
    fields: Any = ()
    if isinstance(out, tuple):
        fields = out
    elif hasattr(out, "logits"):
        fields = vars(out).values()
    found = [
        x.reshape(z.shape[:2])
        for x in fields
        if isinstance(x, Tensor)
        and x.is_floating_point()
        and x is not z
        and x.shape in (z.shape[:2], (*z.shape[:2], 1))
    ]
    if len(found) != 1:
        raise InputError(
            f"value= needs a model that returns logits and values, as (logits, values) with values [1, S]: "
            f"of what it returns, {len(found) or 'no'} tensors have this shape."
        )
    return found[0]


def _device(net: nn.Module) -> torch.device:
    """Return where a module takes token ids: its first embedding's device, or its first
    parameter's, or the CPU.
    """
    tables = [m.weight for m in net.modules() if isinstance(m, nn.Embedding)]
    first = next(iter([*tables, *net.parameters()]), None)
    return CPU if first is None else first.device


def _head_names(net: nn.Module, vocabulary: int, trained: Collection[str]) -> list[str]:
    """Return the names of the parameters of the last linear layer as wide as the
    vocabulary; none where it does not train, or where one of them is an embedding as
    well, on which the layers below depend.
    """
    embeddings = {id(m.weight) for m in net.modules() if isinstance(m, nn.Embedding)}
    prefix = ""
    head = None
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear) and module.out_features == vocabulary:
            prefix = f"{name}." if name else ""  # the whole net has no name
            head = module
    if head is None:
        return []
    parameters = {f"{prefix}{name}": p for name, p in head.named_parameters()}
    trains = set(parameters) <= set(trained)
    is_shared = any(id(p) in embeddings for p in parameters.values())
    return [*parameters] if trains and not is_shared else []


def _vocabulary(net: nn.Module) -> int:
    """Return the size of the vocabulary, from the configuration or from the first
    embedding; raise InputError where neither has it.
    """
    size = getattr(text_config(net), "vocab_size", None)
    if isinstance(size, int):
        return size
    tables = [m.num_embeddings for m in net.modules() if isinstance(m, nn.Embedding)]
    if not tables:
        raise InputError(
            "the size of the vocabulary is unknown: give the model an nn.Embedding "
            "or a config.vocab_size."
        )
    return tables[0]
