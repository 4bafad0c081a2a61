# SPDX-License-Identifier: Apache-2.0
"""Every command on a page that invites copying is run: here, by a test named here, or
with a reason why not.

test_pages.py runs those in ```console blocks and compares what they print. This file
has the rest: indented lines and `commands` in the text. A command that is in none of
the tables below fails.
"""

import re
from pathlib import Path

import pytest

from docs.make import put, run

ROOT = Path(__file__).parents[2]
NAMES = [
    "README",
    "CONTRIBUTING",
    "docs/trl",
    "docs/verl",
    "docs/frameworks",
    "docs/course/README",
]
PAGES = [ROOT / f"{name}.md" for name in NAMES]
PAGES += sorted((ROOT / "docs" / "howto").glob("*.md"))
WORDS = r"(?:upref|python|pip|bash|docker|hf|\.venv/bin/python|repro/venv\.sh) "
# SCALE, YOUR-OVERRIDES: a form, not a command
PLACE = re.compile(r"\.\.\.|(?<![-\w/=])[A-Z][A-Z-]{3,}(?![\w=])")

# command -> what it prints, among other things; {said} is the sentence that README
# shows of it
HERE = {
    "upref identify my.py:loss": "{said}",
    "upref maximizes my.py:loss": "my.py:loss with leave_one_out advantages",
    "upref check verl:vanilla --as dapo": "NOT dapo: ",
    "upref diff my.py:ppo my.py:loss": "differ first in the weight of a token",
    "upref diff verl:vanilla,loss_agg_mode=seq-mean-token-mean trl:grpo": "differ first in the weight of a token",
    "upref recipe dapo --in verl": "loss_agg_mode=token-mean",
    "upref cap -o cap.svg dapo my.py:loss": "cap.svg",
    "upref cap -o cap.svg dapo up_dapo": "cap.svg",
    "upref cap --log -o cap.svg dapo up_dapo": "cap.svg",
    "upref weights dapo my.py:loss": "my.py:loss",
    "upref weights dapo my.py:loss -o weights.svg": "weights.svg",
    "upref explorer cap.html": "cap.html: open it in a browser",
    "upref derive dapo": "dJ/dlp = A*r",
    "upref learn": "a policy is a softmax",
    "upref learn 1": "lesson01.py: written",
    "python lesson01.py": "loss: ",
}
REPLAYS = [  # of docs/howto/replay.md, whose commands run in one test
    "upref replay train_data_step12.jsonl --as grpo", "upref replay train_data_step12.jsonl --as grpo -o sheet.html",
    "upref replay rollouts", "upref replay rollouts/step_7", "upref replay dumps --as grpo",
    "upref replay dumps/7.pt --as grpo", "upref replay dumps --as grpo -o sheet.html",
    "upref replay dumps --as dapo --hp eps_high=0.2", "upref replay dumps --as dapo --hp eps_high=0.2 -o sheet.html",
    "upref replay dumps --as dapo --hp eps_high=0.2 --hp c=3",
    "upref replay dumps --as dapo --hp eps_high=0.2 --hp c=3 -o sheet.html",
    "upref replay dumps --zero",
]  # fmt: skip
# command -> the test that runs it or its smallest form, and words of that test's file
# that show it
SUITE = "python -m pytest --pyargs upref.conformance"
IN_CI = (
    f"{SUITE} --adapter tests/upref_adapter.py:Mine --upref-xfails tests/upref_xfails.toml "
    "--suite 2026.11 --level 3 --upref-results results.json"
)
ADAPTERS_TEST = "tests/conformance/test_adapters.py::test_a_sample_agrees"
SUITE_TEST = "tests/conformance/test_suite.py::test_the_command_and_the_list_of"
DIFF = "tests/conformance/test_diff_steps.py::test_a"
SHEET = "tests/replay/test_real_run.py::test_the_command_draws_a_sheet"
LOGS = "tests/logs/test_logs.py::test_each_command_of_the_page_runs"
REAL_RUN = "tests/replay/test_real_run.py::test_the_page_s_commands_print_what_it_shows"
INSTALL = "tests/pages/test_release.py::test_the_install_lines_are_true"
ELSEWHERE = {
    f"{SUITE} --adapter upref_frameworks.trl.adapter:TRL": (ADAPTERS_TEST, "target(name)"),
    "pip install z3-solver": ("tests/pages/test_requirements.py::test_", "venv.sh"),
    "upref prove mine.py:k3 --as-kl k3": ("tests/proof/test_kl_terms.py::test_the_command", "--as-kl"),
    "upref replay repro/lm/run/recorded --as up_dapo --agg group-token-mean": (REAL_RUN, "up_dapo"),
    "upref replay repro/lm/run/recorded --as up_dapo --agg group-token-mean -o sheet.html": (SHEET, "sheet"),
    "python -m docs.proved openrlhf": ("tests/proof/test_proofs_of_frameworks.py", "proofs"),
    "pip install .": ("tests/pages/test_release.py::test_the_installed_wheel_judges_a_loss", '"install"'),
    "pip wheel --no-deps -w vendor .": ("tests/pages/test_release.py::test_the_wheel_holds", '"wheel"'),
    'pip install -e ".[plot]"': (INSTALL, "optional-dependencies"),
    'pip install -e ".[prove]" pytest': (INSTALL, "optional-dependencies"),
    'pip install -e ".[prove]"': (INSTALL, "optional-dependencies"),
    'pip install -e ".[prove,plot]"': (INSTALL, "optional-dependencies"),
    "python -m docs.site.picture picture.html": ("tests/pages/test_picture.py::test_one_file_that_loads", "picture"),
    'pip install -e ".[trl]"': (INSTALL, "trl"),
    "bash repro/run.sh up_dapo": ("tests/matrix.py", "bash repro/run.sh up_dapo mini steps=2"),
    "bash repro/run.sh up_dapo mini": ("tests/matrix.py", "bash repro/run.sh up_dapo mini steps=2"),
    "bash tests/run.sh": (".ci/run", "bash tests/run.sh"),
    "bash tests/run.sh quick": ("tests/matrix.py", "bash tests/run.sh quick"),
    "bash docs/build.sh": ("tests/pages/test_site.py::test_every_page", '"docs.site"'),
    "pip install -e '.[test,dev]'": ("tests/pages/test_requirements.py::test_", "venv.sh"),
    "python -m docs.make": ("tests/pages/test_pages.py::test_it_is_fresh", "make.written"),
    "python figures/make.py": ("tests/core/test_figures.py::test_", "make"),
    "python -m paper claims --run": ("tests/claims/test_claims.py::test_a_claim_is_as_red_as_its_evidence", "evidence"),
    "python -m docs.diff trl verl openrlhf skyrl": (f"{DIFF}_difference_that_is_planted", "diff_steps(release"),
    "upref diff trl verl": (f"{DIFF}_difference_that_is_planted", "PLANTED"),
    "upref diff trl verl --case generation/2": (f"{DIFF}_setting_of_trl_closes", "generation/2/micro-2"),
    "upref diff trl verl --case generation/2 --case prepare/": (f"{DIFF}_difference_that_is_planted", "PLANTED"),
    "upref diff --steps adapter.py:Plain means.py:Plain --case micro/2/token": (f"{DIFF}_difference", '"means"'),
    "upref diff --steps a.py:Adapter b.py:Adapter --case prepare/old": (f"{DIFF}_difference", "SamplerIsOld"),
    "upref audit verl": ("tests/frameworks/test_audit.py::test_verl_agrees_or_differs_for_the_named_reasons", "audit"),
    "upref audit liger": ("tests/frameworks/test_frameworks.py::test_the_audit_is_the_ledger", "audit"),
    "upref audit liger --ledger": ("tests/frameworks/test_ledger.py::test_", '"--ledger"'),
    "upref check liger:dapo --as dapo": ("tests/frameworks/test_isolated.py::test_", "check"),
    "upref check liger:dapo@matched --as dapo": ("tests/frameworks/test_trl.py::test_", "trl:dapo@matched"),
    "upref step trl": ("tests/frameworks/test_step_table.py::test_trl_agrees_where_it_is_recorded_to", "trl"),
    "upref step verl": ("tests/frameworks/test_step_table.py::test_verl_agrees_where_it_is_recorded_to", "verl"),
    "upref step openrlhf": ("tests/frameworks/test_step_table.py::test_openrlhf_agrees_where_it_is", "openrlhf"),
    "bash repro/run.sh up_dapo trl --tiny": ("tests/with_trl/test_trl_training_run.py::test_it_trains", '"--tiny"'),
    "bash repro/run.sh up_dapo smoke": ("tests/with_verl/test_smoke.py::test_", "repro.with_verl.cpu.smoke"),
    "bash repro/run.sh up_dapo paper --dry-run": ("tests/with_verl/test_verl_launch.py::test_a_dry_run", "--dry-run"),
    "bash repro/run.sh up_dapo gpu1 --shakedown": ("tests/with_verl/test_verl_launch.py::test_a_shake", "shakedown"),
    ".venv/bin/python -m tests.which upref/verify/match.py": ("tests/pages/test_which.py::test_the_tests_of", "which"),
    "python -m tests.conformance.known_bugs trl": ("tests/conformance/test_known_bugs.py::test_the_command", "main"),
    "upref check my.py:loss my.py:other --as dapo": ("tests/verify/test_cli.py::test_several_losses", "*losses"),
    SUITE: (SUITE_TEST, '"--pyargs"'),
    IN_CI: (SUITE_TEST, "--upref-xfails"),
    "upref badge results.json -o badge.svg": ("tests/conformance/test_suite.py::test_a_badge", '"badge"'),
    **{command: ("tests/replay/test_howto.py::test_each_command_of_the_page_runs", "replay.md") for command in REPLAYS},
    "python -m docs.make docs/frameworks.md": ("tests/pages/test_pages.py::test_it_is_fresh", "make.written"),
    **{command: (LOGS, "the_page") for command in (
        "upref logs metrics.csv", "upref logs metrics.csv --json",
        "upref logs metrics.csv --map kl_loss=my/kl --map length_mean=tokens",
    )},
    "python -m docs.gallery": ("tests/replay/test_gallery.py::test_the_command", "gallery.main"),
    "python -m docs.drafts": ("tests/pages/test_drafts.py::test_the_command", "main"),
    "repro/venv.sh verl trl": ("tests/pages/test_requirements.py::test_", "venv.sh"),
}  # fmt: skip
NOT_RUN = {
    "python -m tests.support.mutants.proofs --mutants 5900 --seed 0": "judges mutants for an hour",
    "python -m tests.proof.table": "proves losses for half an hour",
    "python -m benchmarks.tests": "measures all tests",
    "python -m docs.make --print docs.proved.losses": "test_pages.py has all parts of the site",
    ".venv/bin/python -m pytest -q tests/core/test_kl.py": "runs tests of this suite",
    ".venv/bin/python -m pytest -q tests/core/test_rollouts.py::test_masked_slots_may_hold_anything": "the same",
    ".venv/bin/python -m pytest -q tests/core -k dual_clip": "the same",
    "bash repro/run.sh up_dapo trl": "trains on a GPU; its form with --tiny is run",
    "bash repro/run.sh up_dapo paper": "trains on eight GPUs; its dry run is run",
    "hf download Qwen/Qwen2.5-0.5B-Instruct --revision 7ae557604adf67be50417f59c2c2f167def9a775": "downloads a model",
    ".venv/bin/python -m repro.with_verl.data.prepare gsm8k_train gsm8k_test": "downloads data",
    "bash tests/run.sh save": "runs tests that the whole command has",
    "pip install torch --index-url https://download.pytorch.org/whl/cpu": "needs PyTorch's own package index",
    "pip install . vendor/upref_rl-*.whl transformers pytest": "a line of a workflow on GitHub",
}


