# SPDX-License-Identifier: Apache-2.0
"""Losses of JAX and MLX, as docs/howto/wrap-your-loss.md has them."""

import re
import textwrap
from pathlib import Path

import pytest
import torch

import upref

PAGE = Path(__file__).parents[2] / "docs/howto/wrap-your-loss.md"
MINIMUM = "jnp.minimum(r * A, jnp.clip(r, 0.8, 1.28) * A)"


def of_the_page(change: str = MINIMUM, library: str = "jax"):
    """Run the code of the page, with another surrogate, or in MLX, and return its
    names.
    """
    section = PAGE.read_text().partition("## A loss in JAX or MLX")[2]
    blocks = re.findall(r"^(?: {4}.*|)$", section, re.M)
    code = textwrap.dedent("\n".join(blocks)).partition("$ upref")[0]
    assert MINIMUM in code
    code = code.replace(MINIMUM, change)
    if library == "mlx":
        code = code.replace("jax.numpy as jnp", "mlx.core as jnp").replace(
            "from_jax", "from_mlx"
        )
    module: dict = {}
    exec(code, module)
    return module


@pytest.mark.nightly
@pytest.mark.parametrize("library", ["jax", "mlx"])
def test_a_loss_is_judged_through_its_librarys_own_gradient(library):
    pytest.importorskip("jax" if library == "jax" else "mlx.core")
    assert upref.check(of_the_page(library=library)["loss"], "dapo")
    for change, cause in (
        ("jnp.clip(r, 0.8, 1.28) * A", "the minimum is missing"),
        (
            "jnp.minimum(r * A, jnp.clip(r, 0.72, 1.2) * A)",
            "the two sides of the clip are swapped",
        ),
    ):
        report = upref.check(of_the_page(change, library)["loss"], "dapo")
        assert cause in report.failures[0].cause


@pytest.mark.nightly
def test_what_jit_cannot_trace_gets_the_core_oracles():
    pytest.importorskip("jax")
    module = of_the_page()
    exec(
        "def picked(log_prob, old_log_prob, advantages, mask):\n"
        "    x = [a[mask.astype(bool)] for a in (log_prob, old_log_prob, advantages)]\n"
        "    return dapo(*x, jnp.ones(x[0].shape, bool))\n",
        module,
    )
    report = upref.check(upref.from_jax(module["picked"]), "dapo")
    assert report and "jax.jit" in report.oracles["padding"]


@pytest.mark.parametrize(
    ("library", "dtype"),
    [("jax", torch.float64), ("jax", torch.float32), ("mlx", torch.float32)],
)
def test_gradients_by_each_input(library, dtype):
    """Gradients by both inputs pass through a function of JAX or MLX; what it returns
    beside the loss has none.
    """
    pytest.importorskip("jax" if library == "jax" else "mlx.core")

    def make(fn):
        if library == "mlx":
            return upref.from_mlx(fn)
        return upref.from_jax(fn, float32=dtype is torch.float32)

    f = make(lambda x, y, k: ((x * y * k).sum(), {"x": x}))
    x, y = (
        torch.tensor([1.0, a], dtype=torch.float64, requires_grad=True) for a in (2, 3)
    )
    value, rest = f(x, y=y, k=2)
    (value * 3).backward()
    assert value.dtype is dtype and value.item() == 14
    assert x.grad.tolist() == [6, 18] and y.grad.tolist() == [6, 12]
    assert not rest["x"].requires_grad
    terms = make(lambda x: x * x)(x)  # not reduced
    assert torch.autograd.grad((terms * x.detach()).sum(), x)[0].tolist() == [2, 8]
