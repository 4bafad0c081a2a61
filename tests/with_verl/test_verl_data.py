# SPDX-License-Identifier: Apache-2.0
"""Data preparation on small files in the upstream formats."""

import base64
import json
import subprocess
from dataclasses import replace
from io import BytesIO
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import upref

pytest.importorskip(
    "omegaconf", reason="`repro/venv.sh verl` installs it, on Python 3.11 and 3.12"
)
from repro.with_verl.config.scales import load_scale, paper, scale_names
from repro.with_verl.data import prepare as p, schema
from repro.with_verl.data.sources import SOURCES
from repro.with_verl.machine import costs, preflight

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def dapo_rows(problems: int, copies: int):
    """Return rows of DAPO's data set: this many problems, each so many times."""
    before = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    )
    after = '\n\nRemember to put your answer on its own line after "Answer:".'
    return [
        {
            "data_source": "math_dapo",
            "prompt": [
                {
                    "content": f"{before}What is {i} + 1?\n\nThink.{after}",
                    "role": "user",
                }
            ],
            "ability": "MATH",
            "reward_model": {
                "ground_truth": str(i + 1),
                "style": "rule-lighteval/MATH_v2",
            },
            "extra_info": {"index": f"id-{i}"},
        }
        for _ in range(copies)
        for i in range(problems)
    ]


