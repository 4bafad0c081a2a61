# SPDX-License-Identifier: Apache-2.0
"""What docs/steps.md has generated: a table per trainer, from docs/steps/NAME.json, and notes
on the differences.

The records are what `upref step NAME --json` printed; `python -m docs.steps` makes those of
the plug-ins. A step in them has `setting`, `family` (of the model), `error` (of its
gradient, relative; None if it does not run), `cause` (of a difference, "" if it agrees)
and `not_exercised` (numbers of the objective that the rows do not reach).

benchmarks/conformance.json has runs of the conformance suite by KIND/NAME: `errors` by case,
`counts` by how cases ended, `known failures` (cases that fail as listed) and `unexpected`.
"""

import tomllib
import warnings
from pathlib import Path
from typing import Any

from docs import record
from upref import markdown
from upref.conformance import CASES, SUITES
from upref.conformance.cases import SINGLE
from upref.conformance.results import read_expected_failures
from upref.errors import InputError
from upref.registry import Objective, get, names
from upref.step import StepReport

HERE = Path(__file__).parent / "steps"
ADAPTERS = Path(__file__).parents[1] / "tests/conformance"
RUNS = Path(__file__).parents[1] / "benchmarks/conformance.json"


def _notes() -> list[dict]:
    """Return the notes of notes.toml, in their order."""
    return tomllib.loads((HERE / "notes.toml").read_text(encoding="utf-8"))["note"]


def note_of(trainer: str, step: dict) -> dict | None:
    """Return the note on a difference: the first of its trainer with one of its causes
    in the step's; None if there is none.
    """
    for note in _notes():
        causes = note["causes"]
        if note["trainer"] == trainer and any(c in step["cause"] for c in causes):
            return note
    return None


def table(trainer: str) -> str:
    """Return the recorded steps of a trainer: how many agree, and a table with a row
    for each.
    """
    steps = record.rows(HERE / f"{trainer}.json")
    ran = [step for step in steps if step["error"] is not None]
    agree = [step["error"] for step in ran if not step["cause"]]
    single = max(error for error in agree if error < 1e-4)  # bfloat16 is above
    head = (
        f"{len(steps)} settings: {len(agree)} agree, in float32 to {single:.1e}; "
        f"{len(ran) - len(agree)} differ; {len(steps) - len(ran)} do not run."
    )
    rows = []
    for step in steps:
        cells = (
            step["setting"],
            step["family"],
            "" if step["error"] is None else f"{step['error']:.1e}",
            _verdict(trainer, step),
            step["not_exercised"].replace("|", "\\|"),
        )
        rows.append(cells)
    columns = ["setting", "model", "error", "", "not exercised"]
    return head + "\n\n" + markdown.table(columns, rows)


def _verdict(trainer: str, step: dict) -> str:
    """Return whether a step agrees; if not, why, with the status of the note on it."""
    cause = step["cause"]
    if step["error"] is None:
        return f"does not run: {cause.split(': ', 2)[-1][:90]}"
    if not cause:
        return "agrees"
    note = note_of(trainer, step)
    status = f" ({note['status']}, {note['severity']})" if note else ""
    return f"**differs**: {cause}{status}"


AVERAGES = {
    "token-mean": "the mean over all tokens of the step",
    "group-token-mean": (
        "the mean over all tokens of the step, or the mean of each group's token mean: "
        "both pass"
    ),
    "seq-mean-token-mean": "the mean of each response's token mean",
    "seq-mean-token-sum": "the mean of each response's token sum",
    "seq-mean": "the mean over responses, of one term each",
}


