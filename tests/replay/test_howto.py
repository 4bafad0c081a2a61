# SPDX-License-Identifier: Apache-2.0
"""docs/howto/replay.md: its programs and commands run as they stand on the page, each
on files of its framework.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from upref.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "replay.md").read_text(encoding="utf-8")
FILES = Path(__file__).parent / "files"
PARTS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
FOUND = {  # framework -> what each of its commands prints, among other things
    "NeMo-RL": "ok    advantages: leave_one_out",
    # its 16 rows are normalized in two halves, which mix prompts
    "slime and miles": "FAIL  advantages",
    "SkyRL": "ok    sampler",
    "prime-rl": "not run  sampler",
    "TRL": "ok    loss",
    "verl": "ok    loss",
}
OPTIMIZER_STEPS = 3


def commands(part):
    return re.findall(r"^    (upref .+)$", PARTS[part], re.M)


def programs(part):
    return re.findall(r"^```py\n(.*?)^```", PARTS[part], re.M | re.S)


@pytest.fixture(autouse=True)
def there(tmp_path, monkeypatch):
    """Make a folder with what the frameworks of the first two parts write, and go
    there.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CI", "1")
    shutil.copy(FILES / "train_data_step12.jsonl", tmp_path)


def slimes_files():
    Path("dumps").mkdir()
    shutil.copy(FILES / "slime_7.pt", "dumps/7.pt")


def skyrls_files():
    """Copy what SkyRL's converter writes; tests/replay/test_readers.py converts."""
    assert (
        "python -m upref_frameworks.skyrl.convert dumped_data/*.pkl -o dumps"
        in PARTS["SkyRL"]
    )
    Path("dumps").mkdir()
    shutil.copy(FILES / "global_step_7_training_input.npz", "dumps")


def prime_rls_files():
    pytest.importorskip("msgspec", reason="prime-rl's files are read with it")
    shutil.copytree(FILES / "step_7", "rollouts/step_7")


def train_with_trl():
    """Run the page's program for TRL, and assert which files it writes. Skip without
    TRL.
    """
    pytest.importorskip("trl")
    line, whole = programs("TRL")
    assert (
        'upref.replay.record(trainer, "dumps", every=50)' in line
        and "record(trainer" in whole
    )
    exec(compile(whole, "page", "exec"), {"__name__": "page"})
    steps = sorted(p.name for p in Path("dumps").glob("*.npz"))
    assert steps == [f"step{n:06d}-rank0000.npz" for n in (1, 2, 4, 6, 8, 10, 12)]


def train_with_verl(monkeypatch):
    """Train with verl under the page's variables, and assert which file it writes. Skip
    without verl.
    """
    pytest.importorskip("verl")
    from tests.replay.trained import settings, verl_steps

    exports = dict(re.findall(r"^export (UPREF_\w+)=(\S+)", PARTS["verl"], re.M))
    assert list(exports) == ["UPREF_REPLAY", "UPREF_REPLAY_EVERY"]
    for name, value in exports.items():
        monkeypatch.setenv(name, value)
    verl_steps(
        next(s for s in settings("verl") if s.name == "clip_ratio_c=3 (default)"),
        None,
        OPTIMIZER_STEPS,
    )
    assert [p.name for p in Path("dumps").glob("*.npz")] == ["step000001-rank0000.npz"]


