# SPDX-License-Identifier: Apache-2.0
"""Every registered objective for two steps of verl's own trainer on the CPU; about two minutes each.

    python repro/with_verl/nightly.py [OBJECTIVE...]

Writes results/every.json after each one and goes on where it was stopped. Exit status 1 where one failed.
"""

import json
import sys

import smoke

import upref

TABLE = smoke.HERE / "results" / "every.json"
LEFT_OUT = {"aspo_code": "it needs the policy's entropy per token, which verl does not hand to a loss"}


def main(names: list[str]) -> int:
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for name in names or upref.names():
        if name in LEFT_OUT:
            table[name] = {"not run": LEFT_OUT[name]}
        elif names or table.get(name, {}).get("wrong") != []:
            out = smoke.ROOT / "repro" / "out" / name / "nightly"
            smoke.main(name, 2, out)
            found = json.loads((out / "summary.json").read_text())
            table[name] = {k: found[k] for k in ("steps", "seconds", "wrong", "parity_max_abs", "parity_of_bound")}
        lines = (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(table.items()))
        TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return int(any(row.get("wrong") for row in table.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
