# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/what-check-sees.md: axes, tolerances, habits and ends, read from
the code that defines them.
"""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from docs import record
from upref import markdown


def axes() -> str:
    """Return the table of the axes of the input, from upref.weights.stress."""
    from upref.verify.oracles.batches import ONE_RESPONSE
    from upref.weights.batches import GRID_ADVANTAGES, LOG_R, MU, MU_READ, OVERFLOW
    from upref.weights.stress import AXES, NAMED, TILED

    grid = (
        f"A of {_listed(GRID_ADVANTAGES)}; π_old of {_listed(MU)} (of {_listed(MU_READ)} too where bounds depend on it); "
        "every bound from below, on it and from above; "
        f"{len(LOG_R)} more ratios with |log r| up to {max(LOG_R):g}; masks with holes, NaN in padding"
    )
    far_ratios = (
        f"|log r| of {_listed(OVERFLOW)}, and π_θ of exactly 1, in float64, float32 and bfloat16; where a bound depends "
        "on π_old, any finite weight passes at π_θ = 1"
    )
    name_of: dict[str, str] = {}  # the words of an axis -> the name of its first level
    for level, axis in AXES.items():
        name = level
        if level[0].isdigit():  # the level is a size
            name = "whole tiles" if axis.words == TILED else "sizes and compositions"
        name_of.setdefault(axis.words, name)
    group_ids = (
        f"{', '.join(NAMED)}; "
        "the batches from `every two` on have each of these beside each level of the other axes"
    )
    rows = [
        ("the grid", grid),
        ("one response", ONE_RESPONSE),
        ("far ratios, certain tokens", far_ratios),
        *((name, words) for words, name in name_of.items()),
        ("group ids", group_ids),
    ]
    return _rows("axis | inputs", rows)


def _listed(numbers: Iterable[float]) -> str:
    """Return numbers with commas between them."""
    return ", ".join(f"{x:g}" for x in numbers)


# objectives that read, together, everything that a batch may have -> their settings
READERS = {
    "dapo": {},
    "gspo": {},
    "up_dapo": {},
    "dr_grpo": {},
    "grpo": {"beta": 0.04},
    "aspo_code": {},
    "decoupled(dapo)": {},
}


def quantities() -> str:
    """Return the table of every quantity of a batch, with the values that it takes in
    the calls of the checks of READERS.
    """
    values_of: dict[str, set[float]] = {}
    for name, settings in READERS.items():
        for batch in _inputs_of_check(name, settings):
            for quantity, values in _measured(batch).items():
                values_of.setdefault(quantity, set()).update(values)
    rows = [(quantity, _range(values)) for quantity, values in values_of.items()]
    return _rows("quantity | values", rows)


def _inputs_of_check(name: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the inputs of every call that a check of this objective makes beside its
    proof, whose calls compare nothing.

    Args:
        name: of the objective, which is checked against itself.
        settings: its hyperparameters; those with settings read logp_ref.
    """
    import upref

    objective = upref.get(name)
    calls: list[dict[str, Any]] = []

    def loss(
        log_prob: Any,
        old_log_prob: Any,
        advantages: Any,
        mask: Any,
        ref_log_prob: Any,
        group: Any,
        entropy: Any,
        rollout_log_probs: Any,
    ) -> Any:
        """Return the loss of the objective itself, and keep the inputs in `calls`."""
        fields = {
            "logp": log_prob,
            "logp_old": old_log_prob,
            "adv": advantages,
            "mask": mask,
            "logp_ref": ref_log_prob,
            "group": group,
            "entropy": entropy,
            "logp_sampler": rollout_log_probs,
        }
        read = {*MAIN, "entropy", "logp_sampler"}
        if settings:  # without one no objective of READERS has a KL term
            read.add("logp_ref")
        calls.append({k: v.detach() for k, v in fields.items() if k in read})
        return objective.loss(upref.Rollouts.unchecked(**fields), **settings)

    report = upref.check(loss, name, skip=PROOF, **settings)
    assert report, str(report)
    return calls


MAIN = ("logp", "logp_old", "adv", "mask", "group")
PROOF = ("every-value",)  # the oracle that proves