def suite_objectives() -> str:
    """Return the table of the objectives of the suite: what they average, and their
    numbers.
    """
    rows = []
    for name in dict.fromkeys(case.objective for case in CASES.values()):
        o = get(name)
        numbers = [
            f"{key} = {value}"
            for key, value in o.resolve({}).items()
            if value is not None and key != "beta"
        ]
        rows.append([f"`{name}`", AVERAGES[o.agg], ", ".join(numbers) or "none"])
    others = []
    for case in CASES.values():
        if case.hp:
            numbers = ", ".join(
                f"`{key}` = {value:g}" for key, value in case.hp.items()
            )
            others.append(f"`{case.id}` has an `hp`: {numbers}")
    columns = ["objective", "what it averages", "its numbers"]
    return f"{markdown.table(columns, rows)}\n\nOnly {'; '.join(others)}."


def suite_dates() -> str:
    """Return sentences on what the newest suite has beside the one before."""
    *_, before, newest = SUITES
    added = [case for case in CASES.values() if case.suite == newest]
    # cases of one process by their ids, those of several by their levels
    ids = [case.id for case in added if case.level <= SINGLE]
    *first, last = sorted({case.level for case in added if case.level > SINGLE})
    return (
        f"{newest} is the newest, and the default. It adds {markdown.codes(ids)} and "
        f"the levels {', '.join(map(str, first))} and {last} to {before}. It is open until "
        "the first release of upref; "
        "a build that must not change names the one before."
    )


def engines() -> str:
    """Return the table of the engines that the cases `engine/*` of one process ran on,
    and what each found.
    """
    rows = []
    for engine, verdicts in sorted(record.rows(HERE / "engines.json").items()):
        failures = {case: v for case, v in verdicts.items() if v != "passed"}
        words = [f"`{case}`: {verdict}" for case, verdict in failures.items()]
        passed = len(verdicts) - len(failures)
        rows.append([engine, f"{passed} of {len(verdicts)}", "; ".join(words)])
    return markdown.table(["engine", "cases that pass", "what fails"], rows)


def suite() -> str:
    """Return the table of what each case of the conformance suite gave for each
    trainer, and why cases did not pass, from the results files and the known failures
    of their adapters.
    """
    adapters, reasons = [], []
    ends_of: list[dict[str, dict]] = []  # of each trainer: case -> its result
    cases: dict[str, None] = {}  # each once, in the order of the files
    for file in sorted((HERE / "suite").glob("*.json")):
        results = record.rows(file)
        adapters.append(results["adapter"])
        reasons.append(_suite_reasons(file.stem, results))
        ends_of.append(results["cases"])
        cases |= dict.fromkeys(results["cases"])
    rows = []
    for case in cases:
        rows.append([case, *(_suite_cell(ends.get(case)) for ends in ends_of)])
    return "\n".join([markdown.table(["case", *adapters], rows), "", *reasons])


def _suite_cell(result: dict | None) -> str:
    """Return a case of a trainer in one word, or the error of its gradient; "" where it
    was skipped or is not there.
    """
    if result is None or result["status"] == "skipped":
        return ""
    if result["status"] == "could not run":
        return "does not run"
    error = f"{result['error']:.1e}" if "error" in result else ""
    if result["status"] == "passed":
        return error
    return f"**differs** {error}".rstrip()


def _suite_reasons(name: str, results: dict) -> str:
    """Return how many cases of a trainer ended how, and why those that did not pass.

    Raises:
        KeyError: one that did not pass is no known failure.
    """
    file = ADAPTERS / f"{name}_xfails.toml"
    listed = read_expected_failures(file) if file.exists() else {}
    ends = [result["status"] for result in results["cases"].values()]
    counts = [
        f"{ends.count('passed')} pass",
        f"{ends.count('failed')} differ",
        f"{ends.count('could not run')} do not run",
        f"{ends.count('skipped')} are skipped",
    ]
    lines = [
        f"**{results['adapter']}**, suite {results['suite']}, level {results['level']}: "
        f"{', '.join(counts)}.",
        "",
    ]
    cases_of: dict[str, list[str]] = {}  # reason -> cases
    for case, result in results["cases"].items():
        if result["status"] == "passed":
            continue
        if result["status"] == "skipped":
            reason = f"skipped: {result['reason']}"
        else:
            reason = listed[case]
        cases_of.setdefault(reason, []).append(case)
    for reason, cases in cases_of.items():
        lines.append(f"* {markdown.codes(cases)}: {reason}.")
    return "\n".join([*lines, ""])


