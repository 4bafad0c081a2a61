# SPDX-License-Identifier: Apache-2.0
"""What a framework sees when it is imported: its own folder, torch, numpy and what
upref needs, and nothing else of the environment; empty packages and stand-ins for what
it does not need here."""

import importlib.metadata
import importlib.util
import re
import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from upref.errors import InputError
from upref_frameworks.audits.isolated.pin import Pin, normalize

# what upref depends on
OURS = ("torch", "numpy", "sympy", "matplotlib", "jaxtyping", "rich")

STDLIB = sysconfig.get_path("stdlib")


def isolate(paths: list[str], pin: Pin) -> None:
    """Restrict the imports of this process to a framework, for good.

    From then on imports find the given folders, the standard library and what upref
    itself depends on; nothing else of the environment.

    Args:
        paths: folders, put in front of sys.path.
        pin: whose `stubs` become stand-ins, and whose `skip_init` become packages with
            an empty __init__.

    Raises:
        InputError: a package of `skip_init` is not there.
    """
    sys.path[:0] = paths
    finders = [
        f
        for f in sys.meta_path
        if isinstance(f, type) and f.__name__ in ("BuiltinImporter", "FrozenImporter")
    ]
    rest = [f for f in sys.meta_path if f not in finders]
    sys.meta_path[:] = [_FinderOfStubs(pin), *finders, _FinderOfAllowed(rest, paths)]
    for name in sorted(pin.skip_init):  # parents first
        _add_package_without_init(name)


class _FinderOfAllowed:
    """A finder that passes on what other finders find, if the module is in one of these
    folders, in the standard library or a dependency of upref.
    """

    def __init__(self, finders: list[Any], paths: list[str]):
        self.finders = finders
        self.paths = tuple(paths)
        self.known = _modules_of_upref()

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> ModuleSpec | None:
        """Return the module that the finders find first. Return None for a top-level
        module that is elsewhere than in the folders, the standard library and upref's
        dependencies.
        """
        spec = self._first_spec(name, path, target)
        is_submodule = path is not None
        is_known = name in sys.stdlib_module_names or name in self.known
        if spec is None or is_submodule or is_known:
            return spec
        where = [spec.origin or "", *(spec.submodule_search_locations or ())]
        # such as _sysconfigdata_..., which sys.stdlib_module_names does not list
        in_stdlib = where[0].startswith(STDLIB) and "-packages" not in where[0]
        in_folders = any(w.startswith(self.paths) for w in where)
        return spec if in_stdlib or in_folders else None

    def _first_spec(self, name: str, path: Any, target: Any) -> ModuleSpec | None:
        """Return what the first finder that knows the module finds; None without one."""
        for finder in self.finders:
            if not hasattr(finder, "find_spec"):
                continue
            spec: ModuleSpec | None = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None

    def invalidate_caches(self) -> None:
        """Have the finders forget which files they found."""
        for f in self.finders:
            if hasattr(f, "invalidate_caches"):
                f.invalidate_caches()


def _modules_of_upref() -> set[str]:
    """Return the top-level module names of upref, its dependencies, and theirs."""
    packages = set()
    todo = ["upref", *OURS]
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in packages:
            continue
        packages.add(name)
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for requirement in needs:
            found = re.match(r"[\w.-]+", requirement)
            if found and "extra ==" not in requirement:
                todo.append(found[0])
    modules = {"upref", "upref_frameworks"}
    for module, owners in importlib.metadata.packages_distributions().items():
        if {normalize(owner) for owner in owners} & packages:
            modules.add(module)
    return modules


# ---- packages without their __init__ -------------------------------------------------
def _add_package_without_init(name: str) -> None:
    """Put a package into sys.modules without running its __init__: its modules can then
    be imported.
    """
    parent, _, last = name.rpartition(".")
    above = sys.modules[parent].__path__ if parent in sys.modules else sys.path
    folder = next((p for base in above if (p := Path(base) / last).is_dir()), None)
    if folder is None:
        raise InputError(
            f"there is no package {name}: upref's audit of this framework is for another version."
        )
    module = ModuleType(name)
    module.__path__ = [str(folder)]
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__spec__.submodule_search_locations = [str(folder)]
    sys.modules[name] = module
    if parent in sys.modules:
        setattr(sys.modules[parent], last, module)


# ---- modules that are not there ------------------------------------------------------
class Absent:
    """Anything of a module that is not there: it may be named, inherited from, patched;
    a call raises.
    """

    def __init__(
        self, name: str, decorators: tuple[str, ...] = (), decorates: bool = False
    ):
        """Keep the dotted name; the names that may be called as decorators; and whether
        this was such a call with options, and decorates what it is called with.
        """
        self.__dict__.update(_name=name, _decorators=decorators, _decorates=decorates)

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        return Absent(f"{self._name}.{key}", self._decorators)

    def __delattr__(self, key: str) -> None:
        """Do nothing: there is nothing to delete."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for a decorator: return a stand-in for what it decorates, or, called
        with options, a decorator. Any other call raises.
        """
        alone = len(args) == 1 and not kwargs and callable(args[0])
        if self._decorates and alone:
            return Absent(f"{self._name}({getattr(args[0], '__name__', '...')})")
        if self._name in self._decorators:
            if not alone:
                return Absent(f"{self._name}()", decorates=True)
            return Absent(f"{self._name}(...)")
        raise NotImplementedError(
            f"{self._name} is a stand-in for what is not installed, and it was called"
        )

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        """Let a class derive from this: its base is an empty class, which refuses to
        make objects.
        """

        def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(
                f"{type(self).__name__} derives from a stand-in, and it was called"
            )

        # a class that derives from a generic one may be subscripted
        generic = classmethod(lambda cls, key: cls)
        return (
            type(
                self._name.rpartition(".")[2],
                (),
                {"__init__": refuse, "__class_getitem__": generic},
            ),
        )

    def __instancecheck__(self, x: Any) -> bool:
        return False

    def __subclasscheck__(self, x: Any) -> bool:
        return False

    def __or__(self, other: Any) -> "Absent":
        return self

    __ror__ = __or__

    def __getitem__(self, key: Any) -> "Absent":
        return self

    def __bool__(self) -> bool:
        raise NotImplementedError(
            f"{self._name} is a stand-in for what is not installed; it has no truth value"
        )

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError(
            f"{self._name} is a stand-in for what is not installed, and it was iterated"
        )

    def __repr__(self) -> str:
        return f"<stand-in for {self._name}>"


class _FinderOfStubs:
    """A finder of stand-ins for the modules of Pin.stubs and all below them."""

    def __init__(self, pin: Pin):
        self.stubs = pin.stubs
        self.decorators = pin.decorators

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> ModuleSpec | None:
        """Return a stand-in for a module of Pin.stubs or below one; None for any other."""
        if any(name == s or name.startswith(f"{s}.") for s in self.stubs):
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> ModuleType:
        """Return the stand-in: a package without files, whose version is 0."""
        module = _StubModule(spec.name)
        module.__dict__.update(
            __path__=[], __version__="0", _decorators=self.decorators
        )
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


class _StubModule(ModuleType):
    """A module whose every name is a stand-in, Absent."""

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        return Absent(f"{self.__name__}.{key}", self.__dict__["_decorators"])
