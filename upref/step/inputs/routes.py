# SPDX-License-Identifier: Apache-2.0
"""Routes of experts: which experts each token of a row takes in each layer, as a
sampler recorded them, and a model that takes them again.

A router is a call of `topk` in the forward pass, one for each layer of experts. Where
routes are replayed, it gets its scores at the recorded experts, whatever the largest are.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from upref.errors import InputError

CHOICES = (torch.topk, torch.Tensor.topk)
NO_GROUPS = (
    "upref replays no router that chooses groups of experts first, as DeepSeek-V3 does."
)
# of the tokens in a layer, the part whose experts are not those of the model
OTHER_EXPERTS = 1 / 3
INTEGERS = (
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)


@dataclass(frozen=True)
class Routes:
    """The experts of the tokens of one row.

    Attributes:
        experts: their numbers, [S, L, K]: of each token of prompt and response, in each
            layer.
        has_gradient: whether the scores of the experts have a gradient.
    """

    experts: Tensor
    has_gradient: bool = True

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Let each router take these experts.

        Raises:
            InputError: the forward pass has another number of routers, tokens or
                experts for a token.
        """
        layers = _Replayed(self)
        with layers:
            yield
        if layers.done != self.experts.shape[1]:
            raise InputError(
                f"the routes have {self.experts.shape[1]} layers, and the model calls topk "
                f"{layers.done} times: one call is one router."
            )


class _Choices(TorchFunctionMode, ABC):
    """Hands each call of `topk`, which is a router, to `choose`."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call `func`; hand a call of `topk` to `choose` in its place."""
        call = partial(func, *args, **(kwargs or {}))
        if func not in CHOICES:
            return call()
        scores, k = _scores_and_count(args, kwargs or {})
        return self.choose(scores, k, call)

    @abstractmethod
    def choose(self, scores: Tensor, k: int, call: Callable[[], Any]) -> Any:
        """Return what the router gets.

        Args:
            scores: of the experts, [..., E].
            k: how many experts a token takes.
            call: the call of `topk` itself.
        """


class _Replayed(_Choices):
    """Replaces each call of `topk` by the next layer of the routes."""

    def __init__(self, routes: Routes):
        """Begin at the first layer of the routes."""
        super().__init__()
        self.routes = routes
        self.done = 0  # layers

    def choose(self, scores: Tensor, k: int, call: Callable[[], Any]) -> Any:
        """Return the scores at the recorded experts, and these experts. A call beyond
        the last layer gets the last layer; `Routes.replayed` counts the calls.

        Raises:
            InputError: the routes have another number of tokens or experts, or an expert
                that the router does not have.
        """
        layer = min(self.done, self.routes.experts.shape[1] - 1)
        experts = self.routes.experts[:, layer]
        self.done += 1
        tokens = scores[..., 0].numel()
        if experts.shape != (tokens, k):
            other = tokens > len(experts) and tokens % len(experts) == 0
            raise InputError(
                f"the routes have {experts.shape[1]} experts for each of {experts.shape[0]} tokens, "
                f"and {'a call of topk in' if other else 'a router of'} the model chooses {k} for each of "
                f"{tokens}{f': {NO_GROUPS}' if other else '.'}"
            )
        largest, count = int(experts.max()), scores.shape[-1]
        if largest >= count:
            raise InputError(
                f"the routes name expert {largest}, and a router of the model chooses among {count}: "
                "experts count from 0."
            )
        experts = experts.reshape(*scores.shape[:-1], k).to(scores.device)
        chosen = scores.gather(-1, experts)
        if not self.routes.has_gradient:
            chosen = chosen.detach()
        return torch.return_types.topk((chosen, experts))


