# SPDX-License-Identifier: Apache-2.0
"""Base policies by supervised fine-tuning on demonstrations; committed, so that
everybody starts from the same.

python -m repro.mini.policy.bases               what there is
python -m repro.mini.policy.bases walk          rebuild repro/mini/bases/walk/ (minutes on one thread)
python -m repro.mini.policy.bases walk --check  rebuild it, write nothing, and compare
every weight with the committed
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from repro.mini import files, provenance, tasks
from repro.mini.policy import evals, models, smollm2
from repro.mini.policy.sample import sample
from repro.mini.policy.tokens import tokenizer
from upref import logprobs
from upref.errors import InputError

ROOT = Path(__file__).parents[1] / "bases"


@dataclass(frozen=True)
class Recipe:
    """How a base is trained: on which task, from which start, with which settings.

    Attributes:
        policy: architecture, a name of models.CLASSES.
        style: of the demonstrations.
        start: a base to go on from; "": a fresh policy.
        lr: the highest learning rate of the cycle.
    """

    task: str
    policy: str = "qwen3"
    style: str = "walk"
    start: str = ""
    steps: int = 3000
    batch: int = 256
    lr: float = 6e-3


RECIPES = {
    "walk": Recipe("countdown"),
    "biased": Recipe("countdown", style="biased", start="walk", steps=1000, lr=1e-3),
    "moe": Recipe("countdown", policy="qwen3_moe", steps=2000),
    "chain": Recipe("chain", steps=1000),
    "vl": Recipe("geometry", policy="qwen3_vl", steps=1000, batch=128, lr=3e-3),
}


def folder_of(name: str) -> Path:
    """Return the folder of the base of that name, or else the path that the name is;
    SmolLM2 is converted first where that was not done.
    """
    if name == smollm2.NAME:
        return smollm2.folder()
    return ROOT / name if (ROOT / name).exists() else Path(name)


def load(name: str, task_name: str) -> PreTrainedModel:
    """Return the base of that name, or the policy of any folder; its checksums are
    verified where it has some.

    Raises:
        InputError: there is none, a file is damaged, or it was made for another task.
    """
    folder = folder_of(name)
    if not (folder / "config.json").is_file():
        have = ", ".join(sorted(p.name for p in ROOT.glob("*") if p.is_dir()))
        raise InputError(
            f"there is no base named {name!r}: choose one of {have}, or a folder with config.json."
        )
    if (folder / files.PROVENANCE).exists():
        try:
            made_for = files.checked(folder).get("recipe", {}).get("task", task_name)
        except InputError as e:
            again = (
                f"Remove {folder}, and it is made anew"
                if name == smollm2.NAME
                else f"Restore it with git, or rebuild it: python -m repro.mini.policy.bases {name}"
            )
            raise InputError(f"{e} {again}.") from e
        if made_for != task_name:
            raise InputError(
                f"base {name!r} was made for task {made_for!r}, not {task_name!r}."
            )
    return models.load(folder, tasks.get(task_name))


def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer in the folder of a base, for a task whose tokens are another
    model's.

    Raises:
        InputError: there is none.
    """
    folder = folder_of(name)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as e:
        raise InputError(f"{folder} has no tokenizer that can be loaded: {e}.") from e


def build(recipe: Recipe, say: Callable[[str], object] = print) -> PreTrainedModel:
    """Return a policy that was trained with cross-entropy on the responses of fresh
    demonstrations, the learning rate in one cosine cycle.

    Args:
        recipe: of the base.
        say: called with a line every 100 steps.
    """
    task = tasks.get(recipe.task)
    if recipe.start:
        model = load(recipe.start, recipe.task)
    else:
        model = models.new(recipe.policy, task)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.lr, weight_decay=0.01, fused=True
    )
    cycle = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.lr, recipe.steps, pct_start=0.05
    )
    for step in range(recipe.steps):
        g = tasks.generator("demonstrations", recipe.style, step)
        problems, tokens = task.demonstrations(recipe.batch, recipe.style, g)
        mask = tasks.response_mask(tokens)
        # by transformers, as the committed ones were made: packed.py adds the same
        # numbers in another order
        logits = models.padded_logits(
            model, models.inputs(task, problems), torch.arange(len(tokens)), tokens
        )
        loss = cross_entropy(logits[mask], tokens[mask])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        cycle.step()
        if step % 100 == 99:
            say(f"step {step + 1} of {recipe.steps}: loss {loss.item():.3f}")
    return model


def describe(model: PreTrainedModel, task: tasks.Task) -> dict:
    """Return what the base can do at T = 1: of each set of problems the scores of 256
    held-out problems with 32 samples each, by name; and "entropy", its mean over the
    tokens sampled for the last set, in nats.
    """
    facts = {}
    for name in ("test", *task.levels):
        problems = task.problems(name, 256, seed=0)
        right, said = evals.tables(
            model, task, problems, 32, 1.0, tasks.generator("base", name)
        )
        facts[name] = {k: round(v, 4) for k, v in evals.scores(right, said).items()}
    samples = sample(
        model,
        models.inputs(task, problems),
        4,
        task.response_length,
        tasks.generator("base"),
    )
    of_states = logprobs.entropy(samples.logits[None])[0]
    return facts | {
        "entropy": round(of_states[samples.state[samples.mask]].mean().item(), 4)
    }


def main(argv: list[str] | None = None) -> int:
    """Train the base of a name, publish it with its accuracy, and print that; with
    --check compare it with the committed weights instead. Without a name, print the
    bases.

    Returns:
        0; 1 if a weight differs; 2 if there is no such base, or it cannot be made.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?")
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare with the committed weights (status 1: others)",
    )
    args = parser.parse_args(argv)
    name = args.name
    models.deterministic()
    if name is None:
        for folder in sorted(ROOT.glob("*/provenance.json")):
            facts = files.checked(folder.parent)
            print(
                f"{folder.parent.name:10} {facts['recipe']['task']:10} {facts['accuracy']['test']}"
            )
        return 0
    if name not in RECIPES:
        print(
            f"there is no base named {name!r}: choose one of {', '.join(RECIPES)}.",
            file=sys.stderr,
        )
        return 2
    recipe = RECIPES[name]
    task = tasks.get(recipe.task)
    try:
        model = build(recipe, lambda line: print(line, flush=True))
        if args.check:
            committed = load(name, recipe.task).state_dict()
            differing = [
                key
                for key, weights in model.state_dict().items()
                if not torch.equal(weights, committed[key])
            ]
            print(
                f"repro/mini/bases/{name}: {len(differing)} of {len(committed)} tensors differ from the committed ones"
            )
            return 1 if differing else 0
        facts = {"recipe": asdict(recipe), **provenance.of_this_machine()}
        accuracy = describe(model, task)

        def write(folder: Path) -> None:
            """Save the policy and its tokenizer into the folder."""
            models.save(folder, model, tokenizer(task))

        files.publish(ROOT / name, write, **facts, accuracy=accuracy)
    except (InputError, OSError) as e:
        print(f"bases: {e}", file=sys.stderr)
        return 2
    print(f"repro/mini/bases/{name}: {accuracy}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
