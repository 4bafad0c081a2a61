# SPDX-License-Identifier: Apache-2.0
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

import upref
from tests.support.hanging import HANGING
from upref import catalog, interrupt
from upref.cli import _parser, commands, main
from upref.cli.verb import hyperparameters
from upref.errors import describe_kind
from upref.result import Result
from upref.user_code.guard import call_guarded
from upref_frameworks.audits import Audit

ROOT = Path(__file__).parents[2]


def run(capsys, *argv):
    code = main(list(argv))
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.parametrize("name", upref.names())
def test_show_tells_all(capsys, name):
    code, out, _ = run(capsys, "show", name)
    o = upref.get(name)
    assert (
        code == 0
        and o.equation.splitlines()[0] in out
        and "return" in out
        and o.source in out
    )
    assert not o.paper or f"{{{o.paper}," in out, "the BibTeX entry of its paper"
    assert "no entry" not in out
    for key, sentence in o.defaults.items():
        assert f"{key} = " in out and sentence in out
    assert f"def {o.closed_form.__name__}(" in out
    code, out, _ = run(capsys, "show", name, "--json")
    assert code == 0 and json.loads(out)["equation"] == o.equation


def test_list(capsys):
    code, out, _ = run(capsys, "list", "--json")
    assert code == 0 and [o["name"] for o in json.loads(out)] == upref.names()


def test_numbers(capsys):
    code, out, _ = run(capsys, "cap", "dapo", "up_dapo", "--json")
    caps = json.loads(out)
    assert (
        code == 0
        and caps["dapo"][1] == pytest.approx(0.0028)
        and caps["up_dapo"][1] == pytest.approx(0.99)
    )
    _, out, _ = run(capsys, "weights", "dapo", "--hp", "eps_high=1", "--json")
    assert json.loads(out)["dapo, A = +1"][-3] == pytest.approx(2)


@pytest.mark.parametrize(
    "argv", [("cap", "dapo", "gspo", "--adv", "-1"), ("weights", "dapo", "sapo")]
)
def test_figures_are_written(capsys, tmp_path, argv):
    file = tmp_path / "x.png"
    assert run(capsys, *argv, "-o", str(file))[0] == 0
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("show", "dap"), "did you mean dapo"),
        (("cap", "dapo", "--hp", "eps=1"), "no hyperparameter 'eps'"),
        (("cap", "dapo", "--hp", "eps_high"), "is not NAME=NUMBER"),
        (("cap", "dapo", "--adv", "0"), "give +1 or -1"),
        (("cap", "dapo", "--adv", "nan"), "give +1 or -1"),
        (("cap", "dapo", "--hp", "eps_low=None"), "eps_low must be"),
        (("cap", "m2po"), "the whole batch"),
        (("weights", "m2po"), "the whole batch"),
        (("weights", "aspo_code"), "entrop"),
        (("cap", "dapo", "-o", "no/such/folder/x.svg"), "No such file"),
        (("weights", "dapo", "-o", "x.xyz"), "end the name in one of"),
        (("derive", "nothing"), "there is no objective named"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(capsys, argv, says):
    code, out, err = run(capsys, *argv)
    assert code == 2 and says in err and err.count("\n") == 1 and not out


def test_debug_shows_the_traceback(capsys):
    for argv in (["--debug", "show", "dap"], ["show", "dap", "--debug"]):
        assert main(argv) == 2
        assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["frobnicate"], ["cap"], ["audit", "nobody"]])
def test_bad_usage_is_one_sentence_and_status_2(capsys, argv):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("words", [("loss.py:f", "dapo"), ("dapo", "loss.py:f")])
def test_an_objective_without_as_gets_the_right_form(capsys, words):
    with pytest.raises(SystemExit):
        main(["check", *words])
    assert "`upref check loss.py:f --as dapo`" in capsys.readouterr().err


def test_a_word_beside_an_objective_is_one_too_many(capsys):
    with pytest.raises(SystemExit):
        main(["check", "--as", "dapo", "loss.py:f", "dapo"])
    assert "one word too many: dapo" in capsys.readouterr().err


