# SPDX-License-Identifier: Apache-2.0
"""The sampler says what the policy says, token by token, and a saved policy is the same
policy.
"""

import importlib.util

import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    DynamicCache,
    Qwen2VLImageProcessorPil,
    set_seed,
)

from repro.mini import tasks
from repro.mini.policy import bases, models
from repro.mini.policy.sample import nucleus, sample
from repro.mini.policy.tokens import tokenizer
from repro.mini.tasks import EOS, PAD
from upref.errors import InputError

KINDS = [("qwen3", "countdown"), ("qwen3_moe", "chain"), ("qwen3_vl", "geometry")]
each_kind = pytest.mark.parametrize(("kind", "task_name"), KINDS)


def untrained(kind, task_name, n=6):
    task = tasks.get(task_name)
    problems = task.problems("test", n, 0)
    return task, models.new(kind, task, seed=1), models.inputs(task, problems)


def all_logits(model, prompts, of, tokens):
    """Return the logits [N, T, V], as if no response ended before its last token."""
    found = models.response_logits(
        model, prompts, of, tokens, torch.ones_like(tokens, dtype=torch.bool)
    )
    return found.view(*tokens.shape, -1)


@each_kind
def test_decoding_step_by_step_is_one_forward_pass(kind, task_name):
    task, model, prompts = untrained(kind, task_name)
    tokens, mask, logits, state = sample(
        model, prompts, 4, task.response_length, tasks.generator(0)
    )
    with torch.no_grad():
        whole = models.response_logits(
            model, prompts, torch.arange(6).repeat_interleave(4), tokens, mask
        )
    torch.testing.assert_close(logits[state[mask]], whole, atol=1e-4, rtol=1e-4)


@each_kind
def test_a_prompt_of_another_row_changes_nothing(kind, task_name):
    task, model, prompts = untrained(kind, task_name)
    tokens = sample(model, prompts, 1, task.response_length, tasks.generator(0)).tokens
    alone = {name: x[2:3] for name, x in prompts.items()}
    with torch.no_grad():
        together = all_logits(model, prompts, torch.arange(6), tokens)[2:3]
        by_itself = all_logits(model, alone, torch.zeros(1).long(), tokens[2:3])
    torch.testing.assert_close(by_itself, together, atol=1e-5, rtol=1e-4)


@each_kind
def test_what_was_sampled_can_be_trained_on_even_of_one_token(kind, task_name):
    """The sampler works in inference mode, whose tensors autograd refuses; none of them
    may come out or stay behind.
    """
    task, model, prompts = untrained(kind, task_name)
    tokens, mask, logits, state = sample(
        model, prompts, 2, task.response_length, tasks.generator(0)
    )
    assert not any(x.is_inference() for x in (tokens, mask, logits, state))
    of = torch.arange(6).repeat_interleave(2)
    for length in (task.response_length, 1):
        trained = all_logits(model, prompts, of, tokens[:, :length])
        said = logits[state[:, :length]]
        assert trained.shape == said.shape
        (trained - said).square().sum().backward()


@each_kind
def test_saved_and_loaded_is_the_same_policy(kind, task_name, tmp_path):
    task, model, prompts = untrained(kind, task_name)
    models.save(tmp_path / "policy", model, tokenizer(task))
    again = models.load(tmp_path / "policy", task)
    tokens = torch.full((6, task.response_length), 3)
    with torch.no_grad():
        assert torch.equal(
            *(all_logits(m, prompts, torch.arange(6), tokens) for m in (model, again))
        )
    words = AutoTokenizer.from_pretrained(tmp_path / "policy", local_files_only=True)
    assert (words.pad_token_id, words.eos_token_id, words.bos_token_id) == (PAD, EOS, 2)
    assert (
        words.decode([3, 4], skip_special_tokens=True)
        == f"{task.words[3]} {task.words[4]}"
    )
    assert again.generation_config.eos_token_id == EOS


