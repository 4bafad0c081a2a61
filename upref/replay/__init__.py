# SPDX-License-Identifier: Apache-2.0
"""Replay: what a real run's recorded batches say, without its GPUs and without its
trainer.

    batch = upref.replay.read("dumps/step000003.npz")
    upref.replay.gap(batch)                                # the sampler's log-probabilities, and why they differ
    upref.replay.advantages(batch)                         # which estimator, over which groups
    upref.replay.loss(batch, "dapo", 0.0123, eps_high=0.28)
    upref.replay.weights(batch, ["up_dapo", "tis(dapo)"], ran="dapo")
    upref.replay.clipping(upref.get("dapo"), batch)        # which tokens are clipped, on which side
    upref.replay.record(trainer, "dumps", every=50)        # such files, from TRL's GRPOTrainer
    upref.replay.watch(trainer, "dapo", eps_high=0.2)      # the same checks while it trains

The columns are those of docs/dump.md. A recorded batch holds users' texts, as token
ids.
"""

from upref.replay.advantages import advantages
from upref.replay.batch import make_batch
from upref.replay.clipping import clipping
from upref.replay.compare import heaviest_tokens, weights
from upref.replay.files import read, read_steps, write
from upref.replay.gap import gap
from upref.replay.loss import loss
from upref.replay.normalizer import normalizer
from upref.replay.record import Recording, record
from upref.replay.report import Replay
from upref.replay.run import replay
from upref.replay.schema import RecordedBatch
from upref.replay.series import measure_step, series
from upref.replay.watch import watch

__all__ = [
    "RecordedBatch",
    "Recording",
    "Replay",
    "advantages",
    "clipping",
    "gap",
    "heaviest_tokens",
    "loss",
    "make_batch",
    "measure_step",
    "normalizer",
    "read",
    "read_steps",
    "record",
    "replay",
    "series",
    "watch",
    "weights",
    "write",
]
