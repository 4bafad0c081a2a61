# SPDX-License-Identifier: Apache-2.0
"""The log-probability functions of a framework, each through check_logprobs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from upref.errors import InputError
from upref.result import Result
from upref.verify.logprobs import check_logprobs
from upref.verify.report import Report
from upref_frameworks.audits import framework, isolated
from upref_frameworks.audits.framework import Framework


@dataclass(frozen=True)
class Kernels(Result):
    """A report for each function, or why it could not be run; true where no report has
    a failure.
    """

    framework: str
    version: str
    reports: dict[str, Report | str]

    def __bool__(self) -> bool:
        return all(not isinstance(r, Report) or bool(r) for r in self.reports.values())

    def data(self) -> dict[str, Any]:
        """Return the reports as data.

        Returns:
            What `upref audit --logprobs --json` prints.
        """
        each = {
            name: report.data() if isinstance(report, Report) else report
            for name, report in self.reports.items()
        }
        return {"ok": bool(self), "version": self.version, "functions": each}

    def text(self, verbose: bool = False) -> str:
        """Return the reports one below the other.

        Args:
            verbose: as of Report.text.

        Returns:
            Paragraphs, without a line break at the end.
        """

        def said(k: str, r: Report | str) -> str:
            """Return a function's report, or why it was not run."""
            return r.text(verbose) if isinstance(r, Report) else f"not run: {k} ({r})"

        return "\n\n".join(
            [
                f"{self.framework} {self.version}",
                *(said(k, r) for k, r in self.reports.items()),
            ]
        )


def kernels(
    name: str, version: str = "", source: str = "", loud: bool = False
) -> Kernels:
    """Check every log-probability function of a framework that upref has a table of.

    Args:
        name: a framework with an audit, or `torch` for its linear_cross_entropy.
        version: another version than the pinned one, or `newest`.
        source: path of a working copy of the framework.
        loud: print the output of the framework's process.

    Returns:
        A report for each function. A framework with a pin runs in a process of its own.

    Raises:
        InputError: the framework cannot be installed or run.
    """
    if name == "torch":
        return Kernels(
            name,
            torch.__version__,
            {"nn.functional.linear_cross_entropy": check_logprobs(_log_probs_by_torch)},
        )
    f = framework(name)
    answer: Kernels | None = isolated.run_elsewhere(
        "kernels", name, f.pin, version, source, loud
    )
    if answer is not None:
        return answer
    inside = isolated.INSIDE["version"] if isolated.INSIDE else f.version()
    return Kernels(
        name,
        inside,
        {k: _report_or_reason(f, k, fn) for k, fn in kernels_of(f).items()},
    )


def _log_probs_by_torch(
    hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float
) -> Tensor:
    """Return log-probabilities [...] by torch's fused loss, in chunks. It has no
    temperature, so the hidden states are divided by it.
    """
    loss = torch.nn.functional.linear_cross_entropy
    options = torch.nn.LinearCrossEntropyOptions()
    arguments = (hidden / temperature).flatten(0, -2), weight, tokens.flatten()
    return -loss(*arguments, reduction="none", options=options).view_as(tokens)


def kernels_of(framework: Framework) -> dict[str, Callable[..., Any]]:
    """Collect the log-probability functions of a framework.

    Args:
        framework: imports are those of its process.

    Returns:
        Name -> function: its components of that kind, and its own table `kernels`.
    """
    return {
        p.mode: p.found for p in framework.parts() if p.kind == "logprobs"
    } | framework.kernels()


def _report_or_reason(
    framework: Framework, mode: str, fn: Callable[..., Any]
) -> Report | str:
    """Check a function of a framework, and set the name that its report has; return the
    report, or why it cannot be run.
    """
    fn.__name__ = f"{framework.name} {mode}"
    try:
        return check_logprobs(fn)
    except InputError as e:
        return str(e)
