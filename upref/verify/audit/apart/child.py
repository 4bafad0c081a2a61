# SPDX-License-Identifier: Apache-2.0
"""The process of one framework: `python -m upref.verify.audit.apart.child JOB ANSWER`; or, by `named`, this one."""

import contextlib
import functools
import io
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from upref.errors import InputError
from upref.losses.guard import said
from upref.losses.settings import split
from upref.verify import audit as audits
from upref.verify.audit import apart
from upref.verify.audit.apart.isolate import isolate
from upref.verify.audit.apart.pin import place


def main(job: str, answer: str) -> int:
    """Does the job, and writes ("ok", what it gave) or ("error", a sentence)."""
    work, name, where, more = pickle.loads(Path(job).read_bytes())
    out: tuple[str, Any]
    try:
        enter(name, where)
        out = "ok", WORK[work](name, **more)
    except InputError as e:
        traceback.print_exc()
        out = "error", f"{name} {where.version}: {e}"
    except BaseException as e:
        traceback.print_exc()
        imports = isinstance(e, ImportError | AttributeError)
        verb = "does not import as upref knows it" if imports else "does not run as upref knows it"
        out = "error", f"{name} {where.version} {verb} ({type(e).__name__}: {said(e)})."
    Path(answer).write_bytes(pickle.dumps(out))
    return 0


def enter(name: str, where):
    """Makes this process the framework's."""
    pin = audits.framework(name).pin
    assert pin is not None
    os.environ.update(pin.env)
    apart.INSIDE.update(name=name, version=where.version, remarks=where.remarks)
    isolate(where.paths, pin)


def named(loss: str) -> Any:
    """A loss of a framework with a pin, `liger:dapo,defaults,beta=0`, as a function; any other name as it is.

    From then on this process is that framework's: nothing else can be imported here.
    """
    name, colon, mode = loss.partition(":")
    if not colon or name not in audits.frameworks() or not (f := audits.framework(name)).pin or not f.plain:
        return loss
    mode, fields, plain = split(loss, mode)
    if not plain:
        raise InputError(f"{loss}: write {name}:{mode},defaults and then what is to be set, FIELD=VALUE.")
    enter(name, place(name, f.pin))
    if mode not in f.modes():
        raise InputError(f"{name} has no loss {mode!r}: choose {', '.join(sorted(f.modes()))}.")
    inner = f.plain(mode, f.configured(mode, fields))

    @functools.wraps(inner)
    def fn(**given):
        if f.one_adv and given["advantages"].ndim != 1:
            raise InputError(f"{loss} takes one advantage a response.")
        return inner(**given)

    fn.__name__ = loss
    return fn


def scripts(name: str, texts: list[str]) -> list[str]:
    """What the scripts of the ledger print; what one raises stands where its answer would."""
    return [_script(text) for text in texts]


def _script(text: str) -> str:
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(text, "<proof>", "exec"), {"__name__": "__main__"})
    except Exception as e:
        traceback.print_exc()
        return f"{type(e).__name__}: {said(e)}"
    return out.getvalue()


WORK: dict[str, Callable[..., Any]] = {"audit": audits.audit, "scripts": scripts}

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
