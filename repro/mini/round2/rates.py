# SPDX-License-Identifier: Apache-2.0
"""The learning rate of each method, by the rule of family_rates.toml: `python -m repro.mini.round2.rates`."""

import json
import sys

import numpy as np

from repro.mini import files
from repro.mini.study import plan, results
from repro.mini.study.plan import Contrast


def choose(records: dict[str, results.Record]) -> dict[str, float]:
    """Method -> the rate whose training reward ends highest, the mean over the seeds; {} while runs are missing."""
    e = plan.load("family_rates")
    ends: dict[str, dict[float, float]] = {}
    for arm, settings in e.arms.items():
        found = [records.get(e.run(arm, seed).key) for seed in e.seeds]
        if not all(found):
            return {}
        reward = Contrast((arm,), "reward", "last", more_than=0)
        end = float(np.mean([results.value(r, reward) if r["status"] == "done" else 0.0 for r in found if r]))
        ends.setdefault(arm.rpartition("_")[0], {})[settings["lr"]] = end
    return {method: max(rates, key=lambda rate: rates[rate]) for method, rates in ends.items()}


def main() -> int:
    folder = results.folder_of(2)
    rates = choose(results.load(folder))
    if not rates:
        print(
            "rates: runs of family_rates are missing: python -m repro.mini.study.suite --only family_rates",
            file=sys.stderr,
        )
        return 2
    files.write_atomically(folder / "rates.json", (json.dumps(rates, indent=1) + "\n").encode())
    print(rates)
    return 0


if __name__ == "__main__":
    sys.exit(main())
