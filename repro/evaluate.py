# SPDX-License-Identifier: Apache-2.0
"""How good a saved policy is: Avg@k, Maj@k, Best@k and Pass@1 of k samples a problem,
with 95 % intervals.

    python -m repro.evaluate repro/mini/bases/walk                                # the miniature's held-out problems
    python -m repro.evaluate FOLDER --problems FILE.jsonl --max-tokens 4096       # any causal language model
    python -m repro.evaluate FOLDER --agree 32                                    # do vLLM and transformers agree?

FOLDER is what `save_pretrained` wrote, with its tokenizer. A line of FILE.jsonl is
{"prompt", "answer"} and, if it is not "boxed", "protocol"
(repro/with_verl/reward/score.py). A prompt that is a text is continued as it stands;
one that is a list of messages goes through the tokenizer's chat template.

The intervals are over problems (upref.metrics.Estimate). The two engines draw by other
random numbers, so their values differ by sampling noise. --agree holds their
log-probabilities of the same tokens against each other, and ends with status 1 where
they are apart.
"""

import argparse
import importlib.util
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import transformers
from rich.console import Console
from rich.table import Table

from repro import engines, exams
from repro.mini import files, provenance, tasks
from repro.mini.policy import evals
from upref.errors import InputError

# Largest difference of a token's log-probability. Logits near 10 are rounded by 0.03 in
# bf16, 0.004 in fp16.
BOUND = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.15}
NAMES = {
    "avg": "Avg@{k}",
    "maj": "Maj@{k}",
    "best": "Best@{k} (unbiased)",
    "best_bootstrap": "Best@{k} (verl's bootstrap)",
    "pass1": "Pass@1 (of {k} samples)",
}


def main(argv: list[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    transformers.utils.logging.disable_progress_bar()
    try:
        config, words = check(args)
        exam = exams.make(args, words)
        room = getattr(
            config.get_text_config(), "max_position_embeddings", None
        ) or float("inf")
        if (longest := max(map(len, exam.prompts)) + exam.length) > room:
            raise InputError(
                f"the longest prompt and response take {longest} tokens, and the policy reads {room}."
            )
        if args.agree:
            return agree(args, exam)
        if args.engine == "vllm":
            responses, _ = engines.vllm(args, exam, args.k)
        else:
            responses = engines.transformers(args, exam, words)
        report(args, exam, evals.estimates(*exam.judge(responses)))
        return 0
    except InputError as e:
        print(f"evaluate: {e}", file=sys.stderr)
    except OSError as e:
        print(
            f"evaluate: cannot read or write {e.filename or args.json}: {e.strerror or e}.",
            file=sys.stderr,
        )
    return 2


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--engine", choices=("vllm", "transformers"), default="transformers"
    )
    parser.add_argument(
        "--task",
        choices=tasks.TASKS,
        help="default: the one whose vocabulary the tokenizer has",
    )
    parser.add_argument(
        "--set", help="test, or a difficulty of the task (default: test)"
    )
    parser.add_argument(
        "--problems",
        default="256",
        help="how many of the set, or a JSONL file of others",
    )
    parser.add_argument("--k", type=int, default=32, help="samples a problem")
    parser.add_argument("--top-p", type=float, default=0.7)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=1024,
        help="of a response to a problem of a JSONL file",
    )
    parser.add_argument(
        "--dtype", choices=BOUND, help="default: the one in the folder's config.json"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the numbers there too"
    )
    parser.add_argument(
        "--agree",
        type=int,
        metavar="N",
        help="compare log-probabilities of N responses, and no more",
    )
    return parser


