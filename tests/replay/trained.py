# SPDX-License-Identifier: Apache-2.0
"""TRL's and verl's own losses over several optimizer steps, recorded by the hooks and
compared with the reference.

python -m tests.replay.trained [PART OF A NAME]

A line for each setting of `upref step` that changes the loss, and for verl's losses
that it has no setting for: the largest difference
between the logged loss and the reference over its steps, how far dL/dlp is from the
reference's, and what `upref replay` says of it.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from upref.replay import loss, normalizer, read_steps, record
from upref.replay.schema import RecordedBatch
from upref.replay.terms import objective_as_run, terms_of
from upref.step.compare.case import build_case, make_goal, perturb
from upref.step.inputs.families import tiny
from upref.step.inputs.reference import TorchModel
from upref_frameworks.steps.settings import Setting
from upref_frameworks.steps.table import select_settings

STEPS = {"trl": 6, "verl": 3}
TRLS = (
    "loss_type=dapo, epsilon_high=0.28",
    "loss_type=grpo",
    "loss_type=dr_grpo",
    "loss_type=bnpo",
    "loss_type=cispo, epsilon_high=2",
    "loss_type=sapo",
    "loss_type=vespo",
    "importance_sampling_level=sequence (GSPO)",
    "loss_type=luspo, importance_sampling_level=sequence",
    "delta=2 (dual clip for A > 0 and A < 0)",
    "beta=0.04",
    "beta=0.04, loss_type=dapo",
    "mask_truncated_completions, loss_type=grpo",
    "four micro-batches of one response",
)
VERLS = (
    "loss_agg_mode=token-mean",
    "loss_agg_mode=seq-mean-token-mean",
    "loss_agg_mode=seq-mean-token-sum",
    "loss_agg_mode=seq-mean-token-sum-norm, loss_scale_factor=16",
    "clip_ratio_high=0.28",
    "clip_ratio_c=3 (default)",
    "loss_mode=gspo",
    "loss_mode=sapo",
    "use_kl_loss, kl_loss_type=k3",
    "use_kl_loss, kl_loss_type=low_var_kl (default)",
    "use_dynamic_bsz",
    "micro_batch_size_per_gpu=1",
)


def verls_loss(
    mode: str, objective: str, hp: dict[str, float] | None = None, **actor: Any
) -> Setting:
    """Return a loss of verl for which `upref step` has no setting."""
    fields = {
        "actor": actor
        | {"policy_loss": {"loss_mode": mode}, "loss_agg_mode": "token-mean"},
        "engine": {},
        "model_config": {},
    }
    return Setting(f"loss_mode={mode}", fields=fields, objective=objective, hp=hp or {})


def clip(low: float, high: float, c: float) -> dict[str, float]:
    """verl's names of the bounds."""
    return {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": c}


BEYOND = {  # losses of verl that are not coupled over the batch
    "trl": (),
    "verl": (
        verls_loss("cispo", "cispo", **clip(1.0, 4.0, 3.0)),
        verls_loss("gpg", "reinforce_off_policy"),
        verls_loss(
            "dppo_tv",
            "dppo_tv_verl",
            hp={"delta": 0.15, "trunc": 3.0},
            **clip(0.15, 0.15, 3.0),
        ),
        verls_loss(
            "dppo_kl",
            "dppo_kl_verl",
            hp={"delta": 0.05, "trunc": 3.0},
            **clip(0.05, 0.05, 3.0),
        ),
        verls_loss("geo_mean", "gmpo", **clip(0.4, 0.4, 3.0)),
    ),
}
SILENT = ("uninformative", "no_gradient")  # of a step that tells nothing
NAMES = {"trl": TRLS, "verl": VERLS}


@dataclass(frozen=True)
class Line:
    """One setting: what its recorded steps say."""

    trainer: str
    setting: str
    steps: int
    off: float  # the largest |logged - reference| over Σ |terms|, at least 1
    factors: float  # the largest |factor - 1| of a response's gradient
    said: str  # of what is not the objective's; "" where loss and gradient are
    moved: float  # the largest |log r|
    unused: str  # numbers of the objective on which no loss of these steps depends

    @property
    def agrees(self) -> bool:
        return not self.said

    def __str__(self) -> str:
        """Return the line of the table: trainer, verdict, steps, differences, setting;
        then remarks.
        """
        word = "agrees" if self.agrees else "differs"
        numbers = f"{self.off:8.1e} {self.factors:8.1e} {self.moved:7.2g}"
        more = [self.said, f"not exercised: {self.unused}" if self.unused else ""]
        return "\n".join(
            [f"{self.trainer:5} {word:8} {self.steps:5} {numbers}  {self.setting}"]
            + [f"{'':14}{line}" for line in more if line]
        )


HEAD = f"{'':5} {'':8} {'steps':>5} {'loss':>8} {'gradient':>8} {'|log r|':>7}  setting"


def settings(trainer: str) -> Iterator[Setting]:
    """Yield the settings of `upref step` with these names, of the small model of the
    table.
    """
    found = {s.name: s for s in select_settings(trainer) if s.family == "qwen3"}
    for name in NAMES[trainer]:
        yield found[name]
    yield from BEYOND[trainer]


def trl_steps(
    s: Setting, folder: Path, base: type | None = None, steps: int = STEPS["trl"]
) -> None:
    """Train with TRL's trainer, or one derived from it, and record each step."""
    import trl

    from upref_frameworks.trl import step

    class Recorded(base or trl.GRPOTrainer):  # type: ignore[misc]
        def __init__(self, *args, **kw):
            super().__init__(*args, **kw)
            record(self, folder, every=1)

    step.record_training(
        perturb(tiny(s.family)), dict(s.fields), step.batch(**s.rows), steps, Recorded
    )


def verl_steps(s: Setting, folder: Path | None, steps: int = STEPS["verl"]) -> None:
    """Train with verl's worker and record each step; without a folder, as the
    environment says.
    """
    from upref_frameworks.verl import step
    from upref_frameworks.verl.record import by_environment, in_verl

    model = perturb(tiny(s.family))
    temperature = s.fields.get("temperature", 0.7)
    rows = build_case(
        TorchModel(model), make_goal(s.objective, s.hp, temperature, **s.goal), None, []
    ).rows
    recording = by_environment() if folder is None else in_verl(folder, 1)
    assert recording is not None
    with recording:
        step.record_training(model, rows, temperature, updates=steps, **s.fields)


TRAIN: dict[str, Callable[[Setting, Path], None]] = {
    "trl": trl_steps,
    "verl": verl_steps,
}


def judged(trainer: str, s: Setting, batches: list[RecordedBatch]) -> Line:
    """Compare the recorded steps with the objective that the setting means."""
    o = s.objective  # by its name: as frameworks run it
    hp = s.hp | ({"beta": s.goal["beta"]} if "beta" in s.goal else {})
    off, factors, moved, said = 0.0, 0.0, 0.0, ""
    for b in batches:
        found = loss(b, o, **hp)
        gradient = normalizer(b, o, **hp)
        step = terms_of(b, objective_as_run(o, hp), hp)
        size = max(1.0, float(step.total(step.terms.abs())))
        off = max(off, abs(found.value - found.logged) / size)
        if gradient.low == gradient.low:  # else no response has a gradient
            factors = max(factors, abs(gradient.low - 1), abs(gradient.high - 1))
        moved = max(moved, float((b.now - b.trainer()).abs().max()))
        said = said or " ".join(str(f) for f in found.findings if f.cause not in SILENT)
    return Line(
        trainer,
        s.name,
        len(batches),
        off,
        factors,
        said,
        moved,
        ", ".join(unused(o, hp, batches)),
    )


def unused(o: str, hp: dict[str, Any], batches: list[RecordedBatch]) -> list[str]:
    """Return the numbers that can be doubled without another loss at any step."""
    first = [loss(b, o, **hp).value for b in batches]
    return [
        k
        for k in hp
        if [loss(b, o, **hp | {k: 2 * hp[k]}).value for b in batches] == first
    ]


def run(trainer: str, s: Setting) -> Line:
    """Train, record and judge one setting."""
    with tempfile.TemporaryDirectory() as folder:
        TRAIN[trainer](s, Path(folder))
        return judged(trainer, s, list(read_steps([folder])))


def main(part: str = "") -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print(HEAD)
    for trainer in NAMES:
        for s in settings(trainer):
            if part in s.name:
                print(run(trainer, s), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
