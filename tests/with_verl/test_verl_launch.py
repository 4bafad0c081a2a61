# SPDX-License-Identifier: Apache-2.0
"""The installed verl accepts every method at every scale; what cannot work is refused in one sentence, status 2."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

import upref

NEED = "`repro/venv.sh verl` installs what verl's configuration needs"
core_algos = pytest.importorskip("verl.trainer.ppo.core_algos", reason=NEED)
from repro.with_verl.config import compose as c  # noqa: E402
from repro.with_verl.config.validate import validate  # noqa: E402
from repro.with_verl.data import schema  # noqa: E402
from repro.with_verl.machine import preflight  # noqa: E402
from repro.with_verl.machine.estimate import GB, estimate  # noqa: E402
from repro.with_verl.machine.preflight import VERL, Machine  # noqa: E402
from repro.with_verl.run import launch  # noqa: E402

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore:Disabled critic")]
RUNS = [n for n in upref.names() if n != "aspo_code"]
HERE = {"verl": VERL, "vllm": "0.24.0", "torch": "2.11.0", "ray": "2.60.0", "TransferQueue": "0.1.11"}
HERE["flash-attn"] = "2.8.3"
BIG = Machine(8, 85e9, "H100", 1e13, HERE, nodes=4)


@pytest.fixture(autouse=True)
def _runs_elsewhere(tmp_path, monkeypatch):
    """compose() of a real run writes below the checkout; here it must not."""
    monkeypatch.setattr(c, "RUNS", tmp_path)


@pytest.mark.parametrize("scale", c.scale_names())
def test_every_method_at_every_scale(scale):
    for name in RUNS:
        cfg = validate(c.compose(name, scale))
        loss = cfg.actor_rollout_ref.actor.policy_loss
        assert loss.loss_mode == f"upref/{c.load_scale(scale).loss.get(name, (name,))[0]}"
        assert cfg.actor_rollout_ref.rollout.val_kwargs.top_p == 0.7


def test_the_papers_methods_get_the_papers_experiments():
    data = c.paper()
    for name, experiment in data["experiments"].items():
        for method in experiment["methods"]:
            got = c.paper_scale(data["names"][method])[0]
            if not (name == "geo3k" or (name == "math" and method == "GSPO")):
                assert got == f"paper_{name}"
    scale, why = c.paper_scale("topr")
    assert scale == "paper_math" and "not in the paper" in why
    assert "not in the paper" in c.compose("topr", "paper").notes[0]


def test_what_up_dapo_at_the_papers_scale_is_given():
    cfg = validate(c.compose("up_dapo", "paper", ["trainer.nnodes=2", "data.seed=7"]))
    actor = cfg.actor_rollout_ref.actor
    assert dict(actor.policy_loss.upref) == {"eps_low": 0.2, "c": 10.0}
    assert (actor.loss_agg_mode, cfg.algorithm.adv_estimator) == ("token-mean", "grpo")
    assert (cfg.trainer.nnodes, cfg.data.seed, cfg.actor_rollout_ref.rollout.val_kwargs.n) == (2, 7, 32)
    assert cfg.algorithm.filter_groups.max_num_gen_batches == 0  # the V1 trainer would ignore another value


REFUSED = {
    "loss name": (["up_dappo", "paper"], "no objective is called 'up_dappo': did you mean up_dapo"),
    "scale": (["up_dapo", "papper"], "no scale is called 'papper': did you mean paper"),
    "key": (["up_dapo", "paper", "data.train_batchsize=4"], "did you mean data.train_batch_size?"),
    "type": (["up_dapo", "paper", "trainer.nnodes=two"], "trainer.nnodes must be a whole number, got 'two'"),
    "float": (["up_dapo", "paper", "actor_rollout_ref.rollout.n=2.5"], "rollout.n must be a whole number, got 2.5"),
    "bool": (["up_dapo", "paper", "data.shuffle=maybe"], "data.shuffle must be true or false, got 'maybe'"),
    "sweep": (["up_dapo", "paper", "data.seed=1,2"], "lists several values"),
    "grammar": (["up_dapo", "paper", "trainer.save_freq=["], "hydra cannot read trainer.save_freq"),
    "engine": (["up_dapo", "paper", "model_engine=megatrom"], "hydra cannot read model_engine=megatrom"),
    "no override": (["up_dapo", "paper", "quick"], "'quick' is no override"),
    "flag": (["up_dapo", "paper", "--dryrun"], "'--dryrun' is no override"),
    "choice": (["up_dapo", "paper", "actor_rollout_ref.actor.loss_agg_mode=mean"], "Invalid loss_agg_mode: mean"),
    "loss mode": (
        ["up_dapo", "paper", "actor_rollout_ref.actor.policy_loss.loss_mode=upref/up_dap"],
        "no policy loss is called 'upref/up_dap': did you mean 'upref/up_dapo'",
    ),
    "estimator": (["grpo", "paper", "algorithm.adv_estimator=grop"], "no advantage estimator is called 'grop'"),
    "clip": (["up_dapo", "paper", "actor_rollout_ref.actor.clip_ratio_low=0.3"], "does not read actor.clip_ratio_low"),
    "hyperparameter": (
        ["up_dapo", "paper", "++actor_rollout_ref.actor.policy_loss.upref.eps_high=0.3"], "hyperparameter 'eps_high'",
    ),
    "batch": (["up_dapo", "paper", "data.train_batch_size=48"], "must be a multiple of"),
    "replicas": (["gspo", "paper", "trainer.nnodes=1", "trainer.n_gpus_per_node=6"], "do not divide into vLLM"),
    "bypass": (["dapo", "paper", "algorithm.rollout_correction.bypass_mode=true"], "replaces every loss_mode"),
    "entropy": (["aspo_code", "paper"], "needs the policy's entropy"),
    "plug-in": (["up(sapo)", "paper"], "is not registered with verl"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_one_sentence_and_status_2(case, capsys):
    argv, sentence = REFUSED[case]
    assert launch.main([*argv, "--dry-run"]) == 2
    err = [x for x in capsys.readouterr().err.splitlines() if x.startswith("launch: ")]
    assert len(err) == 1 and sentence in err[0], err


@pytest.fixture
def ready(tmp_path, monkeypatch):
    """A run whose model and data are there: (arguments, the model's directory, the data directory)."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    data = tmp_path / "data"
    data.mkdir()
    for name in ("dapo_math_17k", "aime24"):
        schema.write(data / f"{name}.parquet", [schema.row("x", i, "Q", "1", "dapo", "test") for i in range(30)], {})
    args = ["up_dapo", "paper", f"actor_rollout_ref.model.path={model}", "--data", str(data)]
    return args, model, data


def without(what, ready):
    args, model, data = ready
    machine = Machine(**{**BIG.__dict__, "versions": dict(HERE)})
    match what:
        case "gpu":
            machine.gpus = 0
        case "gpus":
            machine.gpus = 4
        case "nodes":
            machine.nodes = 1
        case "gpu memory":
            machine.gpu_bytes = 16e9
        case "kv":
            args.append("actor_rollout_ref.rollout.gpu_memory_utilization=0.3")
        case "disk":
            machine.free_disk = 1e9
        case "verl version":
            machine.versions["verl"] = "0.8.0"
        case "vllm":
            machine.versions["vllm"] = None
        case "flash-attn":
            machine.versions["flash-attn"] = None
        case "data":
            (data / "aime24.parquet").unlink()
        case "rows":
            (data / "aime24.parquet").write_bytes(b"")
        case "schema":
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.table({"question": ["x"]}), data / "aime24.parquet")
        case "model":
            args[2] = f"actor_rollout_ref.model.path={model}/nothing"
        case "weights":
            (model / "model.safetensors").unlink()
    return launch.main(args, machine)


