# SPDX-License-Identifier: Apache-2.0
"""Stale data: what staleness means in a run."""

import json
import multiprocessing
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from repro.mini.experiment import plan, records
from repro.mini.train import loop
from repro.mini.train.checkpoint import Run
from repro.mini.train.settings import Settings
from upref.errors import InputError

ROOT = Path(__file__).parents[2]
S = Settings(
    steps=4, prompts=4, responses=4, minibatches=2, warmup=0, train_problems=100, eval_every=0, eval_problems=4,
    eval_samples=2, checkpoint_every=1, staleness=2, old_log_probs="recomputed", lean_eval=True,
)  # fmt: skip


# ---- a run ---------------------------------------------------------------------------
def test_responses_come_from_the_policy_of_s_rollouts_ago():
    run = Run(S)
    for step in range(6):
        next(run.policy.parameters()).data.fill_(step)
        assert next(run.sampler().parameters()).unique().item() == max(0, step - 2)
    assert len(run.ring) == 3, "no more snapshots than are needed"
    assert Run(replace(S, staleness=0)).sampler.__self__.ring == []


def test_lp_old_is_the_samplers_or_recomputed(tmp_path):
    """With one update a rollout a recomputed ratio is 1, whatever the staleness; the
    sampler's is not.
    """
    for old, exact in (("recomputed", True), ("sampler", False)):
        loop.train(
            replace(S, minibatches=1, old_log_probs=old),
            tmp_path / old,
            say=lambda _: None,
        )
        rows = [
            json.loads(line)
            for line in (tmp_path / old / "steps.jsonl").read_text().splitlines()
        ]
        ratios = [row["ratio_q"] for row in rows]
        assert np.allclose(ratios[0], 1, atol=1e-5), (
            "at the first step the sampler is the policy"
        )
        assert np.allclose(ratios[-1], 1, atol=1e-5) == exact


def test_killed_with_snapshots_in_the_ring(tmp_path):
    """kill -9 in step 3 and in step 4: the run ends as one that nothing happened to, to
    the bit.
    """
    loop.train(S, tmp_path / "whole", say=lambda _: None)
    out = tmp_path / "run"
    for last in ("checkpoints/step-2", "checkpoints/step-3", "done.json"):
        victim = multiprocessing.get_context("fork").Process(
            target=loop.train, args=(S, out)
        )
        victim.start()
        while victim.is_alive() and not (out / last).exists():
            time.sleep(0.002)
        if last == "done.json":
            victim.join()
        victim.kill()
        victim.join()
    for name in (
        "steps.jsonl",
        "evals.jsonl",
        f"checkpoints/step-{S.steps}/model.safetensors",
    ):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), (
            name
        )
    fresh = replace(S, staleness=0)
    loop.train(fresh, tmp_path / "fresh", say=lambda _: None)
    assert (tmp_path / "fresh/steps.jsonl").read_bytes() != (
        out / "steps.jsonl"
    ).read_bytes()


def test_settings_say_what_is_wrong_and_old_names_stay():
    for r in records.read_lines(plan.MINI / "round2/results/runs.jsonl")[:3]:
        assert Settings(**r["settings"]).key == r["name"], (
            "named before there was staleness"
        )
    for bad in ({"staleness": -1}, {"staleness": 1.5}, {"old_log_probs": "none"}):
        with pytest.raises(InputError, match=next(iter(bad))):
            Settings(**bad)
