# SPDX-License-Identifier: Apache-2.0
"""For every option of a trainer that changes the gradient: which case of the suite
notices that it has another value?

    python -m tests.conformance.options trl|verl|openrlhf|skyrl [--only OPTION]

The options are the fields of the framework's own configuration classes. Each is sorted
by hand in docs/steps/options/NAME.toml: it changes the gradient, with a value to try, or
it does not, with the reason. A field that a new release brings is in no list, and a
test fails.

To measure an option, its value is replaced where the adapter makes the configuration,
and nothing else: the adapter and the case stay as they are. First the case runs that the
list names, then all others until one fails or cannot run: a build is red in both. Cases
that fail on the unmodified release are left out. The results go to docs/steps/options/NAME.json.
"""

import argparse
import ast
import dataclasses
import importlib
import importlib.util
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from docs import record
from tests.conformance.known_bugs import load
from upref.conformance import CASES, Status, cases, run
from upref.conformance.results import read_expected_failures
from upref_frameworks.openrlhf import step as openrlhf_step

HERE = Path(__file__).parent
LISTS = HERE.parents[1] / "docs/steps/options"

FIRST = "objective/ppo_clip"  # the case that runs first where a list names none

MEASURED = ("trl", "verl", "openrlhf", "skyrl")  # the frameworks that have results

# What may be altered together: the option, and what has to change with it.
Values = Mapping[str, Any]
Alteration = Callable[[Any, str, Values], AbstractContextManager[None]]


