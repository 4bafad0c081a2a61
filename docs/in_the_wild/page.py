# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/in-the-wild.md, from losses.toml and found.json."""

import json
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
# gradients that differ by less are the same, with room for a 1e-6 in a denominator
SAME = 1e-5


def read() -> tuple[dict, dict]:
    table = tomllib.loads((HERE / "losses.toml").read_text(encoding="utf-8"))
    return table, json.loads((HERE / "found.json").read_text(encoding="utf-8"))


def right(found: dict) -> bool:
    """Whether the verdict is what the formula, written by hand and compared with the code, says."""
    if "refused" in found:
        return found["raises"]
    agrees = found["off_formula"] is not None and found["off_formula"] < 1e-6
    return agrees and meant(found) == (found["off_objective"] < SAME)


def meant(found: dict) -> bool:
    """Whether it is what it says but for rounding at extremes, which a formula does not have."""
    return "refused" not in found and {f["oracle"] for f in found["failures"]} <= {
        "extremes"
    }


def table() -> str:
    losses, every = read()
    out, last = [], ""
    for name, x in losses.items():
        if x["list"] != last:
            head = "| code | its name or text says | wrapper | `upref.check` | `upref.identify` | by hand |"
            out += ["", f"## {x['list']}", "", head, "|---|---|---|---|---|---|"]
            last = x["list"]
        out.append(
            f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row(x, every[name]))} |"
        )
    return "\n".join(out)


def row(x: dict, found: dict) -> list[str]:
    where = f"[{x['repo']}](https://github.com/{x['repo']}/blob/{x['commit']}/{x['file'].replace('+', '%2B')})"
    lines = f"{found['lines']} line{'s' if found['lines'] != 1 else ''}: {x['needs']}"
    hand = found["by_hand"] + ("" if right(found) else " **(the verdict is wrong)**")
    says = x["says"] + (f"; it says so itself: {x['said']}" if "said" in x else "")
    return [
        f"{where}<br>{x['file'].rpartition('/')[2]}",
        says,
        lines,
        verdict(x, found),
        named(found),
        hand,
    ]


def estimators() -> str:
    _, every = read()
    head = "| code | its name or text says | `check_advantages`, `check_kl` | by hand |"
    out = [head, "|---|---|---|---|"]
    for x in every["estimators"].values():
        where = f"[{x['repo']}](https://github.com/{x['repo']}/blob/{x['commit']}/{x['file']})"
        # rounding, which a formula has not
        meant = all(f.startswith("equal-rewards") for f in x["failures"])
        says = f"**is {x['held']}**" if meant else f"**is not {x['held']}**"
        if not meant:
            says += "; "
        elif not x["check"]:
            says += ", but not at "
        says += "; ".join(x["failures"])
        says += "".join(f"; {c}" for c in x["read"])
        wrong = x["off_formula"] > 1e-6 or meant != x["same"]
        hand = x["by_hand"] + (" **(the verdict is wrong)**" if wrong else "")
        out.append(
            f"| {' | '.join([f'{where}<br>' + x['file'].rpartition('/')[2], x['says'], says, hand])} |"
        )
    return "\n".join(out)


def verdict(x: dict, found: dict) -> str:
    if "refused" in found:
        return f"refused: {found['refused']}"
    hp = ", ".join(f"{k}={v:g}" for k, v in x["hp"].items())
    name = f"{x['held']}({hp})" if hp else x["held"]
    if found["check"]:
        return f"**is {name}**"
    whys: dict[str, str] = {}
    for f in found["failures"]:
        whys[f["oracle"]] = whys.get(f["oracle"]) or f["cause"]
    says = "; ".join(f"{k}: {v}" if v else k for k, v in whys.items())
    if meant(found):
        return f"**is {name}**, but not at {says} ({found['failures'][0]['where']})"
    return f"**is not {name}**; {says}"


def named(found: dict) -> str:
    return found["identify"] or "refused"


def tally() -> str:
    losses, every = read()
    rows = [every[k] for k in losses]
    agree, refused = sum(map(meant, rows)), sum("refused" in r for r in rows)
    beyond = sum(meant(r) and not r["check"] for r in rows)
    lines = sorted(r["lines"] for r in rows)
    told = sum(right(r) for r in rows)
    repos = len({x["repo"] for x in losses.values()})
    cpu = sorted(r["cpu"] for r in rows)
    late = [k for k, x in losses.items() if x["list"].startswith("2026: ")]
    other = [k for k in losses if not meant(every[k]) and "refused" not in every[k]]
    new, old = [k for k in other if k in late], [k for k in other if k not in late]
    return (
        f"There are {len(rows)} losses from {repos} repositories: {agree} are the objective that they name ({beyond} "
        f"of these not at ratios or tokens that the row names), {len(rows) - agree - refused} are not, and {refused} "
        f"were refused. The check by hand agrees with {told} of {len(rows)} verdicts. This is in-sample: the wrappers, "
        "the checks by hand and the tool have the same authors, who had these losses at hand when they changed it. "
        f"A wrapper takes {lines[len(lines) // 2]} lines (median), at most {lines[-1]}. `check`, "
        f"`identify` and the check by hand take {cpu[len(cpu) // 2]:g} CPU seconds per loss (median), at most "
        f"{cpu[-1]:g}, on a shared machine with {every['machine']}. {len(late)} of the losses are from repositories "
        f"begun in 2026: {len(new)} of these are not what they name, and "
        f"{sum('said' in losses[k] for k in new)} of the {len(new)} say so themselves. Of the {len(old)} others "
        f"that are not what they name, {sum('said' in losses[k] for k in old)} say what they compute."
    )
