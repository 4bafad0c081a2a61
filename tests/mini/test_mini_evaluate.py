# SPDX-License-Identifier: Apache-2.0
"""A saved policy is scored as what it is, by either engine; bad input is one sentence."""

import importlib.util
import json
import subprocess
import sys
from math import sqrt
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from repro import engines, evaluate, exams
from repro.mini import tasks
from repro.mini.policy import bases, evals
from repro.mini.policy.sample import nucleus
from repro.with_verl.reward import score as rewards

ROOT = Path(__file__).parents[2]
WALK = str(bases.ROOT / "walk")
WORDS = ("<pad>", "<eos>", "a", "b", "\\boxed{3}", "\\boxed{4}")


def run(tmp_path, *arguments):
    out = tmp_path / "scores.json"
    assert evaluate.main([*arguments, "--json", str(out)]) == 0
    return json.loads(out.read_text())


@pytest.fixture
def writer(tmp_path):
    """A policy of six words to which all are equally likely, whose folder asks for
    greedy decoding.
    """
    words = Tokenizer(WordLevel({w: i for i, w in enumerate(WORDS)}))
    words.pre_tokenizer = WhitespaceSplit()
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>"
    )
    torch.manual_seed(0)
    size = {
        "hidden_size": 16,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    config = transformers.Qwen3Config(
        vocab_size=6, intermediate_size=16, num_hidden_layers=1, tie_word_embeddings=True, initializer_range=0.5,
        max_position_embeddings=32, eos_token_id=1, pad_token_id=0, **size,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config)
    model.generation_config.update(top_k=1, do_sample=True, repetition_penalty=1.5)
    folder = tmp_path / "writer"
    words.save_pretrained(folder)
    return folder, words, model


def lines(tmp_path, *rows):
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(path)


def test_the_miniature_gets_the_scores_of_its_own_evaluation(tmp_path, capsys):
    found = run(
        tmp_path,
        WALK,
        "--set",
        "one_step",
        "--problems",
        "20",
        "--k",
        "4",
        "--seed",
        "3",
    )
    task = tasks.get("countdown")
    g = tasks.generator("evaluate", 3, "countdown one_step")
    problems = task.problems("one_step", 20, 0)
    tables = evals.tables(bases.load("walk", "countdown"), task, problems, 4, 0.7, g)
    expected = {name: e.value for name, e in evals.estimates(*tables).items()}
    assert {name: e["value"] for name, e in found["scores"].items()} == expected
    assert 0 < expected["avg"] < expected["best"]
    assert all(
        0 <= e["low"] <= e["value"] <= e["high"] <= 1 for e in found["scores"].values()
    )
    assert (found["of"], found["n_problems"], found["k"], found["top_p"]) == (
        "countdown one_step",
        20,
        4,
        0.7,
    )
    assert "Best@4" in capsys.readouterr().out


@torch.inference_mode()
def exact_avg(problems, top_p=0.7):
    """What Avg@k estimates, without drawing: every response that WALK's nucleus allows,
    by its probability.
    """
    task, policy = tasks.get("countdown"), bases.load("walk", "countdown")
    problems = task.problems("test", problems, 0)
    right = 0.0
    for at, prompt in enumerate(task.prompts(problems).tolist()):
        begun, ended = {(): 1.0}, {}
        while begun:
            p = (
                policy(input_ids=torch.tensor([[*prompt, *said] for said in begun]))
                .logits[:, -1]
                .softmax(-1)
            )
            p = nucleus(p, top_p).double()
            odds = zip(begun.items(), p / p.sum(-1, keepdim=True), strict=True)
            grown = {
                (*said, t): w * row[t].item()
                for (said, w), row in odds
                for t in row.nonzero()[:, 0].tolist()
            }
            over = lambda said: (
                said[-1] == tasks.EOS or len(said) == task.response_length
            )
            ended |= {said: w for said, w in grown.items() if over(said)}
            begun = {said: w for said, w in grown.items() if not over(said)}
        assert sum(ended.values()) == pytest.approx(1)
        tokens = torch.tensor(
            [
                [*said, *[tasks.PAD] * (task.response_length - len(said))]
                for said in ended
            ]
        )
        verdicts = task.verify(
            problems[at : at + 1].repeat_interleave(len(tokens), 0), tokens
        ).reward.tolist()
        right += sum(
            w for w, verdict in zip(ended.values(), verdicts, strict=True) if verdict
        )
    return right / len(problems)


def test_avg_is_the_chance_of_a_right_answer(tmp_path):
    p = exact_avg(16)
    found = run(tmp_path, WALK, "--problems", "16", "--k", "512")["scores"]["avg"][
        "value"
    ]
    assert abs(found - p) < 4 * sqrt(p * (1 - p) / (16 * 512))


def test_the_seed_decides(tmp_path):
    few = (WALK, "--problems", "8", "--k", "4")
    first = run(tmp_path, *few)
    assert run(tmp_path, *few) == first
    assert run(tmp_path, *few, "--seed", "1")["scores"] != first["scores"]


def test_any_language_model_on_problems_of_a_file(tmp_path, writer, monkeypatch):
    """One token, six equally likely ones, one of them right: 1/6 whatever the folder
    asks for.
    """
    folder, _, model = writer
    monkeypatch.setattr(rewards._GRADER, "ask", lambda *_: False)
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
    model.save_pretrained(folder)
    path = lines(
        tmp_path, *({"prompt": p, "answer": "3"} for p in ("a b", "a", "b b a"))
    )
    found = run(
        tmp_path,
        str(folder),
        "--problems",
        path,
        "--k",
        "500",
        "--max-tokens",
        "1",
        "--top-p",
        "1",
    )
    avg = found["scores"]["avg"]["value"]
    assert abs(avg - 1 / 6) < 4 * sqrt(5 / 36 / 1500)
    assert found["n_problems"] == 3 and found["scores"]["best"]["value"] == 1


def test_shorter_prompts_are_padded_and_change_nothing(tmp_path, writer):
    folder, words, model = writer
    model.save_pretrained(folder)
    few = ["--k", "1", "--max-tokens", "6", "--temperature", "1e-4"]

    def said(*prompts):
        path = lines(tmp_path, *({"prompt": p, "answer": "3"} for p in prompts))
        args = evaluate.arguments().parse_args(
            [str(folder), "--problems", path, *few, "--dtype", "float32"]
        )
        responses = engines.transformers(args, exams.make(args, words), words)
        return [words.decode(r[0], skip_special_tokens=True) for r in responses]

    together = said("a", "b a b a", "a a b")
    assert together == [said(p)[0] for p in ("a", "b a b a", "a a b")]
    assert len(set(together)) > 1


def test_verdicts_and_votes_of_texts(tmp_path, writer, monkeypatch):
    _, words, _ = writer
    monkeypatch.setattr(rewards._GRADER, "ask", lambda *_: False)
    path = lines(
        tmp_path,
        {"prompt": "a", "answer": 3},
        {"prompt": "b", "answer": "4", "protocol": "boxed"},
    )
    args = evaluate.arguments().parse_args(["x", "--problems", path, "--k", "3"])
    correct, votes = exams.make(args, words).judge(
        [[[4, 1], [2, 5, 1, 0], [5, 4]], [[4], [2, 3], [5, 1]]]
    )
    assert correct.tolist() == [[True, False, True], [False, False, True]]
    assert votes.tolist() == [["3", "4", "3"], ["3", None, "4"]]
    assert evals.estimates(correct, votes)["maj"].value == 0.75  # 1, and a tie


@pytest.mark.parametrize(("shift", "status"), [(0.0, 0), (2e-4, 1), (float("nan"), 1)])
def test_agreement_is_within_the_bound_or_status_1(shift, status, monkeypatch, capsys):
    said = [15, 103, 6, 18, 1]

    def another_engine(args, exam, k):
        lp = engines.log_probs(args, exam, exam.prompts, [said] * len(exam.prompts))
        lp[-1][2] += shift
        return [[said]] * len(exam.prompts), [[x] for x in lp]

    monkeypatch.setattr(evaluate.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(engines, "vllm", another_engine)
    assert evaluate.main([WALK, "--problems", "4", "--agree", "6"]) == status
    assert "30 tokens of 6 responses" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "has no config.json"),
        ([WALK, "--k", "0"], "--k must be at least 1"),
        ([WALK, "--agree", "0"], "--agree must be at least 1"),
        ([WALK, "--problems", "0"], "--problems must be at least 1"),
        ([WALK, "--problems", "none.jsonl"], "neither a number nor a file"),
        ([WALK, "--problems", __file__], "is not lines of prompt and answer"),
        ([WALK, "--problems", __file__, "--set", "test"], "leave them out"),
        ([WALK, "--set", "five_steps"], "has no set 'five_steps'"),
        ([WALK, "--task", "chain", "--problems", "2"], "was made for task"),
        ([WALK, "--top-p", "0"], "--top-p must be above 0"),
        (
            [WALK, "--engine", "vllm", "--temperature", "6"],
            "a --temperature of at most 2",
        ),
        ([WALK, "--dtype", "bfloat16"], "computes in float32"),
        ([WALK, "--json", "nowhere/scores.json"], "its folder does not exist"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence, capsys):
    assert evaluate.main(arguments) == 2
    said = capsys.readouterr().err.strip()
    assert sentence in said and "\n" not in said


def test_a_folder_without_tokenizer_or_with_a_damaged_one(tmp_path, capsys):
    (tmp_path / "config.json").write_bytes(Path(WALK, "config.json").read_bytes())
    for content in (None, "{"):
        if content:
            (tmp_path / "tokenizer.json").write_text(content)
        assert evaluate.main([str(tmp_path)]) == 2
        assert "tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"prompt": "3 7"}, "is not lines of prompt and answer"),
        ({"prompt": "3 seven", "answer": "3"}, "is not lines of prompt and answer"),
        (
            {"prompt": [{"role": "user", "content": "3"}], "answer": "3"},
            "chat_template",
        ),
        (
            {"prompt": "3 7", "answer": "3", "protocol": "geometry"},
            "there is no protocol named geometry",
        ),
        ({"prompt": "3 7", "answer": "3"}, "and the policy reads 128"),
    ],
)
def test_a_file_that_cannot_be_asked_is_one_sentence(tmp_path, row, sentence, capsys):
    assert evaluate.main([WALK, "--problems", lines(tmp_path, row)]) == 2
    said = capsys.readouterr().err.strip()
    assert sentence in said and "\n" not in said


def test_without_vllm_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(evaluate.importlib.util, "find_spec", lambda _: None)
    for flags in (["--engine", "vllm"], ["--agree", "4"]):
        assert evaluate.main([WALK, *flags]) == 2
        assert "vLLM is not installed" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.skipif(
    not importlib.util.find_spec("vllm"),
    reason="no vLLM here: `repro/venv.sh smoke` installs it",
)
def test_vllm_says_the_same(tmp_path):
    command = [sys.executable, "-m", "repro.evaluate", WALK, "--problems", "64"]
    out = tmp_path / "scores.json"
    subprocess.run(
        [*command, "--engine", "vllm", "--json", out], cwd=ROOT, check=True, timeout=900
    )
    theirs, p = json.loads(out.read_text())["scores"]["avg"]["value"], exact_avg(64)
    assert abs(theirs - p) < 4 * sqrt(p * (1 - p) / (64 * 32))
    subprocess.run([*command, "--agree", "32"], cwd=ROOT, check=True, timeout=900)
