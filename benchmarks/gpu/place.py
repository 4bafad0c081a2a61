# SPDX-License-Identifier: Apache-2.0
"""Where a part runs, how it writes its rows, and how it takes time and memory."""

import contextlib
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SEED = 0
ROOT = Path(__file__).parent.parent.parent


def without_folders(text: str) -> str:
    """Replace the folders of this machine in a text, because rows are published.

    Files of the checkout are named from its top, installed ones from SITE_PACKAGES.
    """
    installed = [p for p in sys.path if Path(p).is_absolute() and Path(p) != ROOT]
    for folder in sorted(installed, key=len, reverse=True):
        text = text.replace(folder, "SITE_PACKAGES")
    text = text.replace(sys.prefix, "PYTHON_PREFIX")
    return text.replace(f"{ROOT}/", "").replace(str(ROOT), "CHECKOUT")


@dataclass(frozen=True)
class PartSetup:
    """One part of the run.

    Attributes:
        device: "cuda", or "cpu" for a trial of the script.
        small: sizes for a trial of the script.
        rows: the file of JSON lines that the part appends to.
        folder: for files that the part needs.
    """

    device: str
    small: bool
    rows: Path
    folder: Path

    def write(self, **row: Any) -> None:
        """Append one row as a line of JSON, without the folders of this machine. A part
        that is ended keeps the rows that it has written.
        """
        with open(self.rows, "a", encoding="utf-8") as f:
            f.write(without_folders(json.dumps(row, default=str)) + "\n")

    @contextlib.contextmanager
    def row(self, **name: Any) -> Iterator[dict[str, Any]]:
        """Yield a dict for the fields of a row, and write the row at the end with its
        name and seconds.

        An exception inside is printed and not raised; the row then has it as `failed`.

        Args:
            **name: fields that tell the row from others.
        """
        fields: dict[str, Any] = {}
        start = time.perf_counter()
        try:
            yield fields
        except Exception as e:
            fields["failed"] = f"{type(e).__name__}: {str(e)[:600]}"
            traceback.print_exc()
        finally:
            seconds = round(time.perf_counter() - start, 3)
            self.write(**name, **{"seconds": seconds} | fields)
            print(name, f"{seconds} s", fields.get("failed", ""), flush=True)

    def wait(self) -> None:
        """Wait until the GPU has done what it was given."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def milliseconds(self, run: Callable[[], object]) -> float:
        """Return the median time of a call, after two that warm up. 3 to 30 calls are
        timed, about 0.3 s in all.
        """
        run()
        first = self._once(run)
        rounds = max(3, min(30, int(300 / max(first, 1e-3))))
        return statistics.median(self._once(run) for _ in range(rounds))

    def _once(self, run: Callable[[], object]) -> float:
        """Return the milliseconds of one call: by the events of the GPU, or by the
        clock on a CPU.
        """
        if self.device != "cuda":
            start = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - start)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Return the most bytes that a call allocates on the GPU, beyond what was there
        before; 0 on a CPU.
        """
        if self.device != "cuda":
            run()
            return 0
        self.wait()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        self.wait()
        return torch.cuda.max_memory_allocated() - before


def moved(x: Any, device: str, dtype: torch.dtype | None = None) -> Any:
    """Return a tensor on the device, in the dtype if it is a floating-point tensor;
    return everything else as it is.
    """
    if not isinstance(x, Tensor):
        return x
    return x.to(device, dtype if x.is_floating_point() else None)


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines, without lines that are not complete.
    Return [] if there is no file.
    """
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows
