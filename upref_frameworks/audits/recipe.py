# SPDX-License-Identifier: Apache-2.0
"""What to set in a framework to train an objective as its paper has it, as one types
it.

The settings are those of the audit's comparison of that loss with that objective; how
they are typed stands in the ledger, [recipe]. What still differs, and how much, is what
the ledger records of this comparison, and what upref's own plug-in does to the gradient
of a typical batch. Throughout, `how` is the table [recipe] of the framework's ledger.
"""

import ast
import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

import torch

from upref.advantages import ADVANTAGES
from upref.definition import NEEDS
from upref.errors import InputError
from upref.registry import Objective, get, names
from upref.rollouts import autograd_gradient
from upref.verify.faults.losses import GROUPS
from upref.weights.batches import typical_batch
from upref_frameworks import names as frameworks
from upref_frameworks.audits import framework
from upref_frameworks.audits.case import MICRO, TOL, Comparison
from upref_frameworks.audits.compare import FaultEffect
from upref_frameworks.audits.framework import Framework
from upref_frameworks.ledger import SEVERITY, Entry, read, read_tables, share

# a constant that divides Dr. GRPO's sum: not a choice of objective
SCALE = ("max_completion_length", "max_seq_len")
PLUG_IN = {
    "verl": "VERL_USE_EXTERNAL_MODULES=upref_frameworks.verl.training  # in the environment\n"
    "actor_rollout_ref.actor.policy_loss.loss_mode=upref/{name}",
    "trl": "from upref_frameworks.trl.training import GRPOTrainer\n"
    'trainer = GRPOTrainer(..., objective="{name}")  # the arguments of TRL\'s own',
}
# which code has taken the plug-in's lines: tests/frameworks/test_recipes.py
STARTED = {
    "verl": "verl's own configuration and validation take them, and the plug-in registers the loss",
    "trl": "the plug-in refuses an objective or a setting that it cannot run before the first batch",
}
# what the framework hands to a loss beside the five tensors
PASSED_TO_LOSS: dict[str, tuple[str, ...]] = {
    "verl": (),
    "trl": ("entropy", "sampler"),
}
INPUT_WORDS = NEEDS | {"sampler": "the sampler's log-probabilities"}
# objectives that are the loss of another one with advantages of their own
SAME_LOSS = {
    "reinforce_pp": "grpo",
    "reinforce_pp_baseline": "grpo",
    "rloo": "reinforce",
}
# with whose loss frameworks train them where they have no such loss: the first that the
# audit compares
TRAINED_WITH = {"rloo": ("dr_grpo", "ppo_clip", "grpo")}
# what divides their own Dr. GRPO
LENGTH = {"verl": "actor.loss_scale_factor", "trl": "max_completion_length"}


@dataclass(frozen=True)
class Recipe:
    """Settings as one types them, a line each; what then still differs from the paper,
    and how much.
    """

    objective: str
    framework: str
    version: str = ""
    surface: str = ""  # where the lines are typed
    settings: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    # how the framework computes those of the objective's kind, or that no setting is
    # known
    advantages: str = ""
    # parts of the algorithm beside the loss
    beside: dict[str, str] = field(default_factory=dict)
    # what one must know beside the lines
    notes: list[str] = field(default_factory=list)
    command: str = ""  # that holds the loss with these settings against the objective
    # which code of the framework has taken these lines, or where their keys were read
    started: str = ""
    # the settings by the names of the framework's config
    fields: dict[str, Any] = field(default_factory=dict)
    mode: str = ""

    def json(self) -> str:
        """Return the recipe as JSON.

        Returns:
            An object with every field, of one space of indentation.
        """
        return json.dumps(asdict(self), indent=1, ensure_ascii=False)

    def __str__(self) -> str:
        """Return the settings, what still differs with them, and the command that
        checks them.
        """
        lines = [
            f"# {self.objective} in {self.framework} {self.version}: {self.surface}",
            *self.settings,
            "",
        ]
        lines += [f"still differs: {line}" for line in self.differs] or [
            "nothing differs in the loss, as measured"
        ]
        lines += [f"advantages: {self.advantages}"]
        lines += [f"{part}: {how}" for part, how in self.beside.items()]
        lines += [f"note: {line}" for line in self.notes]
        lines += [f"settings: {self.started}"]
        return "\n".join([*lines, f"checked by: {self.command}"])

    text = __str__