RIGHT_AND_WRONG = """
def right(log_prob, old_log_prob, advantages, mask):
    r = ((log_prob - old_log_prob) * mask).exp()
    clipped = r.clamp(0.8, 1.28)
    return -((r * advantages).minimum(clipped * advantages) * mask).sum() / mask.sum()

def wrong(log_prob, old_log_prob, advantages, mask):
    r = ((log_prob - old_log_prob) * mask).exp()
    return -(r * advantages * mask).sum() / mask.sum()
"""


def test_several_losses_are_checked_in_one_call(capsys, tmp_path):
    file = tmp_path / "two.py"
    file.write_text(RIGHT_AND_WRONG)
    losses = [f"{file}:right", f"{file}:wrong"]
    code, out, _ = run(capsys, "check", *losses, "--as", "dapo")
    assert code == 1
    assert out.startswith("dapo: agrees") and "\nNOT dapo: " in out
    assert out.index(losses[0]) < out.index(losses[1])


def test_the_other_losses_are_checked_where_one_cannot_run(capsys, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_this_name\ndef loss(): pass\n")
    whole = tmp_path / "whole.py"
    whole.write_text(RIGHT_AND_WRONG)
    losses = [f"{broken}:loss", f"{whole}:wrong"]
    code, out, err = run(capsys, "check", *losses, "--as", "dapo")
    assert code == 2
    assert "nothing_of_this_name" in err and out.startswith("\nNOT dapo: ")


def test_watch_checks_again_at_each_save_until_ctrl_c(tmp_path):
    """A saved import counts as well, and a file that cannot be read is no end."""
    file = tmp_path / "watched.py"
    text = RIGHT_AND_WRONG.replace("1.28", "HIGH")
    file.write_text(f"from bound import HIGH\n{text}")
    helper = tmp_path / "bound.py"
    helper.write_text("HIGH = 1.5\n")
    words = ["check", f"{file}:right", "--as", "dapo", "--watch"]
    command = [sys.executable, "-m", "upref", *words]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None

    def next_verdict() -> str:
        """Return what the command prints up to the next line that it waits for a save."""
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "waiting for a save" in line:
                break
        return "".join(lines)

    try:
        assert next_verdict().startswith("NOT dapo")
        helper.write_text("HIGH = 1.28  # as in the paper\n")
        assert next_verdict().startswith("dapo: agrees")
        file.write_text("def right(:\n")
        assert "agrees" not in next_verdict()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "SyntaxError" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nofile.py:f", "--as", "dapo"], "there is no file"),
        (["FILE:rigth", "--as", "dapo"], "did you mean right?"),
        (["FILE:righ", "--as", "dapo"], "did you mean right?"),  # a part of that word
        (["FILE", "--as", "dapo"], "two.py is a file: name its function"),
        (["FILE:right", "--as", "dap"], "did you mean dapo"),
        (["FILE:right", "--as-advantage", "group"], "there is no"),
        (["FILE:right", "--as-advantage", "FILE:wrong"], "against one name"),
        (["FILE:right", "--as", "dapo", "--agg", "mean"], "aggregation"),
        (["FILE:right", "--as-kl", "k3", "--agg", "token-mean"], "give it with --as"),
        (["FILE:right", "--as", "dapo", "--hp", "eps"], "is not NAME=NUMBER"),
        (["FILE:right", "--as-kl", "k3", "--hp", "beta=1"], "leave --hp out"),
        (["FILE:right", "FILE:wrong", "--as", "dapo", "--json"], "give one LOSS"),
        (["torch:exp", "--as", "dapo", "--watch"], "path/to/file.py:function"),
        (["FILE:right", "--as", "dapo", "--unknown"], "there is no option --unknown"),
        (["FILE:right", "--as", "dapo", "--beta", "1"], "--hp beta=VALUE sets"),
    ],
)
def test_wrong_words_are_refused_before_torch_is_imported(tmp_path, words, says):
    """Status 2 and one line, in a process that has not imported torch."""
    file = tmp_path / "two.py"
    file.write_text(RIGHT_AND_WRONG)
    words = [word.replace("FILE", str(file)) for word in words]
    script = f"""
import sys
from upref.cli import main
sys.argv = ["upref", "check", *{words!r}]
try:
    status = main()
except SystemExit as stop:
    status = stop.code
print(status, "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == "2 False\n" and says in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_command_that_is_spelled_like_another_one_is_named(capsys):
    assert run(capsys, "chek", "my.py:loss")[::2] == (
        2,
        "upref: there is no command 'chek': did you mean check? `upref -h` lists all.\n",
    )
    with pytest.raises(SystemExit):
        main(["zzz"])
    assert "choose from" in capsys.readouterr().err


def test_a_function_that_a_file_makes_in_another_way_is_no_typo(tmp_path):
    file = tmp_path / "made.py"
    file.write_text("from somewhere import *\n")
    catalog.require_loss(f"{file}:right")
    file.write_text("globals()['ri' + 'ght'] = max\n")
    catalog.require_loss(f"{file}:right")


def test_import_is_light():
    """`import upref` must not pull in what is slow or optional."""
    heavy = "{'sympy', 'matplotlib', 'transformers', 'verl', 'trl', 'rich', 'pandas'} & set(sys.modules)"
    script = f"import sys, upref; upref.names(); print(sorted({heavy}))"
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == "[]"


def test_a_check_imports_nothing_of_replay():
    """A check asks the plug-in of frameworks for losses, and for no reader of dumps."""
    script = (
        "import sys, upref.verify.check, upref_frameworks.plugin as plugin; "
        "print('upref.replay' in sys.modules, len(plugin.dump_readers()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True
    )
    assert done.stdout.split() == ["False", "4"], done.stderr


def test_derive_exit_status(capsys, monkeypatch):
    from upref import definition

    assert run(capsys, "derive", "up_gspo")[0] == 0
    wrong = replace(
        upref.get("dapo"),
        name="wrong",
        closed_form=lambda r, A, *, eps_low, eps_high, c: A * r,
    )
    monkeypatch.setitem(definition.OBJECTIVES, "wrong", wrong)
    assert run(capsys, "derive", "wrong")[0] == 1


def test_doctor(capsys, monkeypatch):
    """The command lists versions, tested or not, and fails where an objective's weight
    is not its gradient.
    """
    code, out, _ = run(capsys, "doctor", "--json")
    report = json.loads(out)
    assert code == 0 and report["ok"] and str(len(upref.names())) in report["gradients"]
    from upref import definition
    from upref.cli import doctor

    known = {"verl": "0.9.1", "trl": "9.0"}
    monkeypatch.setattr(doctor, "_version", known.get)
    found = doctor.examine()
    assert found["verl"] == "0.9.1 (tested)" and found["vllm"] is None
    assert found["trl"].startswith("9.0 (not tested: upref was tested with 1.16.")
    wrong = replace(
        upref.get("dapo"),
        name="wrong",
        closed_form=lambda r, A, *, eps_low, eps_high, c: A * r,
    )
    monkeypatch.setitem(definition.OBJECTIVES, "wrong", wrong)
    monkeypatch.setattr("upref.cli.doctor.names", lambda: ["dapo", "wrong"])
    code, out, _ = run(capsys, "doctor", "--json")
    assert code == 1 and json.loads(out)["wrong"] == "wrong"


class Verdict(Result):
    def __init__(self, ok):
        self.ok = ok

    def __bool__(self):
        return self.ok

    def data(self):
        return {"ok": self.ok}


@pytest.mark.parametrize("ok", [True, False])
def test_audit_exit_status_is_the_verdict(capsys, monkeypatch, ok):
    monkeypatch.setattr(
        "upref_frameworks.audits.audit", lambda framework, **which: Verdict(ok)
    )
    code, out, _ = run(capsys, "audit", "verl", "--json")
    assert code == (0 if ok else 1) and json.loads(out)["ok"] == ok


def test_a_missing_module_is_one_sentence(capsys, monkeypatch):
    def gone(framework, **which):
        raise ModuleNotFoundError("No module named 'verl'")

    monkeypatch.setattr("upref_frameworks.audits.audit", gone)
    code, _, err = run(capsys, "audit", "verl")
    assert code == 2 and "No module named 'verl'" in err and err.count("\n") == 1


def helps():
    """Return {command: all that its help says}."""
    commands = next(a for a in _parser()._actions if a.choices)
    return {name: c.format_help() for name, c in commands.choices.items()}


def test_each_example_of_the_help_texts_runs(capsys):
    """Each `upref ...` in backticks."""
    texts = [_parser().format_help(), *helps().values()]
    examples = {
        e
        for text in texts
        for e in re.findall(r"`upref ([^`]+)`", " ".join(text.split()))
    }
    assert examples >= {"list"}
    for example in examples:
        if example != "-h":
            assert run(capsys, *shlex.split(example))[0] == 0


LOG_PROBS = """
import torch
def loss(log_prob, old_log_prob, advantages, mask, eps_low=0.2, eps_high=0.28):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    J = torch.min(r * advantages, r.clamp(1 - eps_low, 1 + eps_high) * advantages)
    return -(J * mask).sum() / mask.sum()