@pytest.mark.parametrize(
    "part",
    [
        "NeMo-RL",
        "slime and miles",
        "SkyRL",
        "prime-rl",
        pytest.param("TRL", marks=pytest.mark.trl),
        pytest.param("verl", marks=pytest.mark.verl),
    ],
)
def test_each_command_of_the_page_runs(part, capsys, monkeypatch):
    """On files that the trainer's own code or a stand-in for it writes; each finds what
    the page says.
    """
    if part == "slime and miles":
        slimes_files()
    if part == "SkyRL":
        skyrls_files()
    if part == "prime-rl":
        prime_rls_files()
    if part == "TRL":
        train_with_trl()
    if part == "verl":
        pytest.importorskip(
            "pydantic", reason="`repro/venv.sh smoke` installs verl's trainer"
        )
        train_with_verl(monkeypatch)
    capsys.readouterr()
    found = commands(part)
    assert len(found) == 2
    for command in found:
        status = main(command.split()[1:])
        out = capsys.readouterr().out
        assert FOUND[part] in out, out
        assert (status == 1) == ("FAIL" in out)
        if " -o " in command:
            assert "<svg" in Path("sheet.html").read_text(encoding="utf-8")
    if part == "TRL":
        (program,) = programs("What it says")
        exec(compile(program, "page", "exec"), {"__name__": "page"})
        assert capsys.readouterr().out.startswith("token-mean")


RANKS = 2
LAUNCH = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc_per_node",
    str(RANKS),
]


@pytest.mark.nightly
@pytest.mark.trl
def test_trls_script_runs_on_two_ranks(monkeypatch, capsys):
    """Each rank writes a file a step; the loss and dL/dlp are judged over both, while
    it trains and afterwards.
    """
    pytest.importorskip("trl")
    _, whole = programs("TRL")
    one = "per_device_train_batch_size=32"
    assert one in whole
    judged = (
        'upref.replay.watch(trainer, "dapo", every=2, eps_high=0.2)\ntrainer.train()'
    )
    script = whole.replace(one, f"per_device_train_batch_size={32 // RANKS}").replace(
        "trainer.train()", judged
    )
    Path("two.py").write_text(script, encoding="utf-8")
    env = os.environ | {
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [*LAUNCH, "two.py"], env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(list(Path("dumps").glob("step000012-rank000?.npz"))) == RANKS
    (command, _) = commands("TRL")
    main([*command.split()[1:], "-v"])
    out = capsys.readouterr().out
    assert "ok    loss" in out and "so is dL/dlp" in out and "FAIL" not in out


def test_the_lines_of_the_watch_are_what_the_code_takes(monkeypatch):
    """tests/replay/test_watch.py trains with both."""
    import inspect

    import upref
    from upref.replay.watch import Watch

    (line,) = programs("While it trains")
    call = compile(line, "page", "eval")
    assert call.co_names[:3] == ("upref", "replay", "watch")
    known = inspect.signature(upref.replay.watch).parameters
    said = {}
    monkeypatch.setattr(
        upref.replay,
        "watch",
        lambda trainer, name, **more: said.update(more, name=name),
    )
    eval(call, {"upref": upref, "trainer": None})
    assert {"every"} == set(said) & set(known) and Watch(
        said["name"], {"eps_high": said["eps_high"]}, "stop", None
    )
    (words,) = re.findall(
        r'^export UPREF_WATCH="(.*?)"', PARTS["While it trains"], re.M
    )
    pytest.importorskip("verl")
    from upref_frameworks.verl.record import make_watch

    assert make_watch(words, None).hp == {"eps_high": 0.2, "c": 3.0}
    assert (
        make_watch(f"{words} agg=seq-mean-token-mean on_fail=warn", None).on_fail
        == "warn"
    )


def test_the_settings_of_the_table_are_objectives():
    """Each `--as` of the table is one that `upref replay` takes, with hyperparameters
    that it has.
    """
    import upref
    from upref.replay.terms import objective_as_run

    cells = [
        row.split("|")[2]
        for row in PARTS["Which objective ran"].splitlines()
        if row.startswith("| ")
    ][1:]
    named = [
        code for cell in cells for code in re.findall(r"`([a-z_]+(?: --[^`]*)?)`", cell)
    ]
    named = [code for code in named if code.split()[0] in upref.names()]
    assert len(named) >= 6
    for code in named:
        hp = {k: float(v) for k, v in re.findall(r"--hp (\w+)=(\S+)", code)}
        objective_as_run(code.split()[0], hp).resolve(hp)