def recipe(objective: str, name: str, **hp: float) -> Recipe:
    """Return the settings that give an objective in a framework; no framework runs.

    Args:
        objective: a registered name.
        name: a framework with an audit.
        **hp: hyperparameters other than the objective's defaults, if the audit has a
            comparison at these values.

    Returns:
        A Recipe. In verl and TRL, an objective with which the audit compares no loss,
        such as UP's family, is given as upref's plug-in.

    Raises:
        InputError: there is neither a recipe nor a plug-in, or the plug-in cannot run
            the objective.
    """
    o = get(objective)
    f = framework(name)
    how = read_tables(name)["recipe"]
    entries = read(name)
    if comparisons := _comparisons(o, f, hp, how):

        def rank(c: Comparison) -> tuple[Any, ...]:
            """Rank the smallest difference first; then the paper's settings; then the
            fewest fields.
            """
            return (*_severity_left(c, entries), c.setting != "paper", len(c.config))

        best = min(comparisons, key=rank)
        r = _recipe_of_comparison(o, best, f, how, entries)
        known = how.get("differs", {}).get(o.name)
        if known:
            r = replace(r, differs=[*r.differs, known])
    else:
        _refuse_without_recipe(o, f, hp)
        r = _recipe_of_plug_in(o, f)
    advantages, differs = _advantages(o, name, how, entries)
    version = entries[0].version if entries else f.version()
    return replace(
        r,
        version=version,
        advantages=advantages,
        differs=[*r.differs, *differs],
        notes=[*r.notes, *_notes(o, how)],
        beside=how["beside"],
        started=r.started or how.get("started") or _where_keys_were_read(how, version),
    )


def covered_objectives(name: str, hp: dict[str, float] | None = None) -> list[str]:
    """Return the objectives for which a framework has a loss that the audit compares.

    Args:
        name: the framework.
        hp: None: those of any comparison. Else only those with a recipe at these
            hyperparameters; {} is each objective's defaults.

    Returns:
        Names in the registry's order.
    """
    f = framework(name)
    how = read_tables(name)["recipe"]
    if hp is None:
        known = {c.objective for c in f.comparisons}
        return [objective for objective in names() if objective in known]
    return [
        objective for objective in names() if _comparisons(get(objective), f, hp, how)
    ]


def _comparisons(
    objective: Objective,
    framework: Framework,
    hp: dict[str, float],
    how: dict[str, Any],
) -> list[Comparison]:
    """Return the comparisons of the audit that a recipe for this objective can use.

    First come those of the objective itself, at these hyperparameters. For a loss that
    draws at random the ledger may name hyperparameters at which it can be measured:
    `measured` of [recipe.at]. If there are none, the framework has the objective's
    advantages and only they set it apart from another objective, then the comparisons
    are those of that objective: `loss_of` of [recipe.at], SAME_LOSS or the first of
    TRAINED_WITH that the audit compares.
    """
    of_recipe = how.get("at", {}).get(objective.name, {})
    settings_hp = hp or of_recipe.get("measured", {})
    matching = [
        c
        for c in framework.comparisons
        if c.objective == objective.name and c.hp == settings_hp
    ]
    if matching or hp or objective.adv not in how["advantages"]:
        return matching
    loss_of = of_recipe.get("loss_of")
    if loss_of:
        others = [loss_of]
    else:
        others = [
            SAME_LOSS.get(objective.name),
            *TRAINED_WITH.get(objective.name, ()),
        ]
    for other in others:
        of_other = [
            c for c in framework.comparisons if c.objective == other and not c.hp
        ]
        if of_other:
            return of_other
    return []


def _where_keys_were_read(how: dict[str, Any], version: str) -> str:
    """Return a sentence that tells in which files the keys were read. It is for a
    framework whose configuration was not started.
    """
    owners = [
        owner
        for owner_or_owners in how["schema"].values()
        for owner in (
            [owner_or_owners] if isinstance(owner_or_owners, str) else owner_or_owners
        )
    ]
    files = ", ".join(dict.fromkeys(owner.partition(" ")[0] for owner in owners))
    return f"keys, types and defaults were read in {files} of {version}; its configuration was not started"


def _notes(objective: Objective, how: dict[str, Any]) -> list[str]:
    """Return the notes of [recipe.notes] on this objective, and those on the sampler
    correction unless the objective has one of its own.
    """
    notes_by_name = how.get("notes", {})
    notes = [notes_by_name.get(objective.name, "")]
    if not objective.sampler:
        notes.append(
            notes_by_name.get(
                f"sampler, {objective.name}", notes_by_name.get("sampler", "")
            )
        )
    return [text for text in notes if text]


