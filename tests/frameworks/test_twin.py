# SPDX-License-Identifier: Apache-2.0
"""step_check: a two-layer twin of a run stops it where the trainer's step is wrong for
its family, and only there.
"""

import copy
from dataclasses import replace

import pytest
import torch

import upref
from docs import steps
from tests.support.daily import daily

transformers = pytest.importorskip("transformers")
from upref.step.inputs.families import tiny  # noqa: E402
from upref_frameworks.steps.twin import twin  # noqa: E402
from upref_frameworks.trl.twin import trl_twin  # noqa: E402


def test_a_twin_keeps_the_head_and_the_kinds_of_layers():
    """The small model has the softcaps, tied weights and kinds of attention of the
    large one, with a small window and an attention that runs here.
    """
    config = transformers.Gemma2Config(
        num_hidden_layers=26, sliding_window=4096, attn_implementation="sdpa"
    )
    net = twin(config).config
    assert (
        net.final_logit_softcapping,
        net.attn_logit_softcapping,
        net.tie_word_embeddings,
    ) == (30.0, 50.0, True)
    assert (
        net.layer_types == ["sliding_attention", "full_attention"]
        and net.sliding_window < 10
    )
    assert net.hidden_size == 32 and net._attn_implementation == "sdpa"
    assert (
        twin(
            config, attn_implementation="flash_attention_2"
        ).config._attn_implementation
        == "eager"
    )
    shared = transformers.LlamaConfig(num_attention_heads=32, num_key_value_heads=1)
    assert twin(shared).config.num_key_value_heads == 1


def test_what_has_no_twin_gets_a_sentence():
    with pytest.raises(upref.InputError, match="no two-layer twin of Linear"):
        twin(torch.nn.Linear(2, 2))


# ---- TRL -----------------------------------------------------------------------------
def trainer(family, **kw):
    """Return upref's trainer in TRL on a tiny model of this family, with the check of
    its step on. Skip without TRL.
    """
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    from upref_frameworks.trl.adapter import tokenizer
    from upref_frameworks.trl.step import default_config
    from upref_frameworks.trl.training import GRPOTrainer

    args = trl.GRPOConfig(**default_config().to_dict() | dict(
        temperature=0.7, per_device_train_batch_size=8, num_generations=4, gradient_accumulation_steps=2,
        steps_per_generation=4, generation_batch_size=None, report_to="none"))  # fmt: skip
    data = Dataset.from_list([{"prompt": "w3"}] * 8)

    def reward(completions, **_):
        return [0.0] * len(completions)

    return GRPOTrainer(tiny(family), reward, args, train_dataset=data, processing_class=tokenizer(),
                       objective="up_dapo", step_check=True, **kw)  # fmt: skip


@pytest.mark.trl
def test_a_right_family_trains_on_and_is_left_as_it_was():
    """The check agrees, and changes no random state, no state of accelerate and no
    weight.
    """
    from accelerate.state import AcceleratorState, PartialState

    before = copy.deepcopy(torch.get_rng_state())
    state, accelerated = (
        dict(PartialState._shared_state),
        dict(AcceleratorState._shared_state),
    )
    pytest.importorskip("trl")
    from upref_frameworks.trl.training import GRPOTrainer

    model = tiny("qwen3")
    weights = copy.deepcopy(model.state_dict())
    o = upref.get("up_dapo")
    report = trl_twin(GRPOTrainer, o, o.resolve({}), model)
    assert report and report.error < 2e-5, report
    assert torch.equal(before, torch.get_rng_state())
    assert (
        state == PartialState._shared_state
        and accelerated == AcceleratorState._shared_state
    )
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())


@pytest.mark.trl
@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_a_generation_may_make_as_many_steps_as_it_has_micro_batches(accumulation):
    pytest.importorskip("trl")
    from upref_frameworks.trl.step import default_config
    from upref_frameworks.trl.training import GRPOTrainer

    args, o = default_config(), upref.get("up_dapo")
    args.steps_per_generation = 4
    args.gradient_accumulation_steps = accumulation
    report = trl_twin(GRPOTrainer, o, o.resolve({}), tiny("qwen3"), args)
    assert report and report.error < 2e-5, report


