# SPDX-License-Identifier: Apache-2.0
"""The estimate of a run, and what a reader should know about it before it starts."""

import copy
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from repro.with_verl.config.compose import Run
from repro.with_verl.config.scales import Scale, paper
from repro.with_verl.data.sources import SOURCES
from repro.with_verl.machine.estimate import GPU, Estimate, estimate, flash

ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"


def price(cfg: DictConfig, gpu: GPU, gpu_bytes: float) -> Estimate:
    """Return the estimate, with as many prompts as the files have, or, before they are
    prepared, as their sources have.
    """
    rows = count_rows(cfg.data.val_files), count_rows(cfg.data.train_files)
    return estimate(cfg, gpu, gpu_bytes, *rows)


def count_rows(files: Any) -> int:
    """Return the number of rows of data files. A file that is not there yet counts as
    many as its source has, and 0 where no source makes it.
    """
    from repro.with_verl.data.schema import check_file

    count = 0
    for name in [files] if isinstance(files, str) else files:
        path = Path(name).expanduser()
        if path.exists():
            count += check_file(path)
        elif path.stem in SOURCES:
            count += SOURCES[path.stem].count
    return count


def save_hourly(run: Run, cfg: DictConfig, e: Estimate) -> Estimate:
    """Have a run save checkpoints so often that an interruption costs an hour of work.
    verl saves between steps only.

    Args:
        run: gets an override, unless the user set trainer.save_freq or it is small
            enough.
        cfg: changed likewise.
        e: the estimate, whose number of checkpoints is changed likewise.

    Returns:
        The same estimate.
    """
    often = max(1, int(3600 // max(e.step_seconds, 1)))
    given = any(line.startswith("trainer.save_freq=") for line in run.given)
    if not given and often < cfg.trainer.save_freq:
        cfg.trainer.save_freq = often
        run.overrides.append(f"trainer.save_freq={often}")
        run.sources["trainer.save_freq"] = (
            "ours: an hour of work between checkpoints at most, by the estimate"
        )
        e.saves = (e.steps or 0) // often
    return e


def notes(run: Run, cfg: DictConfig, e: Estimate, gpu_bytes: float) -> list[str]:
    """Return the sentences that are printed beside the estimate: what an interruption
    costs, and what flash-attn changes.
    """
    found = at_risk(cfg, e), price_of_flash(run, cfg, e.gpu, gpu_bytes)
    return [sentence for sentence in found if sentence]


def at_risk(cfg: DictConfig, e: Estimate) -> str:
    """Return a sentence where a machine that goes away takes all of the run, or more
    than an hour of it; "" elsewhere.
    """
    often, steps = cfg.trainer.save_freq, e.steps or 0
    if often <= 0:
        return f"trainer.save_freq={often}: no checkpoint is saved, and a run that is interrupted starts over."
    hours = min(often, steps) * e.step_seconds / 3600
    if often > 1 and hours > 1:
        return f"trainer.save_freq={often}: a run that is interrupted loses up to {hours:.0f} hours of work."
    return ""


def price_of_flash(run: Run, cfg: DictConfig, gpu: GPU, gpu_bytes: float) -> str:
    """Return a sentence with what the run costs with and without flash-attn; "" where
    the scale needs it.
    """
    chosen = any("attn_implementation" in line for line in run.given)
    if chosen or not run.scale.without_flash:
        return ""
    with_flash, other = flash(cfg), copy.deepcopy(cfg)
    attention = "sdpa" if with_flash else "flash_attention_2"
    OmegaConf.update(other, ATTENTION, attention, force_add=True)
    e = price(other, gpu, gpu_bytes)
    cost = f"the same steps take {e.hours:,.0f} hours and {e.dollars:,.0f} dollars"
    if with_flash:
        return (
            f"where flash-attn is not installed (its wheel is for Python 3.12), {cost}."
        )
    return f"flash-attn is not installed; with it {cost}: `repro/venv.sh gpu flash`, with Python 3.12."


def epochs_in_print(scale: Scale) -> str:
    """Return a sentence with both readings of the epochs that the LaTeX of the paper's
    Table A1 has commented out; "" for scales that are not of this table.
    """
    data = paper()
    experiment = data["experiments"].get(scale.experiment or "", {"tables": []})
    if "A1" not in experiment["tables"]:
        return ""
    rows = {row[0]: row[1:] for row in data["A1"]["commented"]}
    epochs = rows["Total epochs"][data["A1"]["columns"].index(experiment["methods"][0])]
    source = SOURCES["dapo_math_17k"]
    batch = scale.values["data.train_batch_size"][0]
    whole = epochs * (source.count * source.copies // batch)
    unique = epochs * (source.count // batch)
    return (
        f"Table A1 prints no steps; its LaTeX has `Total epochs {epochs}` commented out. With {batch} prompts a step "
        f"that is {whole:,} steps on the published file, which has each problem {source.copies} times, or {unique:,} "
        f"on its {source.count:,} problems; dynamic sampling draws more prompts a step, so that an epoch has fewer. "
        f"{scale.name} trains {scale.values['trainer.total_training_steps'][0]:,}."
    )
