# SPDX-License-Identifier: Apache-2.0
"""`upref logs`: no finding in healthy logs of seven frameworks' naming, and each planted
contradiction by its law, with the step and the columns.
"""

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.logs.simulator import (
    FRAMEWORKS,
    batches,
    draw_setting,
    healthy,
    rounded,
    write,
)
from upref.cli import main
from upref.errors import InputError
from upref.logs import audit, read
from upref.logs.digits import Written, is_short, is_unrounded, last_digit
from upref.logs.names import SCALARS

ROOT = Path(__file__).parents[2]
DIGITS = (None, None, 6, 4, 3)
SUFFIXES = (".csv", ".jsonl", ".json")
SEED = 3  # four updates on a batch, with a KL


def findings_of(rows, path):
    """Return the contradictions and notes of a log."""
    (run,) = read(write(rows, path))
    report = audit(run)
    return [*report.failures, *report.notes]


def test_healthy_logs_have_no_finding(tmp_path):
    _hold_healthy(range(21), tmp_path)


@pytest.mark.slow
@pytest.mark.nightly
def test_hundreds_of_healthy_logs_have_no_finding(tmp_path):
    _hold_healthy(range(1000, 1350), tmp_path)


def _hold_healthy(seeds, folder):
    """Assert that the logs of these seeds have no finding, in several formats and
    numbers of digits.
    """
    for seed in seeds:
        rows = healthy(seed)
        digits = DIGITS[seed % len(DIGITS)]
        rows = rows if digits is None else rounded(rows, digits)
        path = folder / f"log{SUFFIXES[seed % len(SUFFIXES)]}"
        found = findings_of(rows, path)
        assert not found, (seed, digits, [str(f) for f in found])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_names_of_each_framework_are_known(framework, tmp_path):
    (run,) = read(write(healthy(SEED, framework), tmp_path / "log.jsonl"))
    report = audit(run)
    assert len(report.recognized) > 0.7 * report.columns