def log_probs(logits, tokens, temperature, softcap=30.0):
    z = (softcap * (logits.double() / softcap).tanh() / temperature).log_softmax(-1)
    return z.gather(-1, tokens[..., None])[..., 0]
def cut_log_probs(logits, tokens, temperature, top_k=None, top_p=1.0):
    z = logits.double() / temperature
    if top_k is not None:
        z = z.masked_fill(z < z.topk(top_k).values[..., -1:], -torch.inf)
    if top_p < 1:
        order = z.argsort(descending=True, stable=True)
        p = z.gather(-1, order).softmax(-1)
        is_out = torch.zeros_like(z, dtype=torch.bool)
        is_out = is_out.scatter(-1, order, p.cumsum(-1) - p >= top_p)
        z = z.masked_fill(is_out, -torch.inf)
    return z.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
"""
SETTINGS = {  # each K=V of the help texts, and a command in which it has an effect
    "softcap=30": ["check", "mine.py:log_probs", "--as-logprobs"],
    "ranks=2": [
        "check",
        "tests.support.cases.logprob_changes:parallel",
        "--as-logprobs",
    ],
    "eps_high=0.28": ["check", "mine.py:loss", "--as", "dapo"],
    "top_p=0.9": ["check", "mine.py:cut_log_probs", "--as-logprobs"],
    "top_k=20": ["check", "mine.py:cut_log_probs", "--as-logprobs"],
}


def test_each_setting_of_the_help_texts_runs(capsys, tmp_path, monkeypatch):
    """`--hp ranks=2` never ran: every value was a float."""
    told = {
        s for text in helps().values() for s in re.findall(r"\b[a-z_]+=[\d.]+\b", text)
    }
    assert told == set(SETTINGS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(LOG_PROBS)
    for setting, argv in SETTINGS.items():
        code, out, err = run(capsys, *argv, "--hp", setting)
        assert code == 0, (setting, out, err)
        if setting == "ranks=2":
            assert (
                run(capsys, *argv, "--hp", setting, "--json")[1].count('"ranks": "ok"')
                == 1
            )


@pytest.mark.skipif(not find_spec("trl"), reason="it imports TRL's adapter")
def test_the_name_of_an_adapter_is_no_unknown_loss(capsys):
    """`upref diff trl verl` was refused: neither is a loss."""
    code, _, err = run(capsys, "diff", "trl", "verl", "--case", "nothing")
    assert code == 2 and "no case of one process begins with" in err


def test_an_option_of_another_kind_is_refused_by_prove(capsys):
    for argv, words in (
        (("--as-kl", "k3", "--hp", "eps=1"), "leave --hp out"),
        (("--as-advantage", "group_norm", "--columns", "2"), "--columns is for"),
        (("--as-advantage", "group_norm", "--agg", "seq-mean"), "--agg is the"),
    ):
        code, _, err = run(capsys, "prove", "mine.py:fn", *argv)
        assert code == 2 and words in err, (argv, err)


def test_a_whole_number_is_an_int():
    assert [
        repr(v) for v in hyperparameters(["a=2", "b=2.0", "c=-3", "d=1e3"]).values()
    ] == [
        "2",
        "2.0",
        "-3",
        "1000.0",
    ]


def test_brackets_in_a_name_are_no_markup(capsys, tmp_path, monkeypatch):
    """[red] vanished from the table, and [/x] ended the command."""
    monkeypatch.chdir(tmp_path)
    for name in ("a[red]b.py", "e[/x]d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(LOG_PROBS)
        code, out, _ = run(capsys, "cap", "dapo", f"{name}:loss")
        assert code == 0 and f"{name}:loss" in out


def test_a_line_break_in_a_name_breaks_no_line(capsys, tmp_path, monkeypatch):
    """The first line of a report ended in the middle of the name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two\nlines\x1b[1m.py").write_text(LOG_PROBS)
    _, out, _ = run(capsys, "cap", "dapo", "two\nlines\x1b[1m.py:loss")
    assert r"two\nlines\x1b[1m.py:loss" in out and "\x1b" not in out


def test_an_error_beside_user_code_is_not_surely_of_upref(capsys, monkeypatch):
    """A loss that replaces torch.autograd.grad was told of a bug in upref."""

    def fail(args):
        raise IndexError("a shape")

    monkeypatch.setattr(commands, "RUN", {"check": fail, "list": fail})
    _, _, err = run(capsys, "check", "dapo", "--as", "dapo")
    assert "a bug in upref, or the loss changed a function of Python" in err
    _, _, err = run(capsys, "list")
    assert "(a bug in upref; --debug" in err


def test_none_is_a_value(capsys):
    assert run(capsys, "weights", "dapo", "--hp", "c=None")[0] == 0


def test_a_reader_that_leaves_early_is_no_error():
    pipe = f"{sys.executable} -m upref list --markdown | head -n 1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {pipe}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(
        "| name |"
    )


