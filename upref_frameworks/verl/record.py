# SPDX-License-Identifier: Apache-2.0
"""Record the optimizer steps of verl's actor, under any policy loss, as the environment
says.

    UPREF_REPLAY=dumps UPREF_REPLAY_EVERY=50 python -m verl.trainer.main_ppo ...
    UPREF_WATCH="dapo eps_high=0.2 c=3" python -m verl.trainer.main_ppo ...

The first records steps. The second judges the same steps while they train
(`upref.replay.watch`): it holds the objective, its hyperparameters, and `agg=NAME`,
`on_fail=warn` and `keep=failed` where wanted. Both together record and judge. For a
loss of upref's, `UPREF_WATCH=own` takes the objective and its hyperparameters from
verl's configuration. verl imports
upref_frameworks.verl.training in each of its processes (group `verl.plugins`), which
calls `by_environment`. **The files hold users' texts, as token ids.**

One method is wrapped, `train_batch` of verl's engines: one call is one optimizer step
of one rank. The loss function that it is given is called as before, and what it reads
is kept: log π_θ and the entropy of the model's output, the columns of the micro-batch,
and dL/dlog π_θ, which arrives in verl's own backward pass. The worker counts the steps,
because it has no other number of them; in a folder with recorded steps the count goes
on.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from upref.aggregation import verl_name
from upref.definition import Objective
from upref.errors import InputError
from upref.registry import get, names
from upref.replay.prompts import prompt_number
from upref.replay.record import (
    Recording,
    finish,
    gather_ranks,
    hand_over,
    keep_gradient,
    loss_scale,
    step_batch,
)
from upref.replay.schema import RecordedBatch
from upref.replay.terms import EXTRA_TERMS
from upref.replay.trainers import EVERY, Schedule, Sink
from upref.replay.watch import Watch, expect_choices, sink_of

# verl's loss of a micro-batch: (loss, metrics)
LossFunction = Callable[..., tuple[Tensor, dict[str, Any]]]
log = logging.getLogger(__name__)
FOLDER = "UPREF_REPLAY"
HOW_OFTEN = "UPREF_REPLAY_EVERY"
WATCHED = "UPREF_WATCH"
OPTIONAL = {
    "old": "old_log_probs",
    "sampler": "rollout_log_probs",
    "ref": "ref_log_prob",
    "correction": "rollout_is_weights",
}
SETTINGS = (
    "loss_agg_mode",
    "clip_ratio",
    "clip_ratio_low",
    "clip_ratio_high",
    "clip_ratio_c",
    "use_kl_loss",
    "kl_loss_coef",
    "kl_loss_type",
    "entropy_coeff",
)
OURS = "upref"  # in meta: the hyperparameters that upref's loss is given, as JSON
# verl's names of the KL term that the checks compute
K3 = ("low_var_kl", "k3")
# upref's losses that verl knows: loss_mode -> objective; upref_frameworks.verl.training
# fills it
LOSSES: dict[str, Objective] = {}
SCORES = ("token_level_scores", "rm_scores")  # names of the reward in verl's trainers
BY_LENGTH = "seq-mean-token-sum-norm"

HINTS = {
    "sampler": "set actor_rollout_ref.rollout.calculate_log_probs=True.",
    "ref": "set actor_rollout_ref.actor.use_kl_loss=True.",
    "entropy": "set actor_rollout_ref.actor.calculate_entropy=True.",
    "version": "verl's workers do not have it.",
    "reward": "the trainer did not send it to the actor.",
}


def in_verl(folder: str | Path, every: int = EVERY, watch: str = "") -> Recording:
    """Record, and judge, the actor's optimizer steps of every verl engine of this
    process.

    Only steps of the actor are taken, not those of a critic.

    Args:
        folder: where a file for each step and rank goes, on a path that all nodes share
            or one for each node. "": no files.
        every: number of optimizer steps between two that are taken; the first one is
            taken too.
        watch: what the loss should be, as UPREF_WATCH has it; "": the steps are not
            judged.

    Returns:
        The Recording, whose `stop` ends it.

    Raises:
        InputError: the folder cannot be made, or the objective or a hyperparameter does
            not exist, or there is neither a folder nor an objective.
    """
    sink = make_watch(watch, folder) if watch else sink_of(folder, "all")
    if sink is None:
        raise InputError(
            "there is nothing to do: name a folder, or an objective to watch."
        )
    return Recording(Steps(Schedule(every), sink, folder).detach)


def make_watch(words: str, folder: str | Path = "") -> Sink:
    """Make what judges the steps, from `NAME KEY=VALUE...`.

    Args:
        words: an objective, its hyperparameters, and agg, on_fail and keep where
            wanted; or `own` with on_fail and keep.
        folder: where judged steps are recorded too; "": they are not.

    Returns:
        A Watch, or an OwnWatch for `own`.

    Raises:
        InputError: the words cannot be read, or the objective or a hyperparameter does
            not exist.
    """
    name, *rest = words.split()
    given = {word.partition("=")[0]: word.partition("=")[2] for word in rest}
    on_fail = given.pop("on_fail", "stop")
    keep = given.pop("keep", "all")
    expect_choices(on_fail, keep)
    sink = sink_of(folder, keep)
    if name == "own":
        if given:
            raise InputError(
                f"{WATCHED}=own takes on_fail and keep, not {sorted(given)[0]!r}: the rest is verl's configuration."
            )
        return OwnWatch(on_fail, keep, sink)
    agg = given.pop("agg", "")
    try:
        hp = {key: float(value) for key, value in given.items()}
    except ValueError:
        wanted = "an objective and KEY=NUMBER after it"
        raise InputError(f"{WATCHED} is {wanted}, not {words!r}.") from None
    objective = get(name).aggregated(agg) if agg else name
    return Watch(objective, hp, on_fail, sink, keep)


class OwnWatch:
    """Judges the steps of a loss of upref's by the objective and the hyperparameters
    that verl's configuration names.

    Args:
        on_fail, keep, sink: of the Watch.
    """

    def __init__(self, on_fail: str, keep: str, sink: Sink | None) -> None:
        self.on_fail = on_fail
        self.keep = keep
        self.sink = sink
        self.watch: Watch | None = None

    def __call__(
        self, batch: RecordedBatch | None, group: Any = None
    ) -> Mapping[str, float]:
        """Judge a step, as `Watch` does."""
        if self.watch is None and batch is not None:
            objective, hp = configured_objective(batch.meta)
            self.watch = Watch(
                objective, hp, self.on_fail, self.sink, self.keep, known=True
            )
        # without a step of its own, this rank has only to tell the others
        watch = self.watch or Watch("dapo", {}, "warn", None)
        return watch(batch, group)


def configured_objective(meta: Mapping[str, str]) -> tuple[Objective, dict[str, Any]]:
    """Return the objective of upref's that verl is configured to train.

    It is the objective as its loss in verl computes it: without prompts, and with
    verl's KL term.

    Args:
        meta: of a recorded step.

    Returns:
        The objective and the hyperparameters that were given.

    Raises:
        InputError: the loss is not upref's, or a recorded step does not determine its
            loss.
    """
    mode = meta.get("loss_mode", "")
    if mode not in LOSSES:
        raise InputError(
            f"{WATCHED}=own is for a loss of upref's, and loss_mode is {mode}: name the objective instead."
        )
    objective = LOSSES[mode]
    if objective.name in names():  # not what was registered under its name
        objective = get(objective.name)
    if objective.batch_coupled:
        raise InputError(
            f"{objective.name} acts on each micro-batch by itself, so a whole step does not show its loss."
        )
    if objective.agg == "group-token-mean":  # the plug-in has no prompts
        objective = objective.aggregated("token-mean")
    objective = replace(objective, kl="")
    hp = json.loads(meta[OURS])
    coefficient = float(meta["kl_loss_coef"]) if meta["use_kl_loss"] == "True" else 0.0
    if coefficient:
        kind = meta["kl_loss_type"]
        agg = meta["loss_agg_mode"]
        if kind not in K3 or agg != verl_name(objective.level, objective.agg):
            raise InputError(
                f"the KL term {kind} under {agg} is not one that is computed here."
            )
        objective = replace(objective, kl="k3")
        hp = hp | {"beta": coefficient}
    return objective, hp


def by_environment() -> Recording | None:
    """Record and judge as the environment variables say.

    Returns:
        The Recording; None where the variables are not set, or where it cannot be done.
        Then one warning is logged: verl hides what a plug-in raises.
    """
    folder = os.environ.get(FOLDER, "")
    watch = os.environ.get(WATCHED, "")
    if not folder and not watch:
        return None
    every = os.environ.get(HOW_OFTEN, str(EVERY))
    try:
        if not every.isdecimal():
            wanted = "the number of steps between two records"
            raise InputError(f"{HOW_OFTEN} is {wanted}, not {every!r}.")
        return in_verl(folder, int(every), watch)
    except Exception as e:
        log.warning("upref records and judges nothing of this run: %s", e)
        return None


class Steps:
    """The wrapped `train_batch`, and the number of steps of each engine."""

    def __init__(self, schedule: Schedule, sink: Sink, folder: str | Path) -> None:
        """Put a wrapper in the place of verl's `train_batch`."""
        from verl.workers.engine.base import BaseEngine

        self.engines: Any = BaseEngine
        self.schedule = schedule
        self.sink = sink
        self.folder = Path(folder) if folder else None
        self.counts: dict[int, int] = {}
        self.stopped = False
        self.inner = BaseEngine.train_batch
        steps = self

        def train_batch(
            self: Any, data: Any, loss_function: LossFunction
        ) -> dict[str, Any]:
            """Take an optimizer step by `Steps.train_batch`; `self` is verl's engine."""
            return steps.train_batch(self, data, loss_function)

        self.wrapper = train_batch
        self.engines.train_batch = train_batch

    def detach(self) -> None:
        """Restore verl's own `train_batch`, and record nothing from now on."""
        self.stopped = True
        if self.engines.train_batch is self.wrapper:
            self.engines.train_batch = self.inner

    def train_batch(
        self, engine: Any, data: Any, loss_function: LossFunction
    ) -> dict[str, Any]:
        """Take an optimizer step, and record it if it is one of the actor's and due.

        Args:
            engine: verl's engine.
            data: the batch of this rank, a TensorDict.
            loss_function: verl's loss of a micro-batch.

        Returns:
            What verl's `train_batch` returns; its metrics have those of the judge in
            addition.
        """
        is_actors = "old_log_probs" in data.keys()  # noqa: SIM118  a TensorDict iterates over rows
        # a step of the critic, or of supervised training
        if self.stopped or not is_actors:
            return self._train(engine, data, loss_function)
        if id(engine) not in self.counts:
            self.counts[id(engine)] = self._recorded(engine)
        self.counts[id(engine)] += 1
        step = self.counts[id(engine)]
        if not self.schedule.due(step):
            return self._train(engine, data, loss_function)
        kept = KeptStep(engine, loss_function)
        out = self._train(engine, data, kept.loss_function)
        if engine.is_mp_src_rank_with_outputs():
            group = engine.get_data_parallel_group()
            finish(lambda: self._hand_over(kept, step, group, out), self.detach, group)
        return out

    def _train(
        self, engine: Any, data: Any, loss_function: LossFunction
    ) -> dict[str, Any]:
        """Call verl's own train_batch."""
        out: dict[str, Any] = self.inner(engine, data, loss_function)
        return out

    def _hand_over(
        self, kept: "KeptStep", step: int, group: Any, out: dict[str, Any]
    ) -> None:
        """Give the step to the sink, and put the metrics that it returns into verl's,
        which has a list for each.
        """
        metrics = hand_over(lambda: kept.batch(step), self.sink, group)
        out["metrics"] |= {name: [value] for name, value in metrics.items()}

    def _recorded(self, engine: Any) -> int:
        """Return the last step of this rank in the folder, from which a resumed run
        goes on; 0 without one.
        """
        if self.folder is None:
            return 0
        rank = engine.get_data_parallel_rank()
        names = [file.name for file in self.folder.glob(f"step*-rank{rank:04d}.npz")]
        numbers = [
            int(found[1]) for name in names if (found := re.match(r"step(\d+)-", name))
        ]
        return max(numbers, default=0)