class _Recorded(_Choices):
    """Keeps what each call of `topk` chooses, and of how many."""

    def __init__(self) -> None:
        """Begin with no layer."""
        super().__init__()
        self.layers: list[Tensor] = []  # [S, K] each
        self.counts: list[int] = []  # of experts

    def choose(self, scores: Tensor, k: int, call: Callable[[], Any]) -> Any:
        """Return what the router chooses itself.

        Raises:
            InputError: the call before it chose groups of the experts.
        """
        count = scores.shape[-1]
        flat = scores.detach().reshape(-1, count).cpu()
        if self.layers and _are_groups(self.layers[-1], self.counts[-1], flat):
            raise InputError(
                f"the model chooses {self.layers[-1].shape[1]} of {self.counts[-1]} groups of experts for a "
                f"token, and then {k} of their experts: {NO_GROUPS}"
            )
        out = call()
        self.layers.append(out[1].detach().reshape(-1, k).cpu())
        self.counts.append(count)
        return out


def _are_groups(chosen: Tensor, count: int, scores: Tensor) -> bool:
    """Tell whether choices are groups of the experts that the next call chooses among:
    then the experts of all other groups have one score, which stands for a mask.

    Args:
        chosen: the choices [S, K].
        count: of what they were chosen among.
        scores: of the experts, [S, E].
    """
    tokens, experts = scores.shape
    if len(chosen) != tokens or chosen.shape[1] >= count:
        return False
    if experts <= count or experts % count:
        return False
    is_other = torch.ones(tokens, count, dtype=torch.bool).scatter(1, chosen, False)
    others = scores.reshape(tokens, count, -1)[is_other]
    return bool((others == others[0, 0]).all())


class RefusedChoices(TorchDispatchMode):
    """Refuses `topk` in a backward pass: a model that recomputes its layers there would
    choose other experts than the recorded ones.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call `func`; raise InputError where it is `topk`."""
        if func.overloadpacket is torch.ops.aten.topk:
            raise InputError(
                "the model calls topk in the backward pass, as a checkpoint of its own does: "
                "turn its checkpoints off for a check with routes."
            )
        return func(*args, **(kwargs or {}))


def _scores_and_count(args: Any, kwargs: dict[str, Any]) -> tuple[Tensor, int]:
    """Return the scores and the k of a call of `topk`.

    Raises:
        InputError: it does not choose in the last dimension.
    """
    scores = args[0] if args else kwargs["input"]
    k = args[1] if len(args) > 1 else kwargs["k"]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    if dim % scores.ndim != scores.ndim - 1:
        raise InputError(
            f"the model calls topk with dim={dim} on scores of {scores.ndim} dimensions: "
            "routes need routers that choose in the last one."
        )
    return scores, k


def own_experts(forward: Any, ids: Sequence[int]) -> tuple[list[Tensor], list[int]]:
    """Return the experts that a model chooses itself, and of how many.

    Args:
        forward: runs the model on token ids.
        ids: of a row.

    Returns:
        Of each layer [S, K], and the number of experts.

    Raises:
        InputError: a router does not choose in the last dimension.
    """
    with _Recorded() as mode, torch.no_grad():
        forward(ids)
    return mode.layers, mode.counts


