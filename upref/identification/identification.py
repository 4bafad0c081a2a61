# SPDX-License-Identifier: Apache-2.0
"""What `upref.identify` answers: an equivalence class of objectives, or the nearest of
those that it is not.
"""

import shlex
from dataclasses import asdict, dataclass, field
from typing import Any

from upref.aggregation import AGGREGATIONS
from upref.description import RATIOS_OF_RESPONSES
from upref.registry import get, parts
from upref.result import Result, name_first
from upref.verify.report import describe_assumptions, describe_basis, row, short

MOST_SHOWN = 8  # of a longer list
OF_RESPONSE = "of the response: the weight of a token depends on its other tokens"
OF_ONE_A = "given the same advantages"


@dataclass(frozen=True)
class Match:
    """One objective with the hyperparameters that its gradients show, and how far its
    gradients are.
    """

    name: str
    hp: dict[str, Any]  # those that have an effect; None: no dual clip
    agg: str  # the loss's aggregation in words, "" where none was recognized
    own: bool  # ... which is the objective's own
    same_kl: bool  # the loss has no KL term, or the one this objective has
    # largest difference of weights, of |w|, |A| or 0.1, whichever is largest
    distance: float
    mean: float  # the mean of it, each at most 1
    length: float | None = None  # the fixed length by which the loss divides

    @property
    def arguments(self) -> list[str]:
        """The hyperparameters as "eps_low=0.2", without those that are None, and
        without a beta of 0.
        """
        return [
            f"{name}={value:.7g}"
            for name, value in self.hp.items()
            if value is not None and (name != "beta" or value)
        ]

    def __str__(self) -> str:
        """Return "dapo(eps_low=0.2, eps_high=0.28)"; the name alone without arguments."""
        arguments = ", ".join(self.arguments)
        return f"{self.name}({arguments})" if arguments else self.name


