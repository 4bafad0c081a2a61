# SPDX-License-Identifier: Apache-2.0
"""From hidden states to log-probabilities and entropy, without the N x V logits.

    y = logit_scale (h W^T + bias),   z = softcap tanh(y / softcap)  or  z = y,   π = softmax(z/τ)

1. Forward. A tile is all N tokens by as many columns of the vocabulary as make `chunk`
   logits. Each tile updates three numbers per token: the largest logit m, s = Σ exp(x -
   m) and t = Σ exp(x - m)(x - m). When a tile raises m, s and t are moved to the new m
   first. Then log π(o) = x_o - m - log s and H = log s - t/s. A float32 product of 896
   terms is off by 4e-6, and so is H beside a peak. The sampled token's logit and the
   largest ones are therefore computed again in float64, and their terms of s and t
   exchanged; the errors of the many small terms cancel.
2. Backward. Each tile is computed again. With p = exp(x - m - log s) and upstream
gradients g (of log π) and g_H (of H)

       dx_v = g (1[v = o] - p_v) - g_H p_v (log p_v + H),

   which the chain rule carries to h, W and bias. A tile holds every token, so its rows
   of dW are one matrix product, rounded to the dtype of W once; tiles of tokens would
   need a second [V, H] to add up.
3. Tokens without upstream gradient are left out of the backward. The result is exact,
and NaN padding never meets dW.

All other products are float32, or float64 where an input is. Memory beyond dh and dW is
O(N H + chunk), and O(N V) with `keep_logits`. Where states and weights are bfloat16 on a GPU, its tensor cores add up
the products, which float32 holds exactly, in float32; dx, which bfloat16 does not hold,
is the sum of two bfloat16 parts there, exact to 2^-17.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch._C import _functorch as functorch

from upref.errors import InputError
from upref.logprobs import check_temperature, check_tokens
from upref.tensors import describe, is_materialized

# torch multiplies no float8 with float32
DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16
# in place of -inf: exp of it is 0 in every dtype, and 0 times it is 0 instead of NaN
LOG_OF_ZERO = -1e4
MOST_EXACT = 8  # of the largest logits of a token: these are computed again in float64
# since torch 2.8, on CUDA alone
HAS_WIDE_PRODUCTS = "out_dtype" in (torch.mm.__doc__ or "")


def _multiplies_bfloat16(hidden: Tensor, weight: Tensor) -> bool:
    """Tell whether a GPU multiplies these as they are, and adds up in float32."""
    dtypes = {hidden.dtype, weight.dtype}
    return HAS_WIDE_PRODUCTS and hidden.is_cuda and dtypes == {torch.bfloat16}


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, in float32 where the factors are bfloat16."""
    if a.dtype != torch.bfloat16:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32)


