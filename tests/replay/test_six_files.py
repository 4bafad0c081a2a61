# SPDX-License-Identifier: Apache-2.0
"""An adapter that is never delivered is told from one that is one step late, by the
command, from six small files. The engine counts each adapter as delivered.
"""

import re

import pytest

from tests.replay.simulator import World, count_as_delivered, run_of_steps
from upref.cli import main
from upref.replay import make_batch, write

SMALL = 40_000  # bytes of a file


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Write two runs of several steps, whose adapter is never delivered or late; return
    their folders by delivery.
    """
    out = {}
    for delivery in ("never", "late"):
        folder = out[delivery] = tmp_path_factory.mktemp(delivery)
        steps = run_of_steps(World("qwen3", 5, responses=32, length=20), delivery)
        if delivery == "never":
            steps = count_as_delivered(steps)
        for number, columns in enumerate(steps):
            write(
                folder / f"step{number}.npz",
                make_batch(columns, file="made", step=number),
            )
    return out


@pytest.mark.parametrize(
    ("delivery", "status", "said"),
    [
        (
            "never",
            1,
            "FAIL run: at .* steps the sampler's column is that of the reference",
        ),
        ("late", 0, "follows the lag"),
    ],
)
def test_six_files_tell_the_two_apart(folders, delivery, status, said, capsys):
    files = sorted(folders[delivery].glob("*.npz"))
    assert len(files) == 6 and all(f.stat().st_size < SMALL for f in files)
    found = main(["replay", *map(str, files), "--only", "sampler"])
    words = " ".join(capsys.readouterr().out.split())
    assert found == status and re.search(said, words), words
