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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
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
from upref.step.check import Attempt, StepReport, doubt_of, report_step
from upref.step.compare.case import allowed_error, build_case, half_of, make_goal
from upref.step.compare.forward import gradients_by_row
from upref.step.compare.ranks import is_follower
from upref.step.compare.record import Feed, is_alone, sketched, state_of_gradients
from upref.step.compare.sketch import DIRECTIONS, project
from upref.step.explain.halves import NO_HALVES, ONE_PASS, Halves
from upref.step.inputs.reference import (
    Gradient,
    TorchModel,
    gather_tensor,
    to_dense,
    unwrapped,
)
from upref.step.inputs.rows import CASE_AXES, Row, text_of, validate_rows
from upref.verify.finding import Cause
from upref.verify.report import note

COLUMNS = ("old", "ref", "sampler")
# The first half is sketched where its share of the tokens first reaches each level. These
# are few, because each sketch of a large model takes seconds.
LEVELS = (1e-9, 0.25, 0.45)
LARGEST_HALF = 1 - 1e-9  # share of the first half
# keys of accumulated gradients
HALF_KEYS = ("after the first half", "after both halves")


class SketchedModel(TorchModel):
    """A model whose gradients are sketches."""

    def __init__(self, model: nn.Module):
        """Take the model, with shapes of sketches: at most 64 numbers a parameter."""
        super().__init__(model)
        self.shapes = {
            n: torch.Size([min(s.numel(), DIRECTIONS)]) for n, s in self.shapes.items()
        }

    def flat(self, g: Gradient) -> Tensor:
        """Join sketches to one vector; 0 where a parameter has no gradient.

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
        """Yield the sketch of one gradient at a time, [1, P]."""
        for dz_row in dz:
            yield self.pull(z, dz_row, ids)[None]


# ---- where the run trains ------------------------------------------------------------
class _TwoHalves:
    """Sketches of what has accumulated after the backward pass with which about half of
    the tokens have trained, and after the one with which all rows have.
    """

    def __init__(self, net: nn.Module, rows: Sequence[Row]):
        """Begin with no pass; `watching` starts to look at the passes."""
        self.net = net
        self.rows = rows
        self.feed = Feed()
        self.texts = [text_of(row.ids) for row in rows]
        self.passes = 0
        # whether the accumulated gradients are not those of two separate halves
        self.spoiled = False
        # number of a row that was fed -> 0 for the first half, 1 for the second
        self.half_of_row: dict[int, int] = {}
        self.sketches: list[Gradient] = []  # after each half
        self.state_after_pass: list[Any] = []
        self.levels = [*LEVELS]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at every backward pass that is made inside."""
        if not is_alone():
            yield
            return
        plain_backward = torch.autograd.backward

        def backward_between_checks(*args: Any, **kw: Any) -> Any:
            """Run the backward pass, and note what it adds to."""
            self._check_before_pass()
            out = plain_backward(*args, **kw)
            self._record_pass()
            return out

        handle = self.net.register_forward_pre_hook(self.feed, with_kwargs=True)
        torch.autograd.backward = backward_between_checks
        try:
            yield
        finally:
            torch.autograd.backward = plain_backward
            handle.remove()

    def _check_before_pass(self) -> None:
        """Note where the pass does not add to the gradients of the pass before it."""
        if self.passes and state_of_gradients(self.net) != self.state_after_pass:
            self.spoiled = True
        elif not self.passes:
            grads = (p.grad for p in self.net.parameters())
            self.spoiled = any(g is not None and bool(g.any()) for g in grads)

    def _record_pass(self) -> None:
        """Note the rows that were fed, and sketch the gradients where half or all of
        them were.
        """
        self.passes += 1
        self.state_after_pass = state_of_gradients(self.net)
        for fed_text in map(text_of, self.feed.sequences):
            for i, row_text in enumerate(self.texts):
                if row_text in fed_text:
                    half = self.half_of_row.setdefault(i, len(self.sketches))
                    self.spoiled |= half != len(self.sketches)
        self.feed.sequences.clear()
        if self.spoiled or len(self.sketches) == 2:
            return
        tokens = [sum(row.trains) for row in self.rows]
        share_done = sum(tokens[i] for i in self.half_of_row) / max(sum(tokens), 1)
        if self.sketches and share_done == 1:
            self.sketches.append(sketched(self.net))
        elif self.levels and self.levels[0] <= share_done < LARGEST_HALF:
            # the number of passes is not known: each is the last chance
            self.levels = [level for level in self.levels if level > share_done]
            self.half_of_row = dict.fromkeys(self.half_of_row, 0)
            self.sketches = [sketched(self.net)]

    def meta(self) -> dict[str, str]:
        """Return the entries of the file about passes and halves; those of the halves
        are left out where there are no two halves.
        """
        entries = {"backward passes": str(self.passes)} if self.passes else {}
        if (
            self.spoiled
            or len(self.sketches) < 2
            or len(self.half_of_row) < len(self.rows)
        ):
            return entries
        halves = [self.half_of_row[i] for i in range(len(self.rows))]
        entries["half of each row"] = json.dumps(halves)
        for when, sketches in zip(HALF_KEYS, self.sketches, strict=True):
            entries |= {f"{when}: {name}": _encoded(x) for name, x in sketches.items()}
        return entries


def _encoded(sketch: Tensor) -> str:
    """Return the numbers as text, in base64."""
    return base64.b64encode(sketch.numpy().tobytes()).decode()


