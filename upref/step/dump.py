# SPDX-License-Identifier: Apache-2.0
"""One real optimizer step in a file of docs/dump.md, and its check on another machine.

    with upref.step.dump_step(model, rows, "step.npz"):       # where the run trains
        trainer.train()
    print(upref.step.check_dump("step.npz", model, "dapo", temperature=0.7))

The gradient of a large model does not fit into a file. Its sketch does: of each
parameter, projections on 64 directions. Direction k has the entries whose bucket is k,
each with a random sign, and the buckets and signs follow from the parameter's name, so
both machines use the same ones. The sketch is linear: the reference is compared, and
the weight of each token is read, in the sketch as in the whole gradient. **The file
holds users' texts, as token ids.**
"""

import base64
import hashlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from upref.errors import InputError
from upref.registry import Objective
from upref.replay.batch import make_batch
from upref.replay.files import read, write
from upref.replay.schema import RecordedBatch
from upref.step.case import allowed, built, half_of, meant
from upref.step.check import StepReport, report_step
from upref.step.forward import expected
from upref.step.ranks import is_follower
from upref.step.reference import Gradient, TorchModel, unwrapped, whole
from upref.step.rows import AXES, Row, validated
from upref.verify.report import note

DIRECTIONS = 64  # of each parameter; one with fewer entries is kept whole
ENTRIES = 2**22  # of a parameter that are projected at once
COLUMNS = ("old", "ref", "sampler")


