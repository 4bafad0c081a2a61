# SPDX-License-Identifier: Apache-2.0
"""Code of other people, fetched into a folder outside this repository: a function of it, or some of its lines."""

import __future__

import ast
import contextlib
import math
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

# their types are not evaluated: what they import is not here
FLAGS = __future__.annotations.compiler_flag
GIVEN = {
    "torch": torch,
    "nn": torch.nn,
    "F": torch.nn.functional,
    "np": np,
    "math": math,
    "contextlib": contextlib,
    "Tensor": torch.Tensor,
}


class Fetched:
    """A repository's folder at one commit. Only what a wrapper names is run: no import of theirs, no training loop."""

    def __init__(self, folder: Path):
        self.folder = folder

    def take(self, file: str, /, *names: str, **given: Any) -> SimpleNamespace:
        """These functions, classes and methods (`Class.method`, then without its class), in one namespace.

        Args:
            file: in the folder.
            names: of the functions, classes and methods.
            given: values for names that their code reads, beside those of GIVEN; a decorator that is not among them is
                dropped.
        """
        tree = ast.parse((self.folder / file).read_text(encoding="utf-8"))
        space = GIVEN | given
        for name in names:
            node: Any = tree
            for part in name.split("."):
                node = next(n for n in node.body if getattr(n, "name", "") == part)
            node.decorator_list = [
                d for d in node.decorator_list if ast.unparse(d) in given
            ]
            exec(compile(ast.Module([node], []), file, "exec", FLAGS), space)
        short_names = [name.rpartition(".")[2] for name in names]
        return SimpleNamespace(**{name: space[name] for name in short_names})

    def lines(
        self, file: str, first: int, last: int, /, **given: Any
    ) -> SimpleNamespace:
        """What these lines, counted from 1, make of the names given.

        Args:
            file: in the folder.
            first: the first line.
            last: the last line.
            given: values for names that the lines read, beside those of GIVEN.
        """
        text = (self.folder / file).read_text(encoding="utf-8")
        code = textwrap.dedent("\n".join(text.splitlines()[first - 1 : last]))
        space = GIVEN | given
        exec(compile(code, file, "exec", FLAGS), space)
        names = {k: v for k, v in space.items() if not k.startswith("__")}
        return SimpleNamespace(**names)