def _runs(kind: str) -> dict[str, dict[str, Any]]:
    """Return the recorded runs of a kind by their names, sorted.

    Args:
        kind: the beginning of the names in RUNS, up to "/", which the names here lack.
    """
    found = {}
    for name, run in sorted(record.rows(RUNS).items()):
        if name.startswith(f"{kind}/"):
            found[name.partition("/")[2]] = run
    return found


def green() -> str:
    """Return the table of the unmodified trainers on several seeds of rows, a row a
    run.
    """
    columns = ["trainer", "seed", "pass", "fail or cannot run, as listed"]
    columns += ["otherwise than listed", "skipped", "largest error in float32"]
    rows = []
    for run in _runs("green").values():
        # the cases precision/ are in bfloat16
        errors = {
            case: error
            for case, error in run["errors"].items()
            if case not in run["known failures"] and not case.startswith("precision/")
        }
        worst = max(errors, key=errors.__getitem__)
        cells = (
            run["adapter"],
            run["seed"],
            run["counts"].get("passed", 0),
            len(run["known failures"]),
            ", ".join(run["unexpected"]) or "none",
            run["counts"].get("skipped", 0),
            f"{errors[worst]:.1e} ({worst})",
            f"{run['cpu seconds']:.0f}",
        )
        rows.append(cells)
    return markdown.table([*columns, "CPU seconds"], rows)


def red() -> str:
    """Return the table of the trainers with a bug planted in them: how many cases fail,
    and how long it takes.
    """
    from tests.conformance import broken_adapters

    rows = []
    for kind, run in _runs("red").items():
        bug = getattr(broken_adapters, f"Broken{kind}").bug
        tried = sum(n for end, n in run["counts"].items() if end != "skipped")
        cells = (
            run["adapter"].removesuffix(" with a bug"),
            f"{bug.what} ({bug.source})",
            run["counts"].get("failed", 0),
            tried,
            f"{run['cpu seconds']:.0f}",
        )
        rows.append(cells)
    return markdown.table(["trainer", "bug", "fail", "of", "CPU seconds"], rows)


def ranks() -> str:
    """Return the table of two ranks beside one process: the error of the gradient in
    each case.
    """
    rows = {}  # a case may be in two runs of one adapter: the last one counts
    for key, run in _runs("ranks").items():
        adapter = f"`{key.partition(',')[0]}`, {run['adapter']}"
        for case, error in run["errors"].items():
            bad = case in run["unexpected"] or case in run["known failures"]
            word = "**differs**" if bad else "agrees"
            rows[adapter, case] = [adapter, case, f"{error:.1e}", word]
    for key, run in _runs("layers").items():
        for way, error in run["errors"].items():
            rows[key, way] = [f"{key} of megatron-core", way, f"{error:.1e}", ""]
    return markdown.table(["adapter", "case", "error", ""], rows.values())


def rounding() -> str:
    """Return the table of the loop of the conformance page on families with a recurrent
    state: the error, and what was allowed.
    """
    by_family = _runs("plain")
    seeds = [*next(iter(by_family.values()))["seeds"]]
    rows = []
    for family, runs in by_family.items():
        cells = []
        for run in runs["seeds"].values():
            cell = f"{run['error']:.1e} of {run['allowed']:.1e}"
            if run["status"] != "passed":
                cell += f": {run['status']}"
            cells.append(cell)
        rows.append([family, *cells])
    return markdown.table(["family", *(f"seed {seed}" for seed in seeds)], rows)


def bugs() -> str:
    """Return how many of the recorded bugs the suite kills, and those that survive."""
    text = (ADAPTERS / "known_bugs.toml").read_text(encoding="utf-8")
    every = tomllib.loads(text)["bug"]
    alive = [bug for bug in every if bug.get("survives")]
    killed = len(every) - len(alive)
    lines = [
        f"Of {len(every)} bugs {killed} are killed. The others survive:",
        "",
    ]
    for bug in alive:
        why = bug["survives"]
        lines.append(f"* {bug['source']}: {bug['what']}. {why[0].upper()}{why[1:]}.")
    return "\n".join(lines)


