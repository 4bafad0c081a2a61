# SPDX-License-Identifier: Apache-2.0
"""The report says what runs have logged, and what went wrong in them."""

import json

import pytest

pytest.importorskip(
    "omegaconf", reason="`repro/venv.sh verl` installs it, on Python 3.11 and 3.12"
)
from repro.with_verl import health, report
from repro.with_verl.run import records, start


def row(step, **other):
    data = {records.STEP: step, report.SCORE: step / 10, report.ENTROPY: 2.0, report.NORM: 1.0, report.KL: step / 1e4,
            "actor/upref/alive": 0.9, "actor/upref/parity_of_bound": 0.1, "actor/upref/parity_alarms": 0.0,
            "timing_s/step": 60.0, "perf/total_num_tokens": 1e6, "perf/throughput": 500.0}  # fmt: skip
    return {"step": step, "data": data | other}


def run(place, name, objective, scale, steps, seed=1, **other):
    """Write the folder of a run with these logged steps; return it."""
    folder = place / name
    folder.mkdir()
    lines = [{"override": f"data.seed={seed}", "source": "x"}]
    facts = {
        "objective": objective,
        "scale": scale,
        "total": 9,
        "overrides": lines,
    } | other
    (folder / "overrides.json").write_text(json.dumps(facts))
    (folder / "steps-20260101-000000.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in steps)
    )
    return folder


def validated(step, mean, task="aime24", n=32):
    """Return a logged row with the scores of a validation."""
    kinds = {
        "best@2/mean": 0.01,
        "maj@2/mean": 0.99,
        f"mean@{n}": mean,
        f"maj@{n}/mean": mean + 0.1,
        f"best@{n}/mean": mean + 0.3,
        f"best@{n}/std": 0.1,
    }
    return row(step, **{f"val-core/{task}/acc/{k}": v for k, v in kinds.items()})


def text_of(out, *folders):
    assert report.main([*map(str, folders), "--out", str(out)]) == 0
    return (out / "report.md").read_text()


def test_curves_and_numbers_beside_the_estimate(tmp_path):
    """Two runs, one with an estimate of its time and memory."""
    estimate = {"step_seconds": 45.0, "step_tokens": 2_000_000, "train_gb": 40.0}
    up = run(
        tmp_path,
        "up",
        "up_dapo",
        "paper_dapo",
        [validated(s, s / 20) for s in range(1, 10)],
        estimate=estimate,
    )
    base = run(
        tmp_path,
        "base",
        "dapo",
        "paper_dapo",
        [validated(s, s / 25) for s in range(1, 10)],
    )
    text = text_of(tmp_path / "out", up, base)
    svg = (tmp_path / "out/curves.svg").read_text()
    assert "](curves.svg)" in text and svg.count("<path") > 20
    for label in report.PANELS.values():
        assert label in text
    assert "| up_dapo seed 1 | seconds a step | 60 | 60 | 45 |" in text
    assert "2,000,000" in text
    assert report.read(up).series("mean@")[1][-1] == 9 / 20
    assert report.read(up).series("best@")[1][-1] == pytest.approx(9 / 20 + 0.3)


def test_alarms_come_first(tmp_path):
    """Alarms, blind steps, steps that were not logged and numbers that are missing are
    above the curves.
    """
    rows = [
        row(1),
        row(2, **{health.ALARMS: 3.0, health.BOUND: 1e4, health.FAILURES: 2.0}),
        row(5, **{health.BLIND: 0.9, report.NORM: None}),
    ]
    text = text_of(tmp_path / "out", run(tmp_path, "r", "up_dapo", "gpu1", rows))
    head = text[: text.index("## Curves")]
    assert (
        "PARITY ALARM" in head
        and "1e+04 times" in head
        and "by parity.on_fail=warn" in head
    )
    assert "parity proves little here: up to 90%" in head
    assert (
        "In 2 of the steps that were judged" in head and "/steps --as up_dapo`" in head
    )
    assert (
        "2 steps were not logged, the first is 3" in head
        and "no number in 1 steps, the first is 5" in head
    )


def test_each_seed_is_a_run(tmp_path):
    folders = [
        run(
            tmp_path,
            f"s{i}",
            "dapo",
            "gpu8",
            [validated(s, i / 10) for s in (1, 2)],
            seed=i,
        )
        for i in (1, 2, 3)
    ]
    text = text_of(tmp_path / "out", *folders)
    assert all(f"dapo seed {i}" in text for i in (1, 2, 3))
    assert (tmp_path / "out/curves.svg").stat().st_size > 10_000


