# SPDX-License-Identifier: Apache-2.0
"""The scales, read from scales/, and the paper's own settings. It runs before anything
is installed: no package.
"""

import difflib
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from upref import InputError

HERE = Path(__file__).resolve().parent
HANDED_OVER = ("mini", "smoke", "trl")  # run by programs of their own


@dataclass
class Scale:
    """One file of scales/. Each setting is (value, source: why it is so).

    Attributes:
        name: of the file.
        about: what the scale trains, in words.
        values: verl's key -> setting.
        hyperparameters: objective -> its hyperparameter -> setting.
        loss: objective -> (the one whose loss trains in its place, why).
        gpu_gb: memory of each GPU in GB.
        experiment: of the paper; None: none.
        without_flash: verl's key -> setting where flash-attn is not installed.
    """

    name: str
    about: str
    values: dict[str, tuple[Any, str]]
    hyperparameters: dict[str, dict[str, tuple[Any, str]]]
    loss: dict[str, tuple[str, str]]
    gpu_gb: float
    experiment: str | None
    without_flash: dict[str, tuple[Any, str]] = field(default_factory=dict)


def paper() -> dict[str, Any]:
    """Return the paper's own settings, paper.toml."""
    return tomllib.loads((HERE / "paper.toml").read_text())


def scale_names() -> list[str]:
    """Return the names of the scales of verl on GPUs, in alphabetical order."""
    return sorted(
        p.stem for p in (HERE / "scales").glob("*.toml") if p.stem != "common"
    )


def load_scale(name: str) -> Scale:
    """Read a scale from its file, over the one that it extends. Raise InputError with
    the nearest names if there is none of this name.
    """
    if name not in scale_names():
        known = [*scale_names(), "paper", *HANDED_OVER]
        near = difflib.get_close_matches(name.lower(), known, 2, 0.4)
        if near:
            hint = f"did you mean {' or '.join(near)}?"
        else:
            hint = f"choose one of {', '.join(sorted(set(known)))}."
        raise InputError(f"there is no scale named {name!r}: {hint}")
    raw = tomllib.loads((HERE / "scales" / f"{name}.toml").read_text())
    base: dict[str, Any] = {}
    if "extends" in raw:
        extended = HERE / "scales" / f"{raw['extends']}.toml"
        base = tomllib.loads(extended.read_text())

    def pairs(table: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return a table of TOML with a tuple (value, source) for each list."""
        return {k: (v[0], v[1]) for k, v in table.items()}

    return Scale(
        name,
        raw["about"],
        pairs(base.get("set", {}) | raw["set"]),
        {o: pairs(t) for o, t in raw.get("hyperparameters", {}).items()},
        pairs(raw.get("loss", {})),
        raw["gpu_gb"][0],
        raw.get("experiment"),
        pairs(raw.get("without_flash", {})),
    )


def paper_scale(objective: str) -> tuple[str, str]:
    """Choose the experiment of the paper that an objective is of.

    Methods of two experiments (GRPO, GSPO) get the one that the paper's text is about:
    GSPO on 30B, GRPO in Table 1.

    Args:
        objective: its name.

    Returns:
        The name of the scale, paper_math for what is not in the paper; and why, in
        words.
    """
    data = paper()
    for name in ("dapo", "gspo", "math"):
        experiment = data["experiments"][name]
        if objective in [data["names"][m] for m in experiment["methods"]]:
            tables = " and ".join(experiment["tables"])
            return (
                f"paper_{name}",
                f"{objective} is of the paper's {experiment['model']} experiment (Tables {tables})",
            )
    if objective in data["forms"]:
        return (
            "paper_math",
            f"{data['forms'][objective]['says']}; the paper does not say which it ran (Table A4)",
        )
    return (
        "paper_math",
        f"{objective} is not in the paper: it runs by the protocol of its baselines (Tables A3 and A4)",
    )
