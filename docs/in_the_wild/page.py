# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/in-the-wild.md, from losses.toml and found.json."""

import inspect
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import CodeType

from docs.in_the_wild import wrappers

HERE = Path(__file__).parent
# gradients that differ by less are the same, with room for a 1e-6 in a denominator
SAME = 1e-5


def read() -> tuple[dict, dict]:
    """The losses that are listed, and the results of each, by name."""
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


WRONG = " **(the verdict is wrong)**"


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """The losses, in a table for each list of losses.toml."""
    losses, results = read()
    out, last = [], ""
    for name, loss in losses.items():
        if loss["list"] != last:
            head = "| code | its name or text says | wrapper | `upref.check` | `upref.identify` | by hand |"
            out += ["", f"## {loss['list']}", "", head, "|---|---|---|---|---|---|"]
            last = loss["list"]
        cells = row(name, loss, results[name])
        out.append(line([cell.replace("|", "\\|") for cell in cells]))
    return "\n".join(out)


def row(name: str, loss: dict, found: dict) -> list[str]:
    """The cells of a loss.

    Args:
        name: of its wrapper.
        loss: its table in losses.toml.
        found: its results in found.json.
    """
    text = loss["says"]
    if "said" in loss:
        text += f"; it says so itself: {loss['said']}"
    count = count_lines(getattr(wrappers, name))
    lines = "1 line" if count == 1 else f"{count} lines"
    return [
        code_link(loss),
        text,
        f"{lines}: {loss['needs']}",
        verdict(loss, found),
        found["identify"] or "refused",
        found["by_hand"] + ("" if right(found) else WRONG),
    ]


def count_lines(wrapper: Callable) -> int:
    """Count the lines of a wrapper and of the functions of its file that it uses.

    Blank lines, and the first line of each function, do not count.
    """
    counts: dict[str, int] = {}
    todo = [wrapper]
    while todo:
        function = todo.pop()
        source = inspect.getsource(function).splitlines()
        counts[function.__name__] = sum(bool(line.strip()) for line in source) - 1
        names_read = _names_read(function.__code__)
        todo += [
            other
            for name, other in vars(wrappers).items()
            if name in names_read and inspect.isfunction(other) and name not in counts
        ]
    return sum(counts.values())


def _names_read(code: CodeType) -> set[str]:
    """Return the names that a function reads, and those that the functions in it read."""
    inner = [_names_read(c) for c in code.co_consts if inspect.iscode(c)]
    return set(code.co_names).union(*inner)


def code_link(listed: dict) -> str:
    """The repository, with a link to the file at the commit, and the name of the file."""
    repo, file = listed["repo"], listed["file"]
    path = file.replace("+", "%2B")
    url = f"https://github.com/{repo}/blob/{listed['commit']}/{path}"
    return f"[{repo}]({url})<br>{file.rpartition('/')[2]}"


def estimators() -> str:
    """The table of the estimators of advantages and KL."""
    _, results = read()
    head = "| code | its name or text says | `check_advantages`, `check_kl` | by hand |"
    out = [head, "|---|---|---|---|"]
    for found in results["estimators"].values():
        # rounding, which a formula has not
        agrees = all(f.startswith("equal-rewards") for f in found["failures"])
        failures = "; ".join(found["failures"])
        if not agrees:
            text = f"**is not {found['held']}**; {failures}"
        elif not found["check"]:
            text = f"**is {found['held']}**, but not at {failures}"
        else:
            text = f"**is {found['held']}**{failures}"
        text += "".join(f"; {assumption}" for assumption in found["read"])
        wrong = found["off_formula"] > 1e-6 or agrees != found["same"]
        by_hand = found["by_hand"] + (WRONG if wrong else "")
        out.append(line([code_link(found), found["says"], text, by_hand]))
    return "\n".join(out)


def verdict(loss: dict, found: dict) -> str:
    """What check says of a loss: which objective it is or is not, and why."""
    if "refused" in found:
        return f"refused: {found['refused']}"
    hp = ", ".join(f"{k}={v:g}" for k, v in loss["hp"].items())
    name = f"{loss['held']}({hp})" if hp else loss["held"]
    if found["check"]:
        return f"**is {name}**"
    causes: dict[str, str] = {}
    for failure in found["failures"]:
        oracle = failure["oracle"]
        causes[oracle] = causes.get(oracle) or failure["cause"]
    why = "; ".join(
        f"{oracle}: {cause}" if cause else oracle for oracle, cause in causes.items()
    )
    if meant(found):
        return f"**is {name}**, but not at {why} ({found['failures'][0]['where']})"
    return f"**is not {name}**; {why}"


def tally() -> str:
    """The results in numbers."""
    losses, every = read()
    rows = [every[name] for name in losses]
    agree, refused = sum(map(meant, rows)), sum("refused" in r for r in rows)
    beyond = sum(meant(r) and not r["check"] for r in rows)
    lines = sorted(count_lines(getattr(wrappers, name)) for name in losses)
    borne_out = sum(right(r) for r in rows)
    repos = len({loss["repo"] for loss in losses.values()})
    cpu = sorted(r["cpu"] for r in rows)
    late = [k for k, loss in losses.items() if loss["list"].startswith("2026: ")]
    other = [k for k in losses if not meant(every[k]) and "refused" not in every[k]]
    new = [name for name in other if name in late]
    old = [name for name in other if name not in late]
    return (
        f"There are {len(rows)} losses from {repos} repositories: {agree} are the objective that they name ({beyond} "
        f"of these not at ratios or tokens that the row names), {len(rows) - agree - refused} are not, and {refused} "
        f"were refused. The check by hand agrees with {borne_out} of {len(rows)} verdicts. This is in-sample: the "
        "wrappers, the checks by hand and the tool have the same authors, who had these losses at hand when they "
        "changed it. "
        f"A wrapper takes {lines[len(lines) // 2]} lines (median), at most {lines[-1]}. `check`, "
        f"`identify` and the check by hand take {cpu[len(cpu) // 2]:g} CPU seconds per loss (median), at most "
        f"{cpu[-1]:g}, on a shared machine with {every['machine']}. {len(late)} of the losses are from repositories "
        f"begun in 2026: {len(new)} of these are not what they name, and "
        f"{sum('said' in losses[k] for k in new)} of the {len(new)} say so themselves. Of the {len(old)} others "
        f"that are not what they name, {sum('said' in losses[k] for k in old)} say what they compute."
    )
