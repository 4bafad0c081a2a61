# SPDX-License-Identifier: Apache-2.0
"""Everything that decides a run. Equal settings are the same run, to the bit."""

import difflib
import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import upref
from repro.mini import files, tasks
from repro.mini.train import faults, halves
from upref.advantages import get as get_advantage
from upref.aggregation import AGGREGATIONS
from upref.errors import InputError

# settings that came after runs had been named, and what those runs did
LATER = {
    "lean_eval": False,
    "staleness": 0,
    "old_log_probs": "sampler",
    "entropy_bonus": 0.0,
    "decodings": (),
    "eval_seed": 0,
    "precision": "float32",
    "record_every": 0,
    "keep_answers": False,
    "fault": "",
    "problem_counts": False,
}


@dataclass(frozen=True)
class Settings:
    """The settings of a run.

    Raises:
        InputError: no run could be made of them; the message is one sentence.
    """

    task: str = "countdown"
    # a folder of repro/mini/bases, or any folder that save_pretrained wrote
    base: str = "walk"
    # a name of the registry, up(NAME), mirror(NAME): mirror.py; or of halves.py
    objective: str = "up_dapo"
    # of the objective; its own defaults where not given
    hp: dict[str, Any] = field(default_factory=dict)
    advantages: str | None = None  # None: the objective's own
    aggregation: str | None = None  # None: the objective's own
    beta: float = 0.0  # coefficient of the KL term to the base
    seed: int = 0
    steps: int = 100
    prompts: int = 64  # per step
    responses: int = 16  # per prompt: the group size G
    # per step and epoch, each of prompts / minibatches whole groups
    minibatches: int = 16
    epochs: int = 1
    lr: float = 3e-4
    warmup: int = 5  # steps over which lr rises
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    temperature: float = 1.0
    train_problems: int = 20000
    # DAPO: groups of equal rewards are replaced by others
    dynamic_sampling: bool = False
    # DAPO: the last so many tokens are punished, linearly up to 1
    overlong: int | None = None
    eval_every: int = 25  # 0: never
    eval_problems: int = 256
    eval_samples: int = 32
    eval_top_p: float = 0.7
    checkpoint_every: int = 25  # 0: at the end only
    staleness: int = 0  # responses are sampled by the policy of so many rollouts ago
    # whose lp_old is (bypass); "recomputed": by the current policy (decoupled)
    old_log_probs: str = "sampler"
    # before the end by top-p only; at the end each set by one decoding, the test set by
    # both
    lean_eval: bool = False
    # coefficient of the policy's entropy, the mean over all tokens of the minibatch
    entropy_bonus: float = 0.0
    # if any: each evaluation of the trained policy is the test set by these top-p
    decodings: tuple[float, ...] = ()
    eval_seed: int = 0  # which draw of the held-out problems
    # of the forward passes; "bfloat16": by autocast, weights and optimizer in float32
    precision: str = "float32"
    # the optimizer steps of every so manyth step are recorded and compared with the
    # reference: recorder.py; 0: none
    record_every: int = 0
    # of each evaluation, every answer and whether it is right, [P][k]
    keep_answers: bool = False
    # a mistake of trainers, made on purpose: faults.py; "": none
    fault: str = ""
    # with lean_eval: at the end, how often each problem was solved
    problem_counts: bool = False

    def __post_init__(self):
        """Refuse settings that no run can have. A list from a file becomes a tuple, and a whole
        number a float where a float is due.
        """
        tasks.get(self.task)
        decodings: Any = self.decodings
        if isinstance(decodings, list):  # from a file
            object.__setattr__(self, "decodings", tuple(decodings))
        for f in fields(self):
            want = type(f.default) if f.name != "hp" else dict
            value = getattr(self, f.name)
            if want is type(None):  # None by default: a whole number or a name
                want = int if f.name == "overlong" else str
                if value is None:
                    continue
            if want is float and type(value) is int:
                object.__setattr__(self, f.name, float(value))
            elif type(value) is not want:
                raise InputError(
                    f"settings: {f.name} must be a {want.__name__}, got {value!r}."
                )
        for name in (
            "steps",
            "prompts",
            "minibatches",
            "epochs",
            "train_problems",
            "eval_problems",
            "eval_samples",
        ):
            if getattr(self, name) < 1:
                raise InputError(
                    f"settings: {name} must be 1 or more, got {getattr(self, name)}."
                )
        for name in ("lr", "grad_clip", "temperature"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError(
                    f"settings: {name} must be a finite number above 0, got {getattr(self, name)}."
                )
        for name in (
            "beta",
            "warmup",
            "weight_decay",
            "eval_every",
            "checkpoint_every",
            "staleness",
            "entropy_bonus",
            "record_every",
        ):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InputError(
                    f"settings: {name} must be 0 or more, got {getattr(self, name)}."
                )
        if self.old_log_probs not in ("sampler", "recomputed"):
            raise InputError(
                f"settings: old_log_probs must be sampler or recomputed, got {self.old_log_probs!r}."
            )
        if self.precision not in ("float32", "bfloat16"):
            raise InputError(
                f"settings: precision must be float32 or bfloat16, got {self.precision!r}."
            )
        if self.record_every and (self.beta or self.entropy_bonus):
            raise InputError(
                "settings: record_every is for an objective by itself: beta and entropy_bonus must be 0."
            )
        if self.fault not in ("", *faults.NAMES):
            raise InputError(
                f"settings: fault must be one of {', '.join(faults.NAMES)}, or left out, got {self.fault!r}."
            )
        if not all(type(p) in (int, float) and 0 < p <= 1 for p in self.decodings):
            raise InputError(
                f"settings: decodings must be numbers above 0 and at most 1, got {self.decodings!r}."
            )
        if not 0 < self.eval_top_p <= 1:
            raise InputError(
                f"settings: eval_top_p must be above 0 and at most 1, got {self.eval_top_p}."
            )
        if self.responses < 2:
            raise InputError(
                "settings: responses must be 2 or more: a group of one has nothing to compare with."
            )
        if self.prompts % self.minibatches:
            raise InputError(
                f"settings: {self.prompts} prompts do not divide into {self.minibatches} minibatches."
            )
        if self.train_problems < self.prompts:
            raise InputError(
                f"settings: train_problems must be {self.prompts} (= prompts) or more."
            )
        if (
            self.overlong is not None
            and not 1 <= self.overlong < tasks.get(self.task).response_length
        ):
            raise InputError(
                f"settings: overlong must lie between 1 and the longest response, got {self.overlong}."
            )
        if self.advantages is not None:
            get_advantage(self.advantages)
        self.target().resolve(self.hyperparameters())

    def target(self) -> upref.Objective:
        """Return the objective, with the aggregation of these settings.

        Raises:
            InputError: there is no such objective or aggregation, or it cannot be
                replaced.
        """
        o = halves.get(self.objective)
        if self.aggregation is None or self.aggregation == o.agg:
            return o
        # one with "norm" has a number of its own, which no setting gives
        if self.aggregation not in AGGREGATIONS or "norm" in self.aggregation:
            raise InputError(
                f"settings: aggregation must be one of {', '.join(AGGREGATIONS[:4])}, or left out."
            )
        if "seq-mean" in (o.agg, self.aggregation):
            raise InputError(
                f"settings: {o.name} has aggregation {o.agg}, which no other aggregation can replace."
            )
        return replace(o, agg=self.aggregation)

    def hyperparameters(self) -> dict[str, Any]:
        """Return those of the objective that are set, and `beta` unless it is 0."""
        return self.hp | ({"beta": self.beta} if self.beta else {})

    @property
    def key(self) -> str:
        """The name of this run's folder: objective, base, seed, and a digest of all
        settings.

        Settings of LATER count only where they differ from what earlier runs did, so
        that the names of these stay.
        """
        said = {
            k: v for k, v in asdict(self).items() if k not in LATER or v != LATER[k]
        }
        text = json.dumps(said, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        name = self.objective.replace("(", "_of_").replace(")", "")
        return f"{name}-{Path(self.base).name}-s{self.seed}-{digest}"

    @classmethod
    def of(cls, given: dict[str, Any]) -> "Settings":
        """Return the settings that a file or a command line gives, with defaults for
        the rest.

        Raises:
            InputError: a name is unknown, or a value is one that no run can have.
        """
        if not isinstance(given, dict):
            raise InputError("settings must be a table of names and values.")
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise InputError(
                    f"settings: there is no {name!r}{f'; did you mean {near[0]!r}?' if near else '.'}"
                )
        return cls(**given)

    @classmethod
    def read(cls, path: Path) -> "Settings":
        """Return the settings in a JSON file. Raises InputError where it has none."""
        try:
            return cls.of(json.loads(Path(path).read_text()))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
            raise InputError(f"cannot read settings from {path}: {e}.") from e

    def write(self, path: Path) -> None:
        """Write the settings as JSON."""
        files.write_atomically(
            path, (json.dumps(asdict(self), indent=1) + "\n").encode()
        )
