# SPDX-License-Identifier: Apache-2.0
"""The parts of a tiny transformer with their gradients written out: fewer passes over
memory than autograd's.

In each class `forward` is the formula of its first line and `backward` takes g, the
gradient of the output. tests/mini/test_mini_packed.py compares each with finite
differences and with transformers.
"""

import torch
from torch import Tensor
from torch.autograd import Function


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Return 1 / √(mean x² + ε) over the last dimension, which stays with size 1."""
    return x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()


def through_rms(g: Tensor, y: Tensor, inverse: Tensor) -> Tensor:
    """Return the gradient of x from g, that of y = x · inverse_rms(x): (g - y mean(g
    y)) times the inverse.
    """
    return torch.addcmul(g, y, (g * y).mean(-1, keepdim=True), value=-1).mul_(inverse)


class Rms(Function):
    """x / √(mean x² + ε)."""

    @staticmethod
    def forward(ctx, x, eps):
        """Return y [..., d] of x [..., d]."""
        inverse = inverse_rms(x, eps)
        y = x * inverse
        ctx.save_for_backward(y, inverse)
        return y

    @staticmethod
    def backward(ctx, g):
        return through_rms(g, *ctx.saved_tensors), None


class RmsTurn(Function):
    """Rms of each head [n, H, D], times w [H, D], then RoPE: z·cos + roll(z)·sin, cos
    and sin [n, 1, D].
    """

    @staticmethod
    def forward(ctx, x, w, cos, sin, eps):
        """Return the turned heads, [n, H, D]."""
        inverse = inverse_rms(x, eps)
        y = x * inverse
        ctx.save_for_backward(y, inverse, w, cos, sin)
        z = y * w
        return (z * cos).addcmul_(z.roll(x.shape[-1] // 2, -1), sin)

    @staticmethod
    def backward(ctx, g):
        """Return the gradients of x and w; cos, sin and eps have none."""
        y, inverse, w, cos, sin = ctx.saved_tensors
        gz = (g * cos).add_((g * sin).roll(y.shape[-1] // 2, -1))
        return through_rms(gz * w, y, inverse), (gz * y).sum(0), None, None, None


class Gate(Function):
    """silu of the first half of [n, 2m] times the second."""

    @staticmethod
    def forward(ctx, x):
        """Return silu(a) b, [n, m], where x is [a, b]."""
        a, b = x.chunk(2, -1)
        s = a.sigmoid()
        y = s * a
        ctx.save_for_backward(b, s, y)
        return y * b

    @staticmethod
    def backward(ctx, g):
        """Return the gradient of x, [n, 2m]: that of a, then that of b."""
        b, s, y = ctx.saved_tensors  # s: sigmoid of a; y: silu of a
        out = g.new_empty(len(g), 2 * g.shape[1])
        slope = torch.addcmul(y, y, s, value=-1).add_(s)  # of silu: s + y (1 - s)
        torch.mul(slope.mul_(b), g, out=out[:, : g.shape[1]])
        torch.mul(y, g, out=out[:, g.shape[1] :])
        return out


def softmax(x: Tensor) -> Tensor:
    """Return the softmax over the last dimension; x may be overwritten.

    Where a row is shorter than a vector register (16 numbers of float32), torch's
    softmax is slow, and this one is computed in place.
    """
    if x.shape[-1] >= 16:
        return x.softmax(-1)
    x = x.sub_(x.amax(-1, keepdim=True)).exp_()
    return x.div_(x.sum(-1, keepdim=True))


class Attend(Function):
    """softmax(q kᵀ · scale + hide) v of [B, Q, D], [B, K, D], [B, K, D]."""

    @staticmethod
    def forward(ctx, q, k, v, hide, scale):
        """Return what each query attends to, [B, Q, D]."""
        p = softmax(torch.baddbmm(hide, q, k.mT, alpha=scale))
        ctx.save_for_backward(q, k, v, p)
        ctx.scale = scale
        return p.bmm(v)

    @staticmethod
    def backward(ctx, g):
        """Return the gradients of q, k and v; hide and scale have none."""
        q, k, v, p = ctx.saved_tensors  # p: attention weights
        gp = g.bmm(v.mT).mul_(p)
        gs = torch.addcmul(gp, p, gp.sum(-1, keepdim=True), value=-1).mul_(ctx.scale)
        return gs.bmm(k), gs.mT.bmm(q), p.mT.bmm(g), None, None