# ---- a loss of the framework ---------------------------------------------------------
DENOMINATOR = GROUPS.words  # the reason by which the ledgers record it


def _recipe_of_comparison(
    objective: Objective,
    comparison: Comparison,
    framework: Framework,
    how: dict[str, Any],
    entries: list[Entry],
) -> Recipe:
    """Return the recipe whose settings are those of this comparison."""
    values = how.get("at", {}).get(objective.name, {})
    # a constant that divides the sum is left out, unless the framework needs one
    fields = {}
    for name, value_of_field in comparison.config.items():
        if name not in SCALE or _must_be_set(framework.name, comparison, name):
            fields[name] = value_of_field
    fields |= values.get("fields", {})
    notes = []
    of_another_loss = []
    if comparison.objective == SAME_LOSS.get(objective.name):
        notes = [
            f"the loss is that of {comparison.objective}; only the advantages differ"
        ]
    elif comparison.objective != objective.name:
        of_another_loss = _differences_of_another_loss(
            objective, get(comparison.objective)
        )
    return Recipe(
        objective.name,
        framework.name,
        surface=how["surface"],
        settings=_typed_lines(
            framework.name, comparison, fields, how, values.get("mode", comparison.mode)
        ),
        differs=[
            *of_another_loss,
            *_recorded_differences(framework, comparison, entries),
        ],
        fields=fields,
        mode=comparison.mode,
        notes=notes,
        command=f"upref check {framework.name}:{comparison.label} --as {comparison.promise.replace(', ', ' --hp ')}",
    )


def _differences_of_another_loss(objective: Objective, other: Objective) -> list[str]:
    """Return in words what the loss of another objective changes in the gradient of a
    typical batch.

    Args:
        objective: the objective that is asked for. Its function has no ratio.
        other: the one whose loss the framework trains with the advantages of `objective`. It
            clips the ratio of each token.
    """
    batch = typical_batch()
    paper = autograd_gradient(objective, batch)
    clipped = autograd_gradient(replace(other, agg=objective.agg), batch)
    differences = [
        f"the loss is that of {other.name}: each token has its ratio and PPO's clip, which {objective.name} has not "
        f"({_size(FaultEffect.between(clipped, paper))}; nothing where a batch makes one step, since the ratio is 1)"
    ]
    if other.agg != objective.agg:
        of_means = FaultEffect.between(autograd_gradient(other, batch), clipped)
        differences.append(
            f"aggregated by {other.agg}, where {objective.name} has {objective.agg} ({_size(of_means)})"
        )
    return differences


def _recorded_differences(
    framework: Framework, comparison: Comparison, entries: list[Entry]
) -> list[str]:
    """Return what the ledger records of this comparison: first in one call, then in
    micro-batches.
    """
    in_one_call = _entries_of(comparison, entries)
    split = _entries_of(comparison, entries, in_micro_batches=True)
    differs = [_with_size(e) for e in in_one_call]
    for setting in SCALE:
        if setting not in comparison.config:
            continue
        must = ""
        if _must_be_set(framework.name, comparison, setting):
            number = comparison.config[setting]
            must = f"; it must be set, and {number} gives the paper's sum"
        differs.append(
            f"divided by {setting}, a constant that the learning rate takes up{must}"
        )
    for e in split:
        if e not in in_one_call:
            differs.append(f"in micro-batches: {_with_size(e)}")
    objective = get(comparison.objective)
    if coupled := objective.batch_coupled:
        differs.append(_by_itself(coupled, _effects(objective)[1]))
        return differs
    # the audit splits its batch at the papers' settings alone
    at_papers_settings = {
        (c.label, c.promise) for c in framework.comparisons if c.setting == "paper"
    }
    if (comparison.label, comparison.promise) not in at_papers_settings:
        differs.append("in micro-batches: not measured")
    return differs


def _with_size(entry: Entry) -> str:
    """Return the reason of an entry, and in parentheses how much it changes."""
    if entry.status == "numerical":
        size = "a guard that training hardly meets"
    else:
        size = f"{entry.severity}, {entry.size}"
    return f"{entry.reason} ({size})"


