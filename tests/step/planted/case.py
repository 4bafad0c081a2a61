# SPDX-License-Identifier: Apache-2.0
"""A step of the set: a bug that was planted in a loop, or a right loop."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CASES: dict[str, "Case"] = {}


@dataclass(frozen=True)
class Case:
    """A step and the truth about it.

    id: its name. loop: padded or ragged. step: `(model, rows)`. model: makes the model.
    truth: what is done, in one sentence. words: a regular expression that the named
    cause matches if it is the planted one, written before the first run; "" where the
    step is right. options: of check_step, the objective and temperature among them.
    """

    id: str
    loop: str
    step: Callable[[Any, list[Any]], Any]
    model: Callable[[], Any]
    truth: str
    words: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        """Whether the step is what it is meant as."""
        return not self.words


@dataclass(frozen=True)
class Loop:
    """The decorators of one loop: its name, its model, its options of check_step."""

    name: str
    model: Callable[[], Any]
    options: dict[str, Any]

    def _add(self, truth: str, words: str, own: dict[str, Any]) -> Callable[[Any], Any]:
        """Return a decorator that adds a step to CASES under its own name.

        Raises:
            ValueError: two steps have one name.
        """

        def add(step: Any) -> Any:
            """Enter the step in CASES, and return it as it is."""
            if step.__name__ in CASES:
                raise ValueError(f"two steps are called {step.__name__}")
            CASES[step.__name__] = Case(
                step.__name__,
                self.name,
                step,
                self.model,
                truth,
                words,
                self.options | own,
            )
            return step

        return add

    def bug(self, truth: str, words: str, **own: Any) -> Callable[[Any], Any]:
        """Decorator: add a step with a planted bug."""
        return self._add(truth, words, own)

    def right(self, truth: str, **own: Any) -> Callable[[Any], Any]:
        """Decorator: add a right step."""
        return self._add(truth, "", own)
