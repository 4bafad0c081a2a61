# SPDX-License-Identifier: Apache-2.0
"""What `upref.identify` answers: an equivalence class of objectives, or the nearest of those that it is not."""

import json
import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any

SHOWN = 8  # of a longer list


@dataclass(frozen=True)
class Match:
    """One objective with the hyperparameters that its gradients show, and how far its gradients are."""

    name: str
    hp: dict[str, Any]  # those that have an effect; None: no dual clip
    agg: str  # the loss's aggregation, "" where none was recognised
    own: bool  # ... which is the objective's own
    same_kl: bool  # the loss has no KL term, or the one this objective has
    distance: float  # largest difference of weights, of |w|, |A| or 0.1, whichever is largest
    mean: float  # the mean of it, each at most 1

    def __str__(self) -> str:
        said = [f"{k}={v:.7g}" for k, v in self.hp.items() if v is not None and (k != "beta" or v)]
        return f"{self.name}({', '.join(said)})" if said else self.name


@dataclass(frozen=True)
class Identity:
    """What a loss is. Truth value: it was identified (as an objective, an up(...) of one, or a known pitfall).

    kind: objective | up | pitfall | none. matches: the simplest first; for none the nearest.
    """

    loss: str
    kind: str
    matches: list[Match]
    why: str  # the pitfall in words
    bounds: dict[str, list[float]]  # by sign of A: the ratios at which the weight jumps
    contract: list[str]
    seconds: float = field(compare=False)

    def __bool__(self) -> bool:
        return self.kind != "none"

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
        """Whatever else has these gradients, aggregation included."""
        first = self.matches[:1]
        same = [m for m in self.matches[1:] if m.own == first[0].own]
        return [str(m) for m in same] + [f"up_anchored{m.name[2:]}" for m in first if m.name.startswith("up(")]

    @property
    def elsewhere(self) -> list[str]:
        """What has these weights, but another aggregation in its paper."""
        return [str(m) for m in self.matches[1:] if m.own != self.matches[0].own]

    def json(self) -> str:
        own = {k: getattr(self, k) for k in ("name", "hp", "agg", "distance", "also", "elsewhere")}
        return json.dumps({"identified": bool(self)} | own | asdict(self), indent=1, ensure_ascii=False)

    def __str__(self) -> str:
        lines = [self._head()]
        if self.matches:
            m = self.matches[0]
            off = "" if m.own or not m.agg else " (not the one of its paper)"
            row = lambda key, text: lines.append(
                textwrap.fill(text, 118, initial_indent=f"  {key:12} ", subsequent_indent=" " * 15)
            )
            row("aggregation", (m.agg or "none recognised") + off)
            if m.hp.get("c", 0) is None:
                row("dual clip", "none")
            for sign, rs in self.bounds.items():
                if rs:
                    row(sign, "the weight jumps at r = " + ", ".join(f"{r:.7g}" for r in rs))
            if self and m.distance:
                row("distance", f"{m.distance:.1e}, the largest difference of gradients, relative")
            if self.also:
                row("the same", _some(self.also))
            if self.elsewhere:
                row("weights of", _some(self.elsewhere) + ", aggregated otherwise in their papers")
        return "\n".join([*lines, *(f"Contract: {c}." for c in self.contract)])

    def _head(self) -> str:
        if self.kind == "none":
            near = f"; the nearest is {self.matches[0]}, {self.distance:.2g} away" if self.matches else ""
            return f"{self.loss} is none of these objectives{near}" + (f": {self.why}" if self.why else "")
        return f"{self.loss} is {self.matches[0]}" + (f" with a known pitfall: {self.why}" if self.why else "")

    def __rich_console__(self, console, options):
        from rich.text import Text

        style = {"objective": "bold green", "up": "bold green", "pitfall": "bold yellow", "none": "bold red"}[self.kind]
        for n, line in enumerate(str(self).splitlines()):
            yield Text(line, style=style if n == 0 else "dim" if line.startswith("Contract") else "")


def _some(xs: list[str]) -> str:
    more = f" and {len(xs) - SHOWN} more" if len(xs) > SHOWN else ""
    return ", ".join(xs[:SHOWN]) + more
