# SPDX-License-Identifier: Apache-2.0
"""`upref doctor`: what is installed, and whether every gradient is right on this
machine.
"""

import platform
from importlib import metadata
from typing import Any

import torch

from upref.registry import get, names
from upref.rollouts import autograd_gradient
from upref.user_code.frameworks import framework_plugins
from upref.weights.batches import batch

PARTS = (
    "torch",
    "numpy",
    "sympy",
    "matplotlib",
    "jaxtyping",
    "verl",
    "vllm",
    "transformers",
    "trl",
)
TOLERANCE = 1e-12  # relative to the largest weight, float64


def examine() -> dict[str, Any]:
    """Collect versions, devices, and the result of the self-test.

    Returns:
        By name; a version is None where the distribution is absent, which is found out
        without importing it. `ok` is true where nothing is wrong.
    """
    report: dict[str, Any] = {
        "upref-rl": _version("upref-rl"),
        "python": platform.python_version(),
    }
    report |= {part: _version(part) for part in PARTS}
    for plugin in framework_plugins():
        for part, tested in plugin.tested_versions().items():
            if report.get(part):
                report[part] = _compared_with_tested(report[part], tested)
    report["cuda"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    if _version("upref"):
        report["warning"] = (
            "the unrelated distribution `upref` is installed and may shadow this one: pip uninstall upref"
        )
    wrong = [name for name in names() if _gradient_error(name) > TOLERANCE]
    report["gradients"] = (
        f"{len(names()) - len(wrong)} of {len(names())} objectives: autograd = weight x aggregation"
    )
    if wrong:
        report["wrong"] = ", ".join(wrong)
    return report | {"ok": not wrong and "warning" not in report}


def _version(distribution: str) -> str | None:
    """Return the version of a distribution; None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _compared_with_tested(version: str, tested: str) -> str:
    """Return a version, and whether upref was tested with it."""
    if version == tested:
        return f"{version} (tested)"
    return f"{version} (not tested: upref was tested with {tested})"


def _gradient_error(name: str) -> float:
    """Return how far autograd's gradient of an objective is from weight x aggregation
    on a batch of its regimes, relative to the largest entry.
    """
    o = get(name)
    b = batch(o, thin=5)
    expected = o.gradient(b)
    error = (autograd_gradient(o, b) - expected).abs().max()
    return float(error / expected.abs().max())
