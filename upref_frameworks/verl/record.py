# SPDX-License-Identifier: Apache-2.0
"""Record the optimizer steps of verl's actor, under any policy loss, as the environment
says.

    UPREF_REPLAY=dumps UPREF_REPLAY_EVERY=50 python -m verl.trainer.main_ppo ...
    UPREF_WATCH="dapo eps_high=0.2 c=3" python -m verl.trainer.main_ppo ...

The first records steps. The second judges the same steps while they train
(`upref.replay.watch`): it holds the objective, its hyperparameters, and `agg=NAME` and
`on_fail=warn` where wanted. Both together record and judge. verl imports
upref_frameworks.verl.training in each of its processes (group `verl.plugins`), which
calls `by_environment`. **The files hold users' texts, as token ids.**

One method is wrapped, `train_batch` of verl's engines: one call is one optimizer step
of one rank. The loss function that it is given is called as before, and what it reads
is kept: log π_θ and the entropy of the model's output, the columns of the micro-batch,
and dL/dlog π_θ, which arrives in verl's own backward pass. The worker counts the steps,
because it has no other number of them; in a folder with recorded steps the count goes
on.
"""

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from upref.errors import InputError
from upref.registry import get
from upref.replay.prompts import prompt_number
from upref.replay.record import (
    EVERY,
    Recording,
    Schedule,
    Sink,
    file_sink,
    guarded,
    keep_gradient,
    loss_scale,
    open_folder,
    step_batch,
)
from upref.replay.schema import RecordedBatch
from upref.replay.terms import EXTRA
from upref.replay.watch import Watch

log = logging.getLogger(__name__)
FOLDER, HOW_OFTEN, WATCHED = "UPREF_REPLAY", "UPREF_REPLAY_EVERY", "UPREF_WATCH"
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
            not exist.
    """
    place = open_folder(folder) if folder else None
    keep = None if place is None else file_sink(place)
    sink = watched(watch, keep) if watch else keep
    if sink is None:
        raise InputError(
            "there is nothing to do: name a folder, or an objective to watch."
        )
    return Recording(Steps(Schedule(every), sink, place).detach)


def watched(words: str, then: Sink | None) -> Watch:
    """The Watch of `NAME KEY=VALUE...`, with agg and on_fail beside the
    hyperparameters.
    """
    name, *rest = words.split()
    given = {word.partition("=")[0]: word.partition("=")[2] for word in rest}
    on_fail = given.pop("on_fail", "stop")
    agg = given.pop("agg", "")
    try:
        hp = {key: float(value) for key, value in given.items()}
    except ValueError:
        wanted = "an objective and KEY=NUMBER after it"
        raise InputError(f"{WATCHED} is {wanted}, not {words!r}.") from None
    return Watch(get(name).aggregated(agg) if agg else name, hp, on_fail, then)


def by_environment() -> Recording | None:
    """Record and judge as the environment says.

    Where that cannot be done it logs one warning: verl hides what a plug-in raises.
    """
    folder, watch = os.environ.get(FOLDER, ""), os.environ.get(WATCHED, "")
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

    def __init__(self, schedule: Schedule, sink: Sink, folder: Path | None) -> None:
        from verl.workers.engine.base import BaseEngine

        self.engines: Any = BaseEngine
        self.schedule = schedule
        self.sink = sink
        self.folder = folder
        self.counts: dict[int, int] = {}
        self.stopped = False
        self.inner = BaseEngine.train_batch
        steps = self

        def train_batch(self: Any, data: Any, loss_function: Any) -> Any:
            return steps.train_batch(self, data, loss_function)

        self.wrapper = train_batch
        self.engines.train_batch = train_batch

    def detach(self) -> None:
        """Take the wrapper off."""
        self.stopped = True
        if self.engines.train_batch is self.wrapper:
            self.engines.train_batch = self.inner

    def train_batch(self, engine: Any, data: Any, loss_function: Any) -> Any:
        """One optimizer step of verl, recorded where it is one of the actor's and due."""
        is_actors = "old_log_probs" in data.keys()  # noqa: SIM118  a TensorDict iterates over rows
        # a step of the critic, or of supervised training
        if self.stopped or not is_actors:
            return self.inner(engine, data, loss_function)
        if id(engine) not in self.counts:
            self.counts[id(engine)] = self._recorded(engine)
        self.counts[id(engine)] += 1
        step = self.counts[id(engine)]
        if not self.schedule.due(step):
            return self.inner(engine, data, loss_function)
        kept = Kept(engine, loss_function, self.detach)
        out = self.inner(engine, data, kept.loss_function)
        if not self.stopped and engine.is_mp_src_rank_with_outputs():
            guarded(lambda: self._hand_over(engine, kept.batch(step), out), self.detach)
        return out

    def _hand_over(
        self, engine: Any, batch: RecordedBatch, out: dict[str, Any]
    ) -> None:
        """Give the step to the sink, and its metrics to verl, which takes a list of
        each.
        """
        metrics = self.sink(batch, engine.get_data_parallel_group())
        out["metrics"] |= {name: [value] for name, value in (metrics or {}).items()}

    def _recorded(self, engine: Any) -> int:
        """The last step of this rank in the folder: a resumed run goes on from there."""
        if self.folder is None:
            return 0
        rank = engine.get_data_parallel_rank()
        names = [file.name for file in self.folder.glob(f"step*-rank{rank:04d}.npz")]
        numbers = [
            int(found[1]) for name in names if (found := re.match(r"step(\d+)-", name))
        ]
        return max(numbers, default=0)