def set_path(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return the arguments of a configuration with another value at a dotted path.

    Args:
        config: argument -> value; a nested configuration is a dict.
        path: such as `policy_loss.loss_mode`.
        value: the new one.
    """
    first, dot, rest = path.partition(".")
    if not dot:
        return config | {first: value}
    return config | {first: set_path(dict(config.get(first) or {}), rest, value)}


@contextmanager
def altered_class(place: str, values: Values) -> Iterator[None]:
    """Let a class of a module be made with other values than its caller gives.

    Args:
        place: `module:Class`; whoever makes one looks the class up in the module.
        values: dotted path among the arguments -> value.
    """
    module_name, _, name = place.partition(":")
    module = importlib.import_module(module_name)
    real = getattr(module, name)

    def made(*given: Any, **arguments: Any) -> Any:
        for path, value in values.items():
            arguments = set_path(arguments, path, _as_field(real, path, value))
        return real(*given, **arguments)

    with patch.object(module, name, made):
        yield


def _as_field(config: Any, name: str, value: Any) -> Any:
    """Return a value as the field of a configuration holds it: a list has a nested
    configuration as a table.
    """
    if not isinstance(value, dict):
        return value
    made = {field.name: field.default_factory for field in dataclasses.fields(config)}
    nested = made.get(name)
    return nested(**value) if dataclasses.is_dataclass(nested) else value


def _alter_class(_: Any, place: str, values: Values) -> AbstractContextManager[None]:
    return altered_class(place, values)


@contextmanager
def alter_openrlhf(adapter: Any, _: str, values: Values) -> Iterator[None]:
    """Let OpenRLHF's step get other arguments than the adapter hands it: those of the
    command, and those that its driver reads off them.
    """
    module = sys.modules[type(adapter).__module__]
    real_step, real_engine = module.record_training, openrlhf_step.Engine
    handed = dict(_handed_to_openrlhf(name, value) for name, value in values.items())

    def record_training(
        model: Any, rows: Any, temperature: float, **fields: Any
    ) -> Any:
        """Run the real step with the options that are changed in place of its own."""
        changed = {"temperature": temperature} | fields | handed
        changed = {key: value for key, value in changed.items() if "." not in key}
        return real_step(model, rows, **changed)

    def engine(arguments: Any, *given: Any) -> Any:
        for path, value in handed.items():
            if "." in path:
                set_attribute(arguments, path, value)
        return real_engine(arguments, *given)

    with (
        patch.object(module, "record_training", record_training),
        patch.object(openrlhf_step, "Engine", engine),
    ):
        yield


def _handed_to_openrlhf(name: str, value: Any) -> tuple[str, Any]:
    """Return the argument of the driver that stands for an option, and its value; an
    option that the trainer reads itself has a dot in its name.
    """
    names = {
        "{prefix}.max_norm": "clip",
        "rollout.temperature": "temperature",
        "train.micro_batch_size": "micro",
        "algo.kl.init_coef": "beta",
        "ds.attn_implementation": "attention",
    }
    if name == "train.batch_size":
        return "updates", ROWS // value
    if name == "ds.param_dtype":
        return "dtype", {"bf16": torch.bfloat16}[value]
    return names.get(name, name), value


ROWS = 8  # of a case


def set_attribute(config: Any, path: str, value: Any) -> None:
    """Set an attribute of a nested configuration; what is missing on the way is made.

    Args:
        config: an object with attributes.
        path: their names, with dots between them.
        value: the new one.
    """
    first, dot, rest = path.partition(".")
    if not dot:
        setattr(config, first, value)
        return
    if not hasattr(config, first):
        setattr(config, first, SimpleNamespace())
    set_attribute(getattr(config, first), rest, value)


@contextmanager
def alter_skyrl(adapter: Any, _: str, values: Values) -> Iterator[None]:
    """Let the adapter's configuration have other values when it is made."""
    real = adapter.config

    def config(case: Any) -> Any:
        made = real(case)
        for path, value in values.items():
            set_attribute(made, path, value)
        return made

    with patch.object(adapter, "config", config):
        yield


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Where a framework has its options, and how the adapter's are altered.

    Args:
        sections: name of a section of the list -> `module:Class` whose fields it sorts,
            or `module:` of a command with a parser. A section `Class.path` is the class
            at that path of `Class`.
        alter: enters a context in which the adapter's configuration has other values.
    """

    sections: Mapping[str, str]
    alter: Alteration = _alter_class

    def fields(self, section: str) -> set[str]:
        """Return the names of a section's options, as the installed framework has them."""
        module, _, name = self.sections[section].partition(":")
        if not name:
            return parser_options(module)
        return option_names(getattr(importlib.import_module(module), name))

    def altered(
        self, adapter: Any, section: str, values: Values
    ) -> AbstractContextManager[None]:
        """Return a context in which options of a section have other values."""
        owner, _, path = section.partition(".")
        prefix = f"{path}." if path else ""
        return self.alter(
            adapter,
            self.sections[owner],
            {f"{prefix}{key}": value for key, value in values.items()},
        )


def option_names(config: Any) -> set[str]:
    """Return the names of a configuration class's fields."""
    return {field.name for field in dataclasses.fields(config)}


def parser_options(module: str) -> set[str]:
    """Return the names of the options that a command's source adds to its parser. The
    command is not imported.

    Args:
        module: the command's.
    """
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    flags = [
        ast.unparse(call.args[0]).removeprefix("f").strip("'\"")
        for call in calls
        if getattr(call.func, "attr", "") == "add_argument"
    ]
    return {flag.removeprefix("--") for flag in flags}


SKYRL = "skyrl.train.config.config:"
SKYRL_SECTIONS = {
    "": "SkyRLTrainConfig",
    ".trainer": "TrainerConfig",
    ".trainer.algorithm": "AlgorithmConfig",
    ".trainer.algorithm.kl_ctrl": "KLCtrlConfig",
    ".trainer.algorithm.off_policy_correction": "OffPolicyCorrectionConfig",
    ".trainer.algorithm.sapo": "SAPOConfig",
    ".trainer.algorithm.clip_cov": "ClipCovConfig",
    ".trainer.algorithm.kl_cov": "KLCovConfig",
    ".trainer.algorithm.cispo": "CISPOConfig",
    ".trainer.algorithm.dppo": "DPPOConfig",
    ".trainer.policy": "PolicyConfig",
    ".trainer.policy.model": "ModelConfig",
    ".trainer.policy.optimizer_config": "OptimizerConfig",
    ".trainer.policy.fsdp_config": "FSDPConfig",
}

TRAINERS: dict[str, Trainer] = {
    "trl": Trainer({"GRPOConfig": "trl:GRPOConfig"}),
    "verl": Trainer(
        {
            "ActorConfig": "verl.workers.config:ActorConfig",
            "ActorConfig.policy_loss": "verl.workers.config:PolicyLossConfig",
            "ActorConfig.policy_loss.rollout_correction": "verl.trainer.config:RolloutCorrectionConfig",
            "FSDPEngineConfig": "verl.workers.config:FSDPEngineConfig",
            "HFModelConfig": "verl.workers.config:HFModelConfig",
            "FSDPOptimizerConfig": "verl.workers.config:FSDPOptimizerConfig",
        }
    ),
    "openrlhf": Trainer(
        {"train_ppo_ray": "openrlhf.cli.train_ppo_ray:"}, alter_openrlhf
    ),
    "skyrl": Trainer(
        {
            f"SkyRLTrainConfig{path}": f"{SKYRL}{name}"
            for path, name in SKYRL_SECTIONS.items()
        },
        alter_skyrl,
    ),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Option:
    """An option that changes the gradient.

    Args:
        section: of the list, a name of the configuration class.
        name: of the field.
        to: the values to try.
        case: the case that runs first.
        why: the reason why no case notices one of the values; "" where each is noticed.
        beside: other options of the section, which have to change with this one.
    """

    section: str
    name: str
    to: list[Any]
    case: str = FIRST
    why: str = ""
    beside: Values = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> str:
        """The name that the results have for it."""
        return f"{self.section}.{self.name}"


def read_list(name: str) -> dict[str, Any]:
    """Return the sorted options of a framework: section -> {changes, keeps}."""
    return tomllib.loads((LISTS / f"{name}.toml").read_text(encoding="utf-8"))


def options(name: str) -> list[Option]:
    """Return the options of a framework that change the gradient."""
    return [
        Option(section, option, **given)
        for section, one in read_list(name).items()
        for option, given in one.get("changes", {}).items()
    ]


def reasons(name: str) -> dict[str, dict[str, str]]:
    """Return section -> option -> the reason why it does not change the gradient."""
    return {
        section: {
            option: reason
            for reason, those in one.get("keeps", {}).items()
            for option in those
        }
        for section, one in read_list(name).items()
    }


def unsorted(name: str, section: str, fields: set[str]) -> tuple[set[str], set[str]]:
    """Return the fields of a section that nobody has sorted, and the sorted ones that
    there are not.

    Args:
        name: of the framework.
        section: of its list.
        fields: those of the configuration class.
    """
    listed = {one.name for one in options(name) if one.section == section}
    listed |= {*reasons(name).get(section, {})}
    return fields - listed, listed - fields


def results(name: str) -> dict[str, Any]:
    """Return what was measured: the adapter's name, and the options."""
    kept: dict[str, Any] = record.rows(LISTS / f"{name}.json")
    return kept


def measure(name: str, adapter: Any, option: Option, value: Any) -> dict[str, Any]:
    """Run cases with another value of an option until one fails or cannot run.

    Args:
        name: of the framework.
        adapter: its adapter.
        option: the option.
        value: the one that it gets.

    Returns:
        The value, how many cases passed before, and the case that did not, or None; of
        one that failed the error of its gradient, of one that could not run what it
        said.
    """
    return {"to": value} | _until_one_notices(
        name, adapter, {option: value}, option.case
    )


def measure_together(
    name: str, adapter: Any, quiet: Sequence[Option]
) -> dict[str, list[dict[str, Any]]]:
    """Measure options of which no case is expected to notice any: all are altered at
    once. Where a case does notice, the options are halved.

    Args:
        name: of the framework.
        adapter: its adapter.
        quiet: the options.

    Returns:
        The option's name in the results -> what `measure` returns for each value.
    """
    found: dict[str, list[dict[str, Any]]] = {option.key: [] for option in quiet}
    for i in range(max(len(option.to) for option in quiet)):
        values = {option: option.to[i] for option in quiet if i < len(option.to)}
        for option, one in _halved(name, adapter, values):
            found[option.key].append(one)
            print_one(option, one)
    return found


def _halved(
    name: str, adapter: Any, values: Mapping[Option, Any]
) -> Iterator[tuple[Option, dict[str, Any]]]:
    """Measure values of options together, and by halves where one is noticed."""
    if len(values) == 1:
        ((option, value),) = values.items()
        yield option, measure(name, adapter, option, value)
        return
    together = _until_one_notices(name, adapter, values, FIRST)
    if together["case"] is None:
        for option, value in values.items():
            yield option, {"to": value, **together, "with the others": True}
        return
    every = [*values]
    for half in (every[: len(every) // 2], every[len(every) // 2 :]):
        yield from _halved(name, adapter, {option: values[option] for option in half})


def _until_one_notices(
    name: str, adapter: Any, values: Mapping[Option, Any], first: str
) -> dict[str, Any]:
    """Run the cases that pass on the release, with other values of some options, until
    one does not pass.

    Args:
        name: of the framework.
        adapter: its adapter.
        values: the option -> its value.
        first: the case that runs first.
    """
    known = read_expected_failures(HERE / f"{name}_xfails.toml")
    rest = [case for case in cases() if case.id != first]
    passed = 0
    for case in [CASES[first], *rest]:
        if case.id in known or adapter.supports(case):
            continue
        with ExitStack() as stack:
            for option, value in values.items():
                changed = {option.name: value, **option.beside}
                stack.enter_context(
                    TRAINERS[name].altered(adapter, option.section, changed)
                )
            outcome = run(adapter, case, explain=False)
        if outcome.status is Status.COULD_NOT_RUN:
            return {"passed": passed, "case": case.id, "said": outcome.reason[:200]}
        if outcome.status is Status.FAILED:
            found: dict[str, Any] = {"passed": passed, "case": case.id}
            if outcome.report is not None:
                found["error"] = float(f"{outcome.report.error:.2g}")
            return found
        passed += 1
    return {"passed": passed, "case": None}


def print_one(option: Option, one: Mapping[str, Any]) -> None:
    """Print an option, its other value, and the case that notices it, or that none of the
    cases that passed does; a case that cannot run is named with its reason, `said`.
    """
    said = one["case"] or f"NO CASE of {one['passed']}"
    if "said" in one:
        said += f" cannot run: {one['said']}"
    print(f"{option.key} = {one['to']!r}: {said}", flush=True)


def main() -> int:
    """Measure the options of a framework that the command names, and keep each result
    as soon as it is there.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("framework", choices=TRAINERS)
    parser.add_argument("--only", default="", help="options whose name holds this text")
    parser.add_argument(
        "--missing", action="store_true", help="options that have no results yet"
    )
    asked = parser.parse_args()
    name = asked.framework
    adapter = load(name)
    file = LISTS / f"{name}.json"
    kept = results(name)["options"] if file.exists() else {}
    listed = options(name)

    def is_complete(option: Option) -> bool:
        return [one["to"] for one in kept.get(option.key, [])] == option.to

    chosen = [option for option in listed if asked.only in option.key]
    if asked.missing:
        chosen = [option for option in chosen if not is_complete(option)]

    def keep(found: dict[str, list[dict[str, Any]]]) -> None:
        """Add results, and write all of them in the order of the list."""
        kept.update(found)
        write(file, adapter.name, {o.key: kept[o.key] for o in listed if o.key in kept})

    for option in chosen:
        if option.why:  # no case notices it: these are measured together, below
            continue
        found = [measure(name, adapter, option, value) for value in option.to]
        for one in found:
            print_one(option, one)
        keep({option.key: found})
    quiet = [option for option in chosen if option.why]
    if quiet:
        keep(measure_together(name, adapter, quiet))
    return 0


def write(file: Path, adapter: str, found: dict[str, Any]) -> None:
    """Write the results, in the order of the list."""
    command = f"python -m tests.conformance.options {file.stem}"
    record.add(file, command, {"adapter": adapter, "options": found})


if __name__ == "__main__":
    torch.set_num_threads(1)  # the models are tiny: more threads wait for each other
    sys.exit(main())
