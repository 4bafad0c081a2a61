# SPDX-License-Identifier: Apache-2.0
"""The recorded run of docs/lm.md, in repro/lm/run, and its two pictures.

python -m docs.lm repro/out/lm/RUN      take over a run that is done, and draw
python -m docs.lm                       draw again
"""

import contextlib
import shutil
import sys
from pathlib import Path

import torch

from docs import gallery
from figures.make import save
from repro.lm import report, room
from repro.mini import tasks
from repro.mini.train.checkpoint import FINAL
from repro.mini.train.recorder import FOLDER
from repro.mini.train.settings import Settings
from upref.replay import read_steps, replay

ROOT = Path(__file__).parents[1]
RUN = ROOT / "repro" / "lm" / "run"
PICTURES = ROOT / "docs" / "lm"
ARGUMENTS = "--as up_dapo --agg group-token-mean"


def settings() -> Settings:
    """Return the settings of the recorded run."""
    return Settings.read(RUN / "settings.json")


def need() -> str:
    """Return a sentence on the memory and disk that a run takes, from
    repro/lm/room.py.
    """
    checkpoints = room.CHECKPOINTS * room.CHECKPOINT
    disk = room.ENVIRONMENT + room.MODEL + checkpoints
    return (
        f"A run needs {room.MEMORY / room.GB:.1f} GB of free memory and {disk / room.GB:.0f} GB of disk: "
        f"{room.ENVIRONMENT / room.GB:.1f} GB for `.venv`, {room.MODEL / room.GB:.1f} GB for the model in float32, and "
        f"{checkpoints / room.GB:.0f} GB for checkpoints."
    )


def steps() -> str:
    """Return sentences on what a step of the run is, from its settings."""
    s = settings()
    return (
        f"Each of {s.steps} steps draws {s.prompts} problems and samples {s.responses} answers to each "
        f"at T = {s.temperature:g}. "
        f"A right answer has reward 1. The step then makes {s.minibatches} updates (AdamW, learning rate {s.lr:g}), "
        f"each on {s.prompts // s.minibatches} of the problems, so that all but the first are off policy."
    )


def scores() -> str:
    """Return the table of scores before and after training."""
    return report.table(settings(), RUN)


def answers() -> str:
    """Return the table of some answers before and after training."""
    return report.answers(settings(), RUN)


def recorded() -> str:
    """Return a sentence on which steps of the run are recorded."""
    s = settings()
    number = len(list((RUN / FOLDER).glob("*.npz")))
    return (
        f"Here it is the first of each {s.record_every} steps: {number} of "
        f"{s.steps * s.minibatches} optimizer steps."
    )


def tokens_read() -> str:
    """Return how many tokens an update reads, with each prompt once and with each
    prompt again for each of its answers.
    """
    s = settings()
    task = tasks.get(s.task)
    prompts = s.prompts // s.minibatches
    answers = prompts * s.responses
    # nothing follows the last token of an answer
    length = task.response_length - 1
    once = prompts * task.prompt_length + answers * length
    again = answers * (task.prompt_length + length)
    return (
        f"A prompt has {task.prompt_length} tokens and an answer at most {task.response_length}. An update of "
        f"{prompts} prompts with {s.responses} answers each reads at most {once} tokens in place of {again}."
    )


def parity() -> str:
    """Return a sentence on how far the recorded steps are from the reference."""
    return report.parity(RUN)


def spent() -> str:
    """Return sentences on processor time, machine and versions of the run."""
    facts = report.facts(RUN)
    seconds = facts["seconds"]["all"]
    threads = facts["machine"]["threads"]
    versions = ", ".join(f"{k} {v}" for k, v in facts["versions"].items())
    return (
        f"The run took {seconds:.0f} seconds of processor time ({report.parts_of_time(RUN)}): "
        f"{seconds / threads / 60:.0f} minutes where {threads} cores are free. "
        f"{facts['machine']['cpu']}, {versions}, commit {facts['commit']['id'][:8]}, seed {settings().seed}."
    )


def replayed() -> str:
    """Return the command on the recorded steps, and what it prints, in Markdown."""
    place = (RUN / FOLDER).relative_to(ROOT)
    with contextlib.chdir(ROOT):  # the report names the files as they were given
        said = replay(read_steps([place]), settings().target()).text()
    return f"    upref replay {place} {ARGUMENTS}\n\n```text\n{said.rstrip()}\n```"


def tokens() -> dict[str, torch.Tensor]:
    """Return the columns of all recorded steps, one entry for each token that trains:
    mask (all True), old and sampler.
    """
    found = [batch for batch in read_steps([RUN / FOLDER])]
    columns = {}
    for name in ("old", "sampler"):
        columns[name] = torch.cat([getattr(b, name)[b.mask] for b in found])
    return columns | {"mask": torch.ones(len(columns["old"]), dtype=torch.bool)}


def count() -> str:
    """Return how many tokens and steps the picture has."""
    number = len(list((RUN / FOLDER).glob("*.npz")))
    return (
        f"These are {gallery.POINTS:,} of the {len(tokens()['mask']):,} tokens of {number} "
        "recorded optimizer steps."
    )


def draw(folder: Path = PICTURES) -> None:
    """Draw both pictures into the folder, which is made: training.svg and
    tokens.svg.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save(report.draw([(settings(), RUN)]), folder / "training.svg")
    save(gallery.scatter("A real run", tokens()), folder / "tokens.svg")


def take_over(run: Path) -> None:
    """Copy what a finished run recorded to RUN, in place of what is there.

    Raises:
        FileNotFoundError: the run is not done.
    """
    report.facts(run)  # it is done
    shutil.rmtree(RUN, ignore_errors=True)
    RUN.mkdir(parents=True)
    for name in (*FINAL, "done.json"):
        shutil.copy(run / name, RUN)
    shutil.copytree(run / FOLDER, RUN / FOLDER)


if __name__ == "__main__":
    for given in sys.argv[1:]:
        take_over(Path(given))
    draw()
