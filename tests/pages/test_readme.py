# SPDX-License-Identifier: Apache-2.0
"""README says what the code says; what it prints is held by test_pages.py, its words
here, its commands by test_commands.py."""

import math
import re
import sys
from pathlib import Path

import pytest
import torch

import upref
from docs.make import WORDS_A_MINUTE, letters, put, reading, run
from tests import matrix, newest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)
FILES = {block.split()[1]: block for block in BLOCKS if block.startswith("# ")}


def test_it_is_short_and_opens_with_the_reader_who_has_a_loss():
    assert README.count("\n") <= 120
    assert README.index("## Is my loss PPO? Is it DAPO?") < 1100


def test_the_first_screen_is_read_in_less_than_a_minute():
    """The text to the first heading, without the links below it."""
    words = reading(README[: README.index("[Course]")])
    assert len(words) < WORDS_A_MINUTE, len(words)


# a word -> the words that explain it, which stand with its first use or before
EXPLAINED = {
    "policy": "a language model that gives each possible next token a probability",
    "verl": "framework (verl, TRL and others)",
    "TRL": "framework (verl, TRL and others)",
    "DAPO": "implements these losses anew: PPO, GRPO, DAPO",
    "advantage": "(its advantage *A* is above 0)",
    "response": "an answer that the policy wrote",
    "weight": "This loss does not: its *weight* is 0",
    "slime": "the frameworks NeMo-RL, slime and miles",
    "Cap": "is the room left",
    "dual clip": "(no gradient where A < 0 and r > c)",
    "rollouts": "[rollouts](docs/glossary.md",
    "seeds": "[seeds](docs/glossary.md",
    "top-p": "[top-p 0.7](docs/findings.md#the-words)",
}


@pytest.mark.parametrize("word", EXPLAINED)
def test_no_word_before_its_explanation(word):
    text = re.sub(r"```.*?```", lambda block: " " * len(block[0]), README, flags=re.S)
    explained = text.index(EXPLAINED[word])
    used = re.search(rf"(?<![\w/.]){word}(?!\w|[/:]\w)", text).start()
    between = text[used:explained]
    assert used >= explained or "\n\n" not in between, between


def test_the_first_block_says_what_the_text_says_of_it():
    """The minimum is missing, on both sides; at r = 1 nothing is to be seen."""
    space: dict = {}
    exec(FILES["my.py"], space)
    report = upref.check(space["loss"], "dapo")
    (clipped,) = report.failures
    assert clipped.regime.startswith("A > 0, r < 0.8; A < 0, r > 1.28")
    assert "the minimum is missing" in clipped.cause
    assert report.oracles["on-policy"] == "ok"


def test_the_seven_letters_are_those_of_the_code():
    from upref import rollouts

    named = {
        w for row in letters().splitlines()[2:] for w in re.findall(r"`(\w+)`", row)
    }
    assert named == {"lp", "lp_old", "A", "r", "s", "mu", "p"}
    for letter in named:
        assert re.search(rf"(^|[ ,]){letter}[ ,=]", rollouts.__doc__, re.M), letter
    assert (
        0.0128 / 0.01 == pytest.approx(1.28) and f"{math.sqrt(1.28):.3f}" in letters()
    )


def test_the_gradient_is_what_the_first_program_says():
    """Run the page's program, and find that the two tokens that DAPO clips have no
    gradient.
    """
    space: dict = {}
    page = (ROOT / "docs" / "howto" / "first-program.md").read_text(encoding="utf-8")
    block = re.search(r"```python\n(.*?)```", page, re.S)[1]
    exec(block, space)
    b, grad = space["b"], space["b"].logp.grad
    r = (b.logp - b.logp_old).detach()
    assert r[0, 1].item() == pytest.approx(1.5) and r[1, 0].item() == pytest.approx(
        -0.5
    )
    assert grad[0, 0] == grad[0, 1] != 0 and grad[1, 0] == 0
    b.logp.grad = None
    upref.get("dapo").loss(b).backward()
    assert b.logp.grad[0, 1] == 0 and b.logp.grad[1, 0] == 0


def test_the_two_sentences_most_often_misread():
    """The clip is one-sided by the sign of A; Cap bounds no policy (that is a
    derivation).
    """
    r = torch.tensor([0.1, 0.79, 0.81, 1.27, 1.29, 9.0])
    dapo = upref.get("dapo").weight
    assert (dapo(r, torch.ones(6)) != 0).tolist() == [True] * 4 + [False] * 2
    assert (dapo(r, -torch.ones(6)) != 0).tolist() == [False] * 2 + [True] * 4
    assert (ROOT / "derivations" / "capacity_is_not_a_bound.py").exists()


