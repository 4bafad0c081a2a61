# SPDX-License-Identifier: Apache-2.0
"""The same function where each process holds a part of the vocabulary, as under tensor parallelism."""

import datetime
import math
import multiprocessing
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from upref.errors import InputError
from upref.foreign.logprobs import Kernel, Outcome, Problem
from upref.verify.logprobs.faults import entropy, log_sum, pick, solved, states
from upref.verify.report import Finding, apart, fail, note

SECONDS = 60


def shard(p: Problem, rank: int, ranks: int) -> Problem:
    """The rank's columns of the vocabulary; tokens stay global ids."""
    cut = lambda v, dim: v.chunk(ranks, dim)[rank].contiguous()
    p = replace(p, bias=None if p.bias is None else cut(p.bias, 0))
    return replace(p, x=cut(p.x, -1)) if p.weight is None else replace(p, weight=cut(p.weight, 0))


def _rank(kernel: Kernel, p: Problem, rank: int, ranks: int, file: str, to: Any):
    torch.set_num_threads(1)
    try:
        wait = datetime.timedelta(seconds=SECONDS)
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks, timeout=wait)
        done = kernel(shard(p, rank, ranks))
        dist.barrier()
        to.send({k: v.tolist() for k, v in done.numbers.items()})
    except BaseException as e:
        to.send(f"rank {rank}: {e}")


def outcomes(kernel: Kernel, p: Problem, ranks: int) -> list[Outcome]:
    """What each of so many gloo processes answers, with the default group; InputError where one fails."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [fork.Pipe(duplex=False) for _ in range(ranks)]
        args = lambda i: (kernel, p, i, ranks, str(Path(folder) / "store"), pipes[i][1])
        children = [fork.Process(target=_rank, args=args(i), daemon=True) for i in range(ranks)]
        for child in children:
            child.start()
        said = [pipe.recv() if pipe.poll(2 * SECONDS) else "no answer" for pipe, _ in pipes]
        for child in children:
            child.join(5)
            child.kill()
    if failed := [s for s in said if isinstance(s, str)]:
        raise InputError(f"{kernel.name} on {ranks} ranks: {failed[0]}")
    numbers = ({k: torch.tensor(v, dtype=torch.float64) for k, v in s.items()} for s in said if isinstance(s, dict))
    return [Outcome(part) for part in numbers]


def compared(kernel: Kernel, p: Problem, ranks: int, tol: float) -> Iterator[Finding]:
    """Each rank's results against the whole vocabulary's; its gradients against its part."""
    every, whole = outcomes(kernel, p, ranks), solved(p).numbers
    parts = [{k: part.numbers[k] for k in part.numbers} for part in every]
    off = lambda x, y: (x - y).abs().max().nan_to_num(math.inf).item() / max(1e-3, y.abs().max().item())
    for rank, found in enumerate(parts):
        want = {k: whole[k] for k in found}
        for k in ("gradient of logits", "gradient of weight"):
            if k in want:
                want[k] = want[k].chunk(ranks, -1 if k.endswith("logits") else 0)[rank]
        if "gradient of hidden" in found:
            alone, added = found.pop("gradient of hidden"), sum(q.numbers["gradient of hidden"] for q in every)
            reduced, right = (off(v, whole["gradient of hidden"]) <= tol for v in (alone, added))
            if reduced or right:
                how = "is already added up" if reduced else "is this rank's part: add it up"
                yield from [note("ranks", f"on each rank the gradient of the hidden states {how}")] * (rank == 0)
            else:
                found["gradient of hidden"] = alone
        worst = max(found, key=lambda k: off(found[k], want[k]))
        if off(found[worst], want[worst]) > tol:
            at = int((found[worst] - want[worst]).abs().nan_to_num(math.inf).argmax())
            numbers = (v[worst].flatten()[at].item() for v in (want, found))
            regime = f"rank {rank} of {ranks}, each with a part of the vocabulary"
            yield fail("ranks", regime, *apart(f"{worst} {{}}", *numbers), cause=_why(found, want, p, rank, ranks, tol))
            return


def _why(found, want, p: Problem, rank: int, ranks: int, tol: float) -> str:
    parts = [states(shard(p, i, ranks)) for i in range(ranks)]
    lp, whole, own, V = want["log-prob"], log_sum(states(p)), parts[rank], parts[0].shape[-1]
    unshifted = sum((pick(z, p.tokens.clamp(max=V - 1)) for z in parts), 0 * lp).masked_fill(p.tokens >= V, 0)
    from_own_max = own.amax(-1) + sum(((z - z.amax(-1, True)).exp().sum(-1) for z in parts), 0 * lp).log()
    grads = {k: v for k, v in want.items() if k.startswith("gradient")}
    for words, change in {
        "log(ranks) is subtracted: every rank's normaliser is counted": {"log-prob": lp - math.log(ranks)},
        "log(ranks) is added": {"log-prob": lp + math.log(ranks)},
        "the normaliser is that of this rank's part alone": {"log-prob": lp + whole - log_sum(own)},
        "each rank subtracts its own maximum": {"log-prob": lp + whole - from_own_max},
        "the ids are not shifted by the rank's first id": {"log-prob": unshifted - whole},
        "the gradient is multiplied by the number of ranks: a sum over ranks is differentiated as a sum": {
            k: v * ranks for k, v in grads.items()},
        "the gradient is divided by the number of ranks": {k: v / ranks for k, v in grads.items()},
        "there is no gradient": {k: 0 * v for k, v in grads.items()},
        "the entropy is that of this rank's part alone": {"entropy": entropy(own)},
    }.items():  # fmt: skip
        keys = change if "log-prob" in change else found
        if all(torch.allclose(found[k], (want | change)[k], rtol=tol, atol=tol) for k in keys if k in found):
            return words
    return ""
