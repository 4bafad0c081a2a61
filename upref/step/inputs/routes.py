# SPDX-License-Identifier: Apache-2.0
"""Routes of experts: which experts each token of a row takes in each layer, as a
sampler recorded them, and a model that takes them again.

A router is a call of `topk` in the forward pass, one for each layer of experts. Where
routes are replayed, it gets its scores at the recorded experts, whatever the largest are.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from upref.errors import InputError

CHOICES = (torch.topk, torch.Tensor.topk)
# of the experts of a token in a layer, the part that is not what the model would choose
OTHER_EXPERTS = 1 / 3


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


class _Replayed(TorchFunctionMode):
    """Replaces each call of `topk` by the next layer of the routes."""

    def __init__(self, routes: Routes):
        super().__init__()
        self.routes = routes
        self.done = 0  # layers

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in CHOICES:
            return func(*args, **(kwargs or {}))
        scores, k = _scores_and_count(args, kwargs or {})
        layer = min(self.done, self.routes.experts.shape[1] - 1)
        experts = self.routes.experts[:, layer].to(scores.device)
        self.done += 1
        if experts.shape != (scores[..., 0].numel(), k):
            raise InputError(
                f"the routes have {experts.shape[1]} experts for each of {experts.shape[0]} tokens, and a "
                f"router of the model chooses {k} for each of {scores[..., 0].numel()}."
            )
        experts = experts.reshape(*scores.shape[:-1], k)
        chosen = scores.gather(-1, experts)
        if not self.routes.has_gradient:
            chosen = chosen.detach()
        return torch.return_types.topk((chosen, experts))


class _Recorded(TorchFunctionMode):
    """Keeps what each call of `topk` chooses, and of how many."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[Tensor] = []  # [S, K] each
        self.counts: list[int] = []  # of experts

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in CHOICES:
            scores, k = _scores_and_count(args, kwargs or {})
            self.layers.append(out[1].detach().reshape(-1, k).cpu())
            self.counts.append(scores.shape[-1])
        return out


def _scores_and_count(args: Any, kwargs: dict[str, Any]) -> tuple[Tensor, int]:
    """Return the scores and the k of a call of `topk`."""
    scores = args[0] if args else kwargs["input"]
    k = args[1] if len(args) > 1 else kwargs["k"]
    return scores, k


def draw_routes(
    forward: Any, tokens: Sequence[Sequence[int]], seed: int
) -> list[list[list[list[int]]]]:
    """Return routes as a sampler could have recorded them: mostly the experts that the
    model takes, and others for a third of the tokens.

    Args:
        forward: runs the model on token ids.
        tokens: of each row.
        seed: of the tokens with other experts.

    Returns:
        The routes of each row: lists [S][L][K].

    Raises:
        InputError: the model has no router, or one that takes all experts.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for ids in tokens:
        with _Recorded() as mode, torch.no_grad():
            forward(ids)
        shapes = {layer.shape for layer in mode.layers}
        if len(shapes) != 1 or len(mode.layers[0]) != len(ids):
            raise InputError(
                "routes=True needs a model whose routers choose equally many experts for each token by topk: "
                f"of {len(ids)} tokens its calls of topk choose {sorted(map(tuple, shapes)) or 'nothing'}."
            )
        layers_and_counts = [*zip(mode.layers, mode.counts, strict=True)]
        if any(count <= layer.shape[1] for layer, count in layers_and_counts):
            raise InputError("routes=True needs more experts than a token takes.")
        layers = []
        for layer, count in layers_and_counts:
            others = torch.rand(len(layer), generator=generator) < OTHER_EXPERTS
            layers.append(torch.where(others[:, None], (layer + 1) % count, layer))
        drawn.append(torch.stack(layers, 1).tolist())
    return drawn


def routes_of(rows: Sequence[Any]) -> dict[tuple[int, ...], Routes]:
    """Return the routes of rows by their tokens; {} where they have none.

    Args:
        rows: all with routes, or none.

    Raises:
        InputError: some rows have none, routes are not [S][L][K], or two rows with the same
            tokens have different ones.
    """
    given = [row for row in rows if row.routes is not None]
    if len(given) not in (0, len(rows)):
        raise InputError(
            "some rows have routes and some have none: give them all, or none."
        )
    routes: dict[tuple[int, ...], Routes] = {}
    for i, row in enumerate(given):
        try:
            experts = torch.tensor(row.routes)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"row {i}: routes are no table of numbers: {error}"
            ) from error
        if (
            experts.ndim != 3
            or len(experts) != len(row.ids)
            or experts.is_floating_point()
        ):
            raise InputError(
                f"row {i}: routes are lists [token][layer][expert], for the {len(row.ids)} tokens of prompt "
                f"and response, got {list(experts.shape)}."
            )
        known = routes.setdefault(tuple(row.ids), Routes(experts))
        if not torch.equal(known.experts, experts):
            raise InputError(
                f"row {i} has the tokens of another row, and other routes: the check needs distinct rows."
            )
    return routes


def shifted(routes: Routes, *, layers: int = 0, tokens: int = 0) -> Routes:
    """Return routes that stand elsewhere; what leaves one end comes in at the other.

    Args:
        routes: of a row.
        layers: by how many layers they stand too late.
        tokens: by how many tokens.
    """
    return replace(routes, experts=routes.experts.roll((tokens, layers), (0, 1)))
