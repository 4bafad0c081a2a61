# SPDX-License-Identifier: Apache-2.0
"""The optimizer steps of one step of a run, as files that `upref replay` reads, each
compared with the reference before it is written.

    RUN/recorded/step000001-rank0000.npz      the first optimizer step of the run

`sampler` is what the policy said when it sampled, token by token with a cache; `old` is
what lp_old of the loss was; `now` and `grad` are those of the pass that trains.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from repro.mini.train.rollout import Batch
from upref import Totals, __version__
from upref.replay.record import file_sink, keep_gradient, step_batch
from upref_frameworks import parity

FOLDER = "recorded"


class Recorder:
    """Takes the minibatches of one batch, in the order in which they train.

    Args:
        run: the Run.
        batch: what was sampled for this step.
        out: folder of the run.
    """

    def __init__(self, run: Any, batch: Batch, out: Path):
        """Make the folder of the files, and begin with no minibatch."""
        self.run, self.batch = run, batch
        self.folder = out / FOLDER
        self.folder.mkdir(exist_ok=True)
        self.updates = run.s.epochs * run.s.minibatches  # of each step
        self.done = 0  # minibatches
        # the comparison that is farthest off, in units of what rounding allows
        self.worst = parity.Parity(0.0, 0.0, 0, (-1, -1))

    def begin(
        self, rows: Tensor, lp: Tensor, loss: Tensor, H: Tensor, totals: Totals
    ) -> None:
        """Keep a minibatch, before its backward pass.

        Args:
            rows: of the batch, [N].
            lp: log π_θ of its tokens, [N, T].
            loss: the scalar that trains.
            H: entropies in nats of its unmasked tokens.
            totals: counts by which the loss is divided.
        """
        self.rows, self.lp, self.loss, self.totals = rows, lp, loss, totals
        self.roundings = parity.roundings(loss, lp)
        width = lp.shape[1]
        mask = self.batch.mask[rows, :width]
        self.columns = {
            "now": lp.detach(),
            "entropy": lp.new_zeros(lp.shape).masked_scatter(mask, H),
        }
        keep_gradient(self.columns, lp)

    def end(self) -> None:
        """Compare the minibatch, whose gradient has arrived since `begin`, with the
        reference, and write it.

        Raises:
            ParityError: the loss or its gradient is not the objective's; nothing is
                written.
        """
        run, rows, width = self.run, self.rows, self.lp.shape[1]
        tokens, mask, state, old = (
            x[rows, :width]
            for x in (
                self.batch.tokens,
                self.batch.mask,
                self.batch.state,
                self.batch.logp,
            )
        )
        A = self.batch.adv[rows, None].expand_as(old)
        found = parity.compare(
            run.objective,
            self.loss,
            self.columns["grad"],
            self.roundings,
            logp=self.columns["now"],
            logp_old=old,
            adv=A,
            mask=mask,
            totals=self.totals,
            entropy=self.columns["entropy"],
            **run.s.hyperparameters(),
        )
        number = run.step * self.updates + self.done + 1
        if found.of_bound > 1:  # more than rounding allows
            raise parity.ParityError(
                f"optimizer step {number}: the loss or its gradient is {found.max_abs:.2g} from the reference, "
                f"{found.of_bound:.1f} times what rounding allows."
            )
        self.worst = max(self.worst, found, key=lambda parity: parity.of_bound)
        self.done += 1
        self._write(number, tokens, mask, state, old, A)

    def _write(
        self,
        number: int,
        tokens: Tensor,
        mask: Tensor,
        state: Tensor,
        old: Tensor,
        A: Tensor,
    ) -> None:
        """Write the minibatch as a file that `upref replay` reads.

        Args:
            number: of the optimizer step in the run, from 1.
            tokens: [N, T], as all that follow.
            mask: of its tokens.
            state: of each token, a row of Batch.log_probs.
            old: lp_old.
            A: advantages.
        """
        s, rows = self.run.s, self.rows
        sampled = self.batch.log_probs[state, tokens]
        rollout = max(0, self.run.step - s.staleness)  # whose policy sampled
        columns = self.columns | {
            "ids": tokens,
            "mask": mask,
            "adv": A,
            "old": old,
            "sampler": sampled.where(mask, 0.0),
            "reward": self.batch.reward[rows],
            "group": self.batch.group[rows],
            # the optimizer step, from 1, before which the policy sampled
            "version": (rows * 0) + rollout * self.updates + 1,
        }
        logged = {
            "loss": float(self.loss.detach()),
            "tokens": float(mask.sum()),
            "responses": float(len(rows)),
            "ranks": 1.0,
        }
        meta = {
            "framework": f"repro.mini of upref {__version__}",
            "objective": s.objective,
            "aggregation": self.run.objective.agg,
            "base": Path(s.base).name,
            "task": s.task,
            "temperature": f"{s.temperature:g}",
        }
        parts = [{name: x.detach().cpu() for name, x in columns.items()}]
        step = step_batch(parts, step=number, rank=0, logged=logged, meta=meta)
        file_sink(self.folder)(step, None)

    def numbers(self) -> dict[str, float]:
        """Return two numbers for steps.jsonl: the largest difference from the reference
        of all minibatches so far, and the same in units of what rounding allows.
        """
        return {
            "parity_max_abs": self.worst.max_abs,
            "parity_of_bound": self.worst.of_bound,
        }