# ---- the sketch ----------------------------------------------------------------------
def project(name: str, gradient: Tensor) -> Tensor:
    """Return the projections of one parameter's gradient.

        s_k = Σ_i [bucket(i) = k] sign(i) g_i,   E |s|² = |g|²

    Args:
        name: of the parameter; buckets and signs follow from it.
        gradient: of any shape, dtype and device.

    Returns:
        [64] in float64 on the CPU; the entries themselves where there are no more.
    """
    g = gradient.reshape(-1)
    if len(g) <= DIRECTIONS:
        return g.to("cpu", torch.float64)
    out = torch.zeros(DIRECTIONS, dtype=torch.float64)
    digest = hashlib.sha256(name.encode()).digest()
    random = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    for part in g.split(ENTRIES):
        # one number has the bucket, and in its last bit the sign
        drawn = torch.randint(2 * DIRECTIONS, part.shape, generator=random)
        signs = 1.0 - 2.0 * (drawn % 2)
        out.index_add_(0, drawn // 2, part.to("cpu", torch.float64) * signs)
    return out


class SketchedModel(TorchModel):
    """A model whose gradients are sketches."""

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self.shapes = {
            n: torch.Size([min(s.numel(), DIRECTIONS)]) for n, s in self.shapes.items()
        }

    def flat(self, g: Gradient) -> Tensor:
        """The sketches, one behind the other; 0 where a parameter has no gradient.

        Args:
            g: gradients or sketches, by the names of the parameters.

        Returns:
            [P], in the order of the parameters.
        """
        return super().flat(
            {
                n: x if x.numel() == self.shapes[n].numel() else project(n, x)
                for n, x in g.items()
                if n in self.shapes
            }
        )

    def pull_each(self, z: Tensor, dz: Tensor, ids: Sequence[int]) -> Iterator[Tensor]:
        for one in dz:
            yield self.pull(z, one, ids)[None]


# ---- where the run trains ------------------------------------------------------------
@contextmanager
def dump_step(
    model: nn.Module, rows: Sequence[Row], path: str | Path
) -> Iterator[None]:
    """Write the first optimizer step that is made inside to a file.

    Enter it before the trainer is built, as `record_step`. Gradients are what the
    optimizer gets. One parameter at a time is copied to the CPU.

    Args:
        model: the nn.Module that is trained, in place. FSDP2's shards are gathered.
        rows: the responses of this step, of all ranks.
        path: the file, which ends in .npz; rank 0 writes it. It holds users' texts, as
            token ids.

    Raises:
        InputError: no optimizer step with the model's parameters was made, or the rows
            are none that a step can have.
    """
    if Path(path).suffix != ".npz":
        raise InputError(f"{path}: a dumped step is written as .npz.")
    checked = validated(rows, max((max(r.ids) for r in rows), default=0) + 1)
    net = unwrapped(model)
    meta: dict[str, str] = {}

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Keep the sketch of each gradient that the first step has."""
        named = {id(p): n for n, p in net.named_parameters()}
        if "weights" not in meta:
            meta["weights"] = hash_of(net)
        for group in optimizer.param_groups:
            sign = -1.0 if group.get("maximize") else 1.0
            for p in group["params"]:
                key = f"gradient: {named.get(id(p), '')}"
                if id(p) in named and p.grad is not None and key not in meta:
                    g = whole(p.grad)
                    sketch = sign * project(named[id(p)], g)
                    meta[key] = base64.b64encode(sketch.numpy().tobytes()).decode()
                    meta[f"norm: {named[id(p)]}"] = repr(float(g.double().norm()))

    handle = register_optimizer_step_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()
    if not any(key.startswith("gradient: ") for key in meta):
        raise InputError(
            "no optimizer step with this model's parameters was made inside dump_step."
        )
    if not is_follower():
        write(Path(path), _batch_of(checked, meta, str(path)))


def hash_of(net: nn.Module) -> str:
    """The SHA-256 of a model's parameters: names, shapes, dtypes and bytes.

    Args:
        net: the model.

    Returns:
        64 hexadecimal digits.
    """
    out = hashlib.sha256()
    for name, p in sorted(net.named_parameters()):
        x = whole(p).cpu().contiguous()
        out.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        out.update(x.reshape(-1).view(torch.uint8).numpy().tobytes())
    return out.hexdigest()


def _batch_of(rows: list[Row], meta: dict[str, str], file: str) -> RecordedBatch:
    """The rows in the columns of docs/dump.md, prompts included."""
    offsets = np.cumsum([0, *(len(r.ids) for r in rows)])

    def flat(values: list[list[Any]]) -> np.ndarray:
        """One number for each token: 0 in prompts."""
        each = (
            [0] * len(r.prompt) + list(x) for r, x in zip(rows, values, strict=True)
        )
        return np.array([v for x in each for v in x])

    columns: dict[str, Any] = {
        "offsets": offsets,
        "ids": np.array([t for r in rows for t in r.ids]),
        "mask": flat([r.trains for r in rows]),
        "adv": flat(
            [
                r.adv if isinstance(r.adv, list) else [r.adv] * len(r.response)
                for r in rows
            ]
        ).astype(float),
        "group": np.array([r.group for r in rows]),
    }
    for name in COLUMNS:
        if all(getattr(r, name) is not None for r in rows):
            columns[name] = flat([getattr(r, name) for r in rows]).astype(float)
    lengths = [[len(r.prompt), len(r.response)] for r in rows]
    return make_batch(columns, file=file, meta=meta | {"rows": json.dumps(lengths)})


# ---- where it is checked -------------------------------------------------------------
def check_dump(
    path: str | Path,
    model: nn.Module,
    objective: str | Objective,
    *,
    temperature: float,
    beta: float = 0.0,
    entropy_coef: float = 0.0,
    z_loss_coef: float = 0.0,
    clip: float | None = None,
    scale: float = 1.0,
    explain: bool = True,
    **hp: Any,
) -> StepReport:
    """Check a step that `dump_step` wrote against the reference.

    Args:
        path: the file.
        model: the model with the weights from before the step.
        objective, temperature, beta, entropy_coef, z_loss_coef, scale, explain, **hp:
            as of check_step.
        clip: the bound of the gradient's norm in the run. Where it acted, the direction
            of the gradient is compared and its size is not.

    Returns:
        A Report, as check_step's.

    Raises:
        InputError: the file is no dumped step, or the weights are others.
    """
    start = time.perf_counter()
    goal = meant(
        objective, hp, temperature, beta, entropy_coef, z_loss_coef, None, scale
    )
    batch = read(path)
    if not {"weights", "rows"} <= batch.meta.keys():
        raise InputError(
            f"{path} has no gradients: write it with upref.step.dump_step."
        )
    if hash_of(unwrapped(model)) != batch.meta["weights"]:
        raise InputError(
            "the model's weights are not those of the dumped step: load the weights "
            "from before it, in the same dtype."
        )
    reference = SketchedModel(model)
    case = built(reference, goal, _rows_of(batch), AXES)
    found = {
        key.removeprefix("gradient: "): torch.from_numpy(
            np.frombuffer(base64.b64decode(text), dtype=np.float64).copy()
        )
        for key, text in batch.meta.items()
        if key.startswith("gradient: ")
    }
    norms = [float(v) for k, v in batch.meta.items() if k.startswith("norm: ")]
    clipped = clip is not None and math.hypot(*norms) >= (1 - 1e-3) * clip
    if clipped:
        want = expected(goal, case.forward, case.b).sum(0)
        size = float(want.norm() / reference.flat(found).norm().clamp(min=1e-300))
        found = {n: size * g for n, g in found.items()}
    bound = allowed(goal, case, half_of(model))
    name = Path(path).name
    report = report_step(
        name,
        goal,
        case,
        found,
        0,
        bound,
        start,
        explain=explain,
        rounding=half_of(model) is None,
    )
    if not clipped:
        return report
    text = "the norm was clipped: the direction of the gradient is compared alone"
    return replace(report, findings=[*report.findings, note("gradient", text)])


def _rows_of(batch: RecordedBatch) -> list[Row]:
    """The rows that a dumped step has."""
    rows = []
    for i, (p, n) in enumerate(json.loads(batch.meta["rows"])):
        at = slice(p, p + n)
        columns = {
            name: value[i, at].tolist()
            for name in ("adv", *COLUMNS)
            if (value := getattr(batch, name)) is not None
        }
        ids = batch.ids[i].tolist()
        group = 0 if batch.group is None else int(batch.group[i])
        trains = batch.mask[i, at].tolist()
        rows.append(Row(ids[:p], ids[at], trains, group=group, **columns))
    return rows