def draw_routes(
    forward: Any, tokens: Sequence[Sequence[int]], seed: int
) -> list[list[list[list[int]]]]:
    """Return routes as a sampler could have recorded them: mostly the experts that the
    model takes. In each layer a third of the tokens, drawn anew, has the next experts by
    number in their place.

    Args:
        forward: runs the model on token ids.
        tokens: of each row.
        seed: of the tokens with other experts.

    Returns:
        The routes of each row: lists [S][L][K].

    Raises:
        InputError: the model has no router, one that takes all experts, or layers that
            take different numbers of experts.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for ids in tokens:
        own_layers, counts = own_experts(forward, ids)
        shapes = {layer.shape for layer in own_layers}
        if len(shapes) != 1 or len(own_layers[0]) != len(ids):
            raise InputError(
                "routes=True needs a model whose routers choose equally many experts for each token by topk: "
                f"of {len(ids)} tokens its calls of topk choose {sorted(map(tuple, shapes)) or 'nothing'}."
            )
        layers_and_counts = [*zip(own_layers, counts, strict=True)]
        if any(count <= layer.shape[1] for layer, count in layers_and_counts):
            raise InputError("routes=True needs more experts than a token takes.")
        layers = []
        for layer, count in layers_and_counts:
            others = torch.rand(len(layer), generator=generator) < OTHER_EXPERTS
            layers.append(torch.where(others[:, None], (layer + 1) % count, layer))
        drawn.append(torch.stack(layers, 1).tolist())
    return drawn


def _has_bool(table: Any) -> bool:
    """Tell whether lists in lists hold a bool, which torch takes for 0 or 1 among whole
    numbers.
    """
    if isinstance(table, list | tuple):
        return any(_has_bool(entry) for entry in table)
    return isinstance(table, bool | np.bool_)


def routes_of(rows: Sequence[Any]) -> dict[tuple[int, ...], Routes]:
    """Return the routes of rows by their tokens; {} where they have none.

    Args:
        rows: all with routes, or none.

    Raises:
        InputError: some rows have none, routes are not [S][L][K], an expert is negative or
            twice in a list, or two rows with the same tokens have different ones.
    """
    given = [row for row in rows if row.routes is not None]
    if len(given) not in (0, len(rows)):
        raise InputError(
            "some rows have routes and some have none: give them all, or none."
        )
    routes: dict[tuple[int, ...], Routes] = {}
    for i, row in enumerate(given):
        experts = _experts_of(i, row)
        known = routes.setdefault(tuple(row.ids), Routes(experts))
        if not torch.equal(known.experts, experts):
            raise InputError(
                f"row {i} has the tokens of another row, and other routes: the check needs distinct rows."
            )
    return routes


def _experts_of(i: int, row: Any) -> Tensor:
    """Return the routes of a row as a tensor, [S, L, K].

    Args:
        i: the number of the row, for messages.
        row: with routes.

    Raises:
        InputError: they are not [S][L][K], or an expert is negative or twice in a list.
    """
    if _has_bool(row.routes):
        raise InputError(
            f"row {i}: routes are whole numbers, those of experts, got a bool among them."
        )
    try:
        experts = torch.tensor(row.routes)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"row {i}: routes are no table of numbers: {error}") from error
    if experts.ndim != 3 or len(experts) != len(row.ids) or not experts.numel():
        raise InputError(
            f"row {i}: routes are lists [token][layer][expert], for the {len(row.ids)} tokens of prompt "
            f"and response, got {list(experts.shape)}."
        )
    if experts.dtype not in INTEGERS:
        raise InputError(
            f"row {i}: routes are whole numbers, those of experts, got {experts.dtype}."
        )
    experts = experts.long()
    if (experts < 0).any():
        raise InputError(
            f"row {i}: routes name expert {int(experts.min())}, and experts count from 0."
        )
    ordered = experts.sort(-1).values
    is_repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    repeated = is_repeated.nonzero().tolist()
    if repeated:
        token, layer = repeated[0]
        raise InputError(
            f"row {i}: token {token} takes an expert twice in layer {layer}: "
            f"{experts[token, layer].tolist()}."
        )
    return experts


def routes_in(
    routes: dict[tuple[int, ...], Routes], ids: Sequence[int]
) -> Routes | None:
    """Return the routes of tokens that are fed to the model: a row, rows among other
    tokens, or the end of a row.

    Args:
        routes: of the rows.
        ids: what is fed.

    Returns:
        Tokens of no row, such as padding, have 0 in place of each expert, as in the routes
        that verl pads. None: no row is fed.
    """
    fed = tuple(ids)
    if fed in routes:
        return routes[fed]
    for row, known in routes.items():
        if row[-len(fed) :] == fed:
            return replace(known, experts=known.experts[-len(fed) :])
    found = None
    for row, known in routes.items():
        for start in range(len(fed) - len(row) + 1):
            if fed[start : start + len(row)] == row:
                if found is None:
                    shape = (len(fed), *known.experts.shape[1:])
                    found = replace(known, experts=known.experts.new_zeros(shape))
                found.experts[start : start + len(row)] = known.experts
    return found


def shifted(routes: Routes, *, layers: int = 0, tokens: int = 0) -> Routes:
    """Return routes that stand elsewhere; what leaves one end comes in at the other.

    Args:
        routes: of a row.
        layers: by how many layers they stand too late.
        tokens: by how many tokens.
    """
    return replace(routes, experts=routes.experts.roll((tokens, layers), (0, 1)))
