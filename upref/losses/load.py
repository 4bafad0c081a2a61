# SPDX-License-Identifier: Apache-2.0
"""From a name to a callable: `package.module:function` or `path/to/file.py:function`."""

import contextlib
import difflib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from upref.errors import InputError


def load(target: str) -> Callable:
    """The callable of that name; InputError where there is none, or where its file does not import."""
    where, colon, attr = target.rpartition(":")
    if not colon or not where or not attr:
        raise InputError(
            f"{target!r} names no loss: write package.module:function, path/to/file.py:function, verl:loss_mode or "
            "trl:loss_type."
        )
    module = _file(Path(where)) if where.endswith(".py") else _module(where)
    found: Any = module
    for part in attr.split("."):
        if not hasattr(found, part):
            known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            near = difflib.get_close_matches(part, known, 3, 0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(known[:8]) or 'no function'}."
            raise InputError(f"{where} has no {part!r}: {hint}")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"{target} is a {type(found).__name__}, not a function.")
    return found


def name_of(fn: Any) -> str:
    """As it was given where it was given by name; else the function's own name."""
    if isinstance(fn, str):
        return fn
    if isinstance(fn, functools.partial):
        return name_of(fn.func)
    return getattr(fn, "__name__", None) or type(fn).__name__


def _file(path: Path) -> ModuleType:
    """A file may import its neighbours, as under `python FILE.py`."""
    if not path.is_file():
        raise InputError(f"there is no file {path}.")
    folder, name = str(path.resolve().parent), path.stem
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) != str(path.resolve()):
        name = f"{path.stem}_{abs(hash(str(path.resolve())))}"  # another module has that name already
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        with _as_input_error(str(path)):
            spec.loader.exec_module(module)
    except InputError:
        del sys.modules[name]
        raise
    return module


def _module(name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    with _as_input_error(name):
        return importlib.import_module(name)


@contextlib.contextmanager
def _as_input_error(what: str):
    try:
        yield
    except SystemExit as e:
        raise InputError(
            f"{what} ends the program when it is imported (SystemExit): put its last lines under "
            "`if __name__ == '__main__':`."
        ) from e
    except Exception as e:
        raise InputError(f"{what} does not import: {type(e).__name__}: {said(e)}.") from e


def said(e: BaseException) -> str:
    """What an exception says, on one line."""
    return " ".join(str(e).split())[:200]