def _decoded(meta: Mapping[str, str], key: str) -> Gradient:
    """Return the sketches of this key from text, by the names of the parameters."""
    sketches = {}
    for entry, text in meta.items():
        if entry.startswith(f"{key}: "):
            numbers = np.frombuffer(base64.b64decode(text), dtype=np.float64)
            # a copy, because a tensor may be written to
            sketches[entry.removeprefix(f"{key}: ")] = torch.from_numpy(numbers.copy())
    return sketches


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
    checked = validate_rows(rows, max((max(r.ids) for r in rows), default=0) + 1)
    if any(row.routes is not None for row in checked):
        raise InputError(
            "a dumped step has no place for routes of experts: check such a step by check_recorded."
        )
    net = unwrapped(model)
    meta: dict[str, str] = {}
    halves = _TwoHalves(net, checked)

    def keep_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Keep the sketch of each gradient that the first step has."""
        name_of = {id(p): name for name, p in net.named_parameters()}
        if "weights" not in meta:
            meta["weights"] = hash_of(net)
            meta.update(halves.meta())
        for group in optimizer.param_groups:
            sign = -1.0 if group.get("maximize") else 1.0
            for p in group["params"]:
                name = name_of.get(id(p))
                if name is None or p.grad is None or f"gradient: {name}" in meta:
                    continue
                g = to_dense(gather_tensor(p.grad))
                meta[f"gradient: {name}"] = _encoded(sign * project(name, g))
                meta[f"norm: {name}"] = repr(float(g.double().norm()))

    handle = register_optimizer_step_pre_hook(keep_gradients)
    try:
        with halves.watching():
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
    """Return the SHA-256 of a model's parameters: names, shapes, dtypes and bytes.

    Args:
        net: the model.

    Returns:
        64 hexadecimal digits.
    """
    out = hashlib.sha256()
    for name, p in sorted(net.named_parameters()):
        x = gather_tensor(p).cpu().contiguous()
        out.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        out.update(x.reshape(-1).view(torch.uint8).numpy().tobytes())
    return out.hexdigest()


def _batch_of(rows: list[Row], meta: dict[str, str], file: str) -> RecordedBatch:
    """Return the rows in the columns of docs/dump.md, prompts included. A column that
    some row lacks is left out.
    """

    def join(entries_of_rows: list[list[Any]]) -> np.ndarray:
        """Return one number for each token of all rows, one row behind the other: 0 in
        prompts.
        """
        joined: list[Any] = []
        for row, entries in zip(rows, entries_of_rows, strict=True):
            joined += [0] * len(row.prompt)
            joined += entries
        return np.array(joined)

    ids: list[int] = []
    advantages = []
    for row in rows:
        ids += row.ids
        if isinstance(row.adv, list):
            advantages.append(row.adv)
        else:
            advantages.append([row.adv] * len(row.response))
    columns: dict[str, Any] = {
        "offsets": np.cumsum([0, *(len(row.ids) for row in rows)]),
        "ids": np.array(ids),
        "mask": join([row.trains for row in rows]),
        "adv": join(advantages).astype(float),
        "group": np.array([row.group for row in rows]),
    }
    for name in COLUMNS:
        entries_of_rows = [getattr(row, name) for row in rows]
        if all(entries is not None for entries in entries_of_rows):
            columns[name] = join(entries_of_rows).astype(float)
    lengths = [[len(row.prompt), len(row.response)] for row in rows]
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
    goal = make_goal(
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
    case = build_case(reference, goal, _rows_of(batch), CASE_AXES)
    found = _decoded(batch.meta, "gradient")
    norms = [float(v) for k, v in batch.meta.items() if k.startswith("norm: ")]
    clipped = clip is not None and math.hypot(*norms) >= (1 - 1e-3) * clip
    if clipped:
        expected = gradients_by_row(goal, case.forward, case.padded).sum(0)
        size = float(expected.norm() / reference.flat(found).norm().clamp(min=1e-300))
        found = {n: size * g for n, g in found.items()}
    bound = allowed_error(goal, case, half_of(model))
    name = Path(path).name
    report = report_step(
        name,
        goal,
        case,
        found,
        int(batch.meta.get("backward passes", 0)),
        bound,
        start,
        explain=explain,
        in_float32=half_of(model) is None,
        doubts=partial(_doubt, batch.meta),
    )
    if not clipped:
        return report
    text = "the norm was clipped: the direction of the gradient is compared alone"
    return replace(report, findings=[*report.findings, note("gradient", text)])


def _doubt(meta: Mapping[str, str], first: Attempt, cause: Cause) -> str:
    """Return words to put in front of a cause that two halves of the rows do not
    confirm; "" where both confirm it.
    """
    if meta.get("backward passes") == "1":
        return ONE_PASS
    if "half of each row" not in meta:
        return NO_HALVES
    first_half, both_halves = (_decoded(meta, when) for when in HALF_KEYS)
    second_half = {
        name: x - first_half.get(name, 0 * x) for name, x in both_halves.items()
    }
    halves = Halves(json.loads(meta["half of each row"]), (first_half, second_half))
    return doubt_of(halves, first, cause)


def _rows_of(batch: RecordedBatch) -> list[Row]:
    """Return the rows of a dumped step."""
    rows = []
    lengths = json.loads(batch.meta["rows"])
    for i, (prompt_length, response_length) in enumerate(lengths):
        response = slice(prompt_length, prompt_length + response_length)
        columns = {}
        for name in ("adv", *COLUMNS):
            values = getattr(batch, name)
            if values is not None:
                columns[name] = values[i, response].tolist()
        ids = batch.ids[i].tolist()
        group = 0 if batch.group is None else int(batch.group[i])
        trains = batch.mask[i, response].tolist()
        rows.append(
            Row(ids[:prompt_length], ids[response], trains, group=group, **columns)
        )
    return rows