def write_lines(rows, path):
    """Write a file with one JSON object in a line, and return its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---- planted contradictions ----------------------------------------------------------
def setting_with_kl():
    """Return the setting of a run with updates, a gap between sampler and trainer, and
    a KL term.
    """
    return replace(
        draw_setting(SEED), updates=2, beta=0.04, gap=0.01, averaged=1, longest=120
    )


def log_of(framework, steps=12):
    setting = setting_with_kl()
    return FRAMEWORKS[framework](setting, batches(setting, steps))


def scale(column, factor, only=None):
    """Return a change of rows that multiplies a column, in all rows or in some."""

    def change(rows):
        for i, row in enumerate(rows):
            if column in row and (only is None or i in only):
                row[column] *= factor

    return change


def put(column, value, only):
    """Return a change of rows that writes a value into a column of some rows."""

    def change(rows):
        for i in only:
            rows[i][column] = value

    return change


def equal_rewards(rows):
    for row in rows[:6]:
        row["frac_reward_zero_std"] = 1.0


def entropy_is_a_sum(rows):
    for row in rows:
        row["entropy"] = 0.5 * row["completions/mean_length"]


def k1_in_slime(rows):
    """Change the rows: the KL of the loss is the mean of log π_old − log π_ref of the
    same step.
    """
    for row in rows:
        if "train/loss" in row:
            k1 = 0.01 * math.sin(7 * row["train/step"])
            row["train/kl_loss"] = k1
            row["train/loss"] = row["train/pg_loss"] + 0.04 * k1


def restart(rows):
    for row in rows[6:]:
        row["num_tokens"] -= rows[5]["num_tokens"]


def another_run(rows):
    rows.extend(dict(row, loss=row["loss"] + 1) for row in rows[:4])


def nan_loss(rows):
    rows[3]["loss"] = math.nan


def averages_apart(rows):
    """Change the rows: the gap is a mean over tokens, and the log-probabilities are
    means of responses.
    """
    for row in rows:
        if "rollout/step" in row:
            row["train/train_rollout_logprob_abs_diff"] = 0.001
            row["rollout/rollout_log_probs"] = row["rollout/log_probs"] + 0.004


PLANTED = [
    ("trl", scale("completions/mean_length", 30, {4}), "order", "failure"),
    ("trl", scale("clip_ratio/region_mean", 2), "clipped shares", "failure"),
    ("trl", put("kl", -0.02, [5]), "negative KL", "failure"),
    ("trl", put("kl", -0.001, [5]), "negative KL", "note"),
    ("trl", put("completions/clipped_ratio", 1.3, [2]), "range", "failure"),
    ("trl", put("reward_std", -0.1, [2]), "range", "failure"),
    ("trl", scale("completions/mean_terminated_length", 0.8), "lengths", "failure"),
    ("trl", scale("sampling/sampling_logp_difference/max", 0.01), "order", "failure"),
    ("trl", equal_rewards, "equal rewards", "note"),
    ("trl", entropy_is_a_sum, "entropy", "note"),
    ("trl", restart, "two runs", "note"),
    ("trl", another_run, "rows of a step", "note"),
    ("trl", nan_loss, "not a number", "note"),
    ("verl", put("actor/kl_loss", -0.01, [3, 7]), "k1 in the loss", "note"),
    ("verl", put("critic/advantages/mean", 9.0, [3]), "order", "failure"),
    ("verl", scale("rollout_corr/log_ppl_diff", -1), "perplexity", "failure"),
    ("verl", scale("rollout_corr/training_ppl", 0.9), "perplexity", "failure"),
    ("verl", put("rollout_corr/chi2_token", -0.1, [3]), "divergences", "failure"),
    ("verl", put("rollout_corr/kl", 2.0, [3]), "divergences", "failure"),
    ("verl", put("rollout_corr/k3_kl", -0.5, [3]), "negative KL", "failure"),
    ("verl", put("critic/score/min", 2.0, [3]), "order", "failure"),
    ("slime", k1_in_slime, "k1 in the loss", "note"),
    ("slime", scale("train/ois", 0.9), "two averages", "note"),
    ("slime", averages_apart, "two averages", "note"),
    ("openrlhf", put("train/ppo_kl", 0.0, [3, 4]), "clip", "note"),
    ("openrlhf", put("train/ppo_clip_ratio", 1.5, [0]), "range", "failure"),
    ("skyrl", put("policy/policy_kl", -0.1, [2]), "k1 in the loss", "note"),
    ("skyrl", scale("generate/max_num_tokens", 0.1), "order", "failure"),
    ("nemo_rl", put("train/token_mult_prob_error", 0.9, [1]), "range", "failure"),
    ("nemo_rl", scale("train/probs_ratio_clamped_max", 4), "clip", "failure"),
    ("prime_rl", put("mismatch_kl/all/mean", -0.1, [1]), "negative KL", "failure"),
    ("prime_rl", put("entropy/all/mean", -0.1, [1]), "range", "failure"),
    ("prime_rl", scale("entropy/all/max", 0.01), "order", "failure"),
    ("prime_rl", scale("mismatch_kl/all/max", 0.01), "order", "failure"),
]


@pytest.mark.parametrize(("framework", "change", "law", "severity"), PLANTED)
def test_a_planted_contradiction_is_found(framework, change, law, severity, tmp_path):
    rows = log_of(framework)
    assert not findings_of(rows, tmp_path / "before.jsonl")
    change(rows)
    found = findings_of(rows, tmp_path / "after.jsonl")
    told = {(f.name, f.severity) for f in found}
    assert (law, severity) in told, [str(f) for f in found]


def test_nothing_was_clamped_where_the_extremes_stay(tmp_path):
    rows = log_of("nemo_rl")
    for row in rows:
        row["train/probs_ratio_clamped_min"] = row["train/probs_ratio_min"]
        row["train/probs_ratio_clamped_max"] = row["train/probs_ratio_max"]
        row["train/probs_ratio_clamped"] = row["train/probs_ratio"] - 0.01
    (found,) = findings_of(rows, tmp_path / "log.csv")
    assert found.name == "clip" and "so no ratio is clamped" in found.text


def test_a_finding_has_its_steps_columns_and_arithmetic(tmp_path):
    """Change one number of one step of a log, and find it named with the sum that it
    differs from.
    """
    rows = log_of("verl")
    rows[4]["rollout_corr/log_ppl_diff"] += 0.5
    all_found = findings_of(rows, tmp_path / "log.jsonl")
    (found,) = (f for f in all_found if f.name == "perplexity" and len(f.columns) == 3)
    assert found.steps == (5.0,)
    assert found.columns == (
        "rollout_corr/training_log_ppl",
        "rollout_corr/rollout_log_ppl",
        "rollout_corr/log_ppl_diff",
    )
    row = rows[4]
    sum_ = row["rollout_corr/training_log_ppl"] - row["rollout_corr/rollout_log_ppl"]
    assert f"{sum_:.6g}" in found.text and "at step 5" in found.text


def test_the_weight_of_k1_in_the_loss_is_read_off(tmp_path):
    rows = log_of("slime")
    k1_in_slime(rows)
    (found,) = findings_of(rows, tmp_path / "log.csv")
    assert "train/loss = train/pg_loss + 0.04 train/kl_loss at" in found.text


def test_a_kl_in_the_reward_is_a_fact(tmp_path):
    (run,) = read(write(log_of("openrlhf"), tmp_path / "log.jsonl"))
    report = audit(run)
    facts = [f.text for f in report.facts if f.name == "k1"]
    assert not report.notes and all("it is train/logprobs_diff to" in t for t in facts)


def test_a_factor_of_zero_was_set(tmp_path):
    rows = log_of("trl")
    rows[2]["sampling/importance_sampling_ratio/min"] = 0.0
    (run,) = read(write(rows, tmp_path / "log.jsonl"))
    report = audit(run)
    assert any(f.name == "dropped" and 3.0 in f.steps for f in report.facts)
    assert not report.failures and not report.notes


# ---- files ---------------------------------------------------------------------------
def test_an_export_of_several_runs(tmp_path):
    path = tmp_path / "wandb.csv"
    path.write_text(
        '"Step","a - train/kl_loss","a - train/kl_loss__MIN","b - train/kl_loss","b - train/kl_loss__MIN"\n'
        "1,0.1,0.1,-0.2,-0.2\n2,0.2,0.2,0.3,0.3\n"
    )
    a, b = read(path)
    assert (a.name, b.name) == ("a", "b")
    assert set(a.columns) == {"train/kl_loss"} and a.steps == (1.0, 2.0)
    assert not audit(a).notes and audit(b).notes


def test_the_event_files_of_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path / "logs"))
    for row in log_of("verl"):
        values = [Summary.Value(tag=k, simple_value=v) for k, v in row.items()]
        step = int(row["training/global_step"])
        writer.add_event(Event(step=step, summary=Summary(value=values)))
    writer.close()
    (run,) = read(tmp_path / "logs")
    report = audit(run)
    assert run.steps == tuple(map(float, range(1, 13)))
    assert len(report.recognized) > 20 and not report.failures and not report.notes


def test_tensorboard_is_optional(tmp_path, monkeypatch):
    (tmp_path / "events.out.tfevents.1").write_bytes(b"")
    monkeypatch.setitem(
        sys.modules, "tensorboard.backend.event_processing.event_accumulator", None
    )
    with pytest.raises(InputError, match="needs tensorboard: pip install"):
        read(tmp_path)


def test_rows_of_a_step_are_joined_and_those_of_another_count_are_not(tmp_path):
    path = tmp_path / "log.jsonl"
    rows = [
        {"train/step": 3, "train/loss": 1.0},
        {"train/step": 3, "train/pg_loss": 0.5},
        {"rollout/step": 3, "rollout/log_probs": -0.1},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run,) = read(path)
    assert run.steps == (3.0, 3.0)
    assert np.isnan(run.columns["rollout/log_probs"]).tolist() == [True, False]


def test_the_file_logger_of_verl_is_read(tmp_path):
    """verl writes {"step": 1, "data": {...}} with trainer.logger=file."""
    rows = [
        {"step": step, "data": {"actor/entropy": 0.4, "actor/kl_loss": -0.01}}
        for step in (5, 6)
    ]
    (run,) = read(write_lines(rows, tmp_path / "run.jsonl"))
    assert run.steps == (5.0, 6.0)
    assert set(audit(run).recognized) == {"entropy", "kl_loss"}


def test_the_steps_of_ms_swift_are_read(tmp_path):
    rows = [
        {"kl": 0.1, "completions/mean_length": 30.5, "global_step/max_steps": f"{k}/40"}
        for k in (10, 20)
    ]
    (run,) = read(write_lines(rows, tmp_path / "logging.jsonl"))
    assert run.steps == (10.0, 20.0)


def test_an_evaluation_of_a_step_is_no_second_run(tmp_path):
    """Its row repeats times, which are no scalars that a law relates."""
    rows = [
        {"step": 100, "loss": 0.1, "grad_norm": 0.3, "memory": 16.5, "speed": 0.2},
        {"step": 100, "eval_loss": 0.2, "memory": 16.6, "speed": 0.3},
    ]
    (run,) = read(write_lines(rows, tmp_path / "log.jsonl"))
    assert not audit(run).statements


@pytest.mark.parametrize("norms", [(0.4, 0.0912, 0.5), (None, 0.0912, None)])
def test_a_deviation_of_0_is_said_of_each_prompt(norms, tmp_path):
    """Where a trainer averages the deviations of the prompts, these may have different
    rewards.
    """
    rows = [
        {"step": step, "reward_std": std, "reward": 3.0, "grad_norm": norm}
        for step, (std, norm) in enumerate(
            zip((0.5123, 0.0, 0.6012), norms, strict=True)
        )
    ]
    (run,) = read(write_lines(rows, tmp_path / "log.jsonl"))
    (fact,) = audit(run).statements
    assert fact.text.startswith("the rewards of each prompt are equal at step 1")
    assert "nan" not in fact.text


@pytest.mark.parametrize("seed", [1, 14, 28])
def test_significant_digits_are_no_contradiction(seed, tmp_path):
    """A console writes four of them, of a small number and of a large one."""
    rows = [{k: float(f"{x:.4g}") for k, x in row.items()} for row in healthy(seed)]
    assert not findings_of(rows, tmp_path / "log.jsonl")


UNROUNDED = 0.12345678901  # a number with all its digits


def scores(step, **others):
    """Return a row of a log in which all responses have one score."""
    least = {
        "critic/score/min": 1.0,
        "critic/score/max": 1.0,
        "actor/grad_norm": UNROUNDED,
    }
    return {"step": step} | least | others


def test_equal_scores_with_advantages_are_not_equal_rewards(tmp_path):
    """With a KL in the reward, equal scores have different rewards."""
    advantages = {"critic/advantages/min": -0.8, "critic/advantages/max": 0.9}
    for others, stated in ((advantages, 0), (dict.fromkeys(advantages, 0.0), 1)):
        rows = [scores(step, **others) for step in range(4)]
        (run,) = read(write_lines(rows, tmp_path / "log.jsonl"))
        assert len(audit(run).statements) == stated


@pytest.mark.parametrize("others", [{}, {"grad_norm": math.nan}])
def test_a_number_that_was_rounded_to_0_is_no_0(others, tmp_path):
    """With two decimals a share below 0.005 is written as 0. A column of NaN alone does
    not tell how many decimals the others have.
    """
    rows = [
        {
            "step": step,
            "pg_clipfrac": 0.0,
            "reward_std": 0.0,
            "completions/clipped_ratio": share,
            "completions/mean_terminated_length": 310.25,
            "completions/mean_length": length,
            **others,
        }
        for step, (share, length) in enumerate([(0.0, 313.75), (0.01, 317.5)] * 2)
    ]
    (run,) = read(write_lines(rows, tmp_path / "log.jsonl"))
    stated = {statement.name for statement in audit(run).statements}
    assert stated == ({"not a number"} if others else set())


def test_a_step_without_a_lowest_reward_does_not_make_rewards_fractions(tmp_path):
    frozen = {"frac_reward_zero_std": 1.0, "critic/score/max": 1.0}
    frozen["grad_norm"] = UNROUNDED
    rows = [{"step": step, "critic/score/min": 1.0} | frozen for step in range(4)]
    del rows[1]["critic/score/min"]
    (run,) = read(write_lines(rows, tmp_path / "log.jsonl"))
    (equal,) = (s for s in audit(run).statements if s.name == "equal rewards")
    assert "grad_norm" in equal.text and "rounding" not in equal.text


# ---- digits --------------------------------------------------------------------------
def log_from(lines, tmp_path, suffix=".csv"):
    """Return the report on a log of these lines."""
    path = tmp_path / f"lines{suffix}"
    path.write_text("\n".join(lines) + "\n")
    (run,) = read(path)
    return audit(run)


ROUNDED = {
    "4 of 1024 responses are cut off, to two decimals": (
        "step,completions/mean_length,completions/mean_terminated_length,completions/clipped_ratio",
        "1,489.3818,483.0425,0.01",
        "2,478.3066,476.1667,0.00",
    ),
    "a smallest ratio of 0.7962 is clamped to 0.8": (
        "step,probs_ratio_min,probs_ratio_max,probs_ratio_clamped_min,probs_ratio_clamped_max,probs_ratio,probs_ratio_clamped",
        "1,0.80,1.20,0.80,1.20,1.000514,1.000537",
    ),
    "1 of 256 prompts has different rewards": (
        "step,frac_reward_zero_std,grad_norm",
        *("1,0.98,0.1939", "2,1.00,0.2241", "3,1.00,0.1829", "4,0.99,0.2124"),
    ),
    "rewards in [0.96, 1], to one decimal": (
        "step,critic/score/min,critic/score/max,critic/score/mean,actor/grad_norm",
        *("1,0.9,1.0,0.94973,0.2187", "2,1.0,1.0,0.97972,0.2122"),
    ),
    "the same without a mean": (
        "step,critic/score/min,critic/score/max,actor/grad_norm",
        *("1,0.9,1.0,0.218712345678", "2,1.0,1.0,0.212212345678"),
    ),
    "57 of 200,000 tokens are clipped": (
        "step,actor/pg_clipfrac,actor/ppo_kl,actor/grad_norm",
        *(f"{step},0.000,0.000387,0.213930312345" for step in range(4)),
    ),
    "a later run writes four decimals": (
        "step,clip_ratio/low_mean,clip_ratio/high_mean,clip_ratio/region_mean",
        *("1,0.00123411,0.00341207,0.00464618", "2,0.0013,0.0033,0.0047"),
    ),
    "a mean of 2047 in three significant digits": (
        "step,response_length/mean,response_length/max,actor/entropy",
        *("1,2.05e+03,2047,0.4123", "2,1.98e+03,2047,0.3981"),
    ),
}


@pytest.mark.parametrize("what", ROUNDED)
def test_rounding_alone_is_no_finding(what, tmp_path):
    assert not log_from(ROUNDED[what], tmp_path).statements


def test_digits_of_another_row_do_not_count_in_json(tmp_path):
    """The first row has four decimals of 0.31214, 0.30936 and 0.00278."""
    names = ("training_log_ppl", "rollout_log_ppl", "log_ppl_diff")
    full = (0.2987184226512909, 0.2961113452911377, 0.0026070773601532)
    rows = [
        {"step": step}
        | {f"rollout_corr/{n}": x for n, x in zip(names, row, strict=True)}
        for step, row in enumerate([(0.3121, 0.3094, 0.0028), full])
    ]
    (run,) = read(write_lines(rows, tmp_path / "log.jsonl"))
    assert not audit(run).statements


def test_digits_of_its_own_show_an_exact_number(tmp_path):
    """With all digits, the same logs contradict themselves or state a fact."""
    lengths = log_from(
        (
            "step,completions/mean_length,completions/mean_terminated_length,completions/clipped_ratio",
            "1,489.3818,483.0425,0.01171875",
            "2,478.3066,476.1667,0.0",
            "3,482.1582,477.3537,0.00878906",
        ),
        tmp_path,
    )
    assert [s.name for s in lengths.failures] == ["lengths"]
    clipped = log_from(
        ("step,pg_clipfrac", *(f"{step},0.0000000" for step in range(4))), tmp_path
    )
    (fact,) = clipped.facts
    assert "no token was clipped. With one update" in fact.text


def test_a_column_without_digits_is_stated_with_a_reserve(tmp_path):
    rows = [
        {"step": step, "pg_clipfrac": 0.0, "ppo_kl": 0.0004, "grad_norm": UNROUNDED}
        for step in range(4)
    ]
    (run,) = read(write_lines(rows, tmp_path / "log.jsonl"))
    (fact,) = audit(run).statements
    assert fact.text.endswith("no token was clipped, unless pg_clipfrac is rounded.")


@pytest.mark.parametrize(
    ("text", "exponent", "short"),
    [
        ("0.80", -2, False),
        ("0.8", -1, False),
        ("1.0", 0, True),
        ("0.0", 0, True),
        ("0.000", -3, False),
        ("0.5", -1, True),
        ("0.0625", -4, False),
        ("2.05e+03", 1, False),
        ("4096", 0, True),
        ("12340.0", 1, True),
        ("4000.0", 1, True),
        ("400.0", 0, True),
        ("1e-05", -5, False),
        ("0e999", 300, False),
    ],
)
def test_the_last_digit_is_read_from_the_text(text, exponent, short):
    number = Written(text)
    assert (last_digit(number), is_short(number)) == (exponent, short)


@pytest.mark.parametrize(
    ("text", "unrounded"),
    [("0.12345678901", 1), ("0.0001", 0), ("1234567890.0", 0), ("1.23456789e-05", 1)],
)
def test_a_count_of_tokens_does_not_show_that_nothing_is_rounded(text, unrounded):
    assert is_unrounded(Written(text)) == bool(unrounded)


# ---- several rows for one step ---------------------------------------------------------
SEVERAL_ROWS = {
    "an evaluation": [
        {"step": 1, "response_length/mean": 310.5, "response_length/max": 1024},
        {"step": 1, "response_length/mean": 1460.2},
        {"step": 2, "response_length/mean": 322.0, "response_length/max": 1024},
    ],
    "two phases": [
        {"step": 1, "response_length/mean": 310.5, "response_length/max": 512},
        {"step": 2, "response_length/mean": 322.0, "response_length/max": 512},
        {"step": 1, "response_length/mean": 1310.5},
        {"step": 2, "response_length/mean": 1402.0, "response_length/max": 4096},
    ],
    "one scalar in a row": [
        {"step": 1, "response_length/mean": 310.5},
        {"step": 1, "response_length/mean": 1310.5},
        {"step": 1, "response_length/max": 512},
        {"step": 1, "response_length/max": 4096},
    ],
}


@pytest.mark.parametrize("what", SEVERAL_ROWS)
def test_numbers_of_two_rows_of_a_step_are_not_compared(what, tmp_path):
    rows = SEVERAL_ROWS[what]
    (run,) = read(write_lines(rows, tmp_path / "log.jsonl"))
    report = audit(run)
    (note,) = report.statements
    assert note.severity == "note" and "mini-batches, epochs, phases" in note.text
    assert report.steps == len({row["step"] for row in rows}) < report.rows


def test_a_contradiction_in_one_row_of_a_step_is_found(tmp_path):
    rows = [
        {"step": 1, "response_length/mean": 310.5, "response_length/max": 512},
        {"step": 1, "response_length/mean": 1310.5, "response_length/max": 600},
    ]
    (run,) = read(write_lines(rows, tmp_path / "log.jsonl"))
    (failure,) = audit(run).failures
    assert "1310.5" in failure.text and "at step 1:" in failure.text


# ---- one quantity, one unit ------------------------------------------------------------
def test_extremes_of_ratios_alone_are_judged(tmp_path):
    keys = "step,probs_ratio_min,probs_ratio_max,probs_ratio_clamped_min,probs_ratio_clamped_max"
    (failure,) = log_from((keys, "1,0.9,1.1,0.7,1.4"), tmp_path).failures
    assert failure.name == "clip"


def test_two_trends_of_one_slope_are_no_sum(tmp_path):
    entropy = (0.5, 0.5102, 0.5194, 0.5309, 0.5391, 0.5508, 0.5602, 0.5697, 0.5801)
    length = (1000, 1022.1, 1037, 1063.2, 1079.9, 1099, 1122.4, 1138.1, 1161.5)
    rows = [
        {"step": n, "entropy": x, "response_length/mean": y}
        for n, (x, y) in enumerate(zip(entropy, length, strict=True))
    ]
    (run,) = read(write_lines(rows, tmp_path / "log.jsonl"))
    assert not audit(run).statements


def test_a_share_may_be_in_percent(tmp_path):
    usual = log_from(("step,pg_clipfrac", "1,1.2", "2,0.9", "3,1.4"), tmp_path)
    (note,) = usual.statements
    assert note.severity == "note" and "unless the column is in percent" in note.text
    negative = log_from(("step,pg_clipfrac", "1,-1.2", "2,1.9"), tmp_path)
    assert negative.failures


def test_a_reward_is_compared_with_scores_of_its_own_family(tmp_path):
    shaped = {"step": 1, "reward": 1.81, "critic/score/max": 1.0, "actor/entropy": 0.41}
    of_family = shaped | {"critic/score/mean": 0.61}
    for row, mean in ((shaped, "reward"), (of_family, "critic/score/mean")):
        (run,) = read(write_lines([row], tmp_path / "log.jsonl"))
        report = audit(run)
        assert report.recognized["reward_mean"] == mean and not report.statements


def test_an_entropy_of_the_other_sign_is_not_ordered(tmp_path):
    row = {"step": 1, "entropy_loss": -0.41, "entropy/all/min": 0.0003}
    path = write_lines([row], tmp_path / "log.jsonl")
    (run,) = read(path)
    assert not audit(run, {"entropy": "entropy_loss"}).statements


def test_the_record_of_real_runs_has_what_the_page_says_of_it():
    text = (Path(__file__).parent / "public.txt").read_text(encoding="utf-8")
    page = (ROOT / "docs/howto/logs.md").read_text(encoding="utf-8")
    assert "in three public repositories. It found no contradiction" in page
    assert text.count("https://github.com/") == 3
    logs, right = (text.count(x) for x in ("known scalars", "ok    no contradiction"))
    assert logs == right and "FAIL" not in text


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("log.csv", "", "has no number"),
        ("log.csv", "a,b\nx,y\n", "has no number"),
        ("log.csv", "my_column,b\n1,2\n", "no scalar that upref logs knows"),
        ("log.csv", "reward,step\n1,2\n", "no law relates them"),
        ("log.jsonl", "{\n", "line 1: no JSON"),
        ("log.jsonl", "[1]\n", "must be a JSON object"),
        ("log.jsonl", "[" * 100_000, "no JSON"),
        ("log.json", "3", "holds no list of steps"),
        ("log.json", '{"a": {"b": 1}}', "holds no list of steps"),
        ("log.txt", "loss: 1", "is no log that upref reads"),
        ("log.csv", "\0", "has no number"),
        ("log.csv", b"\xff\xfe\x00", "not text in UTF-8"),
    ],
)
def test_bad_input_is_one_sentence(name, text, told, tmp_path, capsys):
    path = tmp_path / name
    if isinstance(text, bytes):
        path.write_bytes(text)
    else:
        path.write_text(text)
    assert main(["logs", str(path)]) == 2
    said = capsys.readouterr()
    assert told in said.err and len(said.err.strip().splitlines()) == 1
    assert not said.out


def test_names_of_ones_own_are_mapped(tmp_path, capsys):
    path = tmp_path / "log.csv"
    path.write_text("step,my_kl,my_loss\n1,-0.1,2\n2,0.3,1\n")
    assert main(["logs", str(path), "--map", "kl_loss=my_kl"]) == 0
    assert "my_kl is below 0 at step 1" in capsys.readouterr().out
    assert main(["logs", str(path), "--map", "kl_loss=no"]) == 2
    assert "has no column 'no'" in capsys.readouterr().err
    assert main(["logs", str(path), "--map", "no=my_kl"]) == 2
    assert "knows no scalar 'no'" in capsys.readouterr().err
    assert main(["logs", str(path), "--map", "kl_loss"]) == 2
    assert "needs SCALAR=COLUMN" in capsys.readouterr().err


def test_json_and_the_exit_status(tmp_path, capsys):
    rows = log_of("trl")
    path = write(rows, tmp_path / "log.csv")
    assert main(["logs", str(path), "-v"]) == 0
    out = capsys.readouterr().out
    assert "ok    no contradiction" in out and "reward is the mean reward" in out
    rows[4]["reward_std"] = -1.0
    assert main(["logs", str(write(rows, path)), "--json"]) == 1
    (data,) = json.loads(capsys.readouterr().out)
    assert not data["ok"] and data["statements"][0]["name"] == "range"
    assert data["statements"][0]["steps"] == [5.0]


def test_each_name_means_one_scalar():
    names = [name for scalar in SCALARS.values() for name in scalar.names]
    assert len(names) == len(set(names))


def test_each_command_of_the_page_runs(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs/howto/logs.md").read_text(encoding="utf-8")
    rows = [
        row | {"my/kl": row["actor/kl_loss"], "tokens": row["response_length/mean"]}
        for row in log_of("verl")
    ]
    monkeypatch.chdir(tmp_path)
    write(rows, tmp_path / "metrics.csv")
    commands = re.findall(r"^ {4}upref (logs .*)$", page, re.M)
    assert len(commands) == 3
    for command in commands:
        assert main(command.split()) == 0, (command, capsys.readouterr())


def test_rows_may_be_in_any_order(tmp_path):
    """Tokens since the start fall from row to row, and not from step to step."""
    rows = log_of("trl")
    (run,) = read(write(rows[::-1], tmp_path / "log.jsonl"))
    assert list(run.steps) == sorted(run.steps)
    assert not [s for s in audit(run).statements if s.name == "two runs"]


def test_a_kl_of_rloo_is_no_k3(tmp_path):
    """TRL's RLOO logs GRPO's names, and its kl is that of a reward: k1."""
    rows = [
        {name: x for name, x in row.items() if not name.startswith("sampling/")}
        for row in log_of("trl")
    ]
    rows = [row | {"kl": -0.02} for row in rows]
    (run,) = read(write(rows, tmp_path / "log.jsonl"))
    report = audit(run)
    assert not report.failures and not report.notes
    assert "k1" in [f.name for f in report.facts]


@pytest.mark.parametrize(("entropies", "fails"), [((-0.4, -0.3), 0), ((-0.4, 0.3), 1)])
def test_an_entropy_loss_may_be_minus_the_entropy(entropies, fails, tmp_path):
    rows = [
        {"step": n, "train/entropy_loss": x, "train/grad_norm": 0.3}
        for n, x in enumerate(entropies)
    ]
    (run,) = read(write_lines(rows, tmp_path / "log.jsonl"))
    assert len(audit(run).failures) == fails


def test_factors_that_are_means_may_exceed_that_of_the_mean_gap(tmp_path):
    rows = [
        row | {"sampling/importance_sampling_ratio/max": 2.9} for row in log_of("trl")
    ]
    (run,) = read(write(rows, tmp_path / "log.jsonl"))
    (found,) = [f for f in audit(run).facts if f.name == "of responses"]
    assert "or both numbers are means over several batches" in found.text
