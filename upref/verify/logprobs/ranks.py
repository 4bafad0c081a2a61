# SPDX-License-Identifier: Apache-2.0
"""The same function where each process holds a part of the vocabulary, as under tensor
parallelism.
"""

import datetime
import math
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from upref.errors import Gone, InputError
from upref.user_code.guard import state_restored
from upref.user_code.logprobs import Kernel, KernelOutcome, Problem
from upref.verify.faults.logprobs import entropy, log_sum, pick, solved, states
from upref.verify.finding import number_pair
from upref.verify.group import on_loopback
from upref.verify.report import Finding, fail, note

# that a process may take, and how near is equal
SECONDS = 60
SINGLE = 1e-4


def shard(problem: Problem, rank: int, ranks: int) -> Problem:
    """The rank's columns of the vocabulary; tokens stay global ids.

    Args:
        problem: a problem of the whole vocabulary.
        rank: from 0 on.
        ranks: how many share the vocabulary.
    """

    def cut(v: Tensor, dim: int) -> Tensor:
        """The rank's part along this dimension."""
        return v.chunk(ranks, dim)[rank].contiguous()

    problem = replace(
        problem, bias=None if problem.bias is None else cut(problem.bias, 0)
    )
    if problem.weight is None:
        return replace(problem, x=cut(problem.x, -1))
    return replace(problem, weight=cut(problem.weight, 0))


def _rank(
    kernel: Kernel, problem: Problem, rank: int, ranks: int, file: str, to: Any
) -> None:
    """One rank: call the kernel on its part of the vocabulary, and send the numbers."""
    torch.set_num_threads(1)
    os.environ.update(on_loopback())
    try:
        wait = datetime.timedelta(seconds=SECONDS)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{file}",
            rank=rank,
            world_size=ranks,
            timeout=wait,
        )
        # os._exit, which is replaced in the process of the check alone
        with state_restored():
            outcome = kernel(shard(problem, rank, ranks))
        dist.barrier()
        to.send({k: v.tolist() for k, v in outcome.numbers.items()})
    except Gone as e:
        to.send(e)
    except BaseException as e:
        to.send(f"rank {rank}: {e}")


def outcomes(kernel: Kernel, problem: Problem, ranks: int) -> list[dict[str, Tensor]]:
    """The numbers of each of so many gloo processes, with the default group; InputError
    where one fails, Gone where one ends."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [fork.Pipe(duplex=False) for _ in range(ranks)]
        store = str(Path(folder) / "store")
        children = [
            fork.Process(
                target=_rank,
                args=(kernel, problem, i, ranks, store, pipes[i][1]),
                daemon=True,
            )
            for i in range(ranks)
        ]
        for child in children:
            child.start()
        late = Gone(
            f"{kernel.name} on {ranks} ranks: a rank ends without an answer, or takes longer than {SECONDS} s."
        )
        said = [pipe.recv() if pipe.poll(2 * SECONDS) else late for pipe, _ in pipes]
        for child in children:
            child.join(5)
            child.kill()
    if ended := [s for s in said if isinstance(s, Gone)]:
        raise ended[0]
    if failed := [s for s in said if isinstance(s, str)]:
        raise InputError(f"{kernel.name} on {ranks} ranks: {failed[0]}")
    return [
        {k: torch.tensor(v, dtype=torch.float64) for k, v in s.items()}
        for s in said
        if isinstance(s, dict)
    ]


def compared(
    kernel: Kernel, problem: Problem, ranks: int, off: Callable[..., Any]
) -> Iterator[Finding]:
    """Each rank's results against the whole vocabulary's; its gradients against its
    part.

    Args:
        kernel: the function.
        problem: a problem of the whole vocabulary.
        ranks: how many processes share it.
        off: KernelCase.off.

    Yields:
        A failure of the first rank that differs; a note on whether the ranks' gradients
        of hidden states are added up already.
    """
    all_outcomes = outcomes(kernel, problem, ranks)
    h = "gradient of hidden"

    def worst(numbers: dict[str, Any], want: dict[str, Tensor]) -> tuple[Any, ...]:
        """What `off` answers of these numbers of a rank."""
        return off(problem, KernelOutcome(numbers), KernelOutcome(want), SINGLE)

    for rank, found in enumerate(all_outcomes):
        want = solved(problem).numbers
        want |= {
            f"gradient of {k}": solved(problem)
            .numbers[f"gradient of {k}"]
            .chunk(ranks, dim)[rank]
            for k, dim in (("logits", -1), ("weight", 0))
            if k in problem.leaves
        }
        if h in found:
            reduced, right = (
                worst({h: v}, want)[0] <= 1
                for v in (found[h], sum(q[h] for q in all_outcomes))
            )
            how = "is already added up" if reduced else "is this rank's part: add it up"
            if right and not rank:
                yield note(
                    "ranks", f"on each rank the gradient of the hidden states {how}"
                )
        times, key, index, x, y = worst(
            {k: v for k, v in found.items() if k != h or not (reduced or right)}, want
        )
        if times > 1:
            regime = f"rank {rank} of {ranks}, each with a part of the vocabulary"
            why = _why(found, want, problem, rank, ranks, worst)
            yield fail(
                "ranks", regime, *number_pair(f"{key}{list(index)}", x, y), cause=why
            )
            return


def _why(
    found: dict[str, Any],
    want: dict[str, Any],
    problem: Problem,
    rank: int,
    ranks: int,
    worst: Callable[..., Any],
) -> str:
    """The known mistake that gives these numbers on this rank, in words; "" for
    none.
    """
    parts = [states(shard(problem, i, ranks)) for i in range(ranks)]
    lp = want["log-prob"]
    log_sum_of_all = log_sum(states(problem))
    of_rank = parts[rank]
    V = parts[0].shape[-1]
    unshifted = sum(
        (pick(z, problem.tokens.clamp(max=V - 1)) for z in parts), 0 * lp
    ).masked_fill(problem.tokens >= V, 0)
    from_own_max = (
        of_rank.amax(-1)
        + sum(((z - z.amax(-1, True)).exp().sum(-1) for z in parts), 0 * lp).log()
    )
    grads = {k: v for k, v in want.items() if k.startswith("gradient")}
    for words, change in {
        "log(ranks) is subtracted: every rank's normalizer is counted": {
            "log-prob": lp - math.log(ranks)
        },
        "log(ranks) is added": {"log-prob": lp + math.log(ranks)},
        "the normalizer is that of this rank's part alone": {
            "log-prob": lp + log_sum_of_all - log_sum(of_rank)
        },
        "each rank subtracts its own maximum": {
            "log-prob": lp + log_sum_of_all - from_own_max
        },
        "the ids are not shifted by the rank's first id": {
            "log-prob": unshifted - log_sum_of_all
        },
        "the gradient is multiplied by the number of ranks: a sum over ranks is differentiated as a sum": {
            k: v * ranks for k, v in grads.items()
        },
        "the gradient is divided by the number of ranks": {
            k: v / ranks for k, v in grads.items()
        },
        "there is no gradient": {k: 0 * v for k, v in grads.items()},
        "the entropy is that of this rank's part alone": {"entropy": entropy(of_rank)},
    }.items():
        keys = change if "log-prob" in change else found
        if worst({k: found[k] for k in keys if k in found}, want | change)[0] <= 1:
            return words
    return ""