def _measured(batch: dict[str, Any]) -> dict[str, list[float]]:
    """Return every quantity of one batch with its values; of a continuous one, the
    least and the largest. Fields of a batch are [B, T], mask and group as in
    upref.Rollouts.
    """
    import torch

    mask = batch["mask"]
    # field -> its values on the tokens that train
    on_tokens = {
        name: x.double()[mask].nan_to_num() for name, x in batch.items() if x.ndim == 2
    }
    lp, lp_old = on_tokens["logp"], on_tokens["logp_old"]
    per_prompt = batch["group"].unique(return_counts=True)[1]
    sizes = on_tokens["adv"].abs()
    # where a run of tokens begins; roll takes the last column for that before the first
    begins = (mask & ~mask.roll(1, 1)).sum(1)
    pieces = begins + (mask[:, 0] & mask[:, -1]).int()
    signs_in_long_responses = []
    for A, trains in zip(batch["adv"], mask, strict=True):
        if trains.sum() > 9:
            signs_in_long_responses.append(len(A[trains].sign().unique()))
    out = {
        "responses": [len(mask)],
        "columns": [mask.shape[1]],
        "tokens of a response": mask.sum(1).tolist(),
        "tokens of the batch": [int(mask.sum())],
        "runs of tokens in a response, with holes between": pieces.tolist(),
        "columns before the first token": mask.int().argmax(1).tolist(),
        "prompts": [len(per_prompt)],
        "responses to a prompt": per_prompt.tolist(),
        "size of A, where it is not 0": _ends(sizes[sizes > 0]),
        "signs of A in a response of more than 9 tokens": signs_in_long_responses,
        "log π_θ": _ends(lp),
        "log π_old": _ends(lp_old),
        "log r of a token": _ends(lp - lp_old),
    }
    lp_ref, lp_sampler = on_tokens.get("logp_ref"), on_tokens["logp_sampler"]
    if lp_ref is not None and not torch.equal(lp_ref, lp_old):
        out["log π_ref / π_θ"] = _ends(lp_ref - lp)
    if not torch.equal(lp_sampler, lp_old):
        out["log π_old / μ"] = _ends(lp_old - lp_sampler)
    out["entropy, in nats"] = _ends(on_tokens["entropy"])
    return out


def _ends(x: Any) -> list[float]:
    """Return the least and the largest number of a tensor; [] for an empty one."""
    return [x.min().item(), x.max().item()] if x.numel() else []


MANY = 24  # different values: of more, the page has the least and the largest


def _range(values: set[float]) -> str:
    """Return all values as text where they are few and whole, else the least and the
    largest.
    """
    ordered = sorted(values)
    least, largest = ordered[0], ordered[-1]
    whole = all(float(x).is_integer() for x in ordered)
    if whole and len(ordered) <= MANY:
        return ", ".join(f"{x:,.0f}" for x in ordered)
    if whole and isinstance(least, int):
        return f"{least:,} to {largest:,}, {len(ordered)} different ones"
    return f"{least:.4g} to {largest:.4g}"


def _blocks(in_turn: bool) -> str:
    """Return the sizes of the blocks of the axes, with prompts in turn or without."""
    from upref.weights.stress import AXES

    axes = [axis for axis in AXES.values() if axis.block]
    sizes = {axis.block for axis in axes if bool(axis.prompts_in_turn) == in_turn}
    return _listed(sorted(sizes))


def layouts() -> str:
    """Return the table of the order of the rows in which frameworks call their losses,
    from layouts.toml.
    """
    rows = []
    tables = tomllib.loads(LAYOUTS.read_text(encoding="utf-8"))
    for layout in tables["layout"]:
        order = tables["order"][layout["order"]]
        tried = order["tried"].format(_blocks(layout["order"] == "in turn"))
        file, line = layout["file"], layout["line"]
        place = f"{file}, line {line}"
        if "commit" in layout:
            home = f"https://github.com/{layout['repository']}/blob/{layout['commit']}"
            place = f"[{place}]({home}/{file}#L{line})"
        rows.append((layout["framework"], order["words"], place, tried))
    return _rows("framework | its rows | the line that decides it | in a check", rows)


LAYOUTS = Path(__file__).with_name("layouts.toml")


