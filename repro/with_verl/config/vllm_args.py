# SPDX-License-Identifier: Apache-2.0
"""The argument names of the pinned vLLM, read from its wheel, which needs not be
installed.

    pip download --no-deps vllm==0.24.0 -d DIR && python -m
    repro.with_verl.config.vllm_args DIR/vllm-0.24.0-*.whl

writes facts/vllm_args.json. verl hands rollout.engine_kwargs.vllm to vLLM's command
line, which stops at a name it does not know, after the models are loaded.
"""

import ast
import json
import sys
import zipfile
from pathlib import Path

from upref.files import write_atomically

FACTS = Path(__file__).resolve().parent / "facts" / "vllm_args.json"
FILE, CLASSES = "vllm/engine/arg_utils.py", ("EngineArgs", "AsyncEngineArgs")


def names(source: str) -> list[str]:
    """Return the public fields of vLLM's argument classes, in alphabetical order, from
    the source of their module.
    """
    found = set()
    for part in ast.parse(source).body:
        if not isinstance(part, ast.ClassDef) or part.name not in CLASSES:
            continue
        for field in part.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                found.add(field.target.id)
    return sorted(name for name in found if not name.startswith("_"))


def known() -> set[str]:
    """Return the names that facts/vllm_args.json lists."""
    return set(json.loads(FACTS.read_text())["names"])


if __name__ == "__main__":
    wheel = Path(sys.argv[1])
    with zipfile.ZipFile(wheel) as z:
        found = names(z.read(FILE).decode())
    facts = {"wheel": wheel.name, "file": FILE, "classes": CLASSES, "names": found}
    write_atomically(FACTS, json.dumps(facts) + "\n")
    print(f"{len(found)} arguments of {wheel.name}: {FACTS}")
