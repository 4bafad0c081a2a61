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

MOST_SECONDS = 60  # that a process may take
SINGLE_TOL = 1e-4  # tolerance: the numbers may be computed in float32


def shard(problem: Problem, rank: int, ranks: int) -> Problem:
    """Return the problem with this rank's part of the vocabulary. Tokens stay global.

    Args:
        problem: a problem of the whole vocabulary.
        rank: from 0 on.
        ranks: how many share the vocabulary.
    """

    def part_of_rank(tensor: Tensor, dim: int) -> Tensor:
        """Return the rank's part of a tensor along this dimension."""
        return tensor.chunk(ranks, dim)[rank].contiguous()

    problem = replace(
        problem, bias=None if problem.bias is None else part_of_rank(problem.bias, 0)
    )
    if problem.weight is None:
        return replace(problem, x=part_of_rank(problem.x, -1))
    return replace(problem, weight=part_of_rank(problem.weight, 0))


def _run_rank(
    kernel: Kernel, problem: Problem, rank: int, ranks: int, store: str, pipe: Any
) -> None:
    """Be one rank, in a process of its own: call the kernel on the rank's part of the
    vocabulary, and send its numbers by name through the pipe. An error is sent too: Gone
    as it is, any other as words.
    """
    torch.set_num_threads(1)
    os.environ.update(on_loopback())
    try:
        timeout = datetime.timedelta(seconds=MOST_SECONDS)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=ranks,
            timeout=timeout,
        )
        # the check replaces os._exit for its own process alone: replace it here too
        with state_restored():
            outcome = kernel(shard(problem, rank, ranks))
        dist.barrier()
        pipe.send({key: number.tolist() for key, number in outcome.numbers.items()})
    except Gone as e:
        pipe.send(e)
    except BaseException as e:
        pipe.send(f"rank {rank}: {e}")


def outcomes(kernel: Kernel, problem: Problem, ranks: int) -> list[dict[str, Tensor]]:
    """Run the kernel in gloo processes with the default group, and return the numbers of
    each by name, in float64, in the order of the ranks.

    Args:
        kernel: the function.
        problem: a problem of the whole vocabulary, of which each process gets its part.
        ranks: how many processes share it.

    Raises:
        InputError: a process fails.
        Gone: a process ends, or does not answer in time.
    """
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [fork.Pipe(duplex=False) for _ in range(ranks)]
        store = str(Path(folder) / "store")
        children = [
            fork.Process(
                target=_run_rank,
                args=(kernel, problem, rank, ranks, store, pipes[rank][1]),
                daemon=True,
            )
            for rank in range(ranks)
        ]
        for child in children:
            child.start()
        no_answer = Gone(
            f"{kernel.name} on {ranks} ranks: a rank ends without an answer, or takes longer than {MOST_SECONDS} s."
        )
        answers = [
            pipe.recv() if pipe.poll(2 * MOST_SECONDS) else no_answer
            for pipe, _ in pipes
        ]
        for child in children:
            child.join(5)
            child.kill()
    if ends := [answer for answer in answers if isinstance(answer, Gone)]:
        raise ends[0]
    if failures := [answer for answer in answers if isinstance(answer, str)]:
        raise InputError(f"{kernel.name} on {ranks} ranks: {failures[0]}")
    return [
        {
            key: torch.tensor(number, dtype=torch.float64)
            for key, number in answer.items()
        }
        for answer in answers
        if isinstance(answer, dict)
    ]