def tolerances() -> str:
    """Return the table of every tolerance of a verdict, from where it is used."""
    from upref.verify.advantages.case import SINGLE_TOL
    from upref.verify.measure import EXACT_TOL, FLOAT32_ROUNDING, FLOAT32_TOL, HABIT_TOL
    from upref.verify.oracles.unusual import TOO_LONG
    from upref.weights.batches import BOUND_EDGES, GUARD, SINGLE_EDGES

    rows = [
        (
            f"{EXACT_TOL:g}",
            "a weight in float64, without a note",
            "rounding over a few hundred terms is smaller",
        ),
        (
            f"{HABIT_TOL:g}",
            "a weight in float64, with a note",
            "the largest accepted habit is 1e-6 on a length of one",
        ),
        (
            f"{FLOAT32_TOL:g}",
            "a weight of a float32 loss",
            "float32 also rounds the log-probabilities, by a relative "
            f"{FLOAT32_ROUNDING:g}; what that changes is allowed besides",
        ),
        (
            f"{max(BOUND_EDGES):g}",
            "distance from each bound at which both sides are tested, relative to r",
            "reveals a misplaced bound",
        ),
        (
            f"{max(SINGLE_EDGES):g}",
            "the same in float32",
            "below the narrowest clip range, GSPO's 3e-4",
        ),
        (
            "10 times these",
            "on random batches and unusual inputs",
            "longer sums have more rounding error",
        ),
        (
            f"{GUARD['token']:g}",
            "log r of a token from which a clamp is a note",
            "a ratio of 5e8 meets guards only",
        ),
        (
            f"{GUARD['sequence_mean']:g}",
            "log s of a response from which a clamp is a note",
            "log s is a mean over tokens",
        ),
        (
            f"{SINGLE_TOL:g}",
            "an advantage in float32",
            "computing a variance loses half of the digits",
        ),
        (
            f"{TOO_LONG:g} s",
            "time for one batch; slower batches are skipped",
            "the report lists them",
        ),
    ]
    return _rows("tolerance | applies to | reason", rows)


def _rows(head: str, rows: list[tuple[str, ...]]) -> str:
    """Return a table in Markdown.

    Args:
        head: the names of the columns, with `|` between them.
        rows: the cells; a `|` in a cell is escaped.
    """
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return markdown.table(head.split(" | "), escaped)


def habits() -> str:
    """Return the table of tests/support/zoo/habits.py; a test judges a function with
    each.
    """
    from tests.support.zoo.habits import HABITS

    return _rows("habit | verdict | why", [(h.words, h.verdict, h.why) for h in HABITS])


def ends() -> str:
    """Return the table of tests/support/exit_status.py, and what upref.user_code.guard
    restores.
    """
    from tests.support.exit_status import COMMAND
    from upref.user_code.guard import AROUND, RANDOM, STATE

    rows = [
        (words, f"{status}", "a report" if report else printed)
        for words, status, printed, report in COMMAND.values()
    ]
    table = _rows("the loss | exit status | what is printed", rows)
    restored = ", ".join(STATE | RANDOM | AROUND)
    return f"{table}\n\nThese are restored after a check, and noted in its report: {restored}."


def fuzzed() -> str:
    """Return a line for each complete run of the fuzzer, from
    tests/support/fuzz.json.
    """
    runs = record.read(Path(__file__).parents[1] / "tests/support/fuzz.json")
    return "\n".join(map(_run, runs))


def _run(found: record.Record) -> str:
    """Return the line of one run of the fuzzer: how many inputs, and how many of them
    broke.
    """
    (seed,) = found.seeds
    run = found.rows[f"seed {seed}"]
    counts = run["counts"]  # entry point -> how many inputs
    broke = sum(len(inputs) for inputs in run["found"].values())
    verbs = set()
    for kind in counts:
        # "command " is the command without a verb
        if kind.startswith("command ") and kind != "command ":
            verbs.add(kind.split()[1])
    functions = [kind for kind in counts if kind.startswith(("upref.", "upref_"))]
    return (
        f"* {sum(counts.values()):,} inputs of seed {seed} over {len(counts)} entry points, {len(verbs)} verbs "
        f"of the command and {len(functions)} public functions and methods among them: {broke} got something "
        f"else than an answer or one sentence; {run['again']} of these still did on "
        f"{found.date}, when it was recorded."
    )
