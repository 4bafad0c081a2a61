# SPDX-License-Identifier: Apache-2.0
"""From a name to a callable: `package.module:function` or `path/to/file.py:function`."""

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from upref.catalog import no_function_named
from upref.errors import InputError, describe_kind, importing
from upref.files import require_readable
from upref.interrupt import Terminated
from upref.user_code.guard import (
    asks_for_gpu,
    keeping_what_imports_change,
    one_line,
)


def load(target: str) -> Callable[..., Any]:
    """Return the callable of that name. Its module is imported; what this changes of the
    process stays.

    Args:
        target: package.module:function or FILE.py:function; the function may be an
            attribute of an object there, as in a.b.

    Raises:
        InputError: there is none of this name, it is not callable, or its file does not
            import.
    """
    where, colon, attr = target.rpartition(":")
    if not colon or not where or not attr:
        raise InputError(
            f"{target!r} is not a function: write package.module:function, path/to/file.py:function, verl:loss_mode or "
            "trl:loss_type."
        )
    with keeping_what_imports_change():
        module = (
            _import_file(Path(where))
            if where.endswith(".py")
            else _import_module(where)
        )
    found: Any = module
    for part in attr.split("."):
        try:
            found = getattr(found, part)
        except Exception:
            names = [n for n, v in vars(module).items() if callable(v)]
            raise no_function_named(part, where, names) from None
    if not callable(found):
        raise InputError(no_function(target, found))
    return found


def no_function(name: str, value: Any) -> str:
    """Say that what should be a loss is no function; of an instance, which of its methods
    may be one.

    Args:
        name: of the value.
        value: what was given.
    """
    kind = type(value).__name__
    methods = [
        method
        for method in dir(type(value))
        if "loss" in method
        and not method.startswith("_")
        and inspect.isfunction(getattr(type(value), method, None))
    ]
    if not methods and name == kind:
        return f"a loss is a function or its name, got {name}."
    if not methods:
        return f"{name} is {describe_kind(value)}, not a function: pass a function or its name."
    owner = "" if name == kind else name
    which = " or ".join(f"{owner}.{method}" for method in methods[:3])
    what = (
        f"an instance of {kind} is"
        if name == kind
        else f"{name} is {describe_kind(value)},"
    )
    return f"{what} not a function: check its method, {which}."


def verl_estimator(name: str) -> Callable[..., Any]:
    """Return verl's own advantage estimator of this name.

    Args:
        name: of its registry, such as gae.

    Raises:
        InputError: verl has none of this name.
    """
    with importing("verl"):
        from verl.trainer.ppo import core_algos
    try:
        return core_algos.get_adv_estimator_fn(name)
    except ValueError as e:
        raise InputError(f"verl has no advantage estimator {name!r}: {e}") from e


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


def _import_file(path: Path) -> ModuleType:
    """Import a file. It may import its neighbors, as under `python FILE.py`, and the
    other modules of its package, as under `python -m`. It is kept in `sys.modules`, by its
    own name if that is free.

    Raises:
        InputError: it cannot be read, is no Python file, or raises when it is imported.
    """
    require_readable(path)
    path = path.resolve()
    loaded = sys.modules.get(path.stem)
    name = path.stem
    if name in sys.stdlib_module_names or (
        loaded is not None and getattr(loaded, "__file__", None) != str(path)
    ):
        # another module has that name already
        name = f"{path.stem}_{abs(hash(str(path)))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _NeighborFinder.of(path.parent)
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
                module = _import_as_member_of_package(path)
    except InputError:
        sys.modules.pop(name, None)
        raise
    return module


def _import_as_member_of_package(path: Path) -> ModuleType:
    """Import the file as a module of its package."""
    name = path.stem
    folder = path.parent
    while (folder / "__init__.py").is_file():
        name = f"{folder.name}.{name}"
        folder = folder.parent
    _NeighborFinder.of(folder)
    return importlib.import_module(name)


class _NeighborFinder:
    """Finds the modules that stand beside a file, but for names of the standard
    library, which others need.
    """

    folders: ClassVar[list[str]] = []  # the last one read goes first

    @classmethod
    def of(cls, folder: Path) -> None:
        """Find modules of this folder from now on, before those of folders read earlier,
        and forget loaded modules of the same names from there.
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
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a top-level module of the folders; None for a module of a
        package or of the standard library, and where they have none of this name.

        Args:
            name: of the module.
            path: of its package; None for a top-level module.
            target: not read; importlib passes it.
            folders: where to look; None: in the folders that `of` was given.
        """
        if path is not None or name in sys.stdlib_module_names:
            return None
        return importlib.machinery.PathFinder.find_spec(name, folders or cls.folders)


def _import_module(name: str) -> ModuleType:
    """Import a module by its name; one of the current folder is found too."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    with _as_input_error(name):
        return importlib.import_module(name)


def _import_advice(error: BaseException) -> str:
    """Return in words what to do about an import that fails; "" where that is unknown."""
    if "attempted relative import" not in str(error):
        return asks_for_gpu(error)
    return (
        "; import without the leading dot, or name the module of its package from the folder above: "
        "package.module:function"
    )


@contextlib.contextmanager
def _as_input_error(what: str) -> Iterator[None]:
    """Raise an InputError of one sentence for whatever an import raises. What the import
    prints goes to stderr, because stdout is the report's.
    """
    output = io.StringIO()
    process = os.getpid()
    try:
        with contextlib.redirect_stdout(output):
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
            f"{what} does not import: {type(e).__name__}: {one_line(e)}{_import_advice(e)}."
        ) from e
    finally:
        if os.getpid() != process:  # it forked, and this is the copy
            os._exit(0)
        with contextlib.suppress(ValueError):  # it closed what it was given
            print(output.getvalue(), end="", file=sys.stderr)