@dataclass(frozen=True)
class Identification(Result):
    """What a loss is. Truth value: it was identified (as an objective, an up(...) of
    one, or a known pitfall).

    kind: objective | up | pitfall | none. matches: the simplest first; for none the
    nearest.
    """

    loss: str
    kind: str
    matches: list[Match]
    why: str  # the pitfall in words
    bounds: dict[str, list[float]]  # by sign of A: the ratios at which the weight jumps
    read_as: str  # which argument was taken for what
    assumptions: list[str]
    not_checked: list[str]  # what the answer says nothing about, in words
    # the loss takes the sampler's log-probabilities, which were π_old's: a correction
    # would be 1
    on_sampler: bool
    seconds: float = field(compare=False)
    proved: str = ""  # for which values and batches, in words; "": it is not proved
    # the weight of a token depends on the other tokens of its response: the bounds are
    # those of a response of one token
    reads_others: bool = False
    aggregation: str = ""  # of the loss, in words; "" where none was recognized
    far: str = ""  # for none, the name of the nearest objective, where that is far

    def __bool__(self) -> bool:
        return self.kind != "none"

    @property
    def notes(self) -> list[str]:
        return self.assumptions

    @property
    def name(self) -> str:
        """The simplest match, or the nearest; "" where nothing could be compared."""
        return self.matches[0].name if self.matches else ""

    @property
    def hp(self) -> dict[str, Any]:
        return self.matches[0].hp if self.matches else {}

    @property
    def agg(self) -> str:
        return self.matches[0].agg if self.matches else ""

    @property
    def distance(self) -> float:
        return self.matches[0].distance if self.matches else float("inf")

    @property
    def also(self) -> list[str]:
        """Whatever else has these gradients, aggregation and KL term included.

        Returns:
            Names of objectives.
        """
        transform, base = parts(self.name)
        anchored = [f"up_anchored({base})"] if transform == "up" else []
        return self._other_matches(same_aggregation=True) + anchored

    @property
    def elsewhere(self) -> list[str]:
        """What has these weights, but another aggregation in its paper.

        Returns:
            Names of objectives.
        """
        return self._other_matches(same_aggregation=False)

    def _other_matches(self, *, same_aggregation: bool) -> list[str]:
        """Return the other matches with the KL term of the first one, and with the same
        relation to their own aggregation, or with the opposite one.
        """

        def belongs(match: Match, first: Match) -> bool:
            """Tell whether a match belongs to the list."""
            has_same_relation = match.own == first.own
            has_same_kl = match.same_kl == first.same_kl
            return has_same_kl and has_same_relation == same_aggregation

        return [str(m) for m in self.matches[1:] if belongs(m, self.matches[0])]

    def data(self) -> dict[str, Any]:
        """Return the fields and what they imply by name, `identified` first."""
        own = {
            k: getattr(self, k)
            for k in ("name", "hp", "agg", "distance", "also", "elsewhere")
        }
        fields = asdict(self)
        for match in fields["matches"]:
            del match["length"]  # `agg` has it
        return {"identified": bool(self)} | own | fields

    def text(self, verbose: bool = False) -> str:
        """Return the answer, what it rests on, and the command that goes on from here.

        Args:
            verbose: with the assumptions.

        Returns:
            Lines, without a line break at the end.
        """
        if self.matches:
            rows = self._rows_of_match(self.matches[0])
        else:
            rows = self._rows_without_match()
        lines = [self._answer_line(), *(row(key, text) for key, text in rows.items())]
        lines += describe_basis(self.read_as, self.not_checked)
        if verbose:
            lines += describe_assumptions(self.assumptions)
        if self.matches:
            lines.append(f"next: {self._step_before_check()}{self._check_command()}")
        elif self.far:
            lines.append(f"next: {self._diff_command()}")
        return "\n".join(lines)

    def _rows_of_match(self, first: Match) -> dict[str, str]:
        """Return the rows of the report, key -> words, where there is a match: its
        aggregation, the jumps, the proof, and what else has these gradients or weights.
        """
        remark = "" if first.own or not first.agg else " (not the one of its paper)"
        rows = {"aggregation": (first.agg or "none recognized") + remark}
        if first.hp.get("c", 0) is None:
            rows["dual clip"] = "none"
        rows |= self._jumps()
        if self and first.distance:
            rows["distance"] = (
                f"{first.distance:.1e}, the largest difference of gradients, relative"
            )
        if self.proved:
            rows["proved"] = self.proved
        if self.also:
            rows["the same"] = f"{name_first(self.also, MOST_SHOWN)}, {OF_ONE_A}"
        if self.elsewhere:
            rows["same weight"] = (
                f"{name_first(self.elsewhere, MOST_SHOWN)}, {OF_ONE_A}; "
                "their papers aggregate in another way"
            )
        return rows

    def _rows_without_match(self) -> dict[str, str]:
        """Return the rows of the report, key -> words, where there is no match: the
        name of the nearest objective if it is known, the aggregation on policy, and the
        jumps.
        """
        rows = {}
        if self.far:
            rows["nearest"] = f"{self.far}, which is not near"
        rows["aggregation"] = "none recognized"
        if self.aggregation:
            rows["aggregation"] = f"{self.aggregation} on policy"
        return rows | self._jumps()

    def _jumps(self) -> dict[str, str]:
        """Return where the weight jumps, by sign of A, in words; and first that it is not
        a function of the token's ratio alone, where the loss is no objective of responses.
        """
        ratio = get(self.name).ratio_symbol if self else "r"
        rows = {}
        where = ""
        if self.reads_others and ratio not in RATIOS_OF_RESPONSES:
            rows["ratio"] = OF_RESPONSE
            ratio = "s = r"
            where = ", in a response of one token"
        for sign, places in self.bounds.items():
            if places:
                named = name_first([f"{x:.7g}" for x in places], MOST_SHOWN)
                rows[sign] = f"the weight jumps at {ratio} = {named}{where}"
        return rows

    def _step_before_check(self) -> str:
        """Return what to do before the command; "" where it agrees as it is."""
        length = self.matches[0].length
        if length is None:
            return ""
        return (
            f"multiply the loss by {length:.7g} in a wrapper (or give it L = 1, if L is an argument): "
            "check has no fixed length; then "
        )

    def _check_command(self) -> str:
        """Return the command that compares the loss with the first match: a line for
        the shell where the loss is named FILE:FUNCTION, else a call in Python.
        """
        match = self.matches[0]
        agg = "" if match.own or match.agg not in AGGREGATIONS else match.agg
        if ":" in self.loss:
            words = (
                f"upref check {shlex.quote(self.loss)} --as {shlex.quote(match.name)}"
            )
            if agg:
                words += f" --agg {agg}"
            return words + "".join(f" --hp {argument}" for argument in match.arguments)
        arguments = [self.loss, repr(match.name)]
        if agg:
            arguments.append(f"agg={agg!r}")
        return f"upref.check({', '.join([*arguments, *match.arguments])})"

    def _diff_command(self) -> str:
        """Return the command that compares the loss with the nearest objective, quantity
        by quantity.
        """
        if ":" in self.loss:
            return f"upref diff {shlex.quote(self.loss)} {shlex.quote(self.far)}"
        return f"upref.diff({self.loss}, {self.far!r})"

    def _answer_line(self) -> str:
        """Return the answer in one sentence, without a full stop."""
        if self.kind == "none":
            near = ""
            if self.matches:
                near = f"; the nearest is {self.matches[0]}, {self.distance:.2g} away"
            why = f": {self.why}" if self.why else ""
            return f"{short(self.loss)} is none of these objectives{near}{why}"
        where = " where the sampler's policy is π_old" if self.on_sampler else ""
        if self.kind == "pitfall":
            return f"{short(self.loss)} is meant as {self.matches[0]}{where}, but: {self.why}"
        return f"{short(self.loss)} is {self.matches[0]}{where}"

    @property
    def head_style(self) -> str:
        """Yellow where the objective has a known pitfall."""
        styles = {"pitfall": "bold yellow", "none": "bold red"}
        return styles.get(self.kind, "bold green")
