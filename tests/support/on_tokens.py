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
    """dJ/dlp of the function that trains."""
    lp = T(r).log().requires_grad_()
    return torch.autograd.grad(
        upref.get(name).fn(lp, T(1.0).log(), T(A), **hp).sum(), lp
    )[0].item()


def gradient(J, z):
    z = z.clone().requires_grad_()
    return torch.autograd.grad(J(z), z)[0]


def flow(steps, lr, mu, A, name="dapo"):
    """Gradient ascent on the expectation of the objective's own function, over arms:
    π/π_old at the end.
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