LACKS = {
    "gpu": "no GPU is visible here, and paper_dapo needs 4 x 8: take the scale mini or smoke",
    "gpus": "needs 8 GPUs a machine and 4 are visible",
    "nodes": "needs 4 machines and Ray knows 1: `ray start --head`",
    "gpu memory": "training needs about .* GB on each GPU, which has 16",
    "kv": "vLLM gets .* too little for the weights and one sequence of 22528 tokens",
    "disk": "has 1 GB free and checkpoints need",
    "verl version": "needs verl 0.9.1 and finds 0.8.0: pip install",
    "flash-attn": "flash-attn is not installed, and verl's models want it: pip install flash-attn==2.8.3",
    "vllm": "vllm is not installed",
    "data": r"aime24.parquet is missing: .*prepare aime24",
    "rows": "aime24.parquet is no data file of verl",
    "schema": "aime24.parquet .*prepare it again",
    "model": "the model .* is not on this machine: `hf download",
    "weights": "holds no config.json with .*safetensors",
}


@pytest.mark.parametrize("what", LACKS)
def test_the_preflight_refuses(what, ready, capsys):
    assert without(what, ready) == 2
    err = [x for x in capsys.readouterr().err.splitlines() if x.startswith("launch: ")]
    assert len(err) == 1 and re.search(LACKS[what], err[0]), err


def test_with_everything_there_verl_is_started_with_the_saved_command(ready, monkeypatch, capsys, tmp_path):
    started = {}

    class Verl:
        stdout = ("step:1\n",)

        def __init__(self, command, env, **_):
            started.update(command=command, env=env)

        def wait(self):
            return 7

    monkeypatch.setattr(preflight, "check_plugin", lambda *_: None)
    monkeypatch.setattr(launch.subprocess, "Popen", Verl)
    args, *_ = ready
    assert launch.main(args, BIG) == 7  # verl's own status
    saved = json.loads((tmp_path / "up_dapo-paper_dapo/overrides.json").read_text())
    assert saved["command"] == started["command"]
    assert started["env"]["VERL_USE_EXTERNAL_MODULES"].startswith("upref.verl_plugin,")
    assert all(row["source"] for row in saved["overrides"])
    assert (tmp_path / "up_dapo-paper_dapo/verl.log").read_text() == "step:1\n"
    assert "estimate: training" in capsys.readouterr().out