def _entries_of(
    comparison: Comparison, entries: list[Entry], in_micro_batches: bool = False
) -> list[Entry]:
    """Return the entries of the ledger whose evidence is from this comparison: in one
    call, or in micro-batches.
    """
    key = (comparison.label, comparison.promise, in_micro_batches)
    found = []
    for e in entries:
        measured = {(x.loss, x.held_against, x.micro_batches > 1) for x in e.evidence}
        if key in measured:
            found.append(e)
    return found


def _severity_left(comparison: Comparison, entries: list[Entry]) -> tuple[int, int]:
    """Return the severity of the worst difference that this comparison leaves, from 0
    (none) to 4 (breaks): first without the batch's denominator, then with it. Numerical
    differences count as none.
    """
    order = list(reversed(SEVERITY))
    rest = [e for e in _entries_of(comparison, entries) if e.status != "numerical"]

    def severe(entries: Iterable[Entry]) -> int:
        """Return the severity of the worst of these entries, 0 if there are none."""
        return max((1 + order.index(e.severity) for e in entries), default=0)

    return severe(e for e in rest if e.reason != DENOMINATOR), severe(rest)


def _must_be_set(name: str, comparison: Comparison, field: str) -> bool:
    """Return whether the framework has no default for this field, so that a user must
    set it.
    """
    return _defaults(name, comparison).get(field) == "None"


def _defaults(name: str, comparison: Comparison) -> dict[str, Any]:
    """Return the framework's recorded defaults in the mode of this comparison, by
    field.
    """
    tables = read_tables(name).get("defaults", {})
    return tables.get("every", {}) | tables.get(comparison.mode, {})


# ---- the advantages ------------------------------------------------------------------
def _advantages(
    objective: Objective, name: str, how: dict[str, Any], entries: list[Entry]
) -> tuple[str, list[str]]:
    """Return how the framework computes the objective's kind of advantage, and the
    differences that the ledger records there.
    """
    kind = f"{objective.adv}, {(ADVANTAGES[objective.adv].__doc__ or '').partition(':')[0]}"
    recorded = how["advantages"].get(objective.adv)
    if not recorded:
        return (
            f"{kind}: set them yourself, this recipe knows no setting of {name} that gives them",
            [],
        )
    is_measured = "audited" in recorded
    if not is_measured:
        return f"{kind}: {recorded['set']}; read in the source, not measured", []
    row = f"advantages:{recorded['audited']}"
    differs = []
    for e in entries:
        measured = {(x.loss, x.held_against.split(", ")[0]) for x in e.evidence}
        if (row, objective.adv) in measured:
            differs.append(f"in the advantages: {_with_size(e)}")
    return f"{kind}: {recorded['set']}", differs


# ---- upref's plug-in -----------------------------------------------------------------
def _words_for_no_recipe(
    objective: Objective, framework: Framework, hp: dict[str, float]
) -> str:
    """Say that no loss of the framework is compared with the objective, and which
    frameworks have a recipe or the plug-in for it.
    """
    where_words = " at these settings" if hp else ""
    at_defaults = " at its defaults" if hp else ""
    if objective.name in framework.out_of_scope:
        why = framework.out_of_scope[objective.name]
        own_words = f" (its own {objective.name}: {why})"
    else:
        own_words = _advantages_without_loss(objective, framework.name)
    possible = []
    for name in frameworks():
        if objective.name in covered_objectives(name, {}):
            possible.append(name)
    with_plug_in = []
    for name in PLUG_IN:
        if name not in possible and not _missing_input(objective, name):
            with_plug_in.append(f"{name} with upref's plug-in")
    found = ", ".join([*possible, *with_plug_in]) or "none"
    return (
        f"no recipe for {objective.name} in {framework.name}{where_words}: the audit compares "
        f"the losses of {framework.name} with {', '.join(covered_objectives(framework.name))}{own_words}. "
        f"Frameworks with a recipe for {objective.name}{at_defaults}: {found}."
    )


def _refuse_without_recipe(
    objective: Objective, framework: Framework, hp: dict[str, float]
) -> None:
    """Raise InputError where neither a loss that the audit compares nor the plug-in
    gives this objective; the message names the frameworks that have it.
    """
    plug_in_can_run = framework.name in PLUG_IN and not hp
    if not plug_in_can_run:
        raise InputError(_words_for_no_recipe(objective, framework, hp))
    if missing := _missing_input(objective, framework.name):
        raise InputError(
            f"{objective.name} cannot run in {framework.name}: it needs {INPUT_WORDS[missing]}, "
            f"which {framework.name} passes to no loss."
        )
    if framework.name == "verl" and objective.name not in names():
        raise InputError(
            f"{objective.name} is no policy loss of verl until a module that VERL_USE_EXTERNAL_MODULES names calls "
            "upref_frameworks.verl.training.register on it: the plug-in registers the names of `upref list`."
        )