@pytest.mark.nightly
@pytest.mark.trl
def test_a_family_for_which_trl_is_wrong_does_not_start():
    """TRL hands GPT-2 no positions beside its left padding (docs/steps.md)."""
    pytest.importorskip("trl")
    from upref_frameworks.parity import ParityError

    with pytest.raises(ParityError, match="positions count what precedes a row"):
        trainer("gpt2")
    assert trainer("qwen3").objective.name == "up_dapo"


# ---- verl ----------------------------------------------------------------------------
def twin_of_verl(config, **model):
    """Return the settings of the twin of a verl run with this model."""
    from upref_frameworks.verl.step import settings_of_twin

    actor = dict(strategy="fsdp", use_kl_loss=True, kl_loss_coef=0.04, kl_loss_type="low_var_kl", entropy_coeff=0.01,
                 use_dynamic_bsz=False)  # fmt: skip
    given = dict(
        hf_config=config, use_remove_padding=True, enable_gradient_checkpointing=True
    )
    return settings_of_twin(
        "up_grpo", upref.get("up_grpo").resolve({}), actor, given | model
    )


@pytest.mark.verl
@pytest.mark.nightly
@pytest.mark.parametrize("fused", [True, False])
def test_a_family_for_which_verl_is_wrong_does_not_start(fused):
    """verl's fused head drops Cohere's logit scale (docs/steps.md); the same run
    without it agrees.
    """
    pytest.importorskip("verl")
    from upref_frameworks.verl.step import stop_unless_twin_agrees

    config = transformers.CohereConfig()
    try:
        if not fused:
            assert "up_grpo: agrees" in stop_unless_twin_agrees(twin_of_verl(config))
            return
        with pytest.raises(RuntimeError, match="logit scale or softcap is left out"):
            stop_unless_twin_agrees(
                twin_of_verl(config, use_fused_kernels=True, use_remove_padding=False)
            )
    except upref.InputError as e:
        if "does not import" in str(e):
            pytest.skip("verl's trainer is not installed: `repro/venv.sh smoke`")
        raise


def test_a_twin_that_breaks_is_no_verdict():
    from upref_frameworks.verl.step import stop_unless_twin_agrees

    broken = replace(twin_of_verl(None), actor={})
    with pytest.raises(upref.InputError, match="step_check could not run: KeyError"):
        stop_unless_twin_agrees(broken)


@pytest.mark.verl
def test_a_strategy_without_a_twin_gets_a_sentence():
    pytest.importorskip("verl")
    from upref_frameworks.verl.step import settings_of_twin

    with pytest.raises(upref.InputError, match="strategy=megatron"):
        settings_of_twin("dapo", {}, dict(strategy="megatron"), {})


# ---- every objective -----------------------------------------------------------------
@pytest.mark.parametrize("name", daily(upref.names(), 8))
@pytest.mark.parametrize("plugin", [pytest.param(steps.by_trl, marks=pytest.mark.trl),
                                    pytest.param(steps.by_verl, marks=pytest.mark.verl)])  # fmt: skip
def test_a_plug_in_trains_by_every_objective(plugin, name):
    pytest.importorskip("trl" if plugin is steps.by_trl else "verl")
    try:
        assert plugin(name).error < 2e-5
    except upref.InputError as e:
        if "does not import" in str(e):
            pytest.skip("verl's trainer is not installed: `repro/venv.sh smoke`")
        needs = upref.get(name).needs
        assert needs and needs[0] in str(e)


@pytest.mark.trl
def test_a_plug_in_that_trains_by_another_objective_differs(monkeypatch):
    """On policy up_dapo and dapo have one gradient: the step that is compared has r off
    1.
    """
    pytest.importorskip("trl")
    from upref_frameworks.trl import step as trl

    whole = trl.report
    dapo = upref.get("dapo")

    def judged(model, fields, rows, o, hp, goal, **kw):
        return whole(model, fields, rows, dapo, {}, goal, **kw)

    monkeypatch.setattr(trl, "report", judged)
    assert steps.by_trl("dapo").error < 2e-5
    with pytest.raises(RuntimeError, match="NOT dapo"):
        steps.by_trl("up_dapo")
