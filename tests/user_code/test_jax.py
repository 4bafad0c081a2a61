# SPDX-License-Identifier: Apache-2.0
"""The wrapper of a loss in JAX, as docs/howto/wrap-your-loss.md has it."""

import re
import textwrap
from pathlib import Path

import pytest

import upref

PAGE = Path(__file__).parents[2] / "docs/howto/wrap-your-loss.md"
MINIMUM = "jnp.minimum(r * A, jnp.clip(r, 0.8, 1.28) * A)"


def wrapped(change: str = MINIMUM):
    """The function `loss` of the page, with another surrogate in its JAX function."""
    section = PAGE.read_text().partition("## A loss in JAX")[2]
    code = textwrap.dedent("\n".join(re.findall(r"^(?: {4}.*|)$", section, re.M)))
    assert MINIMUM in code
    module: dict = {}
    exec(code.replace(MINIMUM, change), module)
    return module["loss"]


def test_a_loss_in_jax_is_judged_through_its_own_gradient():
    pytest.importorskip("jax")
    assert upref.check(wrapped(), "dapo")
    report = upref.check(wrapped("jnp.clip(r, 0.8, 1.28) * A"), "dapo")
    assert "the minimum is missing" in report.failures[0].cause