def check(args):
    """The folder's config and tokenizer. Raises InputError on whatever can be known
    before sampling starts.
    """
    for name in ("k", "max_tokens", *(["agree"] if args.agree is not None else [])):
        if getattr(args, name) < 1:
            raise InputError(
                f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}."
            )
    if (
        not 0 < args.top_p <= 1
        or not 0 < args.temperature < float("inf")
        or args.seed < 0
    ):
        raise InputError(
            "--top-p must be above 0 and at most 1, --temperature above 0, --seed not negative."
        )
    if (args.agree or args.engine == "vllm") and args.temperature > 2:
        raise InputError(
            f"vLLM takes a --temperature of at most 2, got {args.temperature:g}."
        )
    if args.json and not args.json.absolute().parent.is_dir():
        raise InputError(f"--json {args.json}: its folder does not exist.")
    if not (args.folder / "config.json").is_file():
        raise InputError(f"{args.folder} is not a saved policy: it has no config.json.")
    if not any(
        (args.folder / f).is_file() for f in ("tokenizer.json", "tokenizer_config.json")
    ):
        raise InputError(
            f"{args.folder} has no tokenizer: save one there with the tokenizer's save_pretrained."
        )
    if (args.agree or args.engine == "vllm") and not importlib.util.find_spec("vllm"):
        raise InputError(
            "vLLM is not installed in this Python: `repro/venv.sh smoke` installs its CPU build."
        )
    try:
        config = transformers.AutoConfig.from_pretrained(
            args.folder, local_files_only=True
        )
        words = transformers.AutoTokenizer.from_pretrained(
            args.folder, local_files_only=True
        )
    except Exception as e:  # tokenizers raises Exception itself
        raise InputError(
            f"{args.folder} has a config or tokenizer that cannot be loaded: {str(e)[:200]}."
        ) from e
    args.dtype = args.dtype or str(config.dtype or "float32").removeprefix("torch.")
    return config, words


def agree(args, exam: exams.Exam) -> int:
    """The same tokens' log-probabilities by both engines; 1 where they are further
    apart than the dtype rounds.
    """
    prompts = (exam.prompts * -(-args.agree // len(exam.prompts)))[: args.agree]
    responses, theirs = engines.vllm(args, replace(exam, prompts=prompts), k=1)
    responses, theirs = (
        [r[0] for r in responses],
        np.concatenate([x[0] for x in theirs]),
    )
    ours = np.concatenate(engines.log_probs(args, exam, prompts, responses))
    largest = np.abs(ours - theirs).max()  # NaN where either is
    fine = bool(largest <= BOUND[args.dtype])
    print(
        f"{'agree' if fine else 'DISAGREE'}: {len(theirs)} tokens of {len(responses)} responses, largest difference of "
        f"log-probabilities {largest:.1e}, bound for {args.dtype} {BOUND[args.dtype]:.0e}"
    )
    return 0 if fine else 1


def report(args, exam: exams.Exam, found: dict) -> None:
    """A table; and a file that says with what it was made."""
    how = f"top-p {args.top_p:g}, T = {args.temperature:g}, {args.engine}, {args.dtype}, seed {args.seed}"
    table = Table(
        title=f"{args.folder}: {exam.name}, {len(exam.prompts)} problems, {how}",
        title_justify="left",
    )
    for column in ("", "value", "95 % interval"):
        table.add_column(column)
    for key, name in NAMES.items():
        e = found[key]
        table.add_row(
            name.format(k=args.k),
            f"{100 * e.value:.1f} %",
            f"{100 * e.low:.1f} .. {100 * e.high:.1f} %",
        )
    Console(highlight=False, width=110).print(table)
    if args.json:
        given = {
            k: str(v) if isinstance(v, Path) else v
            for k, v in vars(args).items()
            if k not in ("json", "agree")
        }
        made = provenance.of_this_machine()
        made["versions"] |= (
            {"vllm": engines.vllm_version()} if args.engine == "vllm" else {}
        )
        facts = {"of": exam.name, "n_problems": len(exam.prompts), **given, **made}
        facts["scores"] = {key: asdict(e) for key, e in found.items()}
        files.write_atomically(args.json, (json.dumps(facts, indent=1) + "\n").encode())


if __name__ == "__main__":
    sys.exit(main())
