# SPDX-License-Identifier: Apache-2.0
"""The page that draws a visitor's recorded batch: probability by the sampler against
probability by the trainer.

`python -m docs.site.picture FILE.html` writes it; the site shows it in
docs/howto/find-your-picture.md. It is one file that loads nothing, and its policy
forbids every connection, so no file can leave the browser. All files but the last of
SCRIPTS compute and know no browser; a test runs them in V8.
"""

from pathlib import Path

from upref.files import write_atomically
from upref.replay import schema
from upref.replay.files import FACTS
from upref.replay.gap import LARGE_EXPONENT
from upref.weights.plots import DOWN
from upref_course.explorer import as_json, assemble, script
from upref_frameworks.nemo_rl import dump

HERE = Path(__file__).parent
PURE = ("archive", "arrays", "step", "gap")
SCRIPTS = (*PURE, "app")
MOST_BYTES = 2**30  # of a file, and of the columns that it announces
NEMO_COLUMNS = ("generation_logprobs", "prev_logprobs")


def write(file: str | Path) -> None:
    """Write the page there."""
    write_atomically(file, page())


def page() -> str:
    """Return the whole page, as HTML."""
    return assemble(HERE, f"{data()}\n{script(SCRIPTS, HERE)}")


def data() -> str:
    """Return the constants of Python that the scripts need, as JavaScript."""
    nemo = {"token_ids": "ids"} | {key: dump.KEYS[key] for key in NEMO_COLUMNS}
    constants = {
        "COLUMNS": schema.COLUMNS,
        "FACTS": FACTS,
        "SCHEMA": schema.SCHEMA,
        "ROUNDING": schema.ROUNDING,
        "MOST_SLOTS": schema.MOST_SLOTS,
        "MOST_BYTES": MOST_BYTES,
        "LARGE_EXPONENT": LARGE_EXPONENT,
        "NEMO": nemo,
        "NEMO_NEEDED": dump.NEEDED,
        "COLOR": DOWN,
    }
    return "\n".join(f"const {k} = {as_json(v)};" for k, v in constants.items())
