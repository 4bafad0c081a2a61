# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning of a tiny transformer with any objective of the registry.

    python -m repro.mini.train --objective up_dapo                 one run, live, into repro/out/mini/
    python -m repro.mini.train --settings FILE --out FOLDER        what the suite calls
    python -m repro.mini.train --minibatch FOLDER/minibatch-17-3.safetensors   a minibatch that stopped a run, once more

Started again with the same settings, a run goes on from its last checkpoint and ends
bit-identical to one that was never interrupted. Exit status: 0 done, 1 stopped by a
non-finite loss or gradient, 2 could not run, 130 interrupted (the same command goes
on).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from repro.mini import files, tasks
from repro.mini.policy import evals, models
from repro.mini.train import faults
from repro.mini.train.checkpoint import (
    MOST_SEEN,
    Run,
    finish,
    require_no_run,
    resume,
    save,
)
from repro.mini.train.failed_minibatch import NotFinite, keep_minibatch, load_minibatch
from repro.mini.train.measure import Tally, entropy, kl
from repro.mini.train.recorder import Recorder
from repro.mini.train.rollout import Batch, rollout, spread
from repro.mini.train.settings import Settings
from upref import Totals
from upref.errors import InputError


def train(
    s: Settings,
    out: Path,
    watch: Callable[[int, dict[str, Any]], object] = lambda *_: None,
    say: Callable[[str], object] = print,
    threads: int = 1,
    device: str = "cpu",
) -> None:
    """Train by the settings, into the folder `out`; go on from its last checkpoint.

    The same numbers to the bit need the same machine and as many threads; a GPU rounds
    as it likes.

    Args:
        s: the settings.
        out: it is made.
        watch: called with (steps done, numbers of steps.jsonl) after every step.
        say: called with a sentence on what happened to a checkpoint.
        threads: of the CPU.
        device: as torch names it.

    Raises:
        InputError: no run can start from these settings or in this folder.
        NotFinite: a loss or gradient is not finite; the minibatch is kept.
        ParityError: a recorded step is not the objective's.
    """
    if device == "cpu":
        models.deterministic(threads)
    with files.alone(out, "another process that trains"), default_device(device):
        _train(s, out, watch, say)


def default_device(device: str) -> AbstractContextManager:
    """Return the context in which new tensors are on the device; it does nothing for
    the CPU, where it would only cost time.
    """
    return nullcontext() if device == "cpu" else torch.device(device)


def require_device(device: str) -> None:
    """Raise InputError where torch has no such device."""
    try:
        torch.empty(0, device=device)
    # a torch that was built without CUDA raises AssertionError
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        raise InputError(
            f"--device {device}: torch cannot use it here: {why}"
        ) from error


def _train(
    s: Settings,
    out: Path,
    watch: Callable[[int, dict[str, Any]], object],
    say: Callable[[str], object],
) -> None:
    """Train from the last checkpoint to the end, with a line in the logs for every
    step; return at once if the run is finished.

    Raises:
        InputError: the folder has a run with other settings, or something else.
    """
    if not (out / "settings.json").exists():
        require_no_run(out)
    elif Settings.read(out / "settings.json") != s:
        raise InputError(
            f"{out} holds a run with other settings: choose another folder or remove it."
        )
    if (out / "done.json").exists():
        return
    s.write(out / "settings.json")
    run = Run(s)
    logs = {
        name: files.Log(out / f"{name}.jsonl") for name in ("steps", "evals", "times")
    }
    resume(run, out, logs, say)
    problems = run.task.problems("train", s.train_problems, seed=0)
    if run.step == 0:
        evaluate(run, logs)
    while run.step < s.steps:
        before = dict(run.seconds)
        numbers = one_step(run, problems, out)
        logs["steps"].add(numbers)
        run.step += 1
        if run.step == s.steps or (s.eval_every and run.step % s.eval_every == 0):
            evaluate(run, logs)
        spent = {
            k: round(v - before.get(k, 0), 4)
            for k, v in run.seconds.items()
            if v != before.get(k, 0)
        }
        logs["times"].add({"step": numbers["step"]} | spent)
        watch(run.step, numbers)
        if run.step == s.steps or (
            s.checkpoint_every and run.step % s.checkpoint_every == 0
        ):
            save(run, out, logs)
    finish(run, out)