def test_what_cannot_be_read(tmp_path, capsys):
    assert report.main([str(tmp_path / "nothing")]) == 2
    (tmp_path / "empty").mkdir()
    assert report.main([str(tmp_path / "empty")]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 2 and all(x.startswith("report: ") for x in err)


def test_starts_are_read_as_one_and_the_last_counts(tmp_path):
    """The logs of two starts are merged; of a step that both have the later counts, and
    a line that was cut is dropped.
    """
    first, second = (
        tmp_path / "steps-20260101-000000.jsonl",
        tmp_path / "steps-20260102-000000.jsonl",
    )
    first.write_text(
        "".join(json.dumps(row(s)) + "\n" for s in (1, 2, 3)) + '{"step": 4, "da'
    )
    second.write_text(
        "".join(json.dumps(row(s, **{report.SCORE: 9.0})) + "\n" for s in (3, 4))
    )
    merged = records.merged(tmp_path)
    assert [(r["step"], r["data"][report.SCORE]) for r in merged] == [
        (1, 0.1),
        (2, 0.2),
        (3, 9.0),
        (4, 9.0),
    ]
    whole = records.read(records.collect(tmp_path))
    assert whole == merged and not (tmp_path / "steps.jsonl.half").exists()


@pytest.mark.parametrize(
    ("said", "cure"),
    [
        (
            "torch.OutOfMemoryError: CUDA out of memory.",
            "lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        ),
        (
            "ValueError: No available memory for the cache blocks",
            "vLLM found too little memory",
        ),
        (
            "(TaskRunner pid=3) \x1b[36mOSError: [Errno 28] No space left on device",
            "the disk is full",
        ),
        (
            "ParityError: upref/dapo is not what trains: in micro-batch 3",
            "`upref replay FOLDER` compares them",
        ),
        (
            "[Rank 3] Watchdog caught collective operation timeout",
            "the machines lost each other (NCCL)",
        ),
        (
            "ImportError: a.so: undefined symbol: _ZN3c10",
            "a package was built for another torch",
        ),
        (
            "upref.errors.InputError: verl adds the KL term: set actor.use_kl_loss",
            "set actor.use_kl_loss",
        ),
        ("ValueError: no such thing", "its last error was: ValueError: no such thing"),
        ("all is quiet", "its output names no error"),
    ],
)
def test_what_to_do_when_it_dies(said, cure, tmp_path):
    (tmp_path / "log").write_text(f"a line\n{said}\nanother\n")
    assert cure in start.advice.cure(tmp_path / "log", "RUN")


HEALTHY = {"response_length/clip_ratio": 0.1, "training/rollout_probs_diff_mean": 0.001, "critic/score/max": 1.0,
           "response/aborted_ratio": 0.0, "training/rollout_actor_probs_pearson_corr": 0.999}  # fmt: skip
SICK = {
    "response_length/clip_ratio": (
        0.7,
        "allow longer ones (verl: data.max_response_length",
    ),
    "training/rollout_probs_diff_mean": (0.2, "vLLM and the trainer disagree"),
    "training/rollout_actor_probs_pearson_corr": (0.5, "vLLM and the trainer disagree"),
    "critic/score/max": (0.0, "no response scored"),
    "response/aborted_ratio": (0.2, "vLLM aborted responses"),
    "actor/upref/alive": (0.2, "most tokens are clipped"),
    "actor/upref/parity_of_bound": (3.0, "the loss that trained is not the reference"),
    "timing_s/step": (
        200.0,
        "steps take 2.0 times the estimate: the run will cost 1,000 dollars",
    ),
}


def test_a_healthy_run_has_nothing_to_change(tmp_path):
    estimate = {"step_seconds": 100.0, "dollars": 500.0, "gpus": 8, "gpu_hours": 160.0}
    folder = run(
        tmp_path,
        "fine",
        "up_dapo",
        "gpu8",
        [row(s, **HEALTHY) for s in (1, 2)],
        estimate=estimate,
    )
    text = text_of(tmp_path / "out", folder)
    assert "Nothing to change." in text and "LOOK" not in text
    assert text.index("## Health of up_dapo seed 1") < text.index("## Curves")


@pytest.mark.parametrize("key", SICK)
def test_each_measure_that_is_not_normal_says_what_to_change(key, tmp_path):
    value, said = SICK[key]
    rows = [row(s, **HEALTHY | {key: value}) for s in (1, 2)]
    page = health.page(
        tmp_path, rows, {"estimate": {"step_seconds": 100.0, "dollars": 500.0}}
    )
    assert "LOOK" in page and said in page


def test_a_shakedown_shows_eight_answers_in_full(tmp_path):
    """The page shows eight answers of the last step, in a fence longer than any that
    they hold.
    """
    (tmp_path / "answers").mkdir()
    answers = [
        {
            "input": "Q",
            "output": f"thought {i} ~~~ \\boxed{{{i}}}",
            "gts": "3",
            "score": float(i == 3),
        }
        for i in range(16)
    ]
    for step in (2, 10):
        (tmp_path / f"answers/{step}.jsonl").write_text(
            "".join(json.dumps(a) + "\n" for a in answers[: step + 6])
        )
    page = health.page(tmp_path, [row(1, **HEALTHY)], {})
    assert (
        "Of 16 responses that were scored last, 100% hold `Answer:` or a box, 6% score above 0."
        in page
    )
    assert "| responses ended by a stop token | 0.9 |" in page
    # a fence longer than what the model wrote
    assert page.count("\nthought") == 8 and "~~~~text\n" in page


def test_a_reward_that_reads_no_box_is_not_blamed_for_it(tmp_path):
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers/1.jsonl").write_text(
        json.dumps({"output": "3 3", "gts": "3", "score": 1.0}) + "\n"
    )
    path = "reward.custom_reward_function.path=pkg://"
    pages = [
        health.page(
            tmp_path, [row(1, **HEALTHY)], {"overrides": [{"override": path + module}]}
        )
        for module in ("repro.with_verl.reward.score", "repro.with_verl.cpu.toy")
    ]
    assert "most responses contain no answer" in pages[0] and "0% hold" in pages[0]
    assert "Nothing to change." in pages[1] and "hold `Answer:`" not in pages[1]


def test_what_is_left_is_predicted_again_from_a_measured_step():
    estimate = {"step_seconds": 100.0, "dollars": 500.0, "gpu_hours": 250.0, "gpus": 8}
    said = start.predicted_again(estimate, 180.0, 100)
    assert (
        "measured 180 s a step: the 100 steps that are left take 5.0 hours, 40 GPU-hours, 80 dollars"
        in said
    )
    assert start.predicted_again({}, 180.0, 100).endswith("take 5.0 hours")
