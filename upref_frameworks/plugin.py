# SPDX-License-Identifier: Apache-2.0
"""What upref loads by the entry point group `upref.frameworks`: see
upref.plugins.Frameworks for each function.
"""

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from upref.registry import Objective
from upref.user_code.loss import Loss
from upref.user_code.signature import parameters
from upref_frameworks import names
from upref_frameworks.nemo_rl import dump as nemo_rl
from upref_frameworks.prime_rl import dump as prime_rl
from upref_frameworks.skyrl import convert as skyrl
from upref_frameworks.slime import dump as slime
from upref_frameworks.trl import losses as trl, record as trl_record
from upref_frameworks.verl import losses as verl

__all__ = [
    "dump_readers",
    "find",
    "names",
    "needs_process",
    "recognize",
    "recorders",
    "tested_versions",
]

# losses that run as they are installed; the others' have packages of their own
HERE = {"trl": trl, "verl": verl}
# arguments of its policy losses
VERLS = {"old_log_prob", "log_prob", "advantages", "response_mask", "config"}


def needs_process(framework: str) -> bool:
    """Tell whether its losses run in packages of their own, beside which nothing else
    can be imported.
    """
    return framework not in HERE


def find(
    name: str, objective: Objective, hp: Mapping[str, Any]
) -> Loss | Callable[..., Any]:
    """Return the loss `FRAMEWORK:MODE[@matched][,FIELD=VALUE...]`."""
    framework, _, mode = name.partition(":")
    if framework in HERE:
        return HERE[framework].named(name, mode, objective, dict(hp))
    from upref_frameworks.audits.child import load_loss

    return load_loss(name, objective.name, dict(hp))


def recognize(
    name: str, loss: Any, objective: Objective, hp: Mapping[str, Any]
) -> Loss | None:
    """Return the Loss of a trainer's class of TRL's, or of a function with the
    signature of verl's policy losses.
    """
    if trl.is_trainer(loss):
        return trl.of(name, loss, objective, dict(hp))
    if (
        callable(loss)
        and not isinstance(loss, type)
        and {p.name for p in parameters(loss)} >= VERLS
    ):
        return verl.of(name, loss, objective, dict(hp))
    return None


def _ledger(name: str) -> dict[str, Any]:
    """Return what a framework's ledger.toml holds."""
    return tomllib.loads(
        (Path(__file__).parent / name / "ledger.toml").read_text(encoding="utf-8")
    )


def tested_versions() -> dict[str, str]:
    """Return the versions of verl and TRL whose losses the audits record."""
    return {name: _ledger(name)["ledger"]["version"] for name in HERE}


def dump_readers() -> list[Any]:
    """Return the readers of NeMo-RL's, prime-rl's, slime's and miles' own files, and
    what refuses SkyRL's.
    """
    return [nemo_rl, prime_rl, slime, skyrl]


def recorders() -> list[Any]:
    """Return what records TRL's GRPOTrainer."""
    return [trl_record]