def _missing_input(objective: Objective, name: str) -> str:
    """Return an input of the objective that this framework passes to no loss, a key of
    INPUT_WORDS; "" where it passes all.
    """
    required = [k for k in NEEDS if k in objective.reads]
    if objective.sampler:
        required.append("sampler")
    return next((k for k in required if k not in PASSED_TO_LOSS[name]), "")


def _advantages_without_loss(objective: Objective, name: str) -> str:
    """Return words for a framework that has the advantages of an objective and no loss
    to go with them; "" for any other framework.
    """
    known = read_tables(name)["recipe"]["advantages"].get(objective.adv, {}).get("set")
    if objective.name not in SAME_LOSS or not known:
        return ""
    same = SAME_LOSS[objective.name]
    return (
        f" (it has the advantages of {objective.name}, {known}, "
        f"and none of its losses is that of {same})"
    )


def _recipe_of_plug_in(objective: Objective, framework: Framework) -> Recipe:
    """Return the recipe that trains the objective with upref's plug-in."""
    settings = PLUG_IN[framework.name].format(name=objective.name).splitlines()
    if objective.sampler:
        settings[-1] += ", with use_vllm=True in GRPOConfig"
    if framework.name == "verl":
        loss = f"verl:upref/{objective.name}"
    else:
        loss = shlex.quote(objective.name)
    notes = []
    if objective.name in framework.out_of_scope:
        own_words = f"{framework.name} has a loss {objective.name} of its own ({framework.out_of_scope[objective.name]})"
        notes.append(f"{own_words}; the lines above are upref's plug-in")
    if objective.agg == "seq-mean-token-sum":
        notes.append(
            f"{LENGTH[framework.name]} is not read: the loss is the paper's plain sum over tokens"
        )
    return Recipe(
        objective.name,
        framework.name,
        surface="the plug-in of upref",
        settings=settings,
        differs=_differences_of_plug_in(objective, framework.name),
        notes=notes,
        started=STARTED[framework.name],
        command=f"upref check {loss} --as {shlex.quote(objective.name)}",
        mode=f"upref/{objective.name}",
    )


def _differences_of_plug_in(objective: Objective, name: str) -> list[str]:
    """Return in words what the plug-in changes in the gradient: it gets no prompts, and
    the micro-batches one by one.
    """
    without_prompts, in_micro_batches = _effects(objective)
    differs = []
    if without_prompts.change > TOL:
        differs.append(f"{DENOMINATOR} ({_size(without_prompts)})")
    if in_micro_batches.change > TOL or objective.batch_coupled:
        differs.append(
            _by_itself(
                objective.batch_coupled or "the gradient is another", in_micro_batches
            )
        )
    if name == "trl" and objective.agg in ("token-mean", "group-token-mean"):
        differs.append(
            "tokens are counted over the generation batch and divided by its optimizer steps, not over each step "
            "(not measured; no difference where a generation batch makes one step)"
        )
    if objective.one_adv:
        differs.append(
            "with a sampler correction a response's term takes the mean of its weights (not measured)"
        )
    return differs


def _by_itself(why: str, effect: FaultEffect) -> str:
    """Return in words that each micro-batch acts by itself, why that matters, and how
    much.
    """
    return f"in micro-batches: each acts by itself, and {why} ({_size(effect)})"


@cache
def _effects(objective: Objective) -> tuple[FaultEffect, FaultEffect]:
    """Return what a loss without prompts does to the gradient of a typical batch; then
    what micro-batches do to the gradient without prompts.
    """
    typical = typical_batch()
    typical = replace(
        typical,
        entropy=1 - typical.logp_old.exp(),
        logp_sampler=typical.logp_old if objective.sampler else None,
    )
    without_prompts = replace(typical, group=None)
    of_batch = autograd_gradient(objective, without_prompts)
    split = torch.cat(
        [autograd_gradient(objective, m) for m in without_prompts.split(MICRO)]
    )
    return FaultEffect.between(
        of_batch, autograd_gradient(objective, typical)
    ), FaultEffect.between(split, of_batch)