def write(path, rows):
    """Write rows as parquet, arrow or lines of JSON, by the suffix; return the path."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(rows)
        with (
            pa.OSFile(str(path), "wb") as f,
            pa.ipc.new_stream(f, table.schema) as stream,
        ):
            stream.write_table(table)
    else:
        path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def qa(n):
    return [{"question": f"Q{i}", "answer": str(i)} for i in range(n)]


UPSTREAM = {
    "dapo_math_17k": (".parquet", lambda n: dapo_rows(n, 3)),
    "aime24": (".parquet", lambda n: dapo_rows(n, 32)),
    "aime24_x32": (".parquet", lambda n: dapo_rows(n // 32, 32)),
    "math_3to5": (".arrow", lambda n: [
        {"problem": f"Q{i}", "gt_answer": str(i), "level": 1 + i % 5} for i in range(n // 3 * 5)
    ]),
    "amc23": (".parquet", qa),
    "math500": (".jsonl", lambda n: [{"problem": f"Q{i}", "answer": str(i), "level": 5} for i in range(n)]),
    "minerva": (".jsonl", qa),
    "olympiadbench": (".parquet", lambda n: [
        {"question": f"Q{i % n}", "final_answer": ["$1$", "2"] if i % n == 0 else [f"${i}$"]} for i in range(n + 2)
    ]),
    "gsm8k_train": (".parquet", lambda n: [{"question": f"Q{i}", "answer": f"1\n#### 1,00{i}"} for i in range(n)]),
    "gsm8k_test": (".parquet", lambda n: [{"question": f"Q{i}", "answer": f"so\n#### 1,00{i}"} for i in range(n)]),
    "geometry3k_train": (".parquet", lambda n: [
        {"images": [{"bytes": PNG, "path": None}], "problem": f"<image>Q{i}", "answer": str(i)} for i in range(n)
    ]),
    "geometry3k_test": (".parquet", lambda n: [
        {"images": [{"bytes": PNG, "path": None}], "problem": f"<image>Q{i}", "answer": str(i)} for i in range(n)
    ]),
}  # fmt: skip
SMALL = {
    name: replace(s, count=64 if "x32" in name else 6) for name, s in SOURCES.items()
}


def made(name, tmp_path, n=None):
    suffix, rows = UPSTREAM[name]
    return write(tmp_path / f"upstream{suffix}", rows(n or SMALL[name].count))


@pytest.mark.parametrize("name", SOURCES)
def test_each_source(name, tmp_path):
    """A small file of the source is prepared: rows, prompts, answers and pictures are
    as its protocol has them.
    """
    s = SMALL[name]
    p.prepare(s, tmp_path, made(name, tmp_path))
    path = tmp_path / f"{name}.parquet"
    assert schema.check_file(path) == s.count
    rows = pq.read_table(path).to_pylist()
    prompts = [r["prompt"][0]["content"] for r in rows]
    protocol = rows[0]["extra_info"]["protocol"]
    assert {"dapo": "Answer:", "boxed": "\\boxed{}", "geo3k": "<think>"}[
        protocol
    ] in prompts[0]
    assert len(set(prompts)) == (2 if "x32" in name else s.count)
    if name == "aime24_x32":
        assert (
            prompts[0].startswith("What is 0 + 1?\n\nThink.\n\nPlease")
            and "Answer" not in prompts[0]
        )
    if name == "olympiadbench":
        assert rows[0]["reward_model"]["ground_truth"] == "1, 2"
    if name.startswith("gsm8k"):
        assert [r["reward_model"]["ground_truth"] for r in rows[:2]] == ["1000", "1001"]
    if name.startswith("geometry"):
        assert rows[0]["images"][0]["bytes"] == PNG


def test_counts_are_table_1s():
    counts = dict(
        zip(paper()["table1"]["columns"], paper()["table1"]["answers"], strict=False)
    )
    *first, olympiad = [
        SOURCES[n].count
        for n in ("aime24_x32", "amc23", "math500", "minerva", "olympiadbench")
    ]
    # the paper left two out, and does not say which
    assert [*first, olympiad - 2] == list(counts.values())
    assert SOURCES["aime24"].count == 30


def test_every_file_that_a_scale_wants_can_be_prepared():
    for scale in map(load_scale, scale_names()):
        for key in ("data.train_files", "data.val_files"):
            for f in scale.values[key][0]:
                assert f.removeprefix("{data}/").removesuffix(".parquet") in SOURCES, f


def test_a_finished_file_stays_and_a_broken_one_is_made_again(tmp_path):
    s, source = SMALL["amc23"], made("amc23", tmp_path)
    p.prepare(s, tmp_path, source)
    path = tmp_path / "amc23.parquet"
    before = path.stat().st_mtime_ns
    assert "is there" in p.prepare(s, tmp_path, source)
    assert path.stat().st_mtime_ns == before
    path.write_bytes(path.read_bytes()[:100])
    assert "6 rows" in p.prepare(s, tmp_path, source)
    assert schema.check_file(path) == 6


def test_another_revision_is_another_file(tmp_path):
    s = SMALL["amc23"]
    p.prepare(s, tmp_path, made("amc23", tmp_path))
    other = write(
        tmp_path / "other.jsonl",
        [{"question": f"R{i}", "answer": "1"} for i in range(6)],
    )
    p.prepare(s, tmp_path, other)
    assert (
        pq.read_table(tmp_path / "amc23.parquet")
        .to_pylist()[0]["prompt"][0]["content"]
        .startswith("R0")
    )


REFUSED = {
    "rows": ("amc23", lambda d: made("amc23", d, 5), "has 5 rows and should have 6 .*--accept-count 5"),
    "columns": ("amc23", lambda d: write(d / "f.jsonl", [{"q": "x"}] * 6), "has none of problem, question, but q"),
    "format": ("dapo_math_17k", lambda d: write(d / "f.jsonl", qa(6)), "has not the format of Byted"),
    "half": ("amc23", lambda d: (d / "f.parquet").write_bytes(b"PAR1") and d / "f.parquet", "cannot be read"),
    "json": ("minerva", lambda d: (d / "f.jsonl").write_text('{"a": ') and d / "f.jsonl", "cannot be read"),
    "suffix": ("minerva", lambda d: (d / "f.csv").write_text("a") and d / "f.csv", "neither .parquet nor .arrow"),
    "missing": ("minerva", lambda d: d / "nothing.jsonl", "there is no file"),
    "images": (
        "geometry3k_test", lambda d: write(d / "f.parquet", [{"images": [{"bytes": b"x", "path": None}],
        "problem": "<image>Q", "answer": "1"}] * 6), "has not the format of hiyouga",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, tmp_path):
    name, make, sentence = REFUSED[case]
    with pytest.raises(upref.InputError, match=sentence):
        p.prepare(SMALL[name], tmp_path, make(tmp_path))
    assert not (tmp_path / f"{name}.parquet").exists()


def test_another_count_can_be_accepted_and_is_written_down(tmp_path):
    p.prepare(SMALL["amc23"], tmp_path, made("amc23", tmp_path, 5), accept=5)
    assert schema.facts(tmp_path / "amc23.parquet")["paper"] == "6"


def test_offline_says_what_to_fetch_from_where(tmp_path, monkeypatch, capsys):
    import huggingface_hub

    def offline(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    assert p.main(["math500", "amc23", "--out", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert (
        f"https://huggingface.co/datasets/math-ai/amc23/resolve/{SOURCES['amc23'].revision}/test-00000"
        in err
    )
    assert (
        "HuggingFaceH4/MATH-500" in err and err.count("\n") == 2 and "format" not in err
    )


def test_a_file_from_github_is_the_pinned_one(tmp_path, monkeypatch):
    """A file is fetched at its revision and taken if its blob is the pinned one;
    another content is refused.
    """
    file = made("math_3to5", tmp_path)
    git = subprocess.run(
        ["git", "hash-object", str(file)], capture_output=True, text=True, check=True
    )
    s = replace(SMALL["math_3to5"], blob=git.stdout.strip())
    asked = []
    monkeypatch.setattr(
        p.urllib.request,
        "urlopen",
        lambda url, timeout: asked.append(url) or BytesIO(file.read_bytes()),
    )
    assert "6 rows" in p.prepare(s, tmp_path)
    assert asked[0].startswith(
        f"https://raw.githubusercontent.com/sail-sg/understand-r1-zero/{s.revision}/datasets/"
    )
    (tmp_path / "math_3to5.parquet").unlink()
    write(file, UPSTREAM["math_3to5"][1](9))
    with pytest.raises(
        upref.InputError, match=r"^could not be fetched .*https://raw.*--from FILE"
    ):
        p.prepare(s, tmp_path)


def test_revisions(tmp_path, capsys):
    assert all(len(s.revision) == 40 for s in SOURCES.values())
    assert p.main(["amc23", "--revision", "main", "--out", str(tmp_path)]) == 2
    assert "no full commit hash" in capsys.readouterr().err
    assert p.main(["amc32"]) == 2
    assert "there is no data set named 'amc32'" in capsys.readouterr().err


def test_verl_reads_the_reward_of_a_prepared_file(tmp_path):
    from repro.with_verl.reward.score import compute_score

    p.prepare(SMALL["aime24"], tmp_path, made("aime24", tmp_path))
    r = pq.read_table(tmp_path / "aime24.parquet").to_pylist()[2]
    got = compute_score(
        r["data_source"],
        "Answer: 3",
        r["reward_model"]["ground_truth"],
        r["extra_info"],
    )
    assert got == {"score": 1.0, "acc": 1.0, "pred": "3"}


def test_the_preflight_counts_validation_prompts(tmp_path):
    from omegaconf import OmegaConf

    p.prepare(SMALL["amc23"], tmp_path, made("amc23", tmp_path))
    file = str(tmp_path / "amc23.parquet")
    cfg = OmegaConf.create({"data": {"train_files": file, "val_files": [file, file]}})
    assert list(preflight.data(SimpleNamespace(cfg=cfg))) == []
    assert costs.count_rows([file, file]) == 12
    # not prepared yet
    assert (
        costs.count_rows(str(tmp_path / "math500.parquet")) == SOURCES["math500"].count
    )
