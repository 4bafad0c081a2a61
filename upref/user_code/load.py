# SPDX-License-Identifier: Apache-2.0
"""From a name to a callable: `package.module:function` or `path/to/file.py:function`."""

import contextlib
import difflib
import functools
import importlib
import importlib.machinery
import importlib.util
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from upref.errors import InputError
from upref.files import require_readable
from upref.interrupt import Terminated
from upref.user_code.guard import asks_for_gpu, one_line


def load(target: str) -> Callable[..., Any]:
    """The callable of that name; InputError where there is none, or where its file does
    not import.

    Args:
        target: package.module:function or FILE.py:function.
    """
    where, colon, attr = target.rpartition(":")
    if not colon or not where or not attr:
        raise InputError(
            f"{target!r} is not a function: write package.module:function, path/to/file.py:function, verl:loss_mode or "
            "trl:loss_type."
        )
    module = _file(Path(where)) if where.endswith(".py") else _module(where)
    found: Any = module
    for part in attr.split("."):
        try:
            found = getattr(found, part)
        except Exception:
            known = [
                n
                for n, v in vars(module).items()
                if callable(v) and not n.startswith("_")
            ]
            similar = difflib.get_close_matches(part, known, 3, 0.5)
            if similar:
                hint = f"did you mean {' or '.join(similar)}?"
            else:
                hint = f"it has {', '.join(known[:8]) or 'no function'}."
            raise InputError(f"{where} has no {part!r}: {hint}") from None
    if not callable(found):
        raise InputError(f"{target} is a {type(found).__name__}, not a function.")
    return found


def name_of(fn: Any) -> str:
    """Return the name given, or the function's own; what cannot be printed is escaped.

    Args:
        fn: a function or a name.
    """
    if isinstance(fn, str):
        # repr without its quotes: a line break becomes \n
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in fn)
    if isinstance(fn, functools.partial):
        return name_of(fn.func)
    try:
        name = fn.__name__
    except Exception:
        name = ""
    return name if isinstance(name, str) and name else type(fn).__name__


def _file(path: Path) -> ModuleType:
    """A file may import its neighbours, as under `python FILE.py`, and its package's
    others, as under `python -m`.
    """
    require_readable(path)
    path = path.resolve()
    known = sys.modules.get(path.stem)
    name = path.stem
    if name in sys.stdlib_module_names or (
        known is not None and getattr(known, "__file__", None) != str(path)
    ):
        # another module has that name already
        name = f"{path.stem}_{abs(hash(str(path)))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _Neighbours.of(path.parent)
    try:
        with _as_input_error(path.name):
            try:
                spec.loader.exec_module(module)
            except ImportError as e:
                if (
                    "relative import" not in str(e)
                    or not (path.parent / "__init__.py").is_file()
                ):
                    raise
                del sys.modules[name]
                module = _member(path)
    except InputError:
        sys.modules.pop(name, None)
        raise
    return module


def _member(path: Path) -> ModuleType:
    """The file as a module of its package."""
    name = path.stem
    folder = path.parent
    while (folder / "__init__.py").is_file():
        name = f"{folder.name}.{name}"
        folder = folder.parent
    _Neighbours.of(folder)
    return importlib.import_module(name)


class _Neighbours:
    """Finds the modules that stand beside a file, but for names of the standard
    library, which others need.
    """

    folders: ClassVar[list[str]] = []  # the last one read goes first

    @classmethod
    def of(cls, folder: Path) -> None:
        """From now on modules of this folder are found, and those of the same name from
        files read before are not.
        """
        if cls not in sys.meta_path:
            sys.meta_path.insert(0, cls)
        before = tuple(f + os.sep for f in cls.folders if f != str(folder))
        cls.folders[:] = [str(folder), *(f for f in cls.folders if f != str(folder))]
        if before:
            for name, module in list(sys.modules.items()):
                where = str(getattr(module, "__file__", None) or "")
                if where.startswith(before) and cls.find_spec(
                    name.partition(".")[0], None, None, [str(folder)]
                ):
                    del sys.modules[name]

    @classmethod
    def find_spec(
        cls, name: Any, path: Any = None, target: Any = None, folders: Any = None
    ) -> Any:
        if path is not None or name in sys.stdlib_module_names:
            return None
        return importlib.machinery.PathFinder.find_spec(name, folders or cls.folders)


def _module(name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    with _as_input_error(name):
        return importlib.import_module(name)


def _imports(error: BaseException) -> str:
    """What to do about an import that fails, in words."""
    if "attempted relative import" not in str(error):
        return asks_for_gpu(error)
    return (
        "; import without the leading dot, or name the module of its package from the folder above: "
        "package.module:function"
    )


@contextlib.contextmanager
def _as_input_error(what: str) -> Any:
    """Whatever an import does becomes one sentence; what it prints goes to stderr:
    stdout is the report's.
    """
    out = io.StringIO()
    process = os.getpid()
    try:
        with contextlib.redirect_stdout(out):
            yield
    except InputError as e:
        raise InputError(one_line(e)) from e
    except Terminated:
        raise
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as e:
        raise InputError(
            f"{what} ends the program when it is imported ({type(e).__name__}): put its last lines under "
            "`if __name__ == '__main__':`."
        ) from e
    except BaseException as e:
        raise InputError(
            f"{what} does not import: {type(e).__name__}: {one_line(e)}{_imports(e)}."
        ) from e
    finally:
        if os.getpid() != process:  # it forked, and this is the copy
            os._exit(0)
        with contextlib.suppress(ValueError):  # it closed what it was given
            print(out.getvalue(), end="", file=sys.stderr)