class KeptStep:
    """What one optimizer step of one engine leaves."""

    def __init__(self, engine: Any, inner: LossFunction) -> None:
        """Keep nothing yet; the config is the one that verl bound to its loss."""
        self.engine = engine
        self.inner = inner
        self.error: Exception | None = None  # why the step cannot be recorded
        self.config = getattr(inner, "keywords", {}).get("config")
        self.micro_batches: list[dict[str, Tensor]] = []
        self.losses: list[Tensor] = []
        self.counts: dict[str, float] = {}

    def loss_function(
        self, model_output: Any, data: Any, dp_group: Any = None, **kw: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute verl's loss of a micro-batch, and keep what it reads.

        An error while keeping does not reach verl here: `batch` raises it.

        Args:
            model_output: of the engine: log_probs, and entropy if verl computes it.
            data: the micro-batch, a TensorDict.
            dp_group: the data-parallel group.
            **kw: what else verl passes.

        Returns:
            verl's loss and metrics, unchanged.
        """
        loss, metrics = self.inner(
            model_output=model_output, data=data, dp_group=dp_group, **kw
        )
        try:
            if self.error is None:
                self._keep(model_output, data, loss)
        except Exception as e:  # `batch` raises it, where all ranks learn of it
            self.error = e
        return loss, metrics

    def _keep(self, model_output: Any, data: Any, loss: Tensor) -> None:
        """Keep a micro-batch: its columns now, its gradient in the backward pass."""
        from verl.workers.utils.padding import no_padding_2_padding

        lp = model_output["log_probs"]
        columns = {
            "ids": data["responses"],
            "mask": data["response_mask"],
            "adv": data["advantages"],
        }
        columns |= {name: data[key] for name, key in OPTIONAL.items() if key in data}
        kept = {name: _dense(x) for name, x in columns.items()}
        kept["mask"] = kept["mask"].bool()
        kept["now"] = no_padding_2_padding(lp.detach(), data).cpu()
        if model_output.get("entropy") is not None:
            kept["entropy"] = no_padding_2_padding(
                model_output["entropy"].detach(), data
            ).cpu()
        kept = _one_width(kept)
        scores = next((data[key] for key in SCORES if key in data), None)
        if scores is not None:
            kept["reward"] = _dense(scores).sum(1)
        kept |= _groups(data)

        def padded(gradient: Tensor) -> Tensor:
            return _fitted(no_padding_2_padding(gradient, data), kept["mask"].shape[1])

        if self._gradient_is_whole():
            keep_gradient(kept, lp, padded)
        self.micro_batches.append(kept)
        self.losses.append(loss.detach())
        self.counts = {
            "tokens": float(data["batch_num_tokens"]),
            "responses": float(data["global_batch_size"]),
            "ranks": float(data["dp_size"]),
        }

    def _gradient_is_whole(self) -> bool:
        """Return whether this rank has dL/dlp of whole sequences: with FSDP, without
        Ulysses.
        """
        alone = getattr(self.engine, "ulysses_sequence_parallel_size", 1) == 1
        return alone and "FSDP" in type(self.engine).__name__

    def batch(self, step: int) -> RecordedBatch:
        """Return the step as a recorded batch.

        Args:
            step: its number.

        Returns:
            The batch of this rank. All ranks must call this: the logged loss is their
            mean.

        Raises:
            Exception: what went wrong while a micro-batch was kept.
        """
        mine = sum(float(loss) for loss in self.losses)
        losses = gather_ranks(mine, self.engine.get_data_parallel_group())
        if self.error is not None:
            raise self.error
        ranks = self.counts["ranks"]
        loss = sum(losses) / len(losses)
        logged = self.counts | {"loss": loss}
        return step_batch(
            self.micro_batches,
            step=step,
            rank=self.engine.get_data_parallel_rank(),
            logged=logged | self._length(),
            meta=self._meta(),
            gradient_scale=ranks * loss_scale(getattr(self.engine, "scaler", None)),
            hints=HINTS,
        )

    def _length(self) -> dict[str, float]:
        """Return the length that divides the loss, where the aggregation has one."""
        if self.config is None or self.config.loss_agg_mode != BY_LENGTH:
            return {}
        widest = max(part["mask"].shape[1] for part in self.micro_batches)
        return {"length": float(self.config.loss_scale_factor or widest)}

    def _meta(self) -> dict[str, str]:
        """Return the version and the settings of verl that the record names."""
        import verl

        meta = {"framework": f"verl {verl.__version__}"}
        if self.config is not None:
            meta |= {name: str(self.config.get(name)) for name in SETTINGS}
            meta["loss_mode"] = str(self.config.policy_loss.get("loss_mode", "vanilla"))
            given = dict(self.config.policy_loss.get("upref", None) or {})
            apart = ("parity", "step_check")  # settings that are no hyperparameters
            given = {name: value for name, value in given.items() if name not in apart}
            meta[OURS] = json.dumps(given)
            if self.config.entropy_coeff:
                meta[EXTRA_TERMS] = "an entropy bonus"
        return meta


def _dense(x: Tensor) -> Tensor:
    """Return a tensor, nested or not, as [B, T] on the CPU."""
    dense = torch.nested.to_padded_tensor(x, 0) if x.is_nested else x
    return dense.detach().cpu()


def _fitted(x: Tensor, width: int) -> Tensor:
    """Return x [B, T] at another width: cut off, where it has padding, or filled up
    with 0.
    """
    return torch.nn.functional.pad(x, (0, max(0, width - x.shape[1])))[:, :width]


def _one_width(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the columns at the width of the mask. One number of a response is repeated
    for each of its tokens.
    """
    width = columns["mask"].shape[1]
    out = {}
    for name, x in columns.items():
        out[name] = _fitted(x.expand(-1, width) if x.shape[1] == 1 else x, width)
    return out


def _groups(data: Any) -> dict[str, Tensor]:
    """Return {"group": a number for the prompt of each response}; {} where verl's uid,
    a text, is not there for each.
    """
    from verl.utils import tensordict_utils as tu

    if "uid" not in data.keys():  # noqa: SIM118
        return {}
    texts = tu.get(data, "uid")
    if len(texts) != len(data):
        return {}
    return {"group": torch.tensor([prompt_number(str(text)) for text in texts])}
