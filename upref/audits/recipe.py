# SPDX-License-Identifier: Apache-2.0
"""What to set in a framework to train an objective as its paper has it, as one types it.

The settings are those of the audit's comparison of that loss with that objective; how they are typed stands in the
ledger, [recipe]. What still differs, and how much, is what the ledger records of this comparison.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from upref.audits import framework, frameworks
from upref.audits.compare import SEVERITY, Comparison
from upref.audits.ledger import Entry, read, recorded
from upref.errors import InputError
from upref.registry import get, names
from upref.verify.faults.losses import GROUPS

SCALE = ("max_completion_length", "max_seq_len")  # a constant that divides Dr. GRPO's sum: not a choice of objective
PLUG_IN = {
    "verl": "VERL_USE_EXTERNAL_MODULES=upref.integrations.verl  # in the environment\n"
    "actor_rollout_ref.actor.policy_loss.loss_mode=upref/{name}",
    "trl": "from upref.integrations.trl import GRPOTrainer\n"
    'trainer = GRPOTrainer(..., objective="{name}")  # the arguments of TRL\'s own',
}


@dataclass(frozen=True)
class Recipe:
    """Settings as one types them, a line each; what then still differs from the paper, and how much."""

    objective: str
    framework: str
    version: str
    surface: str  # where the lines are typed
    settings: list[str]
    differs: list[str]
    beside: dict[str, str]  # parts of the algorithm beside the loss
    command: str  # that holds the loss with these settings against the objective
    fields: dict[str, Any] = field(default_factory=dict)  # the settings by the names of the framework's config
    mode: str = ""

    def json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False)

    def __str__(self) -> str:
        lines = [f"# {self.objective} in {self.framework} {self.version}: {self.surface}", *self.settings, ""]
        lines += [f"still differs: {line}" for line in self.differs] or ["nothing differs from the paper's objective"]
        lines += [f"{part}: {how}" for part, how in self.beside.items()]
        return "\n".join([*lines, f"checked by: {self.command}"])

    text = __str__


def recipe(objective: str, name: str, **hp: float) -> Recipe:
    """Return the settings that give an objective in a framework; nothing runs.

    Args:
        objective: a registered name.
        name: a framework with an audit.
        **hp: hyperparameters other than the objective's defaults, if the audit has a comparison at these values.

    Returns:
        A Recipe. An objective that verl or TRL lack, such as UP's family, is given as upref's plug-in.

    Raises:
        InputError: there is neither a recipe nor a plug-in.
    """
    o, f, how = get(objective), framework(name), recorded(name).get("recipe", {})
    entries = read(name)
    mine = [c for c in f.comparisons if c.objective == o.name and c.hp == hp]
    if not mine:
        return _plug_in(o.name, name, hp, how.get("beside", {}))
    best = min(mine, key=lambda c: (_left(c, entries), c.setting != "paper", len(c.config)))
    differs = []
    for e in _entries(best, entries):
        size = "a guard that training hardly meets" if e.status == "numerical" else f"{e.severity}, {e.size}"
        differs.append(f"{e.reason} ({size})")
    if any(k in best.config for k in SCALE):
        (scale,) = (k for k in SCALE if k in best.config)
        differs.append(f"divided by {scale}: a constant that the learning rate takes up")
    command = f"upref check {name}:{best.label} --as {best.promise.replace(', ', ' --hp ')}"
    version = entries[0].version if entries else f.version()
    fields = {k: v for k, v in best.config.items() if k not in SCALE}
    return Recipe(
        o.name, name, version, how["surface"], _typed(name, best, fields, how), differs, how["beside"], command,
        fields, best.mode,
    )  # fmt: skip


def reached(name: str, hp: dict[str, float] | None = None) -> list[str]:
    """The objectives that the framework has losses for, in the registry's order; hp: at these hyperparameters."""
    known = {c.objective for c in framework(name).comparisons if hp is None or c.hp == hp}
    return [o for o in names() if o in known]


def _plug_in(objective: str, name: str, hp: dict[str, float], beside: dict[str, str]) -> Recipe:
    if name not in PLUG_IN or hp:
        other = ", ".join(reached(name))
        have = ", ".join(n for n in frameworks() if objective in reached(n)) or "none"
        raise InputError(
            f"no loss of {name} is {objective} at these settings: it has {other}; {have} have {objective}."
        )
    version = read(name)[0].version
    lines = PLUG_IN[name].format(name=objective).splitlines()
    command = f"upref check {objective} --as {objective}"
    form = "the plug-in of upref"
    return Recipe(objective, name, version, form, lines, [], beside, command, {}, f"upref/{objective}")


def _entries(c: Comparison, entries: list[Entry]) -> list[Entry]:
    at = (c.label, c.promise, 1)
    return [e for e in entries if at in {(x.loss, x.held_against, x.micro_batches) for x in e.evidence}]


DENOMINATOR = GROUPS.words  # the reason by which the ledgers record it


def _left(c: Comparison, entries: list[Entry]) -> int:
    """How severe is what this comparison leaves: 0 for nothing but what is numerical or the batch's denominator."""
    order = list(reversed(SEVERITY))
    rest = [e for e in _entries(c, entries) if e.status != "numerical" and e.reason != DENOMINATOR]
    return max((1 + order.index(e.severity) for e in rest), default=0)


# ---- as one types it -------------------------------------------------------------------------------------------------
def _typed(name: str, c: Comparison, fields: dict[str, Any], how: dict[str, Any]) -> list[str]:
    mode = c.mode
    tables = recorded(name).get("defaults", {})
    every = tables.get("every", {}) | tables.get(mode, {}) | fields
    said = {k: value(v, how["style"]) for k, v in every.items()}
    lines = how.get("mode", {}).get(mode, how["modes"]).format(mode=mode).splitlines()
    for k in fields:
        form = how.get("keys", {}).get(k, how["form"])
        key = k.replace("_", "-") if how["style"] == "dashes" else k
        line = form.format(**said | {"key": key, "value": said[k]})
        lines.append(line.removesuffix(" true") if how["style"] == "dashes" else line)
    if "beta" not in c.hp:
        lines.append(how.get("no_kl", ""))  # a KL term beside the loss, which is on unless said
    return list(dict.fromkeys(line for line in lines if line))


def value(v: Any, style: str) -> str:
    """A value as YAML, a shell or Python has it."""
    if style == "python":
        return f"{v:g}" if isinstance(v, float) and v >= 1e6 else repr(v)
    if isinstance(v, bool) or v is None:
        return {True: "true", False: "false", None: "null"}[v]
    return f"{v:g}" if isinstance(v, float) else str(v)
