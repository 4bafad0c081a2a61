# SPDX-License-Identifier: Apache-2.0
"""The micro-batches that a run has dumped, compared with the float64 reference again,
without verl.

    python -m repro.with_verl.parity DIR_OR_FILE...

A run dumps with '+actor_rollout_ref.actor.policy_loss.upref={parity: {dump: DIR}}'.
Exit status: 0 all agree within what rounding explains, 1 one does not, 2 there is
nothing to read.
"""

import sys
from pathlib import Path

import torch

import upref
from upref_frameworks.parity import Parity, compare


def again(path: Path) -> tuple[dict, Parity]:
    """One dumped micro-batch and its comparison; InputError where it is not one."""
    try:
        dumped = torch.load(path, weights_only=True)
        held = dict(dumped)
        objective, hp = upref.get(held.pop("objective")), held.pop("hp")
        totals = upref.Totals(*held.pop("totals"))
        loss, gradient, count = (held.pop(k) for k in ("loss", "gradient", "count"))
        return dumped, compare(
            objective, loss, gradient, count, totals=totals, **held, **hp
        )
    except upref.InputError:
        raise
    except Exception as e:  # torch.load raises whatever its parts raise
        why = f"{type(e).__name__}: {e}".splitlines()[0]
        raise upref.InputError(
            f"{path} is not a whole dumped micro-batch ({why}): was the run cut off?"
        ) from e


def main(arguments: list[str]) -> int:
    files = [
        f
        for a in map(Path, arguments)
        for f in (sorted(a.glob("*.pt")) if a.is_dir() else [a])
    ]
    if not files:
        print(
            "parity: no dumped micro-batch (*.pt) there: name a folder that a run dumped to.",
            file=sys.stderr,
        )
        return 2
    if gone := [f for f in files if not f.exists()]:
        print(
            f"parity: there is no {gone[0]}: name a folder that a run dumped to.",
            file=sys.stderr,
        )
        return 2
    worst = 0.0
    for file in files:
        try:
            dumped, found = again(file)
        except upref.InputError as error:
            print(f"parity: {error}", file=sys.stderr)
            return 2
        worst = max(worst, found.of_bound)
        size, dtype = (
            "x".join(map(str, dumped["mask"].shape)),
            str(dumped["logp"].dtype)[6:],
        )
        where = (
            ""
            if found.worst[0] < 0
            else " at response {}, token {}".format(*found.worst)
        )
        print(
            f"{file.name}: {dumped['objective']}, {size}, {dtype}: max_abs {found.max_abs:.1e}, "
            f"{found.of_bound:.3g} of the bound{where}, {found.at_bound} tokens at a clip bound"
        )
    print(
        f"{len(files)} micro-batches, the worst at {worst:.3g} of its bound: {'agree' if worst <= 1 else 'DIFFER'}"
    )
    return 0 if worst <= 1 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
