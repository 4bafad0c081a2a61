# SPDX-License-Identifier: Apache-2.0
"""upref: reference and verification of the policy-gradient objectives that train
reasoning LLMs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from upref.version import __version__ as __version__

if TYPE_CHECKING:
    from upref.aggregation import Totals, aggregate, row_weights
    from upref.derivation import derive
    from upref.errors import InputError
    from upref.identification.diff import diff
    from upref.identification.identify import identify
    from upref.maximization.maximizes import maximizes
    from upref.pytest_plugin import (
        assert_advantages,
        assert_kl,
        assert_logprobs,
        assert_policy_loss,
        assert_step,
    )
    from upref.registry import Objective, get, names, objective
    from upref.rollouts import Rollouts
    from upref.step import check_recorded, check_step, identify_step, record_step
    from upref.transforms import up, up_anchored
    from upref.user_code.arrays import from_jax, from_mlx
    from upref.verify.advantages import check_advantages
    from upref.verify.advantages.proof import prove_advantages
    from upref.verify.check import check
    from upref.verify.formulas.distillation import check_distillation
    from upref.verify.formulas.value import check_value
    from upref.verify.kl import check_kl
    from upref.verify.logprobs import check_logprobs
    from upref.verify.proof import prove, prove_kl
    from upref.weights.capacity import capacity
    from upref.weights.plots import cap_map

# Where each public name lives, imported at its first use: `upref -h` needs no torch, a
# trainer no sympy or matplotlib.
_HOME = {
    "InputError": "errors",
    "Objective": "registry",
    "Rollouts": "rollouts",
    "Totals": "aggregation",
    "aggregate": "aggregation",
    "assert_advantages": "pytest_plugin",
    "assert_kl": "pytest_plugin",
    "assert_logprobs": "pytest_plugin",
    "assert_policy_loss": "pytest_plugin",
    "assert_step": "pytest_plugin",
    "cap_map": "weights.plots",
    "capacity": "weights.capacity",
    "check": "verify.check",
    "check_advantages": "verify.advantages",
    "check_distillation": "verify.formulas.distillation",
    "check_kl": "verify.kl",
    "check_logprobs": "verify.logprobs",
    "check_recorded": "step",
    "check_step": "step",
    "check_value": "verify.formulas.value",
    "derive": "derivation",
    "from_jax": "user_code.arrays",
    "from_mlx": "user_code.arrays",
    "get": "registry",
    "diff": "identification.diff",
    "identify": "identification.identify",
    "identify_step": "step",
    "maximizes": "maximization.maximizes",
    "names": "registry",
    "objective": "registry",
    "prove": "verify.proof",
    "prove_advantages": "verify.advantages.proof",
    "prove_kl": "verify.proof",
    "record_step": "step",
    "row_weights": "aggregation",
    "up": "transforms",
    "up_anchored": "transforms",
}
__all__ = [
    "InputError",
    "Objective",
    "Rollouts",
    "Totals",
    "aggregate",
    "assert_advantages",
    "assert_kl",
    "assert_logprobs",
    "assert_policy_loss",
    "assert_step",
    "cap_map",
    "capacity",
    "check",
    "check_advantages",
    "check_distillation",
    "check_kl",
    "check_logprobs",
    "check_recorded",
    "check_step",
    "check_value",
    "derive",
    "diff",
    "from_jax",
    "from_mlx",
    "get",
    "identify",
    "identify_step",
    "maximizes",
    "names",
    "objective",
    "prove",
    "prove_advantages",
    "prove_kl",
    "record_step",
    "row_weights",
    "up",
    "up_anchored",
]


# modules whose functions are called by two words, as upref.replay.read: imported at
# their first use too
_MODULES = (
    "advantages",
    "aggregation",
    "conformance",
    "critic",
    "distillation",
    "hidden",
    "kl",
    "logprobs",
    "logs",
    "metrics",
    "replay",
    "rollouts",
    "step",
    "token_advantages",
    "transforms",
)


def __getattr__(name: str) -> Any:
    """Import a public name or a module at its first use, and keep a name for the next;
    AttributeError for any other.
    """
    if name in _MODULES:
        return import_module(f"upref.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'upref' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"upref.{_HOME[name]}"), name)
    return found


def __dir__() -> list[str]:
    """Return the names of this module, those that are not imported yet included."""
    return sorted({*globals(), *_HOME, *_MODULES})
