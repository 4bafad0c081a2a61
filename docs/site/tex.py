# SPDX-License-Identifier: Apache-2.0
"""The registry's equations and sympy's expressions as TeX."""

import re
import tomllib
from pathlib import Path

import sympy

from upref import names

_LETTERS = tomllib.loads(
    Path(__file__).with_name("letters.toml").read_text(encoding="utf-8")
)
GREEK: dict[str, str] = _LETTERS["greek"]
SIGNS: dict[str, str] = _LETTERS["signs"]
SYMBOLS: dict[str, str] = _LETTERS["symbols"]  # of sympy
WORDS = "min max clip log exp sg mean sgn std KL Bern whiten low high"
OBJECTIVES = "|".join(sorted(names(), key=len)[::-1])
TOKEN = re.compile(
    rf"(?P<name>{OBJECTIVES})\b"
    r"|1/(?P<over>\([^()]*\)|Σ_i\|o_i\||\|o(?:_i)?\||[Gk]\b)"
    r"|\^(?P<power>\(|-?(?:[A-Za-z]+\d?|[^\s({]))|_(?P<sub>\{|[^\W\d_]+(?:_[^\W\d_]+)*|\d+)"
    r"|(?P<numbered>\b[a-zβ]\d\b)|(?P<word>a(?= [a-z]{2})|[A-Za-z]{2,}(?:['’-][a-z]+)*\.?)"
    r"|(?P<sign><=|>=|->|[~%{}#])|(?P<gap>[,;] {2,})|(?P<char>.)",
    re.S,
)


def equation(text: str) -> str:
    """Return a line of the registry, "J = Σ_t min(r A, clip(r, 1-ε, 1+ε) A)", as TeX;
    what is not mathematics is text.
    """
    tex = r"\\ ".join(map(_converted, text.split("\n")))
    # until no two texts are side by side
    while (joined := re.sub(r"(\\text\{[^{}]*?) ?\} \\text\{ ?", r"\1 ", tex)) != tex:
        tex = joined
    return tex.strip()


def _converted(text: str) -> str:
    """Return a line of an equation as TeX, token by token."""
    out, at = [], 0
    while at < len(text):
        m = TOKEN.match(text, at)
        assert m  # any character is a token
        at = m.end()
        kind, token = m.lastgroup, m[m.lastgroup or 0]
        if kind in ("power", "sub") and token in "({":
            end = _closing(text, at - 1)
            inside, at = _converted(text[at:end]), end + 1
            out.append(f"^{{({inside})}}" if kind == "power" else f"_{{{inside}}}")
        else:
            out.append(_token(kind, token))
    return "".join(out)


def _token(kind: str | None, token: str) -> str:
    """Return a token without brackets as TeX.

    Args:
        kind: its group in TOKEN.
        token: its text.
    """
    if kind == "power":
        return f"^{{{_index(token)}}}"
    if kind == "sub":
        return f"_{{{','.join(map(_index, token.split('_')))}}}"
    if kind == "numbered":
        return _index(token)
    if kind == "over":
        return rf"\frac{{1}}{{{_converted(token)}}} "
    if kind == "name":
        return rf"\text{{{token}}}"
    if kind == "gap":
        return rf"{token[0]}\\ "
    if kind == "word":
        if token == "mu":
            return r"\mu "
        known = re.search(rf"\b{token}\b", WORDS)
        return rf"\operatorname{{{token}}}" if known else rf"\text{{ {token} }}"
    if token in SIGNS:
        return SIGNS[token]
    return f"{GREEK[token]} " if token in GREEK else token


def _index(text: str) -> str:
    """Return as TeX what is above or below a letter: a letter, a letter with a number,
    a word.
    """
    sign, name = ("-", text[1:]) if text.startswith("-") else ("", text)
    if re.fullmatch(r"[^\W\d_]\d", name):
        return f"{sign}{GREEK.get(name[0], name[0])}_{{{name[1]}}}"
    short = len(name) <= 2 and name != "KL"
    return sign + (GREEK.get(name) or (name if short else rf"\mathrm{{{name}}}"))


def _closing(text: str, at: int) -> int:
    """Return the index at which the bracket at that index is closed.

    Raises:
        ValueError: it is not closed.
    """
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] in "({") - (text[i] in ")}")
        if not depth:
            return i
    raise ValueError(f"not closed: {text[at:]}")


def block(tex: str) -> str:
    """Displayed; its lines, parted by \\\\, one under the other."""
    return f"$$\n\\begin{{gathered}}\n{tex}\n\\end{{gathered}}\n$$"


def expression(e: sympy.Expr) -> str:
    """Return a sympy expression as TeX, in the paper's letters."""
    return sympy.latex(
        sympy.sympify(e),
        symbol_names={s: SYMBOLS[s.name] for s in _symbols(e) if s.name in SYMBOLS},
    )


def _symbols(e: sympy.Expr) -> set[sympy.Symbol]:
    """Return the symbols of an expression."""
    return sympy.sympify(e).atoms(sympy.Symbol)


def where(label: str) -> str:
    """Return a regime, "1 - eps_low < r < c", as TeX."""
    longest_first = "|".join(sorted(SYMBOLS, key=len, reverse=True))
    label = re.sub(rf"\b({longest_first})\b", lambda m: SYMBOLS[m[0]], label)
    for name, meant in (
        ("*", r"\cdot "),
        ("every ", r"\text{every } "),
        ("exp", r"\exp"),
        ("oo", r"\infty"),
    ):
        label = label.replace(name, meant)
    return label