def commands(text: str) -> list[str]:
    """Return the commands of a page outside of its console blocks, without their
    comments, sorted. Forms with a PLACE are left out.
    """
    steps = re.findall(rf"^ *- run: ({WORDS}.*)$", text, re.M)  # of a workflow
    text = re.sub(r"^(`{3,}).*?^\1`*$", "", text, flags=re.M | re.S)
    lines = re.findall(rf"^ {{4,}}({WORDS}.*)$", text, re.M)
    rest = re.sub(r"\s+", " ", re.sub(r"^ {4,}\S.*$", "", text, flags=re.M))
    inline = [c for c in re.findall(r"`([^`]+)`", rest) if re.match(WORDS, c)]
    found = (re.sub(r"\s+#.*", "", line).strip() for line in [*steps, *lines, *inline])
    return sorted({c for c in found if not PLACE.search(c)})


def known(command: str) -> bool:
    """Return whether the command is in one of the lists here.

    `upref check` alone names a verb; a step of one family is a row of the table of that
    trainer.
    """
    from upref.cli import _parser

    if re.fullmatch(r"upref [\w-]+", command) and command not in {*HERE, *ELSEWHERE}:
        return any(
            command[6:] in a.choices
            for a in _parser()._actions
            if isinstance(a.choices, dict)
        )
    return re.sub(r" --only [\w ]+$", "", command) in {*HERE, *ELSEWHERE, *NOT_RUN}


