# SPDX-License-Identifier: Apache-2.0
"""The solver: conditions in, an answer for each out. z3 runs as a program of its own, with
a limit of CPU time and memory, so that a proof never ends the process that asks for it.
The limit of each question is z3's count of its own steps: it is the same on a busy machine.

The questions go to it as one SMT-LIB text. exp, log and other functions that are no
polynomials are unknown numbers there, of which a few true facts are told. So `impossible`
holds for the real functions too, and a point that the solver gives may be no real one.

An *id* names a formula, which is made of *atoms* (upref.proof.values): every number of an
atom or a node here is its index there.
"""

import math
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from importlib import metadata

from upref.errors import InputError
from upref.proof.values import (
    TOTALS,
    Branch,
    Choice,
    Compare,
    Function,
    Logarithm,
    Monomial,
    Polynomial,
    TooHard,
    Values,
    Variable,
    simplest,
)

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

INSTALL = "a proof needs the solver z3: pip install z3-solver, or upref-rl with its extra prove."
LARGEST_ROOT = 12  # of a variable; other powers are numbers of their own
MOST_PAIRS = 6  # values of one function that are compared with each other
MEMORY = 1500  # MB
DIGITS = 110  # behind the point: a probability of e^-200 has its first one at 87
STEPS = 20_000_000  # of z3 for one question: about 7 CPU seconds
WAIT = 20  # seconds of waiting for each CPU second, where the machine is busy


@dataclass(frozen=True)
class Question:
    """Is there a point at which all conditions hold, and two values differ?

    Attributes:
        conditions: ids.
        unequal: the ids of two values; empty: none.
    """

    conditions: tuple[int, ...]
    unequal: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What the solver says of one question.

    Attributes:
        outcome: "impossible", "point", or "unknown".
        point: of a point, the numbers of the variables by name.
        logs: of a point, what the solver takes for the logarithms of variables, by name.
            It knows few facts of logarithms, so they may be those of other numbers.
    """

    outcome: str
    point: dict[str, float] = field(default_factory=dict)
    logs: dict[str, float] = field(default_factory=dict)


@cache
def find_z3() -> str:
    """Return the path of the program z3 of the package z3-solver; "" without it."""
    try:
        files = metadata.distribution("z3-solver").files or []
    except metadata.PackageNotFoundError:
        return ""
    for file in files:
        if file.name in ("z3", "z3.exe"):
            return str(file.locate())
    return ""


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the solvers that it has run."""
    if not hasattr(resource, "getrusage"):  # Windows
        return time.process_time()
    others = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + others.ru_utime + others.ru_stime


def require_z3() -> None:
    """Raise InputError where z3 is not installed."""
    if not find_z3():
        raise InputError(INSTALL)


def ask(
    values: Values,
    questions: Sequence[Question],
    seconds: float,
    steps: int = STEPS,
) -> list[Answer]:
    """Ask for a point at which all conditions of a question hold, for each question.

    Args:
        values: that the ids are of.
        questions: ids of conditions.
        seconds: of CPU time, for all questions together.
        steps: z3's own count of its work, the limit of each question.

    Returns:
        An answer for each question: "unknown" where z3 did not come to it in time, or
        where it has no text.
    """
    if not questions:
        return []
    parts = [f"(set-option :rlimit {steps})", "(set-option :pp.decimal true)"]
    parts.append(f"(set-option :pp.decimal_precision {DIGITS})")
    names: list[list[str]] = []
    for question in questions:
        try:
            text, variables = Text(values).question(question)
        except TooHard:
            text, variables = "(assert true)", []
            names.append(["?"])  # no variable has this name: there is no question
        else:
            names.append(variables)
        parts += ["(push)", text, "(check-sat)"]
        if variables:
            parts.append(f"(get-value ({' '.join(variables)}))")
        parts += ['(echo "next")', "(pop)"]
    output = _run("\n".join(parts), seconds)
    blocks = output.split("next")
    answers = []
    for number, variables in enumerate(names):
        block = blocks[number] if number < len(blocks) - 1 else ""
        answers.append(Answer("unknown") if variables == ["?"] else _read(block))
    return answers


