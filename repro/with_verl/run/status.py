# SPDX-License-Identifier: Apache-2.0
"""Where runs stand: one line each.

python -m repro.with_verl.run.status [RUN...]        all under runs/ where none is named
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

from repro import Parser
from repro.with_verl.place import RUNS
from repro.with_verl.run import folder, records
from repro.with_verl.run.start import SCORE, checkpointed


def line(run: Path) -> str:
    """State, steps, score, parity, and when it will be done."""
    import json

    saved = json.loads((run / "overrides.json").read_text(encoding="utf-8"))
    rows = records.training(records.merged(run))
    total, done = saved.get("total"), rows[-1]["step"] if rows else 0
    who = folder.busy(run)
    log = run / "verl.log"
    last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-1:] if log.exists() else []
    state = "running" if who else "finished" if total and done >= total else "ended" if last else "not started"
    parts = [f"{run.name}: {state}", f"step {done}{f' of {total}' if total else ''}"]
    if rows:
        data = rows[-1]["data"]
        parts.append(f"score {data.get(SCORE, float('nan')):.3f}")
        if (alarms := data.get("actor/upref/parity_alarms")) is not None:
            parts.append("parity ALARM" if alarms > 0 else "parity agrees")
        seconds = [r["data"]["timing_s/step"] for r in rows[-20:] if "timing_s/step" in r["data"]]
        if seconds:
            parts.append(f"{median(seconds):.0f} s a step")
        if who and total and seconds:
            parts.append(f"{(total - done) * median(seconds) / 3600:.1f} h to go")
        newest = max(p.stat().st_mtime for p in run.glob("steps*.jsonl"))
        parts.append(f"last step {(time.time() - newest) / 60:.0f} min ago")
    parts.append(f"checkpoint of step {checkpointed(run)}" if checkpointed(run) else "no checkpoint")
    if who:
        parts.append(who)
    elif state == "ended" and last and last[0].startswith("upref: "):
        parts.append(last[0].removeprefix("upref: "))
    return ", ".join(parts)


def main(argv: list[str] | None = None) -> int:
    p = Parser(prog="status", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("runs", nargs="*", type=Path, metavar="RUN")
    args = p.parse_args(argv)
    runs = args.runs or sorted(f.parent for f in RUNS.glob("*/overrides.json"))
    if missing := [r for r in runs if not (r / "overrides.json").exists()]:
        print(f"status: {missing[0]} is no folder of a run: it has no overrides.json.", file=sys.stderr)
        return 2
    print("\n".join(map(line, runs)) if runs else f"no run under {RUNS}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
