# SPDX-License-Identifier: Apache-2.0
"""Adapters of DeepSpeed's ZeRO, where a release of it is on PYTHONPATH, and a record of
their verdicts.

    python -m tests.conformance.deepspeed_adapter [Zero3 ...]

runs the cases `engine/*` of one process on each engine, and records the verdicts on the
release at hand. Set DS_ACCELERATOR=cpu, GLOO_SOCKET_IFNAME=lo and the variables of a
process group of one rank.
"""

import copy
import importlib.metadata
import sys
from pathlib import Path

import torch

from docs import record
from tests.conformance.engine_adapters import Plain, chunks
from upref.conformance import CASES, run


class Zero(Plain):
    """DeepSpeed's engine at one stage of ZeRO, on the CPU."""

    stage = 1
    offload = False
    name = f"deepspeed {importlib.metadata.version('deepspeed')}"

    def supports(self, case):
        return "" if case.ranks == 1 else "one process"

    def step(self, model, rows, case):
        """Train a copy with a DeepSpeed engine; return the weights after each update."""
        import deepspeed

        own = copy.deepcopy(model)  # ZeRO-3 replaces the parameters
        zero = {"stage": self.stage}
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
        engine, *_ = deepspeed.initialize(
            model=own,
            optimizer=torch.optim.AdamW(own.parameters(), lr=1e-3),
            config={
                "train_micro_batch_size_per_gpu": 8
                // (case.micro_batches * case.updates),
                "gradient_accumulation_steps": case.micro_batches,
                "gradient_clipping": case.clip or 0.0,
                "zero_optimization": zero,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "steps_per_print": 10**9,
            },
            dist_init_required=False,
        )
        weights = []
        for update in chunks(rows, case.updates):
            tokens = sum(sum(row.trains) for row in update)
            for part in chunks(update, case.micro_batches):
                loss = self.loss(engine, part, case, tokens, len(update))
                # the engine divides by the number of micro-batches
                engine.backward(case.micro_batches * loss)
                engine.step()
            with deepspeed.zero.GatheredParameters([*engine.module.parameters()]):
                named = engine.module.named_parameters()
                weights.append({name: p.detach().clone() for name, p in named})
        return weights if case.updates > 1 else weights[0]

    move = step


class Zero1(Zero):
    """Optimizer states divided."""


class Zero1Offload(Zero1):
    offload = True


class Zero2(Zero):
    stage = 2


class Zero2Offload(Zero2):
    offload = True


class Zero3(Zero):
    stage = 3


RECORDS = Path(__file__).parents[2] / "docs/steps/engines.json"
ENGINES = (Zero1, Zero1Offload, Zero2, Zero2Offload, Zero3)


def main(chosen: list[str]) -> None:
    """Record the verdicts on engines of the release at hand.

    Args:
        chosen: names of their classes; []: all.
    """
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    rows = {}
    for engine in ENGINES:
        if chosen and engine.__name__ not in chosen:
            continue
        named = "with CPU offload" if engine.offload else ""
        key = f"{engine.name}, ZeRO-{engine.stage} {named}".strip()
        rows[key] = {}
        for case in CASES.values():
            if case.engine and case.ranks == 1:
                outcome = run(engine(), case)
                rows[key][case.id] = outcome.reason or str(outcome.status)
                print(key, case.id, rows[key][case.id], flush=True)
    record.add(RECORDS, "python -m tests.conformance.deepspeed_adapter", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