def _add_product(out: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """Add scale · a @ b to `out`, in place."""
    if a.dtype == out.dtype:
        out.addmm_(a, b, alpha=scale)
    else:
        out.add_(_product(a, b), alpha=scale)


def _parts_for_product(x: Tensor, other: Tensor) -> list[Tensor]:
    """Split x into tensors that can be multiplied by `other`. Their sum is x, to 2^-17
    where they are bfloat16.
    """
    if other.dtype != torch.bfloat16:
        return [x]
    large = x.to(torch.bfloat16)
    return [large, (x - large).to(torch.bfloat16)]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def token_log_probs(
    hidden: Float[Tensor, "*B T H"],
    weight: Float[Tensor, "V H"],
    tokens: Int[Tensor, "*B T"],
    *,
    temperature: float = 1.0,
    bias: Float[Tensor, " V"] | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk: int = 2**23,
    keep_logits: bool = False,
    kernels: str = "torch",
) -> tuple[Float[Tensor, "*B T"], Float[Tensor, "*B T"]]:
    """Compute log π(o_t) and the entropy H_t, in nats, from the inputs of the output
    layer.

    hidden[b, t] is the state that predicted tokens[b, t]; give padding any valid id.
    Both results have first gradients with respect to hidden, weight and bias, and no
    second ones. An entropy that is not used costs nothing in the backward.

    Args:
        hidden: hidden states after the last norm, in a floating-point dtype of 16 bits
            or more.
        weight: the output layer, `lm_head.weight`.
        tokens: the sampled tokens.
        temperature: τ, the sampler's.
        bias: the output layer's bias; -inf forbids a token.
        logit_scale: what the logits are multiplied by before the cap.
        softcap: the cap of `final_logit_softcapping`, or None.
        chunk: logits in memory at once; 2^23 of them take 34 MB a copy in float32, and
            there are three copies.
        keep_logits: whether the backward takes the forward's logits instead of computing
            them again. It saves a product and costs 4 bytes a logit (8 in float64), N · V in
            all. Without a gradient to compute, none are kept.
        kernels: `torch`, or `triton` for one pass over each tile where torch makes many;
            on a GPU, in float32 or less. Of each 1,024 columns it computes the largest
            logit again in float64, and no second one.

    Returns:
        (log π, H), float64 if an input is, else float32. A token whose logits are not
        finite has NaN in its own slot.

    Raises:
        InputError: on shapes, dtypes, devices, ids or settings that do not fit; in the
            backward pass, where a second gradient is asked for (`create_graph=True`, or
            one `torch.func.grad` inside another).

    Works under `torch.func.vmap` over hidden and tokens, without `keep_logits`. `torch.compile` runs it
    eagerly, between two graphs.
    """
    _check_tensors(hidden, weight, tokens, bias)
    check_temperature(temperature)
    _check_positive("logit_scale", logit_scale)
    if softcap is not None:
        _check_positive("softcap", softcap)
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise InputError(
            f"chunk must be a whole number of logits > 0, got {repr(chunk)[:60]}."
        )
    _check_kernels(kernels, hidden, weight)
    keeps = bool(keep_logits) and torch.is_grad_enabled()
    head = _Head(temperature, logit_scale, softcap, chunk, keeps, kernels == "triton")
    return _LogProbs.apply(hidden, weight, bias, tokens, head)[:2]


def _check_tensors(
    hidden: Tensor, weight: Tensor, tokens: Tensor, bias: Tensor | None
) -> None:
    """Raise InputError where the states, the weight or the bias have a wrong dtype or
    shape, or tensors are on several devices.
    """
    if not is_materialized(hidden) or hidden.dtype not in DTYPES or hidden.ndim < 2:
        raise InputError(
            f"hidden must be a floating-point tensor [B, T, H] of 16 bits or more, got {describe(hidden)}."
        )
    for name, tensor, shape in (
        ("weight", weight, (-1, hidden.shape[-1])),
        ("bias", bias, (-1,)),
    ):
        if tensor is None and name == "bias":
            continue
        if (
            not is_materialized(tensor)
            or tensor.dtype not in DTYPES
            or tensor.ndim != len(shape)
            or tensor.shape[1:] != shape[1:]
        ):
            right_shape = f"[V, H] with H = {shape[1]}" if len(shape) == 2 else "[V]"
            raise InputError(
                f"{name} must be a floating-point tensor {right_shape} of 16 bits or more, got {describe(tensor)}."
            )
    if not len(weight) or (bias is not None and len(bias) != len(weight)):
        raise InputError(
            f"weight {describe(weight)} and bias {describe(bias)} must have one row per token, V > 0."
        )
    inputs = (hidden, weight, tokens, bias)
    if len({x.device for x in inputs if isinstance(x, Tensor)}) > 1:
        raise InputError("hidden, weight, tokens and bias must be on one device.")


def _check_positive(name: str, number: float) -> None:
    """Raise InputError where a setting is no finite number above 0."""
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not 0 < number < 1e300:
        raise InputError(
            f"{name} must be a finite number > 0, got {repr(number)[:60]}."
        )


def _check_kernels(kernels: str, hidden: Tensor, weight: Tensor) -> None:
    """Raise InputError where the kernels do not exist, or take no such tensors."""
    if kernels == "torch":
        return
    if kernels != "triton":
        raise InputError(
            f'kernels must be "torch" or "triton", got {repr(kernels)[:60]}.'
        )
    try:
        from upref import hidden_triton
    except ImportError as e:
        raise InputError(f'kernels="triton" needs Triton: {e}.') from e
    if torch.float64 in (hidden.dtype, weight.dtype):
        raise InputError('kernels="triton" has no float64: use "torch".')
    if not (hidden.is_cuda or hidden_triton.INTERPRETED):
        raise InputError(
            f'kernels="triton" needs tensors on a GPU, got {describe(hidden)} on {hidden.device}.'
        )


@dataclass(frozen=True)
class _Head:
    """From states h to x = z/τ: x = h' W^T with h' = inner h, or, with a softcap, x =
    outer tanh(h' W^T).
    """

    temperature: float
    logit_scale: float
    softcap: float | None
    chunk: int
    keeps_logits: bool = False
    in_triton: bool = False

    @property
    def inner(self) -> float:
        """What h is multiplied by: h' = inner h."""
        return self.logit_scale / (self.softcap or self.temperature)

    @property
    def outer(self) -> float:
        """What tanh is multiplied by: c/τ of the softcap c; 0 without one."""
        return (self.softcap or 0.0) / self.temperature

    def states(self, hidden: Tensor, weight: Tensor, wide_dtype: torch.dtype) -> Tensor:
        """Return the states as `tiles` takes them, [N, H]: inner times the states, in
        the wide dtype. States that a GPU multiplies as bfloat16 stay as they are, and
        `tiles` multiplies the products by inner.
        """
        flat = hidden.flatten(0, -2)
        if _multiplies_bfloat16(hidden, weight):
            return flat
        return self.inner * flat.to(wide_dtype)

    def scale_of_kernels(self, h: Tensor) -> float:
        """Return the factor that `tiles` leaves to the kernels, which multiply each
        logit by it; 1 where it leaves none.
        """
        leaves = self.in_triton and h.dtype == torch.bfloat16 and not self.softcap
        return self.inner if leaves else 1.0

    def tiles(
        self,
        h: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kept: Sequence[Tensor] = (),
        rows: Tensor | None = None,
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield the tiles of the vocabulary.

        Args:
            h: what `states` returned.
            weight: of the output layer, [V, H].
            bias: of the output layer, [V].
            kept: the tiles of the forward, [N, columns]; () where they are computed again.
            rows: of the kept tiles, those of h.

        Yields:
            The columns of the tile, their rows of W, and x, [N, columns].
        """
        if kept:
            width = kept[0].shape[1]
        else:
            width = max(1, self.chunk // max(1, len(h)))  # `chunk` logits at most
        for i, start in enumerate(range(0, len(weight), width)):
            columns = slice(start, start + width)
            W = weight[columns].to(h.dtype)
            if not kept:
                yield columns, W, self._logits_of_tile(h, W, bias, columns)
            elif self.in_triton:  # the kernels pick the rows themselves
                yield columns, W, kept[i]
            else:
                yield columns, W, kept[i][rows]

    def _logits_of_tile(
        self, h: Tensor, W: Tensor, bias: Tensor | None, columns: slice
    ) -> Tensor:
        """Compute x of the columns of one tile, [N, columns]; W has their rows."""
        if bias is None:
            x = _product(h, W.T)
        elif h.dtype == torch.bfloat16:
            x = _product(h, W.T).add_(bias[columns])
        else:
            x = torch.addmm(self.inner * bias[columns].to(h.dtype), h, W.T)
        # else `states`, or the kernels, multiply by inner
        if h.dtype == torch.bfloat16 and self.scale_of_kernels(h) == 1:
            x.mul_(self.inner)
        return x.tanh_().mul_(self.outer) if self.softcap else x

    def exact_logits(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor
    ) -> Tensor:
        """Return x of these ids, [N, k], by products in float64; in float32 on a device
        that lacks float64.
        """
        dtype = torch.float32 if hidden.device.type == "mps" else torch.float64
        h = hidden.to(dtype)
        y = torch.stack([(h * weight[column].to(dtype)).sum(1) for column in ids.T], 1)
        x = self.inner * (y if bias is None else y + bias[ids].to(dtype))
        return x.tanh() * self.outer if self.softcap else x


def _in_tile(tokens: Tensor, columns: slice, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return which tokens lie in the tile, [N], and the column of each, [N, 1], clamped to
    the tile.
    """
    column = tokens - columns.start
    is_inside = (column >= 0) & (column < x.shape[1])
    return is_inside, column.clamp(0, x.shape[1] - 1)[:, None]


def _needs_second_gradient(inputs: tuple[Tensor | None, ...]) -> bool:
    """Tell whether the gradient of a backward pass may itself be differentiated. torch.func
    enables gradients in every backward pass: there, two transforms have to track the
    inputs.
    """
    if not torch.is_grad_enabled() or functorch.maybe_current_level() is None:
        return torch.is_grad_enabled()
    levels = set()
    for tensor in inputs:
        while tensor is not None and functorch.is_functorch_wrapped_tensor(tensor):
            if functorch.is_gradtrackingtensor(tensor):
                levels.add(functorch.maybe_get_level(tensor))
            tensor = functorch.get_unwrapped(tensor)
    return len(levels) > 1


class _SumsOfTiles(NamedTuple):
    """What the tiles of the vocabulary add up to, for each of N tokens."""

    m: Tensor  # the largest logit, [N]
    s: Tensor  # the sum of exp(x - m), [N]
    t: Tensor  # the sum of exp(x - m)(x - m), [N]
    largest: Tensor  # the MOST_EXACT largest logits, [N, k]
    largest_ids: Tensor  # their tokens, [N, k]


def _sum_tiles(
    tiles: Iterator[tuple[slice, Tensor, Tensor]],
    least: Tensor,
    scale: float | None = None,
) -> _SumsOfTiles:
    """Return what the tiles of the vocabulary add up to. Without the kernels it writes
    to their logits.

    Args:
        tiles: of `_Head.tiles`.
        least: the least number of the dtype for each token, [N]: where the search for
            the largest logit starts.
        scale: of the kernels; None where torch adds up.
    """
    m = least
    s = torch.zeros_like(m)
    t = torch.zeros_like(m)
    largest = m.new_zeros(len(m), 0)
    largest_ids = m.new_zeros(len(m), 0, dtype=torch.long)
    if scale is not None:
        from upref.hidden_triton import sum_tile

        m = m.clone()  # the kernels write to m, s and t
    for columns, _, x in tiles:
        if scale is None:
            best, best_ids = x.topk(min(MOST_EXACT, x.shape[1]), 1)
        else:
            best, best_ids = sum_tile(x, scale, m, s, t)
        largest = torch.cat([largest, best], 1)
        largest_ids = torch.cat([largest_ids, best_ids + columns.start], 1)
        largest, places = largest.topk(min(MOST_EXACT, largest.shape[1]), 1)
        largest_ids = largest_ids.gather(1, places)
        if scale is not None:
            continue
        new_m = torch.maximum(m, largest[:, 0])
        log_rescale = (m - new_m).clamp(min=LOG_OF_ZERO)  # of earlier terms
        rescale = log_rescale.exp()
        shifted = x.sub_(new_m[:, None]).clamp_(min=LOG_OF_ZERO)
        exp_shifted = shifted.exp()
        t = rescale * (t + s * log_rescale)  # of the s before this tile
        s = rescale * s + exp_shifted.sum(1)
        t = t + shifted.mul_(exp_shifted).sum(1)
        m = new_m
    return _SumsOfTiles(m, s, t, largest, largest_ids)


def _keeping(
    tiles: Iterator[tuple[slice, Tensor, Tensor]], kept: list[Tensor], *, copies: bool
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield the tiles, and append their logits to `kept`: copies where the reader writes
    to them.
    """
    for columns, W, x in tiles:
        kept.append(x.clone() if copies else x)
        yield columns, W, x


class _TokensWithGradient(NamedTuple):
    """The n tokens that have an upstream gradient, and numbers of each, [n, 1]."""

    ids: Tensor  # [n]
    log_z: Tensor
    H: Tensor
    g: Tensor  # upstream gradient of log π
    g_H: Tensor | None  # upstream gradient of the entropy; None for 0

    def parts_of_gradient(
        self, head: "_Head", columns: slice, x: Tensor, h: Tensor, rows: Tensor
    ) -> list[Tensor]:
        """Return the gradient by the products h' W^T of a tile, [n, columns], as the
        parts that are multiplied by h.

        Args:
            head: the settings of the output layer.
            columns: of the tile.
            x: its logits, [n, columns]; of the kept ones, all rows.
            h: the states, [n, H].
            rows: the row in x of each token, [n], for the kernels.
        """
        if not head.in_triton:
            return _parts_for_product(self.gradient_of_tile(head, columns, x), h)
        from upref.hidden_triton import gradient_of_tile

        return gradient_of_tile(
            x,
            head.scale_of_kernels(h),
            head.outer,
            rows,
            (self.ids, self.log_z, self.H, self.g, self.g_H),
            columns.start,
            h.dtype,
        )

    def gradient_of_tile(self, head: "_Head", columns: slice, x: Tensor) -> Tensor:
        """Return the gradient by the products h' W^T of a tile, [n, columns]. It writes
        to x.

        Args:
            head: the settings of the output layer.
            columns: of the tile.
            x: its logits, [n, columns].
        """
        slope = None
        if head.softcap:
            slope = (1 - (x / head.outer) ** 2).mul_(head.outer)
        log_p = x.sub_(self.log_z).clamp_(min=LOG_OF_ZERO)
        p = log_p.exp()
        if self.g_H is None:
            dx = p.mul_(-self.g)
        else:
            dx = p.mul_(log_p.add_(self.H).mul_(-self.g_H).sub_(self.g))
        is_inside, column = _in_tile(self.ids, columns, x)
        dx.scatter_add_(1, column, torch.where(is_inside[:, None], self.g, 0))
        return dx if slope is None else dx.mul_(slope)


def _gradient_of_weight(
    parts: list[Tensor], h: Tensor, inner: float, wide_dtype: torch.dtype
) -> Tensor:
    """Return the gradient of the rows of W of one tile, [columns, H].

    Args:
        parts: as of `_TokensWithGradient.parts_of_gradient`.
        h: the states, [n, H].
        inner: of the head.
        wide_dtype: that of h where `_Head.states` has multiplied it by inner.
    """
    first, *rest = parts
    summed = _product(first.T, h)
    for part in rest:
        summed += _product(part.T, h)
    if h.dtype != wide_dtype:
        summed.mul_(inner)
    return summed


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(hidden: Any, weight: Any, bias: Any, tokens: Any, head: Any) -> Any:
        """Compute log-probabilities and entropies, one tile of the vocabulary at a time.

        Returns:
            log π and H; then log Z and H of the tiles' own logits, for the backward, and
            the tiles that are kept for it.
        """
        # here and not in `token_log_probs`: under vmap only this function has the values
        check_tokens(tokens, hidden.shape[:-1], len(weight), "hidden", "tokens")
        shape = tokens.shape
        tokens = tokens.flatten().long()
        with torch.autocast(hidden.device.type, enabled=False):
            wide_dtype = torch.promote_types(
                torch.promote_types(hidden.dtype, weight.dtype), torch.float32
            )
            h = head.states(hidden, weight, wide_dtype)
            minimum = torch.finfo(wide_dtype).min
            least = h.new_full((len(h),), minimum, dtype=wide_dtype)
            kept: list[Tensor] = []
            tiles = head.tiles(h, weight, bias)
            if head.keeps_logits:
                tiles = _keeping(tiles, kept, copies=not head.in_triton)
            scale = head.scale_of_kernels(h) if head.in_triton else None
            m, s, t, largest, largest_ids = _sum_tiles(tiles, least, scale)
            # The backward computes the tiles' logits again and has no exact ones, so it
            # gets the log Z and H that belong to them.
            log_z_of_tiles = m + s.log()
            H_of_tiles = s.log() - t / s
            ids = torch.cat([tokens[:, None], largest_ids], 1)
            exact = head.exact_logits(hidden.flatten(0, -2), weight, bias, ids)
            exact = exact - m[:, None]
            of_tiles = largest.to(exact.dtype) - m[:, None]
            # exchange the largest logits' terms of s and t for exact ones
            for logits, sign in ((exact[:, 1:], 1), (of_tiles, -1)):
                clamped = logits.clamp(min=LOG_OF_ZERO)
                s = s + sign * clamped.exp().sum(1)
                t = t + sign * (clamped.exp() * clamped).sum(1)
            lp = (exact[:, 0] - s.log()).clamp(max=0)
            H = (s.log() - t / s).clamp(min=0)
        results = (lp, H, log_z_of_tiles, H_of_tiles)
        of_tokens = (result.to(wide_dtype).reshape(shape) for result in results)
        return (*of_tokens, *kept)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save for the backward pass the inputs, log Z and H of the tiles, and the kept
        tiles.
        """
        hidden, weight, bias, tokens, ctx.head = inputs
        ctx.save_for_backward(hidden, weight, bias, tokens, *output[2:])
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        """Return the gradients of states, weight and bias; refuse a second gradient."""
        # read once: under torch.utils.checkpoint a second access has no values
        saved = ctx.saved_tensors
        if _needs_second_gradient((*saved, *upstream)):
            raise InputError(
                "upref.hidden has no second gradient, as create_graph=True or a gradient penalty needs it: use "
                "upref.logprobs on the logits there."
            )
        with torch.no_grad():
            return _LogProbs._gradients(
                ctx.head, ctx.needs_input_grad, saved, *upstream
            )

    @staticmethod
    def _gradients(
        head: Any, needs_gradient: Any, saved: Any, g: Any, g_H: Any, *_: Any
    ) -> Any:
        """Compute the gradients that are needed, one tile of the vocabulary at a time.

        Args:
            head: the settings of the output layer.
            needs_gradient: which inputs of `forward` need a gradient.
            saved: what `setup_context` saved.
            g: upstream gradient of log π; None for 0.
            g_H: upstream gradient of the entropy; None for 0.

        Returns:
            One gradient for each input of `forward`; None where none is needed.
        """
        hidden, weight, bias, tokens, log_z, H, *kept = saved
        needs_dh, needs_dW, needs_db, *_ = needs_gradient
        with torch.autocast(hidden.device.type, enabled=False):
            if g is None:
                g = torch.zeros_like(H)
            has_gradient = g != 0
            if g_H is not None:
                has_gradient = has_gradient | (g_H != 0)
            rows = has_gradient.flatten().nonzero()[:, 0]
            wide_dtype = H.dtype
            h = head.states(hidden.flatten(0, -2)[rows], weight, wide_dtype)

            def of_rows(tensor: Tensor) -> Tensor:
                """Return the numbers of these tokens, [n, 1]."""
                return tensor.flatten()[rows, None]

            trained = _TokensWithGradient(
                ids=tokens.flatten()[rows].long(),
                log_z=of_rows(log_z),
                H=of_rows(H),
                g=of_rows(g),
                g_H=None if g_H is None else of_rows(g_H),
            )
            dh = torch.zeros_like(h, dtype=wide_dtype) if needs_dh else None
            dW = torch.empty_like(weight) if needs_dW else None
            db = torch.empty_like(bias) if needs_db else None
            rows_of_x = rows if kept else torch.arange(len(rows), device=rows.device)
            for columns, W, x in head.tiles(h, weight, bias, kept, rows):
                parts = trained.parts_of_gradient(head, columns, x, h, rows_of_x)
                if dh is not None:
                    for part in parts:
                        _add_product(dh, part, W, head.inner)
                if dW is not None:
                    dW[columns] = _gradient_of_weight(parts, h, head.inner, wide_dtype)
                if db is not None:
                    dx_sum = sum(part.sum(0, dtype=wide_dtype) for part in parts)
                    db[columns] = head.inner * dx_sum
            if dh is not None:
                # 0 for the tokens without an upstream gradient
                dh_of_all = hidden.new_zeros(hidden.shape).flatten(0, -2)
                dh_of_all.index_copy_(0, rows, dh.to(hidden.dtype))
                dh = dh_of_all.reshape(hidden.shape)
        return dh, dW, db, None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        hidden: Any,
        weight: Any,
        bias: Any,
        tokens: Any,
        head: Any,
    ) -> Any:
        """Compute a batch of states and tokens in one call with one dimension more;
        refuse a batch of weights.
        """
        if in_dims[1] is not None or in_dims[2] is not None:
            raise InputError(
                "vmap over weight or bias is not supported: call token_log_probs once for each of them."
            )

        def with_batch_first(tensor: Any, batch_dim: int | None) -> Any:
            """Return a tensor with the batch's dimension in front; expanded where it
            has none.
            """
            if batch_dim is None:
                return tensor.expand(info.batch_size, *tensor.shape)
            return tensor.movedim(batch_dim, 0)

        if head.keeps_logits:
            raise InputError("keep_logits does not work under vmap.")
        hidden = with_batch_first(hidden, in_dims[0])
        tokens = with_batch_first(tokens, in_dims[3])
        return _LogProbs.apply(hidden, weight, bias, tokens, head), (0, 0, 0, 0)
