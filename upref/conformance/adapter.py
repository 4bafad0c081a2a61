# SPDX-License-Identifier: Apache-2.0
"""The adapter that a framework writes: how to make one step of its trainer on given
rows.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from upref.conformance.cases import Case
from upref.errors import InputError
from upref.step.inputs.rows import Row

METHODS = ("supports", "scale", "settings", "step")


@runtime_checkable
class Adapter(Protocol):
    """What the suite calls. A class with these members is an adapter; it needs no
    import of upref.
    """

    name: str
    """The framework with its version, such as `trl 1.16.0`."""

    def supports(self, case: Case) -> str:
        """Return "" if the framework has what the case sets, else the reason why it has
        not.

        Args:
            case: one of the suite.
        """

    def scale(self, case: Case) -> float:
        """Return the constant factor by which the framework's documentation says that
        its loss differs; mostly 1.

        loss = scale * -(J - beta KL + entropy_coef H), with the objective's own J. A
        framework that divides Dr. GRPO's sum by a fixed length of 64 too returns 1 / 64
        for `dr_grpo`, and 1 for every other objective.

        Args:
            case: one of the suite.
        """

    def settings(self, case: Case) -> dict[str, str]:
        """Return the framework's own configuration of the case. A failure prints it.

        Args:
            case: one of the suite.

        Returns:
            Setting -> value, as the framework writes them.
        """

    def step(self, model: Any, rows: list[Row], case: Case) -> Any:
        """Train the model on the rows: leave gradients in `.grad`, or let an optimizer
        make `case.updates` steps.

        A framework that trains a copy of the model returns {parameter's name:
        gradient}, or what `upref.step.compare.record.record_step` recorded on the copy.

        Args:
            model: a small one.
            rows: the responses of the step.
            case: one of the suite.
        """


class TrainingAdapter(Adapter, Protocol):
    """An adapter that can run the cases of level 6 too."""

    def train(self, model: Any, rows: list[Row], case: Case, reference: Any) -> Any:
        """Train the model as `step` does, from samples and their rewards: the trainer
        makes advantages, masks, and the log-probabilities of the old and the reference
        policy itself.

        Each weight has to move by a visible part of its size, for example by SGD with
        lr=0.005: else the ratio would stay 1, and any old log-probabilities would do.

        Args:
            model: a small one. Where `case.reference` is `adapter`, add LoRA adapters
                to it whose product is not 0, and train those alone.
            rows: the responses, four to a prompt, with `reward`, `group` and the
                sampler's log-probabilities `sampler`. `old` and `ref` are None, and
                `adv` is NaN. A response that does not end in the end token was cut off.
            case: one of level 6. It trains `case.iterations` times on the rows, in
                `case.updates` optimizer steps each time.
            reference: a model, where `case.reference` is `model`; else None.

        Returns:
            What `step` may return, all optimizer steps recorded.
        """


class EngineAdapter(Adapter, Protocol):
    """An adapter that can run the cases of level 7 too.

    Where its engine takes the optimizer step without an optimizer of torch in this
    process, that optimizer is SGD without momentum, weight decay and clip, and
    `learning_rate` is its learning rate; without this member it is 1.
    """

    def move(self, model: Any, rows: list[Row], case: Case) -> Any:
        """Train the model as `step` does, through the engine. Nobody reads `.grad`.

        The update of each optimizer of torch in this process is replaced by that of
        SGD.

        Args:
            model: a small one.
            rows: the responses of the step; of several ranks, those of this rank.
            case: one of level 7.

        Returns:
            None, where the model has the weights after each optimizer step. Else
            {parameter's name: array}, the weights after the step; of
            `case.updates` steps a list of these.
        """


class AdjustableAdapter(Adapter, Protocol):
    """An adapter whose settings `upref diff` changes, to find those that close a
    difference.
    """

    def alternatives(self, case: Case) -> list[dict[str, Any]]:
        """Return settings to try in place of those of a case.

        Args:
            case: one that `supports` accepts.

        Returns:
            Changes of `settings`, one after the other: setting -> value.
        """

    def with_settings(self, changed: dict[str, Any]) -> Adapter:
        """Return an adapter like this one, with other settings.

        Args:
            changed: setting -> value, over those of each case. `settings` has them, and
                `step` trains with them.
        """


def load_adapter(target: str) -> Adapter:
    """Load the adapter that `FILE.py:CLASS` or `package.module:CLASS` names, and make
    it without arguments.

    Args:
        target: a file or a module, a colon, and the name of the class.

    Returns:
        The adapter.

    Raises:
        InputError: there is no such file, module or class, or it lacks a member of
            `Adapter`.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise InputError(
            f"--adapter takes FILE.py:CLASS or package.module:CLASS, got {target!r}."
        )
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    if not hasattr(module, name):
        raise InputError(f"{place} has no {name}: name the class of the adapter.")
    adapter = getattr(module, name)
    if isinstance(adapter, type):
        adapter = adapter()
    missing = [member for member in ("name", *METHODS) if not hasattr(adapter, member)]
    if missing:
        raise InputError(
            f"{target} is no adapter: it lacks {', '.join(missing)} (see upref.conformance.Adapter)."
        )
    return adapter


def _load_file(path: Path) -> ModuleType:
    """Run a file as a module of its own, `upref_adapter_NAME`.

    Raises:
        InputError: there is no such file, or it raises an error.
    """
    if not path.is_file():
        raise InputError(f"there is no file {path}: --adapter takes FILE.py:CLASS.")
    spec = importlib.util.spec_from_file_location(f"upref_adapter_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(
            f"{path} cannot be imported: {type(error).__name__}: {error}{_advice_for_module_here(error)}"
        ) from error
    return module


def _advice_for_module_here(error: Exception) -> str:
    """Return what to do where the missing module is in the current folder; "" where it
    is not.
    """
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    top = error.name.partition(".")[0]
    if not Path(top).is_dir() and not Path(f"{top}.py").is_file():
        return ""
    return (
        f". {top} is in the current folder: install it, or run `python -m pytest`, "
        "which looks there"
    )


def _load_module(name: str) -> ModuleType:
    """Import a module by its name; InputError where it, or a module that it imports, is
    missing.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise InputError(
            f"there is no module {name}: {error}. --adapter takes FILE.py:CLASS too."
        ) from error
