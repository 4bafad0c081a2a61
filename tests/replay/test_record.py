# SPDX-License-Identifier: Apache-2.0
"""TRL's unmodified trainer, recorded: the files hold the step, the trainer trains as
before, and nothing stops it.
"""

import inspect
import logging
import textwrap
from dataclasses import replace

import pytest
import torch

import upref
from upref.cli import main
from upref.errors import InputError
from upref.replay import loss, normalizer, read_steps, record
from upref.replay.trainers import Schedule
from upref.step.compare.case import perturb, with_weights
from upref.step.inputs.families import tiny

trl = pytest.importorskip(
    "trl", reason="`repro/venv.sh trl` installs what TRL's losses need"
)
from trl.trainer import grpo_trainer  # noqa: E402

from upref_frameworks.trl import step  # noqa: E402

pytestmark = pytest.mark.trl
ROWS = step.batch()


def train(folder, steps=4, every=1, fields=None, base=trl.GRPOTrainer, **more):
    """Train a tiny model and record it; (what upref saw at the optimizer, the trainer)."""

    class Recorded(base):
        def __init__(self, *args, **kw):
            super().__init__(*args, **kw)
            if folder:
                self.recording = record(self, folder, every=every)

    logs = {"logging_strategy": "steps", "logging_steps": 1}
    return step.record_training(
        perturb(tiny("qwen3")), logs | (fields or {}), ROWS, steps, Recorded, **more
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dumps")
    seen, trainer = train(folder)
    return folder, seen, trainer


def test_the_files_hold_the_steps_of_trls_log(run):
    folder, _, trainer = run
    logged = {h["step"]: h["loss"] for h in trainer.state.log_history if "loss" in h}
    batches = list(read_steps([folder]))
    assert [b.step for b in batches] == [1, 2, 3, 4]
    for b in batches:
        assert b.logged["loss"] == pytest.approx(logged[b.step], rel=1e-6)
        assert b.micro.tolist() == [0, 0, 1, 1]
        assert b.meta["framework"].startswith("TRL ") and b.meta["loss_type"] == "dapo"
    assert [b.version.unique().tolist() for b in batches] == [[1], [1], [3], [3]]


def row_of(b, i):
    """The row of which response i of a recorded batch is."""
    return next(r for r in ROWS if r.response == b.ids[i][: len(r.response)].tolist())


def test_tokens_rewards_and_prompts_are_those_of_the_rows(run):
    for b in read_steps([run[0]]):
        for i in range(len(b.ids)):
            row = row_of(b, i)
            assert b.mask[i].tolist()[: len(row.trains)] == [
                bool(t) for t in row.trains
            ]
            assert not b.mask[i][len(row.trains) :].any()
            assert (
                b.reward[i] == pytest.approx(row.adv, rel=1e-6)
                and b.group[i] == row.group
            )


def test_the_logged_loss_and_the_gradient_are_the_objectives(run):
    for b in read_steps([run[0]]):
        found = loss(b, "dapo", eps_high=0.2)
        assert found and not found.findings and "count of 21.5 tokens" in found.found
        assert found.value == pytest.approx(found.logged, abs=1e-6)
        one = normalizer(b, "dapo", eps_high=0.2)
        assert one.found == found.found and one.factor == pytest.approx(1, abs=1e-6)


def test_the_recorded_gradient_gives_the_gradient_at_the_optimizer(run):
    """Σ_t dL/dlp_t dlp_t/dθ, by a float64 copy of the model, is what the optimizer was
    handed.
    """
    folder, seen, _ = run
    for b, at in zip(read_steps([folder]), seen.steps, strict=True):
        model = with_weights(seen.model, at)
        model.net.zero_grad()
        for i in range(len(b.ids)):
            row = row_of(b, i)
            logits = model.net(torch.tensor([row.ids])).logits[0]
            before = logits[len(row.prompt) - 1 : -1] / 0.7
            tokens = torch.tensor(row.response)[:, None]
            lp = before.log_softmax(-1).gather(1, tokens)[:, 0]
            (lp * b.grad[i][: len(lp)]).sum().backward()
        found = {
            name: p.grad
            for name, p in model.net.named_parameters()
            if p.grad is not None
        }
        off, size = 0.0, 0.0
        for name, g in at.gradients.items():
            off += float((found[name] - g).square().sum())
            size += float(g.square().sum())
        assert off**0.5 < 1e-5 * size**0.5


def test_the_gradients_are_those_of_a_run_that_is_not_recorded(run):
    seen, _ = train(None)
    for one, other in zip(seen.steps, run[1].steps, strict=True):
        assert all(
            torch.equal(g, other.gradients[name]) for name, g in one.gradients.items()
        )


def test_the_command_reads_the_folder(run, capsys):
    """Loss and gradient agree at all four steps, with one line for each."""
    main(
        [
            "replay",
            str(run[0]),
            "--as",
            "dapo",
            "--hp",
            "eps_high=0.2",
            "--only",
            "loss",
        ]
    )
    out = capsys.readouterr().out
    said = " ".join(out.split())
    assert "FAIL" not in said
    # one line for all steps, whose counts differ
    for words in (
        "loss: it is the",
        "loss: dL/dlp of the recorded tokens is that of the",
    ):
        assert said.count(f"ok {words} token-mean over the framework's count") == 1
    assert said.count("at all 4 steps") == 2


def test_what_trl_did_not_compute_is_asked_for_by_its_setting(run, capsys):
    assert main(["replay", str(run[0]), "--only", "sampler"]) == 2
    assert "TRL has it with GRPOConfig.use_vllm=True" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_correction_of_the_sampler_is_recorded_and_enters(tmp_path):
    """As with vLLM: TRL multiplies each token's term by a ratio that it computed from
    the sampler's column.
    """

    class Corrected(trl.GRPOTrainer):
        def _compute_loss(self, model, inputs):
            """Run TRL's loss with a correction of the sampler, drawn by the step's
            number, as if vLLM were used.
            """
            mask = inputs["completion_mask"]
            generator = torch.Generator().manual_seed(int(self.state.global_step))
            inputs["importance_sampling_ratio"] = 0.5 + torch.rand(
                mask.shape, generator=generator
            )
            inputs["sampling_per_token_logps"] = inputs["old_per_token_logps"] - 0.01
            self.use_vllm, used = True, self.use_vllm
            try:
                return super()._compute_loss(model, inputs)
            finally:
                self.use_vllm = used

    train(tmp_path, 2, base=Corrected)
    for b in read_steps([tmp_path]):
        assert b.correction[b.mask].std() > 0.1 and torch.allclose(
            b.sampler[b.mask], b.old[b.mask] - 0.01, atol=1e-6
        )
        found = loss(b, "dapo", eps_high=0.2)
        assert (
            found
            and not found.findings
            and found.value == pytest.approx(found.logged, abs=1e-6)
        )
        assert normalizer(b, "dapo", eps_high=0.2).factor == pytest.approx(1, abs=1e-6)
        bare = loss(replace(b, correction=None), "dapo", eps_high=0.2)
        assert "gradient_other" in [f.cause for f in bare.findings]


def test_an_entropy_bonus_is_no_other_loss(tmp_path):
    """The logged loss has it and dL/dlp has not: the first tells nothing, the second
    everything.
    """
    train(tmp_path, 2, fields={"entropy_coef": 0.1})
    for b in read_steps([tmp_path]):
        found = loss(b, "dapo", eps_high=0.2)
        assert [f.cause for f in found.findings] == [
            "extra_terms"
        ] and "an entropy bonus" in str(found.findings[0])
        assert found.gradient.startswith("token-mean")


def test_the_folder_says_what_it_holds(run, caplog, tmp_path):
    assert "users' texts" in (run[0] / "README.txt").read_text()
    with caplog.at_level(logging.WARNING):
        upref.replay.record(run[2], tmp_path / "other").stop()
    assert "users' texts" in caplog.text


# ---- the old divisor of TRL ----------------------------------------------------------
LINE = "normalizer = normalizer * self.current_gradient_accumulation_steps / self.args.steps_per_generation"


def old_trainer():
    """Return TRL's trainer class without the line that huggingface/trl#6024 added: it
    divides by the whole generation batch.
    """
    source = textwrap.dedent(inspect.getsource(trl.GRPOTrainer._compute_loss))
    assert source.count(LINE) == 1
    space = {}
    exec(source.replace(LINE, "pass"), vars(grpo_trainer), space)
    return type(
        "OldTrainer", (trl.GRPOTrainer,), {"_compute_loss": space["_compute_loss"]}
    )


def test_the_divisor_of_6024_is_named(tmp_path, capsys):
    """TRL's old divisor is recognized in the recorded loss and in the gradient."""
    train(tmp_path, 2, base=old_trainer())
    for b in read_steps([tmp_path]):
        found = loss(b, "dapo", eps_high=0.2)
        assert [f.cause for f in found.failures] == ["other_sum", "gradient_other_sum"]
        assert all(
            "43 tokens of the whole generation batch" in str(f) for f in found.failures
        )
    assert (
        main(
            [
                "replay",
                str(tmp_path),
                "--as",
                "dapo",
                "--hp",
                "eps_high=0.2",
                "--only",
                "loss",
            ]
        )
        == 1
    )
    assert "43 tokens of the whole generation batch" in " ".join(
        capsys.readouterr().out.split()
    )


# ---- what goes wrong -----------------------------------------------------------------
def test_a_folder_that_vanishes_stops_the_recording_and_not_the_run(tmp_path, caplog):
    """The folder is renamed before the second step: training goes on, and the trainer's
    methods are its own again.
    """
    folder = tmp_path / "dumps"

    class Vanishing(trl.GRPOTrainer):
        def training_step(self, *args, **kw):
            if self.state.global_step == 1:
                folder.rename(tmp_path / "gone")
            return super().training_step(*args, **kw)

    logging.getLogger("upref.replay.record").addHandler(caplog.handler)
    _, trainer = train(
        folder, 3, base=Vanishing, fields={"gradient_accumulation_steps": 1}
    )
    assert trainer.state.global_step == 3
    assert [p.name for p in (tmp_path / "gone").glob("*.npz")] == [
        "step000001-rank0000.npz"
    ]
    assert not any(name in vars(trainer) for name in ("_compute_loss", "training_step"))


def test_stop_leaves_the_trainer_as_it_was(run, tmp_path):
    trainer = run[2]
    before = dict(vars(trainer))
    with record(trainer, tmp_path):
        assert trainer._compute_loss != before["_compute_loss"]
    assert vars(trainer)["_compute_loss"] == before["_compute_loss"]


@pytest.mark.parametrize(
    ("every", "said"),
    [(0, "1 or more"), (True, "1 or more"), (2.5, "1 or more")],
    ids=["0", "True", "2.5"],
)
def test_every_is_a_whole_number(every, said, tmp_path, run):
    with pytest.raises(InputError, match=said):
        record(run[2], tmp_path, every=every)


def test_what_cannot_be_recorded_is_one_sentence(tmp_path, run):
    with pytest.raises(
        InputError,
        match="an object of class int cannot be recorded: the trainers that can are TRL's GRPOTrainer",
    ):
        record(3, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="name another folder"):
        record(run[2], tmp_path / "file")


def test_the_first_step_and_then_every_fiftieth():
    assert [n for n in range(1, 160) if Schedule(50).due(n)] == [1, 50, 100, 150]
