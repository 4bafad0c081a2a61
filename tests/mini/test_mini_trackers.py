# SPDX-License-Identifier: Apache-2.0
"""What a tracker holds is what steps.jsonl and evals.jsonl say, each step once, also
after an interruption.
"""

import importlib.util
import json
import struct
import sys
from types import SimpleNamespace

import pytest

from repro.mini.train import command, loop
from repro.mini.train.trackers import MODULES, scalars

SMALL = [
    "--steps",
    "4",
    "--prompts",
    "8",
    "--responses",
    "4",
    "--minibatches",
    "2",
    "--train-problems",
    "100",
]
SMALL += [
    "--eval-every",
    "2",
    "--eval-problems",
    "4",
    "--eval-samples",
    "2",
    "--checkpoint-every",
    "2",
]


class Killed(BaseException):
    """No code catches this."""


def interrupted_and_resumed(out, flag, monkeypatch):
    """Step 3 is trained, and tracked, twice. The tracked numbers as (step, name) ->
    value, from the JSONL files.
    """
    one_step, steps = loop.one_step, []

    def deadly(run, *args):
        steps.append(run.step)
        if len(steps) == 4:
            raise Killed
        return one_step(run, *args)

    monkeypatch.setattr(loop, "one_step", deadly)
    with pytest.raises(Killed):
        command.main([*SMALL, flag, "--out", str(out)])
    assert command.main([*SMALL, flag, "--out", str(out)]) == 0
    assert steps == [0, 1, 2, 3, 2, 3]
    lines = [
        json.loads(x)
        for f in ("steps", "evals")
        for x in (out / f"{f}.jsonl").read_text().splitlines()
    ]
    numbers = {(line["step"], k): v for line in lines for k, v in scalars(line).items()}
    assert {(s, "grad_norm_max") for s in range(4)} | {
        (4, "one_step/t_1/best"),
        (0, "test/t_1/avg"),
    } <= set(numbers)
    return numbers


@pytest.mark.skipif(
    not importlib.util.find_spec("tensorboard"), reason="tensorboard is not installed"
)
def test_tensorboard_holds_every_step_once(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    numbers = interrupted_and_resumed(tmp_path / "run", "--tensorboard", monkeypatch)
    events = EventAccumulator(
        str(tmp_path / "run" / "tensorboard"), size_guidance={"scalars": 0}
    ).Reload()
    found = [
        (e.step, tag, e.value)
        for tag in events.Tags()["scalars"]
        for e in events.Scalars(tag)
    ]
    assert len(found) == len(numbers)
    for step, tag, value in found:
        assert value == pytest.approx(numbers[step, tag], rel=1e-6)


def leveldb(content):
    """The records of a .wandb file: LevelDB's log format (32 KiB blocks, records in
    parts) after 7 bytes of its own.
    """
    at, record = 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # no room for a header: padding
            at += 32768 - at % 32768
        _, size, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


@pytest.mark.skipif(
    not importlib.util.find_spec("wandb"), reason="wandb is not installed"
)
def test_wandb_holds_every_step_once(tmp_path, monkeypatch):
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.delenv("WANDB_MODE", raising=False)
    numbers = interrupted_and_resumed(tmp_path / "run", "--wandb", monkeypatch)
    (path,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    found = []
    for record in map(Record.FromString, leveldb(path.read_bytes())):
        items = {
            i.key or "/".join(i.nested_key): json.loads(i.value_json)
            for i in record.history.item
        }
        found += [
            (record.history.step.num, k, v)
            for k, v in items.items()
            if not k.startswith("_")
        ]
    assert len(found) == len(numbers)
    assert {(step, k): v for step, k, v in found} == numbers


@pytest.mark.parametrize("name", MODULES)
def test_a_tracker_gets_every_step_once_and_is_closed(name, tmp_path, monkeypatch):
    """The same with a stand-in for the package: what the last process handed over, in
    order, and then the end.
    """
    got = []

    def begun(**_):
        got.clear()
        return SimpleNamespace(
            log=lambda numbers, step: got.append((step, numbers)),
            finish=lambda: got.append("end"),
        )

    class Writer(SimpleNamespace):
        def __init__(self, folder):
            assert not folder.exists()
            folder.mkdir()
            run = begun()
            super().__init__(
                add_scalar=lambda k, v, step: run.log({k: v}, step), close=run.finish
            )

    monkeypatch.setitem(
        sys.modules, MODULES[name], SimpleNamespace(SummaryWriter=Writer, init=begun)
    )
    numbers = interrupted_and_resumed(tmp_path / "run", f"--{name}", monkeypatch)
    assert got.pop() == "end"
    handed = [(step, k, v) for step, given in got for k, v in given.items()]
    assert [step for step, *_ in handed] == sorted(step for step, *_ in handed)
    assert len(handed) == len(numbers)
    assert {(step, k): v for step, k, v in handed} == numbers


@pytest.mark.parametrize("name", MODULES)
def test_a_missing_package_is_told_before_training(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, MODULES[name], None)
    assert command.main([*SMALL, f"--{name}", "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == (
        f"train: --{name} needs the package {name}, which is not installed: pip install {name}.\n"
    )
    assert not (tmp_path / "run").exists()
