# SPDX-License-Identifier: Apache-2.0
"""The table of the sampler's gap: every fault of the simulator x model families, and
what replay names.

    python -m tests.replay.grade           # the families and seeds of no tuning
    python -m tests.replay.grade --tuned   # those that the rules were tuned on
    python -m tests.replay.grade --families olmo2,mpt --seed 12

Exit status 1 if a healthy sampler fails, or if fewer than 95 % are named.
"""

import argparse
from dataclasses import dataclass
from typing import Any

import torch

from tests.replay.simulator import FAULTS, World
from upref.replay.batch import make_batch
from upref.replay.gap import gap

TUNED = (
    "qwen3",
    "qwen3_moe",
    "llama",
    "gpt2",
    "gemma",
    "olmo2",
    "mistral",
    "phi3",
    "smollm3",
    "glm4",
    "stablelm",
    "falcon",
    "qwen2",
    "gpt_neox",
)
HELD_OUT = (
    "mixtral",
    "phi",
    "cohere2",
    "granite",
    "olmoe",
    "starcoder2",
    "opt",
    "bloom",
    "nemotron",
    "exaone4",
    "helium",
    "gptj",
)
POLICIES = ("agree", "two_policies")
# whose sentence names other experts and other weights
OTHER_POLICIES = (*POLICIES, "impossible_tokens")
CUTS = ("cut", "cut_or_divided", "all_zero")  # all_zero: one token is left everywhere

# What may be named. What one column cannot tell apart has one cause, whose sentence
# names all that fit.
EXPECTED: dict[str, tuple[str, ...]] = {
    "healthy": POLICIES,
    "healthy_bfloat16": POLICIES,
    "healthy_both_bfloat16": (*POLICIES, "copied"),  # both may compute the same numbers
    "stale_by_one": OTHER_POLICIES,
    "stale_by_four": OTHER_POLICIES,
    "other_experts": OTHER_POLICIES,
    "other_weights": OTHER_POLICIES[1:],
    "quantized_weights": POLICIES,
    "before_temperature": (
        "raw_temperature",
        "some_temperature",
        "not_the_sampler",
        "above_one",
    ),
    "trainer_without_temperature": ("temperature", "some_temperature"),
    "divided": ("factor",),
    "divided_in_trainer": ("cut_or_divided", "trainer_above"),
    "nucleus_cut": CUTS,
    "top_k_cut": CUTS,
    "min_p_cut": CUTS,
    "shifted": ("shift",),
    "shifted_back": ("shift",),
    "exchanged_rows": ("rows",),
    "exchanged_two": ("rows",),
    "tool_output": ("not_sampled",),
    "tool_output_nan": ("not_sampled",),
    "retokenized": ("impossible_tokens",),
    "retokenized_with_ids": ("other_ids",),
    "clamped": ("floor",),
    "bfloat16_column": ("bfloat16_column",),
    "probabilities": ("probabilities",),
    "copied_column": ("copied",),
}
UNDONE = (
    "factor",
    "shift",
    "rows",
    "not_sampled",
    "other_ids",
    "floor",
    "probabilities",
)


@dataclass(frozen=True)
class Cell:
    """One fault in one family: what was named, and whether that is right."""

    fault: str
    family: str
    named: str
    failed: bool

    @property
    def right(self) -> bool:
        expected = EXPECTED[self.fault]
        return self.named in expected and self.failed == (self.named in UNDONE)

    @property
    def false_alarm(self) -> bool:
        return self.failed and EXPECTED[self.fault][0] not in UNDONE


def cell(fault: str, world: World) -> Cell:
    """Simulate the fault and name it."""
    found = gap(make_batch(FAULTS[fault](world), file=fault))
    return Cell(fault, world.family, found.cause, not found)


def worlds(families: tuple[str, ...], seed: int) -> list[World]:
    """A world for each family: temperatures, entropies and sizes vary with it."""
    temperatures, entropies, sizes = (1.0, 0.7, 1.2, 0.6), (0.8, 0.5, 1.2), (64, 32, 96)
    return [
        World(
            f,
            seed + i,
            sizes[i % 3],
            24 + 8 * (i % 3),
            8,
            temperatures[i % 4],
            entropies[(i + seed) % 3],
        )
        for i, f in enumerate(families)
    ]


def table(cells: list[Cell]) -> str:
    """One line a fault: how often it was named right, and what else was named."""
    lines = [f"{'fault':28} {'right':>7}  named otherwise"]
    for fault in FAULTS:
        row = [c for c in cells if c.fault == fault]
        wrong = "; ".join(
            f"{c.family}: {c.named}{' (failure)' if c.failed else ''}"
            for c in row
            if not c.right
        )
        lines.append(
            f"{fault:28} {sum(c.right for c in row):>3}/{len(row):<3}  {wrong}".rstrip()
        )
    right, alarms = sum(c.right for c in cells), sum(c.false_alarm for c in cells)
    lines.append(
        f"{'all':28} {right:>3}/{len(cells):<3}  {100 * right / len(cells):.1f} %; false failures: {alarms}"
    )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    torch.set_num_threads(1)
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("--tuned", action="store_true")
    p.add_argument("--families", default="")
    p.add_argument("--faults", default="")
    p.add_argument("--seed", type=int, default=-1)
    a: Any = p.parse_args(arguments)
    families = (
        tuple(a.families.split(",")) if a.families else TUNED if a.tuned else HELD_OUT
    )
    seed = a.seed if a.seed >= 0 else 0 if a.tuned else 500
    faults = a.faults.split(",") if a.faults else list(FAULTS)
    cells = [cell(fault, world) for world in worlds(families, seed) for fault in faults]
    print(table(cells))
    right = sum(c.right for c in cells)
    return int(any(c.false_alarm for c in cells) or right < 0.95 * len(cells))


if __name__ == "__main__":
    raise SystemExit(main())