def _size(e: FaultEffect) -> str:
    """Return the severity of an effect and the share of the gradient that it changes."""
    return f"{e.severity}, {share(float(f'{e.change:.2g}'))}"


# ---- as one types it -----------------------------------------------------------------
def _typed_lines(
    name: str,
    comparison: Comparison,
    fields: dict[str, Any],
    how: dict[str, Any],
    mode: str,
) -> list[str]:
    """Return the lines that a user types for a loss and these fields: its mode, a line
    for each field, and one that switches off the KL term if the objective has none.
    """
    all_fields = _defaults(name, comparison) | fields
    typed_values = {k: value(v, how["style"]) for k, v in all_fields.items()}
    form_of_mode = how.get("mode", {}).get(mode, how["modes"])
    lines = form_of_mode.format(mode=mode).splitlines()
    has_dashes = how["style"] == "dashes"  # --some-field VALUE, and --some-flag alone
    for name_of_field in fields:
        form = how.get("keys", {}).get(name_of_field, how["form"])
        key = name_of_field.replace("_", "-") if has_dashes else name_of_field
        own = {"key": key, "value": typed_values[name_of_field]}
        line = form.format(**typed_values | own)
        lines.append(line.removesuffix(" true") if has_dashes else line)
    if "beta" not in comparison.hp:
        lines.append(no_kl(how, comparison.mode))
    return list(dict.fromkeys(line for line in lines if line))


def no_kl(how: dict[str, Any], mode: str) -> str:
    """Return the line that switches off the KL term beside a loss.

    Args:
        how: the table [recipe] of the framework's ledger.
        mode: the framework's loss.

    Returns:
        A line as one types it; empty where no KL term is on by default.
    """
    line = how.get("no_kl", "")
    return line if isinstance(line, str) else line.get(mode, "")


# a value as one types it. ASSIGNED finds KEY=VALUE and KEY: VALUE, where VALUE is a tuple,
# a quoted text or a word. OPTION finds --KEY with an optional value and further numbers.
Setting = bool | int | float | str | None | tuple[float, ...]
ASSIGNED = re.compile(
    r"""([A-Za-z_][\w.-]*)(?:\s*=\s*|:\s+)(\([^)]*\)|"[^"]*"|'[^']*'|[^\s,']+)"""
)
OPTION = re.compile(
    r"--([A-Za-z][\w.-]*)((?:\s+(?!--)[^\s,;]+)?(?:\s+[\d.e+-]+(?=\s|$))*)"
)


def typed_fields(line: str) -> list[tuple[str, Setting]]:
    """Return the keys that a line of a recipe sets, each with its value.

    Args:
        line: as a recipe prints it: `KEY=VALUE`, `KEY: VALUE`, `KEY = VALUE` or
            `--KEY VALUE`, one or several. A comment sets nothing, and words in
            parentheses at its end do not either.

    Returns:
        (key, value) in the order of the line. A value is a number, True, False, None, a
        tuple or a string; an option without one is True.
    """
    # a parenthesis after "=" is a tuple; any other one is words, as a comment is
    plain = re.sub(r"(?<![=\w])\([^)]*\)|(^|\s+)#.*", "", line)
    pairs = OPTION.findall(plain) if "--" in plain else ASSIGNED.findall(plain)
    return [(key, _read_value(text.strip())) for key, text in pairs]


def _read_value(text: str) -> Setting:
    """Return the Python value of a text as one types it: a literal, true, false or
    null; True for no text; a tuple of numbers with blanks between them; else the text.
    """
    words: dict[str, bool | None] = {
        "true": True,
        "false": False,
        "null": None,
        "": True,
    }
    if text in words:
        return words[text]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        numbers = text.split()
        return tuple(float(n) for n in numbers) if len(numbers) > 1 else text


def value(setting: object, style: str) -> str:
    """Write a value as one types it in a framework's settings.

    Args:
        setting: a number, a bool, None, or what str() or repr() writes.
        style: `python` for the arguments of a constructor; any other style has the
            words true, false and null.

    Returns:
        Text.
    """
    if style == "python":
        is_large = isinstance(setting, float) and setting >= 1e6
        return f"{setting:g}" if is_large else repr(setting)
    if isinstance(setting, bool) or setting is None:
        return {True: "true", False: "false", None: "null"}[setting]
    return f"{setting:g}" if isinstance(setting, float) else str(setting)