def test_what_a_library_raises_after_an_interrupt_is_not_printed():
    """ray, interrupted in its import, printed a traceback of its atexit callback."""
    code = """
import atexit, os, signal, time
from upref import catalog, interrupt
with interrupt.handled_within("upref x"):
    atexit.register(lambda: 1 / 0)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(9)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 143
    assert done.stderr == "upref x: terminated; run the same command again.\n"


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
@pytest.mark.parametrize(
    "command", [["check", "slow.py:loss", "--as", "dapo"], ["derive", "dapo"]]
)
def test_an_interrupt_is_one_sentence_and_leaves_no_process(
    number, status, command, tmp_path
):
    """While a loss runs, and while upref itself computes."""
    (tmp_path / "slow.py").write_text(
        "import time\nopen('here', 'w').close()\ntime.sleep(60)\n"
    )
    start = (
        "import sys, time, upref.cli, upref.cli.commands as c\n"
        "c.RUN['derive'] = lambda args: (open('here', 'w').close(), time.sleep(60))\n"
        f"sys.argv = ['upref', *{command!r}]\nsys.exit(upref.cli.main())"
    )
    env = os.environ | {"PYTHONPATH": str(Path(upref.__file__).parents[1])}
    run = subprocess.Popen([sys.executable, "-c", start], cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=env,
                           preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))  # fmt: skip
    deadline = time.monotonic() + 300  # a busy machine imports for minutes
    while (
        not (tmp_path / "here").exists()
        and run.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    run.send_signal(number)
    # the pipe closes when the last process has ended
    err = run.communicate(timeout=300)[1]
    assert run.returncode == status and len(err.splitlines()) == 1
    said = "interrupted" if number == signal.SIGINT else "terminated"
    assert f"{said}; run the same command again" in err


ENDLESS = {  # where a file does not end
    "the loss": "def loss(log_prob, old_log_prob, advantages, mask):\n    say()\n    while True: pass\n",
    "the file, while it is imported": "say()\nwhile True: pass\nloss = say\n",
}


@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="it reads the state of a process"
)
@pytest.mark.parametrize("where", ENDLESS)
def test_no_process_goes_on_where_the_command_is_killed(where, tmp_path):
    """Neither the child that checks nor a process that the loss has started in a
    session of its own.
    """
    says = (
        "import os, subprocess\ndef say():\n"
        "    apart = subprocess.Popen(['sleep', '600'], start_new_session=True).pid\n"
        "    with open('half', 'w') as f: f.write(f'{os.getpid()} {apart}')\n"
    )
    (tmp_path / "loop.py").write_text(
        f"{says}    os.rename('half', 'pid')\n{ENDLESS[where]}"
    )
    argv = [sys.executable, "-m", "upref", "check", "loop.py:loss", "--as", "dapo"]
    env = os.environ | {"PYTHONPATH": str(Path(upref.__file__).parents[1])}
    run = subprocess.Popen(argv, cwd=tmp_path, env=env, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300  # a busy machine imports for minutes
    while (
        not (tmp_path / "pid").exists()
        and run.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    pids = [int(pid) for pid in (tmp_path / "pid").read_text().split()]
    run.kill()
    run.wait()
    deadline = time.monotonic() + HANGING
    while (
        alive := [pid for pid in pids if is_running(pid)]
    ) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    assert not alive


def is_running(pid):
    """Return whether there is such a process, and it has not ended."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except (FileNotFoundError, ProcessLookupError):
        return False


