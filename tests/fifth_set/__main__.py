# SPDX-License-Identifier: Apache-2.0
"""Run the set and print the table: `python -m tests.fifth_set [--truth] [--reports FILE] [IDS]`."""

import argparse
import json
import signal
import time
import warnings
from collections.abc import Iterator
from typing import Any

import upref
from tests.fifth_set import aimed_losses, boxes, estimators, kl_terms, log_probs, right_losses, wrong_other, wrong_token
from tests.fifth_set.case import CASES, Case

MODULES = (wrong_token, wrong_other, aimed_losses, right_losses, boxes, estimators, kl_terms, log_probs)
LIMIT = 60  # CPU seconds for a case


class Late(Exception):
    """A case took too long."""


def stop(*_: Any) -> None:
    """Raise where the alarm goes off."""
    raise Late


def asked(case: Case) -> Any:
    """The answer of upref about a case."""
    match case.kind:
        case "loss":
            return upref.check(case.function, case.target, **case.hp)
        case "box":
            return upref.identify(case.function)
        case "advantage":
            return upref.check_advantages(case.function, case.target)
        case "kl":
            return upref.check_kl(case.function, case.target)
    return upref.check_logprobs(case.function, **case.hp)


def named(case: Case, answer: Any) -> bool:
    """Whether identify gave one of the true answers, with the hyperparameters of the box."""
    what = f"pitfall of {answer.name}" if answer.kind == "pitfall" else answer.name
    what = "none" if answer.kind == "none" else what
    names = {what, *answer.also, *answer.elsewhere}
    near = all(abs(float(answer.hp.get(k) or 0) - v) <= 0.02 * abs(v) for k, v in case.hp.items())
    return bool(names & set(case.target.split("|"))) and (near or what == "none")


def run(case: Case) -> dict[str, Any]:
    """One case: what was answered, whether that is right, and the CPU seconds."""
    start = time.process_time()
    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    error, answer = "", None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answer = asked(case)
    except Late:
        error = "timeout"
    except Exception as e:
        error = f"{type(e).__name__}: {e}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    good = answer is not None and (named(case, answer) if case.kind == "box" else bool(answer) == case.right)
    causes = [f.cause for f in getattr(answer, "failures", []) if f.cause] if case.kind != "box" else []
    return {
        "id": case.id,
        "kind": case.kind,
        "target": case.target,
        "fault": case.fault,
        "aimed": case.aimed,
        "shows": case.shows,
        "good": good,
        "error": error,
        "causes": causes,
        "text": "" if answer is None else str(answer),
        "seconds": round(time.process_time() - start, 2),
    }


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    """The rows of the table, as Markdown."""
    yield "| part | wrong, blind: rejected | wrong, aimed: rejected | right: accepted |"
    yield "|---|---|---|---|"
    for kind in ("loss", "advantage", "kl", "logprobs"):
        some = [r for r in results if r["kind"] == kind]
        parts = (
            [r for r in some if r["fault"] and not r["aimed"]],
            [r for r in some if r["aimed"]],
            [r for r in some if not r["fault"]],
        )
        counts = (f"{sum(r['good'] for r in p)} of {len(p)}" for p in parts)
        yield f"| {kind} | {' | '.join(counts)} |"
    some = [r for r in results if r["kind"] == "box"]
    yield f"| identify | | | {sum(r['good'] for r in some)} of {len(some)} named as meant |"


def main() -> None:
    """Run the cases that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.fifth_set", description=__doc__)
    parser.add_argument("ids", nargs="*", help="cases; all by default")
    parser.add_argument("--truth", action="store_true", help="compare the losses with private batches instead")
    parser.add_argument("--reports", help="a file to which results and reports are written as JSON lines")
    args = parser.parse_args()
    cases = [CASES[i] for i in args.ids] or list(CASES.values())
    if args.truth:
        from tests.fifth_set.truth import gap

        for case in (c for c in cases if c.kind == "loss" and (c.shows == "gradient")):
            try:
                off = gap(case)
            except upref.InputError as e:
                print(f"{case.id}: {e}")
                continue
            if (off < 1e-5) != case.right:
                print(f"{case.id}: {'right' if case.right else 'wrong'}, yet its gap is {off:.1e}")
        return
    results = []
    for case in cases:
        results.append(r := run(case))
        if args.reports:
            with open(args.reports, "a", encoding="utf-8") as f:
                print(json.dumps(r, ensure_ascii=False), file=f)
        if not r["good"]:
            print(f"{r['id']} ({r['target']}): {r['error'] or ('accepted' if r['fault'] else 'rejected')}", flush=True)
    print("\n".join(table(results)))
    print(f"{sum(r['seconds'] for r in results):.0f} CPU seconds")


if __name__ == "__main__":
    main()
