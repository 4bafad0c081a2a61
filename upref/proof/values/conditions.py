# SPDX-License-Identifier: Apache-2.0
"""Conditions: not, and, or; greater and equal."""

from upref.proof.values.functions import Functions
from upref.proof.values.nodes import Branch


class Conditions(Functions):
    """Combinations of comparisons, in one form."""

    def condition(self, value: int) -> int:
        """Return a value as a condition: a number is true where it is not 0.

        Args:
            value: an id.
        """
        if self._is_boolean(value):
            return value
        return self.differs(value, self.zero)

    def _branch(self, comparison: int, yes: int, no: int) -> int:
        """Return a condition that one comparison decides first."""
        yes = self.assume(yes, comparison, True)
        no = self.assume(no, comparison, False)
        return yes if yes == no else self._node(Branch(comparison, yes, no))

    def negation(self, x: int) -> int:
        """Return the condition that another one does not hold."""
        if x in (self.zero, self.one):
            return self.one if x == self.zero else self.zero
        known = self._negations.get(x)
        if known is None:
            node = self.nodes[x]
            assert isinstance(node, Branch)
            yes, no = self.negation(node.yes), self.negation(node.no)
            known = self._negations[x] = self._branch(node.comparison, yes, no)
            self._negations[known] = x
        return known

    def both(self, x: int, y: int) -> int:
        """Return the condition that two conditions hold."""
        x, y = self.condition(x), self.condition(y)
        if self.zero in (x, y):
            return self.zero
        if x == y or y == self.one:
            return x
        if x == self.one:
            return y
        key = (x, y) if x < y else (y, x)
        known = self._joined.get(key)
        if known is None:
            known = self._joined[key] = self._both(x, y)
        return known

    def _both(self, x: int, y: int) -> int:
        """Compute what `both` keeps, by the first comparison of either condition."""
        left, right = self.nodes[x], self.nodes[y]
        assert isinstance(left, Branch) and isinstance(right, Branch)
        first = min(left.comparison, right.comparison)
        return self._branch(
            first,
            self.both(self._assume(x, first, True), self._assume(y, first, True)),
            self.both(self._assume(x, first, False), self._assume(y, first, False)),
        )

    def either(self, x: int, y: int) -> int:
        """Return the condition that one of two conditions, or both, holds."""
        x, y = self.condition(x), self.condition(y)
        return self.negation(self.both(self.negation(x), self.negation(y)))

    def same_truth(self, x: int, y: int) -> int:
        """Return the condition that two conditions hold or fail together."""
        x, y = self.condition(x), self.condition(y)
        return self.either(
            self.both(x, y), self.both(self.negation(x), self.negation(y))
        )

    def _where(self, comparison: int, yes: int, no: int) -> int:
        """Return one condition where a comparison holds, and another one elsewhere."""
        if yes == no:
            return yes
        fact = self.literal(comparison)
        return self.either(self.both(fact, yes), self.both(self.negation(fact), no))

    def greater(self, x: int, y: int, or_equal: bool = False) -> int:
        """Return the condition x > y, or x >= y.

        Args:
            x, y: ids; infinity and not-a-number included.
            or_equal: whether it holds where they are equal.
        """
        x, y = self.real(x), self.real(y)
        kinds = (self.special(x), self.special(y))
        if any(kinds):
            return self._greater_special(kinds, or_equal)
        return self.above(self.subtract(x, y), or_equal)

    def _greater_special(self, kinds: tuple[str, str], or_equal: bool) -> int:
        """Return true or false where one value or both are infinite or NaN; NaN is
        neither greater nor equal.
        """
        if "nan" in kinds:
            return self.zero
        size = {"-inf": -1, "": 0, "inf": 1}
        left, right = size[kinds[0]], size[kinds[1]]
        holds = left > right or (or_equal and left == right)
        return self.one if holds else self.zero

    def equals(self, x: int, y: int) -> int:
        """Return the condition that two values are equal on an open set; NaN equals
        nothing.

        Args:
            x, y: ids.
        """
        x, y = self.real(x), self.real(y)
        kinds = (self.special(x), self.special(y))
        if any(kinds):
            return self.one if kinds[0] == kinds[1] != "nan" else self.zero
        difference = self.subtract(x, y)
        at_least = self.above(difference, True)
        return self.both(at_least, self.negation(self.above(difference)))

    def differs(self, x: int, y: int) -> int:
        """Return the condition that two values are not equal."""
        return self.negation(self.equals(x, y))