LOST = {  # where Python or a module would lose an interrupt
    "an import that turns it into ImportError, as numpy's does":
        "try:\n    os.kill(os.getpid(), NUMBER)\nexcept KeyboardInterrupt:\n    raise ImportError('numpy') from None",
    "a callback, whose exceptions Python passes over":
        "class Falls:\n    def __del__(self):\n        os.kill(os.getpid(), NUMBER)\nFalls()\ntime.sleep(60)",
}  # fmt: skip


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
@pytest.mark.parametrize("where", LOST)
def test_no_interrupt_is_lost(where, number, status):
    """Interrupt a program at one place in its life, and find the status and one line."""
    start = "import os, time, upref.interrupt\nupref.interrupt.handled('me')\n"
    code = start + LOST[where].replace("NUMBER", f"{number:d}")
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANGING,
    )
    assert (run.returncode, run.stderr.count("\n")) == (
        status,
        1,
    ) and "again" in run.stderr


COMMANDS = {
    "repro.mini.experiment": signal.SIGINT,
    "docs.logprobs": signal.SIGTERM,
    "benchmarks.speed": signal.SIGINT,
}


@pytest.mark.skipif(
    not Path("/proc/self/maps").exists(),
    reason="it reads which libraries a process has loaded",
)
@pytest.mark.parametrize(("module", "number"), COMMANDS.items())
def test_an_interrupt_of_an_import_is_one_sentence(module, number):
    """Of a command of each package; most of the first seconds are imports."""
    run = subprocess.Popen(
        [sys.executable, "-m", module], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    while "libtorch" not in Path(f"/proc/{run.pid}/maps").read_text():
        assert run.poll() is None
        time.sleep(0.01)
    run.send_signal(number)
    said, how = (
        run.communicate(timeout=HANGING)[1],
        "interrupted" if number == signal.SIGINT else "terminated",
    )
    assert (run.returncode, said) == (
        128 + number,
        f"python -m {module}: {how}; run the same command again.\n",
    )


def test_every_command_is_in_a_package_that_handles_interrupts():
    """But for three that are the children of a command, which stops them, and one that
    runs without the command."""
    found = subprocess.run(
        ["git", "grep", "-l", "__main__", "--", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    files = {
        Path(x)
        for x in found.stdout.split()
        if '__name__ == "__main__"' in (ROOT / x).read_text("utf-8")
    }
    tops = {f.parts[0] for f in files} - {"tests"}
    own = {"upref", "upref_frameworks", "upref_course", "paper"}
    assert (
        tops <= {"repro", "docs", "benchmarks", *own, "figures", "derivations"}
        and len(files) > 40
    ) or not files
    for top in ("repro", "docs", "benchmarks", "paper"):
        assert "interrupt.handled()" in (ROOT / top / "__init__.py").read_text(
            encoding="utf-8"
        )
    ours = {f.as_posix() for f in files if f.parts[0] in own - {"upref_course"}}
    assert ours <= {
        "upref/__main__.py",
        "upref/cli/__init__.py",
        "paper/__main__.py",
        # one rank of a case, which the suite starts and ends
        "upref/conformance/ranks.py",
        "upref_frameworks/audits/child.py",
        # it runs in SkyRL's environment, without the command
        "upref_frameworks/skyrl/convert.py",
        "upref_frameworks/verl/step.py",
    }


def test_sigterm_within_a_loss_is_not_the_loss():
    """The guard takes what a loss raises for its answer."""
    with pytest.raises(SystemExit) as e, interrupt.handled_within("upref x"):
        call_guarded("f", lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(1)))
    assert e.value.code == 143 and sys.excepthook is not interrupt._end


AUDITED = Audit("verl", "1", [], [], [], {}, ["as [ledger] records"], [], [])


def test_a_verdict_that_escapes_markup_is_printed_as_it_is(capsys, monkeypatch):
    monkeypatch.setattr(
        "upref_frameworks.audits.audit", lambda framework, **which: AUDITED
    )
    assert "as [ledger] records" in run(capsys, "audit", "verl")[1]


def test_without_a_word_it_shows_what_one_types_first(capsys):
    """Commands that exist, on one screen, on stderr with status 2: nothing was done."""
    assert main([]) == 2
    out, said = capsys.readouterr()
    assert out == "" and len(said.splitlines()) <= 12
    shown = re.findall(r"^ +upref (.*?)(?:   .*)?$", said, re.M)
    assert len(shown) == 5 and max(map(len, said.splitlines())) <= 100
    for words in shown:
        _parser().parse_args(words.split())


def test_an_option_without_its_word_says_which_words_there_are(capsys):
    with pytest.raises(SystemExit):
        main(["maximizes", "my.py:kl", "--as-kl"])
    said = capsys.readouterr().err
    assert "--as-kl: expected one argument: loss, reward, advantage (`upref" in said


def test_a_setting_behind_a_function_of_a_file_is_refused_as_one(capsys, tmp_path):
    """The sentence named the functions of the file, of which it was one."""
    file = tmp_path / "mine.py"
    file.write_text(RIGHT_AND_WRONG)
    code, _, err = run(capsys, "check", f"{file}:right,high=0.28", "--as", "dapo")
    assert code == 2 and "takes no settings behind a comma" in err


def test_a_terminal_shows_how_long_a_verb_has_worked(monkeypatch):
    """From three seconds on a terminal shows whole seconds, and is cleared; another
    stream gets nothing.
    """
    from upref.cli.supervise import _Progress

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = _Progress(600)
    for passed in (0.2, 1.9, 3.1, 3.3, 4.0):
        progress.show(passed)
    shown = terminal.getvalue()
    assert shown.split("\r")[1:] == [
        f"working for {n} s, at most 600 s ..." for n in (3, 4)
    ]
    progress.clear()
    assert terminal.getvalue().endswith(f"\r{'':60}\r")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    quiet = _Progress(600)
    quiet.show(5)
    quiet.clear()
    assert sys.stderr.getvalue() == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "my.py:f", "--ass", "dapo"], "no option --ass: did you mean --as?"),
        (["check", "my.py:f", "--as", "dapo", "--verbos"], "did you mean --verbose?"),
        (["list", "--frobnicate=3"], "there is no option --frobnicate ("),
    ],
)
def test_an_option_is_not_abbreviated_and_an_unknown_one_is_named(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_number_is_an_int_or_a_float():
    said = [describe_kind(x) for x in (3, 0.5, bytearray(), None)]
    assert said == ["an int", "a float", "a bytearray", "a NoneType"]