@pytest.mark.parametrize("page", PAGES, ids=lambda f: f.relative_to(ROOT).as_posix())
def test_every_command_of_a_page_has_its_test(page):
    assert [c for c in commands(page.read_text(encoding="utf-8")) if not known(c)] == []


def test_the_tables_name_what_is_on_a_page():
    there = {
        re.sub(r" --only [\w ]+$", "", c)
        for page in PAGES
        for c in commands(page.read_text(encoding="utf-8"))
    }
    assert {*HERE, *ELSEWHERE, *NOT_RUN} - there == set()


@pytest.mark.parametrize("command", ELSEWHERE)
def test_the_named_test_is_there(command):
    where, words = ELSEWHERE[command]
    file, _, test = where.partition("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    assert words in text and (not test or f"def {test}" in text)


def test_what_runs_at_every_save_is_there():
    named = re.search(
        r"tests/core/test_\{([a-z_,]+)\}\.py",
        (ROOT / "tests/run.sh").read_text(encoding="utf-8"),
    )
    assert named and all(
        (ROOT / f"tests/core/test_{name}.py").exists() for name in named[1].split(",")
    )


def test_a_new_command_is_found():
    page = "```console\n$ upref check a\n```\n\nRun `upref\nnew x`, `upref check`:\n\n    pip install it  # now\n"
    assert commands(page) == ["pip install it", "upref check", "upref new x"]
    assert [known(c) for c in commands(page)] == [False, True, False]
    assert (
        commands(
            "`upref recipe NAME`, `upref audit liger --source CHECKOUT`, `pip install ...`"
        )
        == []
    )
    assert not known("upref frobnicate")


@pytest.mark.slow
@pytest.mark.parametrize("command", HERE)
def test_it_runs_as_pasted(command, tmp_path):
    """Run a command of README on README's `my.py`, and find what README says that it
    prints.
    """
    if "verl:" in command:
        pytest.importorskip("verl", reason="`repro/venv.sh verl` installs it")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(# my\.py\n.*?)```", readme, re.S)
    put("my.py", code, tmp_path)
    if command == "python lesson01.py":
        run("upref learn 1", tmp_path)
        file = tmp_path / "lesson01.py"  # the page: once the hole is filled
        file.write_text(
            file.read_text().replace(
                "return ...", "return -(reward * log_prob[action]).mean()"
            )
        )
    said = re.search(rf"`{re.escape(command)}`[^*]*\*([^*]+)\*", readme)
    assert HERE[command].format(said=said and said[1]) in run(command, tmp_path)
