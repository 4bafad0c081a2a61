# SPDX-License-Identifier: Apache-2.0
"""TRL's unmodified GRPOTrainer as a step: driven by its public arguments, recorded at
its optimizer.

Rows come from `rollout_func`, rewards from a reward function. The old log-probabilities
are those of the weights that TRL generated with, so that r leaves 1 from the second
optimizer step of a generation batch on.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from upref.errors import InputError, importing
from upref.registry import Objective, get
from upref.step.check import StepReport, check_recorded
from upref.step.compare.case import with_weights
from upref.step.compare.forward import Forward
from upref.step.compare.record import Recorded, record_step
from upref.step.inputs.families import END, V
from upref.step.inputs.rows import CASE_AXES, Row, make_rows
from upref.verify.report import fail
from upref_frameworks.steps.host import mute_trainer

GENERATIONS = 4  # responses of a group
FIELDS = dict(
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    steps_per_generation=4,
    num_generations=GENERATIONS,
    temperature=0.7,
    learning_rate=0.01,
    lr_scheduler_type="constant",
    max_grad_norm=0.0,
    scale_rewards="none",
    loss_type="dapo",
    max_completion_length=16,
    use_bias_correction_kl=False,
    save_strategy="no",
    logging_strategy="no",
    disable_tqdm=True,
    shuffle_dataset=False,
)


def default_config() -> Any:
    """Make a GRPOConfig of TRL's own defaults, on the CPU.

    Returns:
        A trl.GRPOConfig, whose output folder is gone.
    """
    import trl

    with tempfile.TemporaryDirectory() as folder:
        return trl.GRPOConfig(output_dir=folder, use_cpu=True, bf16=False)


def record_training(
    model: Any,
    fields: dict[str, Any],
    rows: Sequence[Row],
    steps: int,
    cls: Any = None,
    **more: Any,
) -> tuple[Recorded, Any]:
    """Train with TRL's GRPOTrainer on rows, and record its optimizer steps.

    The field `adv` of a row is its reward here.

    Args:
        model: a small causal language model of transformers; it is trained in place.
        fields: of GRPOConfig, over FIELDS.
        rows: a generation batch; each GENERATIONS of them make a group.
        steps: optimizer steps.
        cls: a trainer class; None: trl.GRPOTrainer.
        **more: arguments of the trainer, for example peft_config.

    Returns:
        (Recorded, the trainer).

    Raises:
        InputError: TRL is not installed, or its trainer fails.
    """
    with importing("trl"):
        from upref_frameworks.trl.adapter import make_trainer, sampled
    with (
        mute_trainer("TRL's trainer", "trl", CI="1", TRL_EXPERIMENTAL_SILENCE="1"),
        tempfile.TemporaryDirectory() as folder,
        record_step(model) as seen,
    ):
        trainer = make_trainer(
            model,
            FIELDS | fields | dict(max_steps=steps),
            folder,
            cls,
            prompts=len(rows) // GENERATIONS,
            **sampled([*rows], [row.adv for row in rows]),
            **more,
        )
        trainer.train()
    return seen, trainer


def batch(
    seed: int = 0, truncated: bool = False, holes: bool = True, prompts: int = 0
) -> list[Row]:
    """Make a generation batch of eight rows, whose field `adv` is the reward.

    Args:
        seed: of the tokens and rewards.
        truncated: whether each fourth response lacks the token that ends it.
        holes: whether some tokens inside responses do not train.
        prompts: the length of all prompts; 0: they differ.

    Returns:
        The rows, in groups of GENERATIONS.
    """
    rows = make_rows(V, seed, () if holes else ("holes",), END)
    for i, r in enumerate(rows):
        r.response[-1] = 3 + i if truncated and i % 4 == 0 else END
        r.group = i // GENERATIONS
        r.prompt = (r.prompt * 2)[:prompts] if prompts else r.prompt
    return rows


def expected_rows(
    seen: Recorded, rows: Sequence[Row], fields: dict[str, Any]
) -> list[list[Row]]:
    """Return the rows of each recorded step, as TRL documents that it trains on them.

    Advantages are those of its documentation: the reward minus its group's mean, over a
    standard deviation where scale_rewards says so. Old log-probabilities are those of
    the weights that generated.

    Args:
        seen: the recorded steps.
        rows: the generation batch, with rewards in `adv`.
        fields: of GRPOConfig, over FIELDS.

    Returns:
        A list for each step. A truncated response under mask_truncated_completions
        trains on no token.
    """
    settings: dict[str, Any] = FIELDS | fields
    T: float = settings["temperature"]
    # `adv` of a row is its reward; a group of GENERATIONS rows has one prompt
    R = torch.tensor([r.adv for r in rows], dtype=torch.float64).view(-1, GENERATIONS)
    A = R - R.mean(1, keepdim=True)
    if settings["scale_rewards"] == "group":
        A = A / (R.std(1, keepdim=True) + 1e-4)
    if settings["scale_rewards"] == "batch":
        A = A / (R.std() + 1e-4)
    passes = settings["steps_per_generation"] * settings.get("num_iterations", 1)
    steps_per_batch = passes // settings["gradient_accumulation_steps"]
    # the reference policy has the weights before the first step
    ref_of_rows = _log_probs(seen, 0, rows, T)
    rows_of_steps = []
    for number, step in enumerate(seen.steps):
        if number % max(steps_per_batch, 1) == 0:
            old_of_rows = _log_probs(seen, number, rows, T)
        complete_rows = [
            replace(
                row,
                adv=float(advantage),
                old=None if steps_per_batch <= 1 else old.tolist(),
                ref=ref.tolist(),
            )
            for row, advantage, old, ref in zip(
                rows, A.flatten(), old_of_rows, ref_of_rows, strict=True
            )
        ]
        if settings.get("mask_truncated_completions"):
            complete_rows = [
                row
                if row.response[-1] == END
                else replace(row, trains=[False] * len(row.response))
                for row in complete_rows
            ]
        rows_of_steps.append(step.rows(complete_rows))
    return rows_of_steps


def _unfed(rows: Sequence[Row], steps: Sequence[Sequence[Row]]) -> list[int]:
    """Return the places of those rows of a generation batch that none of its optimizer
    steps trained on.
    """
    fed = [row.ids for step in steps for row in step]
    return [i for i, row in enumerate(rows) if row.ids not in fed]


def _log_probs(seen: Recorded, n: int, rows: Sequence[Row], T: float) -> list[Any]:
    """Return the rows' log-probabilities by the weights of recorded step n, at
    temperature T: a tensor for each row.
    """
    return Forward(with_weights(seen.model, seen.steps[n]), list(rows), T).lp()


def report(
    model: nn.Module,
    fields: dict[str, Any],
    rows: list[Row],
    objective: str | Objective,
    hp: dict[str, Any],
    goal: dict[str, Any],
    *,
    step: int = 1,
    bound: float | torch.dtype | None = None,
    cls: Any = None,
    more: dict[str, Any] | None = None,
) -> StepReport:
    """Train with TRL on these rows, and compare one optimizer step with the objective,
    by the divisor that TRL documents.

    Args:
        model: a small causal language model of transformers; it is trained in place.
        fields: of GRPOConfig, over FIELDS.
        rows: a generation batch; rows[i].adv is the reward of row i.
        objective: the objective, or its name.
        hp: its hyperparameters.
        goal: beta, entropy_coef, clip and scale, as for `check_recorded`; scale
            multiplies the objective.
        step: the number of the optimizer step. In step 0 the ratio is 1.
        bound: the relative error that is allowed, as for `check_recorded`.
        cls: a trainer class; None: trl.GRPOTrainer.
        more: arguments of the trainer, for example peft_config.

    Returns:
        The verdict on this step. Where it fails and step 0 fails too, the findings are
        those of step 0: they are clearer.

    Raises:
        InputError: one step trains on several generation batches, TRL is not installed,
            or its trainer fails.
    """
    settings: dict[str, Any] = FIELDS | fields
    accumulation = settings["gradient_accumulation_steps"]
    steps_per_batch = settings["steps_per_generation"] // accumulation
    if not steps_per_batch:
        raise InputError(
            f"gradient_accumulation_steps={accumulation} makes one step of several generation batches: "
            f"set it to at most steps_per_generation={settings['steps_per_generation']}."
        )
    first = step // steps_per_batch * steps_per_batch  # of its generation batch
    last = first + steps_per_batch
    recorded, _ = record_training(model, fields, rows, last, cls, **more or {})
    if not isinstance(objective, Objective):
        objective = get(objective)

    def ends(row: Row) -> bool:
        """Return whether TRL trains on this response rather than masks it as cut."""
        return row.response[-1] == END or not settings.get("mask_truncated_completions")

    mean_tokens = sum(sum(row.trains) for row in rows if ends(row)) / steps_per_batch

    def at_step(number: int, step_rows: list[Row]) -> StepReport:
        """Compare this step with the objective on these rows."""
        terms = {"scale": 1.0} | goal
        # TRL divides by the mean number of tokens of a step: the objective by the
        # tokens of this step, or by its responses
        by_tokens = objective.agg in ("token-mean", "group-token-mean")
        if settings["loss_type"] in ("dapo", "cispo") and by_tokens:
            terms["scale"] *= sum(sum(row.trains) for row in step_rows) / mean_tokens
        if settings["loss_type"] == "vespo":
            terms["scale"] *= len(step_rows) / mean_tokens
        # TRL's entropy term is a mean over the tokens of this step for every loss
        if terms.get("entropy_coef"):
            terms["entropy_coef"] /= terms["scale"]
        verdict = check_recorded(
            Recorded(recorded.model, [recorded.steps[number]]),
            [step_rows],
            objective,
            temperature=settings["temperature"],
            without=CASE_AXES,
            bound=bound,
            **terms,
            **hp,
        )
        return replace(verdict, loss=f"step {number}")

    rows_of_steps = expected_rows(recorded, rows, fields)
    verdict = at_step(step, rows_of_steps[step])
    if unfed := _unfed(rows, rows_of_steps[first:last]):
        cause = f"responses {', '.join(map(str, unfed))} of the generation batch do not train"
        finding = fail(
            "gradient",
            "over the generation batch",
            "a step on each response",
            cause=cause,
        )
        return replace(verdict, findings=[finding])
    if verdict or step == 0:
        return verdict
    # TRL's forward pass makes the old log-probabilities too: where it is wrong, step 0,
    # with a ratio of 1, is clearer
    first_verdict = at_step(0, [replace(row, old=None) for row in rows_of_steps[0]])
    if first_verdict:
        return verdict
    return replace(verdict, findings=first_verdict.findings)