def _run(text: str, seconds: float) -> str:
    """Return what z3 prints of a text, as far as it comes in time."""
    command = [find_z3(), "-in", f"-memory:{MEMORY}"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        if hasattr(resource, "prlimit"):  # Linux
            most = math.ceil(seconds)
            resource.prlimit(process.pid, resource.RLIMIT_CPU, (most, most))
        output, _ = process.communicate(text, timeout=WAIT * seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    except BaseException:
        process.kill()
        process.wait()
        raise
    return output or ""


def _read(block: str) -> Answer:
    """Read what z3 printed of one question: unsat is "impossible", sat a "point", and
    all else "unknown".
    """
    first = block.split(None, 1)[0] if block.strip() else ""
    if first == "unsat":
        return Answer("impossible")
    if first != "sat":
        return Answer("unknown")
    found: dict[str, dict[str, float]] = {"v": {}, "log": {}}
    # (v_NAME NUMBER) or (log_NAME NUMBER); a number may be (- (/ 1.0 3.0))
    for kind, name, number in re.findall(
        r"\((v|log)_(\w+) ([^()]+|\([^()]*(?:\([^()]*\))?[^()]*\))\)", block
    ):
        value = _read_number(number)
        if value is None:
            return Answer("unknown")
        found[kind][name] = value
    return Answer("point", found["v"], found["log"])


def _read_number(text: str) -> float | None:
    """Read a number as z3 prints it: 0.5, (- 2.0), (/ 1.0 3.0), 1.41421356? Return None
    where the text is no number, or one that no float holds.
    """
    words = text.replace("(", " ").replace(")", " ").replace("?", "").split()
    sign = 1.0
    while words and words[0] == "-":
        sign = -sign
        words = words[1:]
    try:
        if words and words[0] == "/":
            inner = words[1:]
            if inner[0] == "-":
                sign, inner = -sign, inner[1:]
            return sign * float(Fraction(inner[0]) / Fraction(inner[1]))
        return sign * float(Fraction(words[0]))
    except (ValueError, IndexError, ZeroDivisionError, OverflowError):
        return None


class Text:
    """Writes one question as SMT-LIB."""

    def __init__(self, values: Values) -> None:
        """Begin an empty text.

        Args:
            values: the formulas that questions name by their ids.
        """
        self.values = values
        self.lines: list[str] = []
        self.facts: list[str] = []
        self.written: dict[int, str] = {}  # node -> its name
        self.atoms: dict[int, str] = {}  # atom -> its name
        self.powers: dict[tuple[int, Fraction], str] = {}
        self.roots: dict[int, int] = {}
        self.names: list[str] = []
        self.functions: dict[str, list[tuple[str, str]]] = {}

    def question(self, question: "Question") -> tuple[str, list[str]]:
        """Return the text that asserts a question, and the names of its variables.

        Args:
            question: the conditions.
        """
        pair = question.unequal
        self._find_roots([*question.conditions, *pair])
        asserted = [self.condition(c) for c in question.conditions]
        if pair:
            x, y = map(self.node, pair)
            asserted.append(f"(not (= {x} {y}))")
        self._compare_functions()
        lines = [*self.lines, *(f"(assert {fact})" for fact in self.facts)]
        lines += [f"(assert {name})" for name in asserted]
        return "\n".join(lines), self.names

    def _find_roots(self, conditions: list[int]) -> None:
        """Find by which root each variable is written, so that all powers are whole."""
        todo = list(conditions)
        seen: set[int] = set()
        while todo:
            node_id = todo.pop()
            if node_id in seen:
                continue
            seen.add(node_id)
            node = self.values.nodes[node_id]
            match node:
                case Branch():
                    todo += [node.comparison, node.yes, node.no]
                case Compare():
                    todo.append(node.polynomial)
                case Polynomial():
                    for monomial, _ in node.terms:
                        for atom, exponent in monomial:
                            self._note_exponent(atom, exponent)
                            todo += self._nodes_within(atom)

    def _note_exponent(self, atom: int, exponent: Fraction) -> None:
        """Write an atom by a root of which this power of it is a whole one too, unless
        the root is above LARGEST_ROOT.
        """
        root = math.lcm(self.roots.get(atom, 1), exponent.denominator)
        if root <= LARGEST_ROOT:
            self.roots[atom] = root

    def _nodes_within(self, atom: int) -> list[int]:
        """Return the nodes that are written in the definition of an atom."""
        kind = self.values.atoms[atom]
        if isinstance(kind, Choice):
            return [kind.condition, kind.yes, kind.no]
        if isinstance(kind, Function) and kind.name not in TOTALS:
            return [kind.argument]
        return []

    # ---- nodes -----------------------------------------------------------------------
    def node(self, node_id: int) -> str:
        """Return the name of a value or a condition, and define it.

        Args:
            node_id: an id.
        """
        known = self.written.get(node_id)
        if known is None:
            known = self.written[node_id] = self._define(node_id)
        return known

    def condition(self, node_id: int) -> str:
        """Return the name of a condition, and define it.

        Args:
            node_id: an id.
        """
        constants = {self.values.zero: "false", self.values.one: "true"}
        return constants.get(node_id) or self.node(node_id)

    def _define(self, node_id: int) -> str:
        """Write the definition of a node, and return its name; raise TooHard for
        infinity and NaN.
        """
        node = self.values.nodes[node_id]
        match node:
            case Polynomial():
                sort, text = "Real", self._sum(node)
            case Compare():
                sort, text = "Bool", f"(> {self.node(node.polynomial)} 0.0)"
            case Branch():
                sort, text = "Bool", self._branch(node)
            case _:
                raise TooHard("a value that is infinite or not a number")
        name = f"n{node_id}"
        self.lines.append(f"(define-fun {name} () {sort} {text})")
        return name

    def _branch(self, node: Branch) -> str:
        """Return a condition as SMT-LIB. Where its comparison fails, the polynomial is
        below 0: points at which it is 0 are left out.
        """
        compare = self.values.nodes[node.comparison]
        assert isinstance(compare, Compare)
        polynomial = self.node(compare.polynomial)
        parts = []
        for sign, part in ((">", node.yes), ("<", node.no)):
            holds = f"({sign} {polynomial} 0.0)"
            if part == self.values.one:
                parts.append(holds)
            elif part != self.values.zero:
                parts.append(f"(and {holds} {self.condition(part)})")
        return parts[0] if len(parts) == 1 else f"(or {' '.join(parts)})"

    def _sum(self, node: Polynomial) -> str:
        """Return a polynomial as SMT-LIB."""
        terms = [self._term(monomial, c) for monomial, c in node.terms]
        if not terms:
            return "0.0"
        return terms[0] if len(terms) == 1 else f"(+ {' '.join(terms)})"

    def _term(self, monomial: Monomial, c: Fraction) -> str:
        """Return a monomial times its coefficient, as a fraction of two products."""
        above: list[str] = []
        below: list[str] = []
        for atom, exponent in monomial:
            base, times = self._power(atom, abs(exponent))
            (above if exponent > 0 else below).extend([base] * times)
        factors = [_number(c), *above] if c != 1 or not above else above
        text = factors[0] if len(factors) == 1 else f"(* {' '.join(factors)})"
        if not below:
            return text
        divisor = below[0] if len(below) == 1 else f"(* {' '.join(below)})"
        return f"(/ {text} {divisor})"

    def _power(self, atom: int, exponent: Fraction) -> tuple[str, int]:
        """Return a name, and how often it is multiplied with itself to give this power."""
        base = self.atom(atom)
        times = exponent * self.roots.get(atom, 1)
        if times.denominator == 1 and times <= 64:
            return base, int(times)
        return self._odd_power(atom, exponent), 1

    def _odd_power(self, atom: int, exponent: Fraction) -> str:
        """Return the name of a power that is written as a number of its own."""
        key = (atom, exponent)
        if key not in self.powers:
            name = self.powers[key] = f"p{len(self.powers)}"
            base = self.atom(atom)
            self.lines.append(f"(declare-const {name} Real)")
            self.facts.append(f"(> {name} 0.0)")
            self.facts.append(f"(= (> {name} 1.0) (> {base} 1.0))")
        return self.powers[key]

    # ---- atoms -----------------------------------------------------------------------
    def atom(self, atom: int) -> str:
        """Return the name of an atom, or of its root, and declare it.

        Args:
            atom: its number.
        """
        known = self.atoms.get(atom)
        if known is None:
            known = self._declare(atom)
        return known

    def _declare(self, atom: int) -> str:
        """Declare an atom with the facts that hold of it, and return what stands for it."""
        kind = self.values.atoms[atom]
        root = self.roots.get(atom, 1)
        match kind:
            case Variable():
                name = f"v_{kind.name}"
                self.lines.append(f"(declare-const {name} Real)")
                self.names.append(name)
                self.facts += _bounds(name, kind)
                if root > 1:
                    whole, name = name, f"root_{kind.name}"
                    self.lines.append(f"(declare-const {name} Real)")
                    product = " ".join([name] * root)
                    self.facts += [f"(> {name} 0.0)", f"(= {whole} (* {product}))"]
            case Choice():
                condition = self.condition(kind.condition)
                name = f"(ite {condition} {self.node(kind.yes)} {self.node(kind.no)})"
            case Logarithm():
                of = self.values.atoms[kind.of]
                name = f"log_{of.name}" if isinstance(of, Variable) else f"l{atom}"
                self.lines.append(f"(declare-const {name} Real)")
                if isinstance(of, Variable):
                    self.names.append(name)
                self._facts_of_log(name, kind.of)
            case Function():
                name = self._declare_function(atom, kind, root)
        self.atoms[atom] = name
        return name

    def _facts_of_log(self, name: str, of: int) -> None:
        """Write what is true of l = log x: 1 - 1/x <= l <= x - 1, and its sign."""
        base, times = self._power(of, Fraction(1))
        x = base if times == 1 else f"(* {' '.join([base] * times)})"
        self.facts += [
            f"(= (> {name} 0.0) (> {base} 1.0))",
            f"(<= {name} (- {x} 1.0))",
            f"(>= (* {name} {x}) (- {x} 1.0))",
        ]
        kind = self.values.atoms[of]
        if isinstance(kind, Variable):
            for sign, bound in ((">", kind.low), ("<", kind.high)):
                if 0 < bound < math.inf:
                    self.facts.append(
                        f"({sign} {name} {_number(simplest(math.log(bound)))})"
                    )

    def _declare_total(self, atom: int) -> str:
        """Declare a sum over tokens: any number, at least 1 where it is a count, and
        above 0 where it is known to be.
        """
        name = f"f{atom}"
        self.lines.append(f"(declare-const {name} Real)")
        if self.values.is_count(atom):
            self.facts.append(f"(>= {name} 1.0)")
        elif self.values.is_positive(atom):
            self.facts.append(f"(> {name} 0.0)")
        return name

    def _declare_function(self, atom: int, kind: Function, root: int) -> str:
        """Declare the value of a function as a number, with the facts that hold of it. With
        a root above 1, the number is that root of the value.
        """
        if kind.name in TOTALS:
            return self._declare_total(atom)
        argument = self.node(kind.argument)
        name = f"f{atom}"
        self.lines.append(f"(declare-const {name} Real)")
        whole = name
        if root > 1:
            whole = f"(* {' '.join([name] * root)})"
            self.facts.append(f"(> {name} 0.0)")
        match kind.name:
            case "exp":
                self.facts += [
                    f"(> {name} 0.0)",
                    f"(= (> {name} 1.0) (> {argument} 0.0))",
                    f"(= (< {name} 1.0) (< {argument} 0.0))",
                    f"(>= {whole} (+ 1.0 {argument}))",
                ]
            case "log":
                self.facts += [
                    f"(> {argument} 0.0)",
                    f"(= (> {name} 0.0) (> {argument} 1.0))",
                    f"(<= {name} (- {argument} 1.0))",
                ]
            case "inverse":
                self.facts.append(f"(= (* {whole} {argument}) 1.0)")
            case "sqrt":
                self.facts += [
                    f"(>= {name} 0.0)",
                    f"(= (* {whole} {whole}) {argument})",
                ]
            case "same":
                self.facts.append(f"(= {whole} {argument})")
            case _:
                self.functions.setdefault(kind.name, []).append((whole, argument))
        if kind.name in ("exp", "log"):
            self.functions.setdefault(kind.name, []).append((whole, argument))
        return name

    def _compare_functions(self) -> None:
        """Write that one function has one value at equal arguments; exp and log rise."""
        for function, pairs in self.functions.items():
            few = pairs[:MOST_PAIRS]
            for i, (x, a) in enumerate(few):
                for y, b in few[:i]:
                    if function in ("exp", "log"):
                        self.facts.append(f"(= (> {x} {y}) (> {a} {b}))")
                        self.facts.append(f"(= (= {x} {y}) (= {a} {b}))")
                    else:
                        self.facts.append(f"(=> (= {a} {b}) (= {x} {y}))")


def _bounds(name: str, kind: Variable) -> list[str]:
    """Return the facts that a variable lies between its bounds."""
    facts = []
    if kind.low > -math.inf:
        facts.append(f"(> {name} {_number(simplest(kind.low))})")
    if kind.high < math.inf:
        facts.append(f"(< {name} {_number(simplest(kind.high))})")
    return facts


def _number(x: Fraction) -> str:
    """Return a rational number as SMT-LIB."""
    text = f"{abs(x.numerator)}.0"
    if x.denominator != 1:
        text = f"(/ {text} {x.denominator}.0)"
    return f"(- {text})" if x < 0 else text