def one_step(run: Run, problems: Tensor, out: Path) -> dict:
    """Sample, score and update; return the line of steps.jsonl.

    Args:
        run: its policy and optimizer change, and `seen` may; its `step` does not.
        problems: all that it trains on.
        out: folder of the run.

    Raises:
        NotFinite: a loss or gradient is not finite; the minibatch is kept in `out`.
    """
    s = run.s
    # the rate rises linearly: step number `warmup`, from 0, is the first at s.lr
    for group in run.optimizer.param_groups:
        group["lr"] = s.lr * min(1.0, (run.step + 1) / (s.warmup + 1))
    with run.clock("sample"), models.precision(s.precision):
        batch = rollout(run.sampler(), run.task, problems, s, run.step)
    with run.clock("score"), torch.no_grad():
        # the base reads every response if the objective has a KL term, else those to a
        # quarter of the prompts, for kl_base alone
        few = max(1, s.prompts // 4) * s.responses
        some = torch.arange(len(batch.tokens) if s.beta else few)
        tokens, mask = batch.tokens[some], batch.mask[some]
        base = log_probs(
            run.base,
            batch.prompts_of(some),
            tokens,
            mask,
            s.temperature,
            s.precision,
        )
        kl_base = (
            kl(batch.log_probs[batch.state[some][mask]], base).double().mean().item()
        )
        ref = spread(of_tokens(base, tokens[mask]), mask) if s.beta else None
        if s.old_log_probs == "recomputed":
            every = torch.arange(len(batch.tokens))
            now = log_probs(
                run.policy,
                batch.prompts_of(every),
                batch.tokens,
                batch.mask,
                s.temperature,
                s.precision,
            )
            batch.logp = spread(of_tokens(now, batch.tokens[batch.mask]), batch.mask)
    tally = Tally(batch.tokens.shape[1])
    recorder = (
        Recorder(run, batch, out)
        if s.record_every and run.step % s.record_every == 0
        else None
    )
    with run.clock("update"):
        for epoch in range(s.epochs):
            order = torch.randperm(
                s.prompts,
                generator=tasks.generator("shuffle", s.seed, run.step, epoch),
                device="cpu",
            ).to(torch.get_default_device())
            for number, groups in enumerate(order.view(s.minibatches, -1)):
                # the responses of a group are side by side
                of_group = torch.arange(s.responses)
                rows = (groups[:, None] * s.responses + of_group).flatten()
                try:
                    update(run, batch, ref, rows, tally, recorder)
                except NotFinite as e:
                    at = number + epoch * s.minibatches
                    said = keep_minibatch(run, batch, ref, rows, out, at, e)
                    raise NotFinite(said) from e
        numbers = tally.numbers(run.objective, s.hyperparameters())
        if recorder is not None:
            numbers |= recorder.numbers()
    # tokens of about twenty steps, for the Cap map
    if run.step % max(1, s.steps // 20) == 0 and sum(map(len, run.seen)) < MOST_SEEN:
        run.seen.append(tally.last())
    lr = run.optimizer.param_groups[0]["lr"]
    return {"step": run.step} | batch.seen | {"kl_base": kl_base} | numbers | {"lr": lr}


def update(
    run: Run,
    batch: Batch,
    ref: Tensor | None,
    rows: Tensor,
    tally: Tally,
    recorder: Recorder | None = None,
) -> None:
    """Make one gradient step on one minibatch, and count what it saw in the tally.

    A response with advantage 0 has no gradient (unless a KL term, a bonus, a penalty or
    its group gives it one): it is counted in the denominators, but not computed, unless
    it is recorded.

    Args:
        run: its policy and optimizer change.
        batch: of the step.
        ref: log-probabilities of the base, [B, T], or None without a KL term.
        rows: of the batch, in the minibatch.
        tally: of the step.
        recorder: takes the minibatch, if the step is recorded.

    Raises:
        NotFinite: the loss or the gradient's norm is not finite; the policy is
            unchanged.
        ParityError: the recorded loss or gradient is not the objective's.
    """
    s = run.s
    totals = Totals.of_lengths(batch.mask[rows].sum(1), batch.group[rows])
    # whether responses with advantage 0 may have a gradient, or are needed otherwise
    needs_all = (
        s.beta
        or s.entropy_bonus
        or run.objective.scale_exception
        or run.objective.batch_coupled
        or recorder is not None
        or s.fault
    )
    alive = batch.adv[rows] != 0
    if needs_all:
        alive = torch.ones(len(rows), dtype=torch.bool)
    alive[0] |= not alive.any()  # nothing to learn from still moves Adam's averages
    rows, totals = rows[alive], totals.rows(alive)
    width = int(batch.mask[rows].any(0).sum())  # of the longest response
    tokens, mask, lp_old = (
        x[rows, :width] for x in (batch.tokens, batch.mask, batch.logp)
    )
    A = batch.adv[rows, None]

    temperature = faults.temperature_of(s.fault, s.temperature)
    all_lp = log_probs(
        run.policy, batch.prompts_of(rows), tokens, mask, temperature, s.precision
    )
    lp = spread(of_tokens(all_lp, tokens[mask]), mask)
    H = None
    if "entropy" in run.objective.reads:
        H = spread(entropy(all_lp.detach()), mask)
    lp_ref = None if ref is None else ref[rows, :width]
    minibatch = faults.Minibatch(
        lp, lp_old, A, mask, batch.group[rows], lp_ref, H, totals
    )
    loss_of = faults.loss_of(s.fault)
    J = loss_of(run.objective, minibatch, s.hyperparameters())
    if s.entropy_bonus:
        J = J + s.entropy_bonus * entropy(all_lp).mean()

    run.optimizer.zero_grad()
    loss = -J
    if recorder is not None:
        recorder.begin(rows, lp, loss, entropy(all_lp.detach()), totals)
    loss.backward()
    if recorder is not None:
        recorder.end()
    norm = torch.nn.utils.clip_grad_norm_(run.policy.parameters(), s.grad_clip).item()
    if not (np.isfinite(J.item()) and np.isfinite(norm)):
        raise NotFinite(f"loss {-J.item()}, gradient norm {norm}")
    run.optimizer.step()
    kl_old = kl(batch.log_probs[batch.state[rows, :width][mask]], all_lp.detach())
    tally.add(lp, lp_old, A, mask, H, kl_old, -J.item(), norm)


def log_probs(
    policy: PreTrainedModel,
    prompts: tuple[dict[str, Tensor], Tensor],
    tokens: Tensor,
    mask: Tensor,
    temperature: float,
    precision: str = "float32",
) -> Tensor:
    """Return the log-probabilities of every token of the vocabulary where responses
    have tokens: [mask.sum(), V], in the order of tokens[mask].

    Args:
        policy: a model.
        prompts: from Batch.prompts_of.
        tokens: [N, T].
        mask: [N, T].
        temperature: the logits are divided by it.
        precision: of the forward pass.
    """
    with models.precision(precision):
        logits = models.response_logits(policy, *prompts, tokens, mask)
    return (logits / temperature).log_softmax(-1)


def of_tokens(log_probs: Tensor, tokens: Tensor) -> Tensor:
    """Return the entry of each token, [n], in its row of [n, V]."""
    return log_probs.gather(1, tokens[:, None])[:, 0]


def evaluate(run: Run, logs: dict[str, files.Log]) -> None:
    """Evaluate the policy as it is, and add a line to evals.jsonl for each kind of
    evaluation; nothing without eval_every. The caller decides at which steps.

    The problems are the same for every seed; training shares no random generator with
    this.
    """
    s = run.s
    if not s.eval_every:
        return
    end = run.step == s.steps
    with run.clock("eval"):
        for name, top_p in evaluations(run):
            problems = run.task.problems(name, s.eval_problems, seed=s.eval_seed)
            g = tasks.generator("eval", s.seed, run.step, name)
            with models.precision(s.precision):
                right, said = evals.tables(
                    run.policy, run.task, problems, s.eval_samples, top_p, g
                )
            line = {
                "step": run.step,
                "set": name,
                "decoding": f"top_p_{top_p:g}" if top_p < 1 else "t_1",
            }
            more = {}
            if s.lean_eval and end:
                solved = evals.bits(right.any(1))
                more = {"solved": solved, "counts": evals.counts(right)}
            if s.problem_counts and end:
                more["solved_times"] = evals.times(right)
            if s.keep_answers:
                more |= {"said": said.tolist(), "right": right.int().tolist()}
            logs["evals"].add(line | evals.scores(right, said) | more)


def evaluations(run: Run) -> list[tuple[str, float]]:
    """Return (set of problems, top-p) of each evaluation that is due at this step.

    With `decodings`, these on the test set, but not before the first step. Else the
    test set at eval_top_p and 1; at the end the sets by difficulty too. `lean_eval`
    leaves out top-p 1 before the end, and eval_top_p for the sets by difficulty.
    """
    s, end = run.s, run.step == run.s.steps
    if s.decodings:
        return [("test", float(top_p)) for top_p in s.decodings] if run.step else []
    due = [
        (name, top_p)
        for name in ("test", *run.task.levels)
        for top_p in (s.eval_top_p, 1.0)
    ]
    if not end:
        due = [(name, top_p) for name, top_p in due if name == "test"]

    def is_lean(name: str, top_p: float) -> bool:
        """Return whether `lean_eval` keeps an evaluation."""
        if name != "test":
            return top_p == 1
        return end or top_p < 1

    if s.lean_eval:
        due = [(name, top_p) for name, top_p in due if is_lean(name, top_p)]
    return due


def repeat_minibatch(path: Path) -> None:
    """Update once more on a minibatch that stopped a run, from the policy before it,
    and print its numbers.

    Raises:
        NotFinite: it stops again.
        InputError: the file is no kept minibatch.
    """
    run, batch, ref, rows = load_minibatch(path)
    tally = Tally(batch.tokens.shape[1])
    update(run, batch, ref, rows, tally)
    for name, value in tally.numbers(run.objective, run.s.hyperparameters()).items():
        print(f"{name:14} {value}")
