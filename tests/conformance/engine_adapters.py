# SPDX-License-Identifier: Apache-2.0
"""Adapters whose engine hides its gradients: a flat copy of the weights, with the faults
that engines have had; FSDP1; and a trainer in another process.

`python -m pytest --pyargs upref.conformance --level 7 --adapter FILE:CLASS` takes each.
"""

import copy
import multiprocessing
import re
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

PAGE = Path(__file__).parents[2] / "docs/howto/conformance.md"
SOURCE = re.search(
    r"```python\n(# adapter\.py\n.*?)```", PAGE.read_text(encoding="utf-8"), re.S
)[1]
namespace = {}
exec(compile(SOURCE, str(PAGE), "exec"), namespace)
Plain, chunks = namespace["Plain"], namespace["chunks"]


class Flat(Plain):
    """An engine that trains a flat copy of the weights, and leaves no gradient in the
    model. Its methods are what faults change.
    """

    name = "flat engine 1.0"
    bound = 0.0  # the engine's default for the norm of the gradient

    def supports(self, case):
        return "" if case.ranks == 1 else "one process"

    def accumulated(self, parts):
        return sum(parts)

    def cleared(self, gradient):
        return gradient

    def place(self, flat, model):
        vector_to_parameters(flat, model.parameters())

    def step(self, model, rows, case):
        """Train a flat copy of the weights by AdamW, and put it into the model after
        each update. The faults are in `accumulated`, `cleared` and `place`.
        """
        self.flat = parameters_to_vector(model.parameters()).detach().clone()
        optimizer = torch.optim.AdamW([self.flat], lr=1e-3)
        for update in chunks(rows, case.updates):
            tokens = sum(sum(row.trains) for row in update)
            parts = []
            for part in chunks(update, case.micro_batches):
                self.loss(model, part, case, tokens, len(update)).backward()
                parts.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
                model.zero_grad()
            self.flat.grad = self.cleared(self.accumulated(parts))
            bound = case.clip or self.bound
            if bound:
                clip_grad_norm_([self.flat], bound)
            optimizer.step()
            self.place(self.flat, model)

    move = step


class FirstAndLast(Flat):
    """What DeepSpeed 0.18.8's ZeRO-2 with CPU offload did."""

    def accumulated(self, parts):
        return parts[0] + parts[-1]


class LastAlone(Flat):
    def accumulated(self, parts):
        return parts[-1]


class LastMissing(Flat):
    """The copy to the CPU is not waited for."""

    def accumulated(self, parts):
        return sum(parts[:-1])


class DividesTwice(Flat):
    def accumulated(self, parts):
        return sum(parts) / len(parts)


class NeverDivides(Flat):
    def accumulated(self, parts):
        return len(parts) * sum(parts)


class AddsAgain(Flat):
    """Each micro-batch counts again in every later pass."""

    def accumulated(self, parts):
        return sum((len(parts) - n) * part for n, part in enumerate(parts))


class ClipsByDefault(Flat):
    bound = 1.0


class MeanOfMeans(Flat):
    def loss(self, model, rows, case, tokens, responses):
        own = sum(sum(row.trains) for row in rows)
        return super().loss(model, rows, case, own, len(rows)) / case.micro_batches


class NeverClears(Flat):
    kept = 0.0

    def cleared(self, gradient):
        self.kept = self.kept + gradient
        return self.kept


class GradientOfStepBefore(Flat):
    kept = None

    def cleared(self, gradient):
        if self.kept is None:
            self.kept = gradient.clone()
        return self.kept.clone()


class NeverPlaces(Flat):
    """The model keeps the weights of the start until the last step is over."""

    calls = 0

    def place(self, flat, model):
        self.calls += 1
        if self.calls == 2:
            super().place(flat, model)


class Fsdp1(Plain):
    """FullyShardedDataParallel over gloo, on one process or two."""

    name = f"FSDP1 of torch {torch.__version__}"

    def supports(self, case):
        return ""

    def tokens(self, rows):
        tokens = torch.tensor(float(sum(sum(row.trains) for row in rows)))
        distributed.all_reduce(tokens)
        return tokens

    def step(self, model, rows, case):
        """Train a copy of the model under FSDP1; return its weights after each update
        as a list, or after the only one.
        """
        ranks = distributed.get_world_size()
        own = copy.deepcopy(model)  # whose parameters are replaced
        wrapped = FullyShardedDataParallel(own, device_id=torch.device("cpu"))
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
        weights = []
        for update in chunks(rows, case.updates):
            tokens = self.tokens(update) / ranks  # FSDP takes the mean of the ranks
            for part in chunks(update, case.micro_batches):
                self.loss(wrapped, part, case, tokens, len(update)).backward()
            if case.clip:
                wrapped.clip_grad_norm_(case.clip)
            optimizer.step()
            optimizer.zero_grad()
            with FullyShardedDataParallel.summon_full_params(wrapped):
                weights.append(
                    {
                        name.replace("_fsdp_wrapped_module.", ""): p.detach().clone()
                        for name, p in wrapped.named_parameters()
                    }
                )
        return weights if case.updates > 1 else weights[0]

    move = step


class CountsItsOwn(Fsdp1):
    def tokens(self, rows):
        return 2 * sum(sum(row.trains) for row in rows)


class SumsTheRanks(Fsdp1):
    """Divides by the tokens of all ranks, and the engine adds in place of a mean."""

    def tokens(self, rows):
        return super().tokens(rows) / 2


class Remote(Plain):
    """A trainer in another process, by its own SGD: it returns weights."""

    name = "remote trainer 1.0"
    learning_rate = 0.001

    def supports(self, case):
        return "" if case.ranks == 1 else "one process"

    def move(self, model, rows, case):
        """Train the model in a process of its own, and return the weights that it
        sends.
        """
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=self.train, args=(there, model, rows, case))
        child.start()
        weights = here.recv()
        child.join()
        return weights

    def train(self, there, model, rows, case):
        """Train in plain tensors, and send the weights after each step."""
        torch.set_num_threads(1)
        weights = []
        for update in chunks(rows, case.updates):
            tokens = sum(sum(row.trains) for row in update)
            for part in chunks(update, case.micro_batches):
                self.loss(model, part, case, tokens, len(update)).backward()
            if case.clip:
                clip_grad_norm_(model.parameters(), case.clip)
            with torch.no_grad():
                for p in model.parameters():
                    p -= self.learning_rate * p.grad
                    p.grad = None
            named = model.named_parameters()
            weights.append({name: p.detach().numpy().copy() for name, p in named})
        there.send(weights if case.updates > 1 else weights[0])


class LosesAMicroBatch(Remote):
    def train(self, there, model, rows, case):
        lost = chunks(rows, case.micro_batches)[1]
        for row in lost:
            row.adv = 0.0
        super().train(there, model, rows, case)