@each_kind
def test_reading_a_prompt_once_is_reading_it_with_every_response(kind, task_name):
    """Against the model's own forward pass over whole sequences; the gradients agree
    too.
    """
    task, model, prompts = untrained(kind, task_name, 3)
    of = torch.tensor([0, 1, 1, 2, 2, 2])
    tokens = torch.randint(
        3, 10, (6, task.response_length), generator=tasks.generator(0)
    )
    grads = []
    for whole in (False, True):
        model.zero_grad()
        logits = (whole_sequences if whole else all_logits)(model, prompts, of, tokens)
        logits.log_softmax(-1).gather(-1, tokens[..., None]).sum().backward()
        grads.append(
            (
                logits.detach(),
                torch.cat(
                    [p.grad.flatten() for p in model.parameters() if p.grad is not None]
                ),
            )
        )
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(
            mine, theirs, rtol=1e-3, atol=1e-4 * theirs.abs().max().item()
        )


def whole_sequences(model, prompts, of, tokens):
    """Return transformers' logits of the responses to prompts, pictures included,
    without a cache.
    """
    ids = torch.cat([prompts["input_ids"][of], tokens[:, :-1]], 1)
    pictures = {}
    if "pictures" in prompts:
        processor = Qwen2VLImageProcessorPil(
            patch_size=8,
            size={"shortest_edge": 1, "longest_edge": 10**6},
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
        )
        pixels = ((prompts["pictures"] + 1) * 127.5).round().to(torch.uint8)[of]
        pictures = processor(list(pixels), return_tensors="pt")
        pictures["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    return model(input_ids=ids, logits_to_keep=tokens.shape[1], **pictures).logits


@pytest.fixture(scope="module")
def eyes(tmp_path_factory):
    """Return the folder of a saved policy with pictures, its problems as pictures and
    texts, and what `read_prompts` gives the model.
    """
    task, model, prompts = untrained("qwen3_vl", "geometry")
    folder, given, forward = tmp_path_factory.mktemp("eyes"), {}, model.forward
    models.save(folder, model, tokenizer(task))
    model.forward = lambda **inputs: given.update(inputs) or forward(**inputs)
    models.read_prompts(model, prompts, torch.arange(6))
    pixels = ((prompts["pictures"] + 1) * 127.5).round().to(torch.uint8)
    pictures = [Image.fromarray(p.permute(1, 2, 0).numpy()) for p in pixels]

    def question(ids):
        return " ".join(task.words[i] for i in ids[-2:])

    texts = [
        f"<|vision_start|> <|image_pad|> <|vision_end|> {question(row)}"
        for row in prompts["input_ids"].tolist()
    ]
    return folder, pictures, texts, given


def test_the_saved_image_processor_cuts_the_policys_patches(eyes):
    folder, pictures, _, given = eyes
    found = Qwen2VLImageProcessorPil.from_pretrained(folder)(
        pictures, return_tensors="pt"
    )
    assert torch.equal(found["image_grid_thw"], given["image_grid_thw"])
    torch.testing.assert_close(
        found["pixel_values"], given["pixel_values"], rtol=0, atol=1e-6
    )


def test_the_processor_s_image_tokens_are_one_token_each(eyes):
    words = AutoTokenizer.from_pretrained(eyes[0], local_files_only=True)
    text = f"<|vision_start|>{'<|image_pad|>' * 9}<|vision_end|> area sum"
    assert torch.equal(
        torch.tensor(words(text).input_ids[:-2]), eyes[3]["input_ids"][0, :-2]
    )


@pytest.mark.skipif(
    not importlib.util.find_spec("torchvision"),
    reason="transformers' AutoProcessor needs torchvision",
)
def test_transformers_loads_the_policy_with_its_processor(eyes):
    folder, pictures, texts, given = eyes
    processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
    asked = processor(images=pictures, text=texts, return_tensors="pt")
    for name in ("input_ids", "image_grid_thw", "mm_token_type_ids"):
        assert torch.equal(asked[name].long(), given[name].long())
    torch.testing.assert_close(
        asked["pixel_values"], given["pixel_values"], rtol=0, atol=1e-6
    )
    again = AutoModelForImageTextToText.from_pretrained(folder, local_files_only=True)
    with torch.no_grad():
        assert again(**asked).logits.shape == (6, 14, 60)


def test_samples_follow_the_policy():
    """First tokens of 20000 responses to one prompt against its softmax: chi-square,
    106 degrees of freedom.
    """
    task, model, prompts = untrained("qwen3", "countdown", 1)
    for temperature in (1.0, 0.6):
        tokens, _, logits, _ = sample(
            model, prompts, 20000, 1, tasks.generator(1), temperature
        )
        expected = 20000 * (logits[0] / temperature).softmax(-1)
        seen = tokens[:, 0].bincount(minlength=len(task.words))
        enough = expected >= 5
        # p < 1e-4 beyond
        assert ((seen - expected)[enough] ** 2 / expected[enough]).sum() < 170


def test_the_generator_decides_alone():
    """Find the same tokens for the same seed whatever the global seed is, and others
    for another.
    """
    task, model, prompts = untrained("qwen3", "countdown")

    def draw(seed):
        return sample(
            model, prompts, 3, task.response_length, tasks.generator(seed)
        ).tokens

    first = draw(0)
    set_seed(99)
    assert torch.equal(first, draw(0))
    assert not torch.equal(first, draw(1))


def test_after_eos_comes_padding():
    task, model, prompts = untrained("qwen3", "chain", 200)
    tokens, mask, _, _ = sample(
        model, prompts, 2, task.response_length, tasks.generator(0)
    )
    assert mask.sum(1).min() < task.response_length
    assert (tokens[~mask] == PAD).all()
    ended = (tokens == EOS).any(1)
    assert (tokens.gather(1, mask.sum(1, keepdim=True) - 1)[ended] == EOS).all()


def test_nucleus_keeps_the_fewest_that_hold_top_p():
    p = torch.tensor([[0.1, 0.5, 0.15, 0.25], [0.7, 0.1, 0.1, 0.1]])
    assert (
        nucleus(p, 0.7).tolist()
        == torch.tensor([[0, 0.5, 0, 0.25], [0.7, 0, 0, 0]]).tolist()
    )
    assert nucleus(p, 1.0) is p


def test_transformers_itself_samples_the_same_distribution():
    """Mean length of what `generate` draws and of what `sample` draws, within four
    standard errors.
    """
    task, model, prompts = untrained("qwen3", "chain", 1)
    n = 2000
    mine = (
        sample(model, prompts, n, task.response_length, tasks.generator(0))
        .mask.sum(1)
        .double()
    )
    set_seed(0)
    ids = prompts["input_ids"].expand(n, -1)
    theirs = model.generate(
        ids,
        do_sample=True,
        top_k=0,
        max_new_tokens=task.response_length,
        past_key_values=DynamicCache(),
    )
    theirs = tasks.response_mask(theirs[:, task.prompt_length :]).sum(1).double()
    assert (
        abs(mine.mean() - theirs.mean())
        < 4 * (mine.var() / n + theirs.var() / n).sqrt()
    )


def test_a_base_built_again_is_compared_weight_by_weight(monkeypatch, capsys):
    committed = bases.load("walk", "countdown")
    monkeypatch.setattr(bases, "build", lambda *_: committed)
    before = bases.files.checked(bases.ROOT / "walk")
    assert bases.main(["walk", "--check"]) == 0
    with torch.no_grad():
        committed.model.norm.weight[0] += 1e-6
    assert bases.main(["walk", "--check"]) == 1
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .startswith("repro/mini/bases/walk: 1 of ")
    )
    assert bases.files.checked(bases.ROOT / "walk") == before


def test_what_is_no_policy_is_one_sentence(tmp_path):
    """Load an empty folder, a policy of another task, and weights that are cut off."""
    task, model, _ = untrained("qwen3", "countdown")
    with pytest.raises(InputError, match="is not a policy that can be loaded"):
        models.load(tmp_path, task)
    models.save(tmp_path, model, tokenizer(task))
    with pytest.raises(InputError, match="has another vocabulary"):
        models.load(tmp_path, tasks.get("chain"))
    (tmp_path / "model.safetensors").write_bytes(
        (tmp_path / "model.safetensors").read_bytes()[:999]
    )
    with pytest.raises(InputError, match="is not a policy that can be loaded"):
        models.load(tmp_path, task)