def test_the_dual_clip_is_off_and_the_figure_has_verls():
    import inspect

    from figures import make

    assert "`c=None`" in README and "c = 3" in README
    every = [upref.get(name) for name in upref.names()]
    papers = [
        o for o in every if "c" in o.hyperparameters and not o.name.endswith("_verl")
    ]
    papers.remove(upref.get("fipo"))  # whose own formula has c
    assert all(o.hyperparameters["c"] is None for o in papers)
    assert inspect.signature(make.cap).parameters["c"].default == 3


@pytest.mark.slow
def test_the_pytest_file_passes_and_can_fail(tmp_path):
    name = "test_ppo.py"
    put(name, FILES[name], tmp_path)
    put("my.py", FILES["my.py"], tmp_path)
    quiet = "python -m pytest -q -p no:cacheprovider -p no:xdist " + name
    assert "1 passed" in run(quiet, tmp_path)
    (tmp_path / "my.py").write_text(FILES["my.py"].replace("1 + clip", "1 + 2 * clip"))
    assert "NOT ppo_clip" in run(quiet, tmp_path)


@pytest.mark.nightly
def test_the_weekly_job_runs_the_blocks_and_the_test(tmp_path):
    """With this torch they are as they say; one character more is a difference."""
    blocks = "".join(re.findall(r"```(?:python|console)\n.*?```\n", README, re.S))
    (tmp_path / "right").mkdir()
    (tmp_path / "wrong").mkdir()
    assert newest.differences(blocks, tmp_path / "right", sys.executable) == []
    changed = blocks.replace("weight 0.740818", "weight 0.740819")
    changed = changed.replace("eps=0.1)", "eps=0.3)").replace(
        "1 - clip", "1 - 2 * clip"
    )
    found = newest.differences(changed, tmp_path / "wrong", sys.executable)
    # the verdict on the loss, that on the test's loss, and the test itself
    assert len(found) == 3, found
    assert sum("NOT ppo_clip" in said for said in found) == 2, found
    weekly = (ROOT / ".github/workflows/weekly.yml").read_text(encoding="utf-8")
    assert "run: python tests/newest.py" in weekly and 'cron: "0 4 * * 1"' in weekly


def test_the_weekly_job_has_the_ten_minutes_and_no_eye_for_spaces(tmp_path):
    """A table of a terminal ends in spaces and an empty line, which no page shows."""
    assert newest.PAGES == ("README.md", "docs/howto/ten-minutes.md")
    page = "```console\n$ printf 'a  \\n\\n'\na\n```\n"
    assert newest.differences(page, tmp_path, sys.executable) == []
    other = page.replace("\na\n", "\nb\n")
    assert len(newest.differences(other, tmp_path, sys.executable)) == 1


def test_a_sample_of_tests_is_the_same_for_the_same_tests():
    names = [f"tests/a.py::test_{n}" for n in range(4000)]
    chosen = matrix.sampled(names)
    assert chosen == matrix.sampled(names[::-1]) and len(set(chosen)) == 1500
    assert matrix.sampled(names[:3]) == names[:3]
    fewer = set(matrix.sampled(names, 300))
    assert len(fewer) == 300 and fewer < set(chosen)


def test_what_is_read_by_name_and_what_is_refused():
    """The sentences under "Your own loss"."""
    from upref.user_code.names import role

    said = dict(zip(("logp_old", "logp_old", "logp", "adv", "mask"),
                    ("old_logps", "behaviour_log_probs", "new", "adv", "response_mask"), strict=True))  # fmt: skip
    for name in ("old_logps", "behaviour_log_probs", "new", "adv", "response_mask"):
        assert f"`{name}`" in README
    assert (
        all(role(name) == meant for meant, name in said.items())
        and role("old_logps") == "logp_old"
    )
    with pytest.raises(upref.InputError, match="check a wrapper: `def loss"):
        upref.check(lambda old, new, x, y: old, "dapo")


def test_ci_runs_the_readmes_test_command():
    assert "bash tests/run.sh" in README and "bash repro/run.sh up_dapo" in README
    assert "bash tests/run.sh" in (ROOT / ".ci/run").read_text()


def test_the_first_mention_of_gpus_says_what_ran_on_one():
    _, _, after = README.partition("GPU")
    assert "docs/gpu.md" in after.split("\n* ")[0]


def test_every_public_name_is_there():
    for name in upref.__all__:
        assert callable(getattr(upref, name))