class Kept:
    """What one optimizer step of one engine leaves."""

    def __init__(
        self, engine: Any, inner: Callable[..., Any], stop: Callable[[], None]
    ) -> None:
        self.engine = engine
        self.inner = inner
        self.stop = stop
        self.config = getattr(inner, "keywords", {}).get("config")
        self.micro_batches: list[dict[str, Tensor]] = []
        self.losses: list[Tensor] = []
        self.counts: dict[str, float] = {}

    def loss_function(
        self, model_output: Any, data: Any, dp_group: Any = None, **kw: Any
    ) -> Any:
        """verl's loss of a micro-batch, and what it reads."""
        loss, metrics = self.inner(
            model_output=model_output, data=data, dp_group=dp_group, **kw
        )
        guarded(lambda: self._keep(model_output, data, loss), self.stop)
        return loss, metrics

    def _keep(self, model_output: Any, data: Any, loss: Tensor) -> None:
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
        """Whether this rank has dL/dlp of whole sequences: with FSDP, without Ulysses."""
        alone = getattr(self.engine, "ulysses_sequence_parallel_size", 1) == 1
        return alone and "FSDP" in type(self.engine).__name__

    def batch(self, step: int) -> RecordedBatch:
        """The step as a recorded batch."""
        ranks = self.counts["ranks"]
        loss = torch.stack(self.losses).sum().float()
        group = self.engine.get_data_parallel_group()
        if group is not None and ranks > 1:
            torch.distributed.all_reduce(loss, group=group)
            loss = loss / ranks
        logged = self.counts | {"loss": float(loss)}
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
        if self.config is None or self.config.loss_agg_mode != BY_LENGTH:
            return {}
        widest = max(part["mask"].shape[1] for part in self.micro_batches)
        return {"length": float(self.config.loss_scale_factor or widest)}

    def _meta(self) -> dict[str, str]:
        import verl

        meta = {"framework": f"verl {verl.__version__}"}
        if self.config is not None:
            meta |= {name: str(self.config.get(name)) for name in SETTINGS}
            meta["loss_mode"] = str(self.config.policy_loss.get("loss_mode", "vanilla"))
            if self.config.entropy_coeff:
                meta[EXTRA] = "an entropy bonus"
        return meta


def _dense(x: Tensor) -> Tensor:
    """[B, T] on the CPU, from a nested tensor too."""
    dense = torch.nested.to_padded_tensor(x, 0) if x.is_nested else x
    return dense.detach().cpu()


def _fitted(x: Tensor, width: int) -> Tensor:
    """[B, T] of another width; what is cut off is padding."""
    return torch.nn.functional.pad(x, (0, max(0, width - x.shape[1])))[:, :width]


def _one_width(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Columns at the width of the mask; one number of a response stands at each of its
    tokens.
    """
    width = columns["mask"].shape[1]
    out = {}
    for name, x in columns.items():
        out[name] = _fitted(x.expand(-1, width) if x.shape[1] == 1 else x, width)
    return out


def _groups(data: Any) -> dict[str, Tensor]:
    """The prompt of each response as a number: verl's uid is a text."""
    from verl.utils import tensordict_utils as tu

    if "uid" not in data.keys():  # noqa: SIM118
        return {}
    texts = tu.get(data, "uid")
    if len(texts) != len(data):
        return {}
    return {"group": torch.tensor([prompt_number(str(text)) for text in texts])}
