# SPDX-License-Identifier: Apache-2.0
"""What `upref.maximizes` answers, and how it is printed."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from upref.maximization.functions import FUNCTIONS, MEAN_REWARD, PER_PREFIX
from upref.result import Result

Kind = Literal[
    "nothing",  # the expected gradient is 0
    "functions",  # a sum of named functions of the policy
    "pass rate",  # the mean reward, times a factor that depends on the pass rate
    "some function",  # the gradient of a function of the policy that has no name here
    "no function",  # no function of the policy has this gradient
    "unknown",  # none of these was found
]


# what is maximized in words, where it is so in each setting
WITHOUT_A_NAME = {
    "some function": "a function of the policy without a name here",
    "no function": "no function of the policy",
    "unknown": "none of the functions that are known here",
}


@dataclass(frozen=True)
class Term:
    """A named function of the policy, and how much of it is maximized."""

    times: float
    function: str

    def __str__(self) -> str:
        """Return "0.25 x the entropy", without the sign and without a factor of 1."""
        times = "" if abs(self.times) == 1 else f"{abs(self.times):.4g} x "
        return f"{times}{self.function}"


@dataclass(frozen=True)
class Answer:
    """What is maximized in one setting.

    Attributes:
        setting: the kind of rewards and of lengths, or where a KL term stands, in words.
        kind: what the expected gradient is.
        terms: for "functions" and, where the factor has a name, for "pass rate".
        target: the function that should be raised or lowered.
        direction: 1 where the target should be raised, -1 where it should be lowered.
        cosine: of the expected gradient to the gradient that raises or lowers the
            target, the smallest and the largest over the policies.
        off_policy: the same one step after sampling; None: not measured.
        factors: pass rate -> factor of the gradient of the mean reward.
    """

    setting: tuple[str, ...]
    kind: Kind
    terms: tuple[Term, ...]
    target: str
    direction: int
    cosine: tuple[float, float]
    off_policy: tuple[float, float] | None = None
    factors: dict[float, float] = field(default_factory=dict)

    @property
    def signed_functions(self) -> tuple[tuple[int, str], ...]:
        """The functions that are maximized (1) or minimized (-1)."""
        return tuple((1 if t.times > 0 else -1, t.function) for t in self.terms)

    @property
    def is_wrong(self) -> bool:
        """Whether nothing is maximized, or the target is moved the wrong way."""
        if self.kind == "nothing":
            return True
        for term in self.terms:
            if term.function == self.target:
                return term.times * self.direction < 0
        if self.factors and min(self.factors.values()) < 0:
            return True
        # where another function is maximized too, its gradient may be the larger one
        return self.cosine[1] < 0

    @property
    def target_words(self) -> str:
        """The gradient to which the cosines are, in words."""
        sign = "-" if self.direction < 0 else ""
        return f"that of {sign}{self.target}"

    def words(self) -> str:
        """Say what the expected gradient is, and its cosine to the target where it is
        that of no named function.
        """
        if self.kind == "nothing":
            return "it is 0"
        if self.kind == "functions":
            return f"that of {_sum(self.terms)}"
        if self.kind == "pass rate":
            if self.terms:
                return f"that of {_sum(self.terms)}"
            return f"that of {FUNCTIONS[MEAN_REWARD].words}, times a factor of the pass rate"
        which = {
            "some function": "that of a function without a name here",
            "no function": "that of no function of the policy",
            "unknown": "none that is known here",
        }[self.kind]
        return f"{which}; cosine {_range(self.cosine)} to {self.target_words}"


@dataclass(frozen=True)
class Maximization(Result):
    """What a loss, an advantage estimator or a KL term maximizes on average.

    Its truth value is false where an expected gradient is 0, is minus the target in a
    named sum, has a negative factor at a pass rate, or has a negative cosine to the
    target at every policy.

    Attributes:
        name: of the loss, the estimator or the term.
        advantages: the name of the estimator that a loss got; "" without one.
        heads: the names of the parts of a setting.
        answers: one for each setting.
        group_size: the responses of a group; 0 where there are no groups.
        groups: how many groups were listed for each gradient.
        policies: how many policies were compared.
        left_out: settings that the estimator refuses, a sentence each.
        seconds: the wall time.
    """

    name: str
    advantages: str
    heads: tuple[str, ...]
    answers: tuple[Answer, ...]
    group_size: int
    groups: int
    policies: int
    left_out: tuple[str, ...]
    seconds: float = field(compare=False)

    def __bool__(self) -> bool:
        """Return whether no answer is wrong."""
        return not any(answer.is_wrong for answer in self.answers)

    @property
    def failures(self) -> Sequence[str]:
        return [
            f"{', '.join(answer.setting)}: {_fault(answer)}"
            for answer in self.answers
            if answer.is_wrong
        ]

    @property
    def headline(self) -> str:
        """The answer in one line."""
        name = self.name
        if self.advantages:
            name += f" with {self.advantages} advantages"
        if all(answer.kind == "nothing" for answer in self.answers):
            return f"{name} maximizes nothing: its expected gradient is 0"
        kinds = {answer.kind for answer in self.answers}
        if len(kinds) == 1 and kinds <= WITHOUT_A_NAME.keys():
            return f"{name} maximizes {WITHOUT_A_NAME[kinds.pop()]}"
        named = {answer.signed_functions for answer in self.answers}
        if len(named) > 1 or () in named:
            return f"{name}: what it maximizes depends on the setting"
        raised = [function for sign, function in min(named) if sign > 0]
        lowered = [function for sign, function in min(named) if sign < 0]
        verbs = []
        if raised:
            verbs.append(f"maximizes {' and '.join(raised)}")
        if lowered:
            verbs.append(f"minimizes {' and '.join(lowered)}")
        return f"{name} {' and '.join(verbs)}"

    def text(self, verbose: bool = False) -> str:
        """Return the report: the headline, what is wrong, a table of the settings, the
        factors by pass rate, and what was summed.

        Args:
            verbose: also the cosine of each setting.
        """
        rows = [(*self.heads, "its expected gradient")]
        rows += [(*answer.setting, answer.words()) for answer in self.answers]
        lines = [self.headline, *(f"FAIL  {line}" for line in self.failures)]
        lines += _columns(rows)
        for factors, where in self._factors().items():
            pass_rates = [f"{pass_rate:g}" for pass_rate, _ in factors]
            numbers = [f"{factor:.4g}" for _, factor in factors]
            lines.append(f"  factor of the gradient of the mean reward ({where})")
            lines += _columns([("pass rate", *pass_rates), ("factor", *numbers)])
        if self._names_function_of_prefixes():
            lines.append(
                f"  {PER_PREFIX}: a sum over prefixes, in which how often each is reached is held fixed"
            )
        lines += [f"  {sentence}" for sentence in (self._basis(), *self.left_out)]
        off = [answer.off_policy for answer in self.answers if answer.off_policy]
        if off:
            lowest = min(low for low, _ in off)
            highest = max(high for _, high in off)
            lines += [
                f"  one step after sampling: cosine {_range((lowest, highest))} to "
                f"{self.answers[0].target_words}"
            ]
        if verbose:
            lines += [
                f"  {', '.join(answer.setting)}: cosine {_range(answer.cosine)} to "
                f"{answer.target_words}"
                for answer in self.answers
            ]
        return "\n".join(lines)

    def _names_function_of_prefixes(self) -> bool:
        """Return whether an answer names a function that is a sum over prefixes."""
        of_prefixes = {
            function.words for function in FUNCTIONS.values() if function.is_per_prefix
        }
        terms = [term for answer in self.answers for term in answer.terms]
        return any(term.function in of_prefixes for term in terms)

    def _factors(self) -> dict[tuple[tuple[float, float], ...], str]:
        """Return each list of (pass rate, factor) with the settings that have it."""
        settings: dict[tuple[tuple[float, float], ...], list[str]] = {}
        for answer in self.answers:
            if answer.factors:
                rounded = ((p, float(f"{x:.6g}")) for p, x in answer.factors.items())
                settings.setdefault(tuple(rounded), []).append(
                    ", ".join(answer.setting)
                )
        return {factors: "; ".join(words) for factors, words in settings.items()}

    def _basis(self) -> str:
        """Say over what the expectation is summed."""
        policies = f"{self.policies} policies of two tokens, one prompt"
        if not self.group_size:
            return f"exact, on policy: all responses; {policies}"
        return (
            f"exact, on policy: all {self.groups} groups of {self.group_size} "
            f"responses; {policies}"
        )

    def data(self) -> dict[str, Any]:
        """Return the fields, `ok` and `headline` first."""
        return {
            "ok": bool(self),
            "headline": self.headline,
            **asdict(self),
        }


def _fault(answer: Answer) -> str:
    """Say what is wrong with an answer."""
    if answer.kind == "nothing":
        return "the expected gradient is 0: those of the batches cancel, or are 0"
    way = "lowers" if answer.direction > 0 else "raises"
    return f"on average it {way} {answer.target}"


def _sum(terms: Sequence[Term]) -> str:
    """Write terms as a sum with signs; there is one at least."""
    first, *rest = terms
    text = f"-{first}" if first.times < 0 else str(first)
    for term in rest:
        text += f" {'-' if term.times < 0 else '+'} {term}"
    return text


def _range(ends: tuple[float, float]) -> str:
    """Write an interval with four decimals, or one number where its ends are equal."""
    low, high = (f"{end:.4f}" for end in ends)
    return low if low == high else f"{low} to {high}"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, indented by two blanks, with the cells aligned two
    blanks apart. All rows have as many cells.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines
