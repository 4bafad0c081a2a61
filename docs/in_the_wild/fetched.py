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
        """These functions, classes and methods (`Class.method`, then without its class), in one namespace."""
        tree, space = (
            ast.parse((self.folder / file).read_text(encoding="utf-8")),
            GIVEN | given,
        )
        for name in names:
            nodes = tree.body
            for part in name.split("."):
                node = next(n for n in nodes if getattr(n, "name", "") == part)
                nodes = getattr(node, "body", [])
            node.decorator_list = [
                d
                for d in getattr(node, "decorator_list", [])
                if ast.unparse(d) in given
            ]
            exec(compile(ast.Module([node], []), file, "exec", FLAGS), space)
        return SimpleNamespace(
            **{n.rpartition(".")[2]: space[n.rpartition(".")[2]] for n in names}
        )

    def lines(
        self, file: str, first: int, last: int, /, **given: Any
    ) -> SimpleNamespace:
        """What these lines, counted from 1, make of the names given."""
        text = (
            (self.folder / file)
            .read_text(encoding="utf-8")
            .splitlines()[first - 1 : last]
        )
        space = GIVEN | given
        exec(compile(textwrap.dedent("\n".join(text)), file, "exec", FLAGS), space)
        return SimpleNamespace(
            **{k: v for k, v in space.items() if not k.startswith("__")}
        )