@pytest.mark.parametrize("name", [n for n in c.scale_names()])
def test_each_scale_fits_the_gpus_that_it_names(name):
    scale = c.load_scale(name)
    e = estimate(scale, validate(c.compose("grpo", name)), scale.gpu_gb * 1e9, 30)
    assert not e.problem, e
    assert e.train < scale.gpu_gb * GB and e.kv_tokens > 0


def test_an_estimate_is_arithmetic():
    scale = c.load_scale("paper_dapo")
    e = estimate(scale, validate(c.compose("up_dapo", "paper")), 80e9, 30)
    assert e.step_tokens == 512 * 16 * 20480 and e.validation_tokens == 30 * 32 * 20480
    kv_bytes = 2 * 40 * 8 * 128 * 2  # keys and values, layers, heads, dimension, bf16
    assert e.kv_tokens == pytest.approx((0.7 * 80e9 - 2 * 14.8e9 - 2e9) / kv_bytes)


@pytest.mark.parametrize(
    ("machine", "objective", "scale"),
    [
        (Machine(), "up_dapo", "mini"),
        (Machine(1, 25.7e9, "4090", nodes=1), "up_dapo", "gpu1"),
        (Machine(1, 8e9, "small", nodes=1), "up_dapo", "mini"),
        (Machine(8, 85e9, "H100", nodes=1), "up_dapo", "gpu1"),
        (Machine(8, 85e9, "H100", nodes=4), "up_dapo", "paper_dapo"),
        (Machine(8, 85e9, "H100", nodes=4), "up_gspo", "paper_gspo"),
        (Machine(8, 85e9, "H100", nodes=1), "up_grpo", "paper_math"),
    ],
)
def test_the_largest_scale(machine, objective, scale, capsys):
    assert launch.main([objective, "--largest"], machine) == 0
    assert capsys.readouterr().out.startswith(f"{scale}: ")


@pytest.mark.parametrize("scale", ["mini", "smoke"])
def test_scales_without_a_gpu_are_handed_over(scale, monkeypatch):
    called = []
    monkeypatch.setattr(
        launch.subprocess, "run", lambda cmd, **_: called.append(cmd) or subprocess.CompletedProcess([], 5)
    )
    assert launch.hand_over("up_dapo", scale, ["a=1"], dry_run=False) == 5
    module = {"mini": "repro.mini.study.compare", "smoke": "repro.with_verl.cpu.smoke"}[scale]
    assert called == [[sys.executable, "-m", module, "up_dapo", "a=1"]]


# ---- the advantages ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["group_norm", "group_mean", "leave_one_out", "signed", "reward"])
def test_verls_estimator_is_the_reference_where_it_is_said_to_be(name):
    from verl.trainer.config import AlgoConfig

    import repro.with_verl.plugins.estimators  # noqa: F401  registers

    estimator, settings_, _ = c.ESTIMATORS[name]
    torch.manual_seed(0)
    rewards = torch.randint(0, 2, (12,)).double()
    group = torch.arange(12) // 4
    mask = torch.arange(5)[None] < torch.randint(1, 6, (12, 1))
    token = torch.zeros(12, 5, dtype=torch.float64)
    token[torch.arange(12), mask.sum(1) - 1] = rewards
    config = AlgoConfig(adv_estimator=estimator)
    extra = {k.rpartition(".")[2]: v for k, v in settings_.items()}
    got, _ = core_algos.get_adv_estimator_fn(estimator)(
        token_level_rewards=token, response_mask=mask, index=np.array(group.tolist()), config=config, **extra
    )
    assert torch.allclose(got, upref.advantages.get(name)(rewards, group)[:, None] * mask, atol=1e-9)


def test_a_shaped_reward_is_signed_by_its_sign():
    from repro.with_verl.plugins.estimators import signed

    token = torch.tensor([[0.0, 0.4], [0.0, -1.5], [0.0, 1.0]])
    assert signed(token, torch.ones(3, 2))[0][:, 0].tolist() == [1.0, -1.0, 1.0]


def test_grpo_of_the_vision_table_has_two_bounds_and_grpos_average():
    from repro.with_verl.plugins.grpo_clip_higher import grpo_clip_higher as two
    from upref.regimes import batch

    b = batch(two)
    same = dict(eps_low=0.2, eps_high=0.2)
    assert torch.equal(two.gradient(b, **same), upref.get("grpo").gradient(b, eps=0.2))
    assert not torch.equal(two.gradient(b, eps_low=0.2, eps_high=0.28), two.gradient(b, **same))


def test_a_fresh_process_has_the_plug_in():
    """Loss and estimator, by the environment that driver and workers get."""
    preflight.check_plugin(c.compose("up_dapo", "paper"), "upref/up_dapo", "upref/signed")


def test_a_fresh_process_without_it_is_refused(monkeypatch):
    monkeypatch.setattr(c, "MODULES", ("no_such_module",))
    with pytest.raises(upref.InputError, match=r"a fresh process does not have upref/up_dapo .*no_such_module"):
        preflight.check_plugin(c.compose("up_dapo", "paper"), "upref/up_dapo", "grpo")
