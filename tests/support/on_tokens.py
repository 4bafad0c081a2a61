# SPDX-License-Identifier: Apache-2.0
"""What a function that trains does to single tokens and arms: for the claims of the
paper.
"""

import torch

import upref

F64 = torch.float64


def T(*x):
    return torch.tensor(x, dtype=F64)


def weight(name, r, A, **hp):
    """Return dJ/dlp of an objective's function for one token with this ratio and
    advantage.
    """
    lp = T(r).log().requires_grad_()
    return torch.autograd.grad(
        upref.get(name).fn(lp, T(1.0).log(), T(A), **hp).sum(), lp
    )[0].item()


def gradient(J, z):
    z = z.clone().requires_grad_()
    return torch.autograd.grad(J(z), z)[0]


def flow(steps, lr, mu, A, name="dapo"):
    """Return π/π_old of each arm after gradient ascent on the expectation of the
    objective's function.

    Args:
        steps: of the ascent.
        lr: its learning rate.
        mu: π_old of each arm, where it begins.
        A: the advantage of each arm.
        name: of the objective.
    """
    z, mu, A = T(*mu).log(), T(*mu), T(*A)
    for _ in range(steps):
        z = z + lr * gradient(
            lambda z: (
                mu * upref.get(name).fn(torch.log_softmax(z, 0), mu.log(), A)
            ).sum(),
            z,
        )
    return (torch.softmax(z, 0) / mu).tolist()
