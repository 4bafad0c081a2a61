# SPDX-License-Identifier: Apache-2.0
"""Are the losses of a framework the objectives that their names promise, for every value?
Each comparison of its audit, by the proofs of upref.proof.

A loss that differs from its promise is compared once more, with the promise and the
faults that the audit records.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from upref.errors import InputError
from upref.proof.compare import Comparison as Found, compare
from upref.proof.domain import Pattern, patterns
from upref.proof.paths import Outputs
from upref.rollouts import Rollouts
from upref.user_code.guard import call_guarded
from upref_frameworks.audits.case import Comparison
from upref_frameworks.audits.compare import gradient_with_faults
from upref_frameworks.audits.faulty import FaultyObjective, make_explanation
from upref_frameworks.audits.framework import Framework

FULL = Pattern(((True, True), (True, False)))
HOLE = Pattern(((True, False, True),))
SECONDS = 60.0  # for one comparison
PROVED, WITH_FAULTS, DIFFERS, OPEN = (
    "proved",
    "proved with the recorded differences",
    "differs",
    "no proof",
)


@dataclass(frozen=True)
class ProvedRow:
    """What became of one comparison.

    Attributes:
        setting: `default` or `paper`.
        label: the loss, as `upref check FRAMEWORK:LABEL` reads it.
        promise: the objective with its hyperparameters.
        status: proved, "proved with the recorded differences", differs, or "no proof".
        faults: the recorded differences, in words; () where the loss is proved without.
        reason: why there is no proof.
        at: of a difference from the promise, A and r there.
    """

    setting: str
    label: str
    promise: str
    status: str
    faults: tuple[str, ...] = ()
    reason: str = ""
    at: str = ""


def proofs(name: str) -> dict[str, Any]:
    """Prove each comparison of a framework's audit, in the process that has it.

    Args:
        name: the framework.

    Returns:
        framework, version, and rows: the ProvedRows as dicts.
    """
    from upref_frameworks.audits import framework, isolated

    f = framework(name)
    answer: dict[str, Any] | None = isolated.run_elsewhere(
        "proofs", name, f.pin, "", "", False
    )
    if answer is not None:
        return answer
    torch.set_num_threads(1)
    version = isolated.INSIDE["version"] if f.pin else f.version()
    rows = [prove_comparison(f, comparison) for comparison in f.comparisons]
    return {
        "framework": name,
        "version": version,
        "torch": torch.__version__,
        "rows": [asdict(row) for row in rows],
    }


def prove_comparison(framework: Framework, comparison: Comparison) -> ProvedRow:
    """Prove one loss to be its promise, or the promise with the recorded faults.

    Args:
        framework: the tables.
        comparison: the loss and what it promises.

    Returns:
        A row.
    """
    from upref.registry import get

    words = comparison.setting, comparison.label, comparison.promise
    faults = tuple(str(fault.words) for fault in comparison.reasons)
    try:
        explanation = make_explanation(
            get(comparison.objective), comparison.hp, comparison.reasons
        )
        loss = gradient_of_framework(framework, comparison)
        _run_once(loss)
        found = _compare(framework, comparison, loss, explanation.promised)
        if found.status == "proved":
            return ProvedRow(*words, PROVED)
        if found.status != "differs":
            if not faults:
                return ProvedRow(*words, OPEN, faults, found.reason)
            at = ""
        else:
            at = _place(found)
            if not faults:
                return ProvedRow(*words, DIFFERS, faults, at=at)
        again = _compare(framework, comparison, loss, explanation.faulty)
    except InputError as error:
        return ProvedRow(*words, OPEN, faults, str(error))
    if again.status == "proved":
        return ProvedRow(*words, WITH_FAULTS, faults, at=at)
    status = DIFFERS if again.status == "differs" else OPEN
    return ProvedRow(*words, status, faults, again.reason, _place(again) or at)


def gradient_of_framework(framework: Framework, comparison: Comparison) -> Outputs:
    """Return dJ/dlp of a framework's loss as a function of a batch and a scale, a scalar
    that multiplies the loss.

    Args:
        framework: the tables.
        comparison: the loss, and the fields of its config.
    """
    mode = comparison.mode
    defaults = framework.defaults(mode)
    config = framework.configured(mode, defaults, comparison.config)

    def gradient(batch: Rollouts, scale: Tensor) -> Tensor:
        """Return dJ/dlp, [1, B, T]; where the batch has entropies [2, B, T], of which
        the second part is 0.
        """
        lp = batch.logp.clone().requires_grad_()
        given = {
            name: x.clone() for name, x in batch.tensors().items() if name != "logp"
        }
        whole = Rollouts.unchecked(logp=lp, **given)

        def backward() -> tuple[Tensor | None, ...]:
            """Return the gradient by lp of the loss times the scale; None in the tuple
            where the loss does not depend on lp.
            """
            value = framework.compute_loss(mode, config, whole, None) * scale
            return torch.autograd.grad(value, [lp], allow_unused=True)

        (found,), _ = call_guarded(f"{framework.name}:{mode}", backward)
        weights = torch.zeros_like(batch.logp) if found is None else -found
        if batch.entropy is None:
            return weights[None]
        return torch.stack([weights, torch.zeros_like(weights)])

    return gradient


def _run_once(loss: Outputs) -> None:
    """Run a loss on one token. Its first call may build what all others use, as TRL's
    trainer with a model at random: that is no part of the function.
    """
    one = torch.full((1, 1), -1.0, dtype=torch.float64)
    batch = Rollouts.unchecked(
        logp=one, logp_old=one, logp_ref=one, adv=-one, mask=one < 0
    )
    loss(batch, torch.ones((), dtype=torch.float64))


def _compare(
    framework: Framework,
    comparison: Comparison,
    loss: Outputs,
    reference: FaultyObjective,
) -> Found:
    """Compare the loss with an objective and what its faults change, on small batches
    whose numbers are variables.
    """
    objective = reference.objective
    own = {k: v for k, v in reference.hp.items() if k in objective.hyperparameters}
    reads = {"entropy"} & set(objective.reads)
    has_term = any(fault.change.term for fault in reference.faults)
    if has_term or objective.resolve(own).get("beta") or comparison.config.get("beta"):
        reads.add("logp_ref")
    grouped = "group-token-mean" in (objective.agg, reference.agg)
    among = [*patterns(1, 1, False), HOLE, FULL, replace(FULL, on_policy=True)]
    if grouped or "group" in objective.reads:
        among.append(replace(FULL, group=(7, 3)))

    def expected(batch: Rollouts, scale: Tensor) -> Tensor:
        """Return dJ/dlp of the reference, [1, B, T]; where the batch has entropies [2,
        B, T], of which the second part is 0.
        """
        weights = gradient_with_faults(reference, batch) * scale
        if batch.entropy is None:
            return weights[None]
        return torch.stack([weights, torch.zeros_like(weights)])

    return compare(
        loss,
        expected,
        among,
        framework.one_adv or comparison.one_adv or objective.one_adv,
        reads,
        SECONDS,
        objective.level == "sequence_mean",
    )


def _place(found: Found) -> str:
    """Return A and r where two losses differ most; "" where they do not."""
    if found.counterexample is None:
        return ""
    batch = found.counterexample.batch
    expected, measured = found.counterexample.expected, found.counterexample.found
    gap = (expected - measured).abs().nan_to_num(float("inf"))
    # the gradients may have several parts, [parts, B, T]
    slot = int(gap.argmax()) % batch.mask.numel()
    row_and_column = divmod(slot, batch.mask.shape[1])
    A = batch.adv[row_and_column].item()
    r = (batch.logp - batch.logp_old)[row_and_column].exp().item()
    return f"A = {A:.4g}, r = {r:.4g}"
