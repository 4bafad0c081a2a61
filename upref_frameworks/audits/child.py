# SPDX-License-Identifier: Apache-2.0
"""The process of one framework: `python -m upref_frameworks.audits.child JOB ANSWER`;
or, by `named`, this one.
"""

import contextlib
import functools
import io
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from upref.errors import InputError
from upref.proof.solver import require_z3
from upref.user_code.guard import one_line
from upref.user_code.settings import Shipped
from upref_frameworks import audits
from upref_frameworks.audits import isolated
from upref_frameworks.audits.framework import Framework
from upref_frameworks.audits.isolated.isolate import isolate
from upref_frameworks.audits.isolated.pin import Installation, place
from upref_frameworks.ledger import WARNED
from upref_frameworks.settings import split_name

if TYPE_CHECKING:
    from upref_frameworks.audits.kernels import Kernels


def main(job: str, answer: str) -> int:
    """Do a job in this process and write its answer.

    Args:
        job: path of a pickle: a key of WORK, the framework's name, its Installation,
            and the arguments of the function.
        answer: path that receives a pickle: ("ok", the result) or ("error", a
            sentence).

    Returns:
        Exit status 0, whether or not the job could be done: `answer` says it.
    """
    work, name, where, arguments = pickle.loads(Path(job).read_bytes())
    out: tuple[str, object]
    try:
        if work == "proofs":
            require_z3()  # afterwards its folder is not found
        enter(name, where)
        out = "ok", WORK[work](name, **arguments)
    except InputError as e:
        traceback.print_exc()
        out = "error", f"{name} {where.version}: {e}"
    except BaseException as e:
        traceback.print_exc()
        imports = isinstance(e, ImportError | AttributeError)
        if imports:
            verb = "does not import as upref expects"
        else:
            verb = "does not run as upref expects"
        out = (
            "error",
            f"{name} {where.version} {verb} ({type(e).__name__}: {one_line(e)}).",
        )
    Path(answer).write_bytes(pickle.dumps(out))
    return 0


def enter(name: str, where: Installation) -> None:
    """Turn this process into the framework's: its environment, and its packages alone.

    Args:
        name: a framework with a pin.
        where: the folders that imports find from then on.
    """
    pin = audits.framework(name).pin
    assert pin is not None
    os.environ.update(pin.env)
    isolated.INSIDE.update(name=name, version=where.version, remarks=where.remarks)
    isolate(where.paths, pin)


def load_loss(loss: str, objective: str, hp: dict[str, Any]) -> Callable[..., Tensor]:
    """Return a loss of a framework with a pin as a function.

    From then on this process is that framework's: no other one can be imported in it.

    Args:
        loss: FRAMEWORK:MODE, with fields after it as `liger:dapo,beta=0`. MODE@matched
            has the settings of the audit's comparison of this loss with the objective.
        objective: for @matched: its registered name.
        hp: for @matched: its hyperparameters.

    Returns:
        A function of keyword arguments, those of Framework.loss_by_names; its attribute
        `__upref__` holds its settings.

    Raises:
        InputError: the framework has no such loss or field, or no comparison with this
            objective.
    """
    name, _, mode = loss.partition(":")
    f = audits.framework(name)
    if not mode or not f.pin or not f.loss_by_names:
        raise InputError(
            f"{loss} is no loss: `upref audit {name}` compares those of {name} with the reference."
        )
    mode, fields, matched = split_name(loss, mode)
    enter(name, place(name, f.pin))
    if mode not in f.modes():
        raise InputError(
            f"{name} has no loss {mode!r}: choose {', '.join(sorted(f.modes()))}."
        )
    if matched:
        fields = _fields_of_comparison(f, mode, objective, hp) | fields
    fn = _checked_loss(f, loss, mode, fields)
    shipped = _checked_loss(f, f"{name}:{mode}", mode, {}) if matched else None
    vars(fn)["__upref__"] = Shipped(fields, f.defaults(mode), shipped)
    return fn


def _checked_loss(
    framework: Framework, loss: str, mode: str, fields: dict[str, Any]
) -> Callable[..., Tensor]:
    """Return the framework's loss in this mode, with these fields over its defaults, as
    a function. It refuses advantages [B, T] where the framework takes one for each
    response.
    """
    assert framework.loss_by_names is not None
    config = framework.configured(mode, framework.defaults(mode), fields)
    inner = functools.partial(framework.loss_by_names, mode, config)

    @functools.wraps(inner)
    def fn(**given: Any) -> Tensor:
        if framework.one_adv and given["advantages"].ndim != 1:
            raise InputError(f"{loss} takes one advantage per response.")
        return inner(**given)

    fn.__name__ = loss
    return fn


def _fields_of_comparison(
    framework: Framework, mode: str, objective: str, hp: dict[str, Any]
) -> dict[str, Any]:
    """Return the fields of the config at which the audit compares this loss with the
    objective, at these hyperparameters.

    Raises InputError where it compares them at no fields with these hyperparameters.
    The paper's settings come before the defaults.
    """
    matching = [
        c for c in framework.comparisons if c.mode == mode and c.objective == objective
    ]
    papers_first = sorted(matching, key=lambda c: c.setting == "default")
    found = next((c for c in papers_first if c.hp == hp), None)
    if found is None:
        other = ", ".join(
            sorted({c.promise for c in framework.comparisons if c.mode == mode})
        )
        settings = ", ".join(
            [objective or "no objective", *(f"{k}={v:g}" for k, v in hp.items())]
        )
        raise InputError(
            f"no settings are known with which {framework.name}:{mode} is {settings}; the audit has {other}."
        )
    return found.config


def scripts(name: str, texts: list[str]) -> list[str]:
    """Run the scripts of the ledger in this process, one after the other.

    Args:
        name: not read: `main` passes the framework's name to each function of WORK.
        texts: Python.

    Returns:
        For each script what it prints, then a line for each warning, which begins with
        WARNED; where it fails, the error in its place.
    """
    return [_output_of(text) for text in texts]


def _output_of(text: str) -> str:
    """Run a script of the ledger; return what it prints, then its warnings, or the
    error in their place.
    """
    out = io.StringIO()
    warned = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(warned):
            exec(compile(text, "<proof>", "exec"), {"__name__": "__main__"})
    except Exception as e:
        traceback.print_exc()
        return f"{type(e).__name__}: {one_line(e)}"
    return out.getvalue() + "".join(
        f"\n{WARNED}{line}" for line in warned.getvalue().splitlines()
    )


def kernels(name: str) -> "Kernels":
    """Check the log-probability functions of a framework.

    Args:
        name: the framework of this process.

    Returns:
        The Kernels of audits/kernels.py, which is imported only when it is needed.
    """
    from upref_frameworks.audits.kernels import kernels as check_kernels

    return check_kernels(name)


def proofs(name: str) -> dict[str, Any]:
    """Prove the losses of a framework.

    Args:
        name: the framework of this process.

    Returns:
        What audits/proofs.py returns, which is imported only when it is needed.
    """
    from upref_frameworks.audits.proofs import proofs as prove_all

    return prove_all(name)


WORK: "dict[str, Callable[..., audits.Audit | Kernels | list[str] | dict[str, Any]]]" = {
    "audit": audits.audit,
    "kernels": kernels,
    "scripts": scripts,
    "proofs": proofs,
}

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
