# SPDX-License-Identifier: Apache-2.0
"""What upref loads by the entry point group `upref.frameworks`: see
upref.user_code.frameworks.FrameworkPlugin for each function.
"""

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from upref.registry import Objective
from upref.user_code.loss import Loss
from upref.user_code.signature import parameters
from upref_frameworks import names
from upref_frameworks.trl import losses as trl
from upref_frameworks.verl import losses as verl

if TYPE_CHECKING:  # a check imports this module, and needs nothing of replay
    from upref.replay.trainers import DumpReader, Recorder

__all__ = [
    "adapters",
    "closing_settings",
    "dump_readers",
    "find",
    "names",
    "needs_process",
    "recognize",
    "recorders",
    "tested_versions",
]


class LossModule(Protocol):
    """The module with the losses of one framework: trl/losses.py, verl/losses.py."""

    def load_loss(
        self, name: str, mode: str, objective: Objective, hp: dict[str, Any]
    ) -> Loss:
        """Return a loss by its name.

        Args:
            name: the whole name, for messages.
            mode: what follows the colon.
            objective: at whose settings a loss `@matched` is set up.
            hp: its hyperparameters.
        """


# losses that run as they are installed; the others' have packages of their own
HERE: dict[str, LossModule] = {"trl": trl, "verl": verl}
# arguments of its policy losses
VERLS = {"old_log_prob", "log_prob", "advantages", "response_mask", "config"}


def needs_process(framework: str) -> bool:
    """Tell whether a process that has a loss of this framework can import no other.

    Args:
        framework: a name of `names()`.

    Returns:
        False for those whose losses run as they are installed: TRL and verl.
    """
    return framework not in HERE


def find(
    name: str, objective: Objective, hp: Mapping[str, Any]
) -> Loss | Callable[..., Any]:
    """Return a loss by its name, as `FrameworkPlugin.find` describes.

    Args:
        name: `FRAMEWORK:MODE[@matched][,FIELD=VALUE...]`.
        objective: at whose settings a loss `@matched` is set up.
        hp: its hyperparameters.

    Returns:
        A Loss of TRL or verl; of another framework a function, in a process that
        becomes that framework's.

    Raises:
        InputError: there is no such loss, or the framework is not installed.
    """
    framework, _, mode = name.partition(":")
    if framework in HERE:
        return HERE[framework].load_loss(name, mode, objective, dict(hp))
    from upref_frameworks.audits.child import load_loss

    return load_loss(name, objective.name, dict(hp))


def recognize(
    name: str, loss: Any, objective: Objective, hp: Mapping[str, Any]
) -> Loss | None:
    """Return the Loss of an object of TRL's or verl's own kind.

    Args:
        name: of the loss, for messages.
        loss: a trainer's class of TRL, or a function with the arguments of verl's
            policy losses.
        objective: what it is compared with.
        hp: hyperparameters of the objective.

    Returns:
        The Loss; None for any other object.
    """
    if trl.is_trainer(loss):
        return trl.make_loss(name, loss, objective, dict(hp))
    if (
        callable(loss)
        and not isinstance(loss, type)
        and {p.name for p in parameters(loss)} >= VERLS
    ):
        return verl.make_loss(name, loss, objective, dict(hp))
    return None


def _ledger(name: str) -> dict[str, Any]:
    """Return what a framework's ledger.toml holds, as a dict of its tables."""
    return tomllib.loads(
        (Path(__file__).parent / name / "ledger.toml").read_text(encoding="utf-8")
    )


def tested_versions() -> dict[str, str]:
    """Return the versions of TRL and verl with which their ledgers were written.

    Returns:
        Distribution -> version.
    """
    return {name: _ledger(name)["ledger"]["version"] for name in HERE}


def dump_readers() -> "list[DumpReader]":
    """Return the readers of the files that trainers write themselves.

    Returns:
        Those of NeMo-RL, prime-rl and slime (miles writes the same files), and one that
        refuses SkyRL's with advice.
    """
    from upref_frameworks.nemo_rl import dump as nemo_rl
    from upref_frameworks.prime_rl import dump as prime_rl
    from upref_frameworks.skyrl import convert as skyrl
    from upref_frameworks.slime import dump as slime

    return [nemo_rl, prime_rl, slime, skyrl]


def recorders() -> "list[Recorder]":
    """Return what records the steps of TRL's GRPOTrainer.

    Returns:
        One module.
    """
    from upref_frameworks.trl import record

    return [record]


def closing_settings(a: Any, b: Any) -> list[str]:
    """Return settings of verl's or TRL's loss with which it is another loss; each was
    run.

    Args:
        a, b: two losses that differ.

    Returns:
        A sentence for each loss that has such settings.
    """
    from upref_frameworks import closing

    return closing.closing_settings(a, b)


def adapters() -> dict[str, str]:
    """Return where the adapters of the conformance suite are.

    Returns:
        Framework -> `package.module:CLASS`.
    """
    return {
        "trl": "upref_frameworks.trl.adapter:TRL",
        "verl": "upref_frameworks.verl.adapter:Verl",
        "openrlhf": "upref_frameworks.openrlhf.adapter:OpenRLHF",
    }