def notes() -> str:
    """Return each difference: what it is, its status and severity, what was searched,
    and the command that shows it.
    """
    out = []
    for note in _notes():
        title = f"**{note['trainer']}: {note['title']}**"
        status = f"({note['status']}, {note['severity']})"
        out += [f"{title} {status}. {note['text']}", "", f"    {note['command']}", ""]
    return "\n".join(out)


# ---- upref's plug-ins ----------------------------------------------------------------
def by_trl(name: str) -> StepReport:
    """Return the report on one step of a two-layer Qwen3 that
    upref_frameworks.trl.training trains by this objective.

    Raises:
        RuntimeError: the step differs.
    """
    import trl

    from upref.step.inputs.families import tiny
    from upref_frameworks.trl.step import default_config
    from upref_frameworks.trl.training import GRPOTrainer
    from upref_frameworks.trl.twin import trl_twin

    o, hp, beta = _settings(name)
    # r off 1
    twice = dict(
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        generation_batch_size=None,
    )
    fields = default_config().to_dict() | twice | dict(beta=beta, report_to="none")
    config = trl.GRPOConfig(**fields)
    return _agreeing(trl_twin(GRPOTrainer, o, hp, tiny("qwen3"), config))


def by_verl(name: str) -> StepReport:
    """Return the report on one step of upref_frameworks.verl.training in verl's worker.

    Raises:
        RuntimeError: the step differs.
    """
    import transformers

    from upref_frameworks.verl.step import check_twin, settings_of_twin

    o, hp, beta = _settings(name)
    kl = dict(use_kl_loss=beta > 0, kl_loss_coef=beta, kl_loss_type=o.kl or "k3")
    actor = dict(strategy="fsdp", entropy_coeff=0.0, use_dynamic_bsz=False) | kl
    model = dict(hf_config=transformers.Qwen3Config(), use_remove_padding=True)
    return _agreeing(check_twin(settings_of_twin(name, hp, actor, model)))


PLUGINS = {"upref.trl": by_trl, "verl's plug-in": by_verl}


def _settings(name: str) -> tuple[Objective, dict, float]:
    """Return the objective, its hyperparameters without beta, and beta: the trainer
    sets the coefficient of the KL term.
    """
    o = get(name)
    hp = o.resolve({})
    return o, hp, hp.pop("beta", 0.0)


def _agreeing(report: StepReport) -> StepReport:
    """Return the report. Raises RuntimeError, with its text, if the step differs."""
    if not report:
        raise RuntimeError(str(report))
    return report


def plugins() -> str:
    """Return the table of the objectives: the error through each plug-in, or why it
    does not run there.
    """
    rows = []
    for name, by_plugin in record.rows(HERE / "plugins.json").items():
        rows.append([name, *(_plugin_cell(by_plugin[plugin]) for plugin in PLUGINS)])
    return markdown.table(["objective", *PLUGINS], rows)


def _plugin_cell(result: dict | str) -> str:
    """Return the error of a step and what it did not exercise, or why it does
    not run.
    """
    if isinstance(result, str):
        return result
    cell = f"{result['error']:.1e}"
    if result["not_exercised"]:
        cell += f"; not exercised: {', '.join(result['not_exercised'])}"
    return cell


def main() -> None:
    """Write docs/steps/plugins.json: a step of each objective through each plug-in."""
    results: dict[str, dict[str, dict | str]] = {}
    for name in names():
        results[name] = {}
        for plugin, step in PLUGINS.items():
            try:
                report = step(name)
                results[name][plugin] = {
                    "error": report.error,
                    "not_exercised": report.not_reached,
                }
            except InputError as e:
                results[name][plugin] = str(e)
    record.add(HERE / "plugins.json", "python -m docs.steps", results)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
