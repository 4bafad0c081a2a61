# SPDX-License-Identifier: Apache-2.0
"""Answers rewritten so that math-verify reads them as a person does, and the few
comparisons that it has no notion of.

math-verify 0.9.0 takes the e of 1e-6 for Euler's number, drops a percent sign without
dividing, reads 204_6 as 204, an interval beside an inequality only in one order, and
letters as a product. Those are mended here; what is left is listed in
tests/with_verl/boxed.tsv with the verdict that it gets and the one that it should.
"""

import re

SCIENTIFIC = re.compile(r"(?<![\w\\])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)")
THOUSANDS = re.compile(r"-?\d{1,3}([,\s]\s?\d{3})+(\.\d+)?")
MIXED = re.compile(r"^(-?)(\d+)\s+(\d+)\s*/\s*(\d+)$")
BASE = re.compile(r"^([0-9A-Za-z]+)_\{?(\d+)\}?$")
PERCENT = re.compile(r"^(.*\d)\s*\\?%$")
UNEQUAL = re.compile(r"^[a-z]\s*\\neq?\s*(.+)$")
INEQUALITY = re.compile(r"[<>]|\\(le|ge|lt|gt)q?(?![a-z])|[≤≥]")
WORDS = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox)\s*\{([^{}]*)\}")
SIGNS = {
    "−": "-",
    "×": r"\times ",
    "π": r"\pi ",
    "∞": r"\infty ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "°": r"^\circ",
    r"\emptyset": r"\varnothing",
    r"\lt": "<",
    r"\gt": ">",
}


def plain(answer: str) -> str:
    """Rewrite an answer in LaTeX that math-verify reads correctly.

    Dollars and layout are removed, signs become LaTeX, and commas between thousands go;
    1.8e7 becomes 1.8 x 10^7, 3 1/2 becomes 7/2, and x != 2 its two intervals.

    Args:
        answer: as the model or the data set has it.
    """
    text = answer.strip().strip("$").strip()
    for sign, tex in SIGNS.items():
        text = re.sub(re.escape(sign) + r"(?![a-zA-Z])", tex.replace("\\", r"\\"), text)
    text = re.sub(r"\\[,!;: ]|~", " ", text).replace("{,}", ",")
    if THOUSANDS.fullmatch(text):
        text = re.sub(r"[,\s]", "", text)
    text = SCIENTIFIC.sub(r"\1\\times10^{\2}", text)
    m = MIXED.match(text)  # sign, whole number, numerator, denominator
    if m and int(m[4]):
        numerator = int(m[2]) * int(m[4]) + int(m[3])
        text = rf"{m[1]}\frac{{{numerator}}}{{{m[4]}}}"
    if m := UNEQUAL.match(text):
        text = rf"(-\infty,{m[1]})\cup({m[1]},\infty)"
    return text.strip()


def pairs(truth: str, pred: str) -> bool | list[tuple[str, str]]:
    """Decide how two answers are compared.

    Args:
        truth: the right answer.
        pred: the model's.

    Returns:
        True or False where that is clear by itself, for choices such as (B) and for
        numbers in a base; else the pairs that math-verify is to compare, of which one
        equal pair is enough.
    """
    a, b = plain(truth), plain(pred)
    letters_a, letters_b = letters(a), letters(b)
    if letters_a and letters_b:
        return letters_a == letters_b
    base_a, base_b = BASE.match(a), BASE.match(b)
    if base_a and base_b and base_a[2] != base_b[2]:
        return False
    if base_a or base_b:  # one without a base is in that of the other
        digits_a = base_a[1] if base_a else a
        digits_b = base_b[1] if base_b else b
        return digits_a.lstrip("0") == digits_b.lstrip("0")
    percent_a, percent_b = PERCENT.match(a), PERCENT.match(b)
    if percent_a and percent_b:
        return [(percent_a[1], percent_b[1])]
    # "what per cent" is answered with and without the sign
    if percent_a:
        return [(b, percent_a[1]), (b, f"({percent_a[1]})/100")]
    if percent_b:
        return [(a, percent_b[1]), (a, f"({percent_b[1]})/100")]
    if bool(INEQUALITY.search(a)) != bool(INEQUALITY.search(b)):
        return [(a, b), (b, a)]  # math-verify compares them in one order only
    return [(a, b)]


def letters(text: str) -> frozenset[str] | None:
    """Return which of the choices A to J an answer is, such as "A, C", "AC", "(B)" or
    "A and C". Return None for any other answer, and where a letter comes twice.
    """
    text = WORDS.sub(r"\1", text)
    text = re.sub(r"\\[{}]|[(){}.,;$\s]|\band\b|\bor\b|\\ ", " ", text)
    words = text.split()
    if (
        not words
        or not all(re.fullmatch(r"[A-J]{1,6}", w) for w in words)
        or sum(map(len, words)) > 6
    ):
        return None
    chosen = "".join(words)
    return frozenset(chosen) if len(set(chosen)) == len(chosen) else None