def compared(
    kernel: Kernel, problem: Problem, ranks: int, worst_number: Callable[..., Any]
) -> Iterator[Finding]:
    """Compare each rank's results with those of the whole vocabulary, and its gradients
    with its part of them.

    Args:
        kernel: the function.
        problem: a problem of the whole vocabulary.
        ranks: how many processes share it.
        worst_number: KernelCase.worst_number.

    Yields:
        A failure of the first rank that differs; a note where the ranks' gradients of
        hidden states are parts, which the user must add up.
    """
    all_outcomes = outcomes(kernel, problem, ranks)
    hidden_key = "gradient of hidden"

    def worst(numbers: dict[str, Any], expected: dict[str, Tensor]) -> tuple[Any, ...]:
        """Return the largest error of these numbers of a rank, as `worst_number` does."""
        done, want = KernelOutcome(numbers), KernelOutcome(expected)
        return worst_number(problem, done, want, SINGLE_TOL)

    for rank, found in enumerate(all_outcomes):
        expected = solved(problem).numbers
        # the dimension of the vocabulary, of which a rank has its part
        for leaf, dim in (("logits", -1), ("weight", 0)):
            if leaf in problem.leaves:
                key = f"gradient of {leaf}"
                expected[key] = expected[key].chunk(ranks, dim)[rank]
        numbers_to_compare = dict(found)
        if hidden_key in found:
            summed = sum(numbers[hidden_key] for numbers in all_outcomes)
            is_reduced = worst({hidden_key: found[hidden_key]}, expected)[0] <= 1
            is_added_up = worst({hidden_key: summed}, expected)[0] <= 1
            if is_added_up and rank == 0:
                yield note(
                    "ranks",
                    "on each rank the gradient of the hidden states is this rank's "
                    "part: add it up",
                )
            # it is right as a part too
            if is_reduced or is_added_up:
                del numbers_to_compare[hidden_key]
        error, key, index, x, y = worst(numbers_to_compare, expected)
        if error > 1:
            about = f"rank {rank} of {ranks}, each with a part of the vocabulary"
            why = _known_mistake(found, expected, problem, rank, ranks, worst)
            yield fail(
                "ranks", about, *number_pair(f"{key}{list(index)}", x, y), cause=why
            )
            return


def _known_mistake(
    found: dict[str, Any],
    expected: dict[str, Any],
    problem: Problem,
    rank: int,
    ranks: int,
    worst: Callable[..., Any],
) -> str:
    """Return in words the known mistake that gives these numbers on this rank; "" for
    none.
    """
    parts = [states(shard(problem, i, ranks)) for i in range(ranks)]
    lp = expected["log-prob"]
    log_sum_of_all = log_sum(states(problem))
    x_of_rank = parts[rank]
    columns = parts[0].shape[-1]
    # each rank picks the id of the whole vocabulary from its own columns
    own_ids = problem.tokens.clamp(max=columns - 1)
    picked = sum((pick(x, own_ids) for x in parts), 0 * lp)
    unshifted = picked.masked_fill(problem.tokens >= columns, 0)
    # sums that are relative to different maxima are added
    own_sums = ((x - x.amax(-1, True)).exp().sum(-1) for x in parts)
    from_own_max = x_of_rank.amax(-1) + sum(own_sums, 0 * lp).log()
    gradients = {
        key: gradient
        for key, gradient in expected.items()
        if key.startswith("gradient")
    }
    mistakes = {
        "log(ranks) is subtracted: every rank's normalizer is counted": {
            "log-prob": lp - math.log(ranks)
        },
        "log(ranks) is added": {"log-prob": lp + math.log(ranks)},
        "the normalizer is that of this rank's part alone": {
            "log-prob": lp + log_sum_of_all - log_sum(x_of_rank)
        },
        "each rank subtracts its own maximum": {
            "log-prob": lp + log_sum_of_all - from_own_max
        },
        "the ids are not shifted by the rank's first id": {
            "log-prob": unshifted - log_sum_of_all
        },
        "the gradient is multiplied by the number of ranks: a sum over ranks is differentiated as a sum": {
            key: gradient * ranks for key, gradient in gradients.items()
        },
        "the gradient is divided by the number of ranks": {
            key: gradient / ranks for key, gradient in gradients.items()
        },
        "there is no gradient": {
            key: 0 * gradient for key, gradient in gradients.items()
        },
        "the entropy is that of this rank's part alone": {
            "entropy": entropy(x_of_rank)
        },
    }
    for words, change in mistakes.items():
        keys = change if "log-prob" in change else found
        numbers = {key: found[key] for key in keys if key in found}
        error, *_ = worst(numbers, expected | change)
        if error <= 1:
            return words
    return ""
