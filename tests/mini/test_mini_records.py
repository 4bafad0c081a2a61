# SPDX-License-Identifier: Apache-2.0
"""Records that cannot be altered unnoticed, and files that cannot run code."""

import ast
import json
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from repro.mini import files, provenance
from repro.mini.experiment import command, records
from upref.errors import InputError
from upref.files import locked, write_atomically

ROOT = Path(__file__).parents[2]
RECORDS = {
    f"run-{i}": {key: {} for key in records.NEEDED}
    | {"name": f"run-{i}", "steps": {"reward": [i]}}
    for i in range(4)
}


@pytest.fixture
def folder(tmp_path):
    records.keep(RECORDS, tmp_path)
    return tmp_path


def lines(folder):
    return (folder / "runs.jsonl").read_bytes().splitlines(keepends=True)


def test_what_is_kept_is_read_back(folder, tmp_path):
    assert records.load(folder) == RECORDS
    assert records.load(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda x: x[:2], "holds 2 records where manifest.json promises 4"),
        (lambda x: [], "holds 0 records"),
        (lambda x: [*x, x[0]], "two records 'run-0'"),
        (lambda x: [*x, x[0].replace(b"run-0", b"run-9")], "holds 5 records"),
        (
            lambda x: [x[0].replace(b"[0]", b"[7]"), *x[1:]],
            "'run-0' is not the one that was promised",
        ),
        (lambda x: [*x[:3], x[3][:20]], "ends in the middle of a line"),
        (lambda x: [b"garbage\n", *x[1:]], "line 1"),
        (lambda x: [*x[:3], b"\xff\xfe\x00\n"], "line 4"),
        (lambda x: [b"[1, 2]\n", *x[1:]], "line 1 is no JSON object"),
        (lambda x: [b"[" * 100_000 + b"\n", *x[1:]], "line 1: maximum recursion depth"),
        (lambda x: [b'{"name": "run-0"}\n', *x[1:]], "lacks status, settings"),
    ],
)
def test_an_altered_record_says_how_to_restore(damage, says, folder, capsys):
    (folder / "runs.jsonl").write_bytes(b"".join(damage(lines(folder))))
    assert command.main(["moe", "--list", "--results", str(folder)]) == 2
    err = capsys.readouterr().err
    assert says in err and "git checkout" in err and err.count("\n") == 1
    with pytest.raises(InputError):
        records.collect(folder / "runs", {"run-0"}, folder)
    assert (
        json.loads((folder / "manifest.json").read_text())["lines"].keys()
        == RECORDS.keys()
    ), "nothing was rewritten"


@pytest.mark.parametrize(
    "content", [None, "", "[]", '{"lines": 3}', "\xff", "[" * 100_000]
)
def test_records_without_their_manifest(content, folder):
    (folder / "manifest.json").unlink()
    if content is not None:
        (folder / "manifest.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match="git checkout"):
        records.load(folder)


def test_a_collection_killed_between_its_two_files_loses_nothing(folder, monkeypatch):
    """Killed before the first, second or last write, the folder has the old records, or
    the new ones.
    """
    more, real = (
        RECORDS | {"run-9": RECORDS["run-0"] | {"name": "run-9"}},
        files.write_atomically,
    )
    for deaths in range(3):
        records.keep(RECORDS, folder)
        left = [deaths]

        def write(path, content, left=left):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            real(path, content)

        monkeypatch.setattr(files, "write_atomically", write)
        with pytest.raises(KeyboardInterrupt):
            records.keep(more, folder)
        monkeypatch.setattr(files, "write_atomically", real)
        assert len(records.load(folder)) == (5 if deaths == 2 else 4)


def test_a_run_with_a_log_changed_after_its_end_is_refused(tmp_path):
    """So is one whose done.json is damaged, or that has failed."""
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    for name in ("settings.json", "steps.jsonl", "evals.jsonl"):
        (run / name).write_text("{}\n" if name == "settings.json" else "")
    digests = {p.name: files.sha256(p) for p in run.iterdir()}
    (run / "done.json").write_text(
        json.dumps({"seconds": {"all": 1}, "sha256": digests})
    )
    assert records.record(run)["provenance"] == {"seconds": {"all": 1}}
    (run / "evals.jsonl").write_text(" ")
    with pytest.raises(
        InputError, match=r"evals\.jsonl is not what it was when the run ended"
    ):
        records.collect(tmp_path / "runs", {"a"}, tmp_path / "results")
    for file, content in (
        ("done.json", ""),
        ("done.json", "[]"),
        ("done.json", "\xff"),
        ("failed.json", "{}"),
    ):
        (run / "done.json").unlink(missing_ok=True)
        (run / file).write_text(content, encoding="latin-1")
        with pytest.raises(
            InputError, match=r"holds no whole run .*: remove it and run again"
        ):
            records.collect(tmp_path / "runs", {"a"}, tmp_path / "results")


def test_a_full_disk_names_the_file_and_keeps_the_old_one(tmp_path, monkeypatch):
    from test_mini_resume import no_file_larger_than

    write_atomically(tmp_path / "report.md", "old")
    with no_file_larger_than(100), pytest.raises(OSError, match=r"report\.md"):
        write_atomically(tmp_path / "report.md", "x" * 1000)
    assert [p.name for p in tmp_path.iterdir()] == ["report.md"] and (
        tmp_path / "report.md"
    ).read_text() == "old"


def test_a_run_is_of_a_changed_tree_when_code_is_changed(tmp_path, monkeypatch):
    """Not when the records are, which are written between runs."""
    code = tmp_path / "repro/mini/provenance.py"
    runs = tmp_path / "repro/mini/round2/results/runs.jsonl"
    for path in (code, runs):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("as committed\n")
    for words in (
        "init -q",
        "add .",
        "-c user.name=a -c user.email=a@b commit -qm one",
    ):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    monkeypatch.setattr(provenance, "__file__", str(code))
    runs.write_text("one more\n")
    assert provenance.commit()["dirty"] is False
    code.write_text("changed\n")
    assert provenance.commit()["dirty"] is True


# A process and its own child exchange pickles in a folder of their own; a page's own
# code and fetched sources, which are pinned by digest, are executed: neither is a file
# that somebody sends.
MAY = {
    "upref_frameworks/audits/child.py",
    "upref_frameworks/audits/isolated/__init__.py",
    "docs/make.py",
}
# statements of the installed TRL, which is imported anyway
MAY |= {"upref_frameworks/trl/audit.py"}
# an edited formula of an objective, which is imported anyway
MAY |= {"upref/verify/synthesis/formula.py"}
# a pipe from a process to its own child, and no file
MAY |= {"upref_frameworks/verl/step.py"}
MAY |= {"repro/fork.py"}  # the command line of a process
MAY |= {"upref_course/verdict.py"}  # the batch that this process's own report prints


TOPS = (
    "upref",
    "upref_frameworks",
    "upref_course",
    "paper",
    "repro",
    "docs",
    "benchmarks",
    "figures",
    "derivations",
)


def unsafe(tree: ast.AST):
    """Yield calls that may run what the file that they read holds."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name, words = (
            ast.unparse(call.func),
            {k.arg: ast.unparse(k.value) for k in call.keywords},
        )
        if name in ("eval", "exec") or name.split(".")[0] in (
            "pickle",
            "dill",
            "cloudpickle",
            "joblib",
            "marshal",
        ):
            yield name
        if (
            name in ("torch.load", "load")
            and words.get("weights_only", "True") != "True"
        ):
            yield name
        if name == "torch.load" and "weights_only" not in words:
            yield name
        if (
            name in ("np.load", "numpy.load")
            and words.get("allow_pickle", "False") != "False"
        ):
            yield name
        if name in ("yaml.load", "yaml.unsafe_load"):
            yield name


def test_no_loader_runs_what_it_reads():
    """Only the files of MAY have calls that may run what they read; the search for such
    calls finds known ones.
    """
    found = set()
    for top in TOPS:
        for path in (ROOT / top).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if re.search(r"load|eval|exec|pickle|marshal", text) and any(
                unsafe(ast.parse(text))
            ):
                found.add(path.relative_to(ROOT).as_posix())
    assert found <= MAY, sorted(found - MAY)
    for bad in (
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "pickle.load(f)",
        "eval(x)",
        "np.load(f, allow_pickle=True)",
    ):
        assert any(unsafe(ast.parse(bad))), bad


# Where another way to write is right: into a folder that is temporary, or that gets its
# name when it is whole.
DRAFTS = {
    "upref/files.py": "the writer",
    "upref_frameworks/audits/child.py": "temporary folder",
    "upref_frameworks/audits/isolated/__init__.py": "temporary folder",
    "upref_frameworks/audits/isolated/pin.py": "folder that is renamed",
    "upref_frameworks/openrlhf/step.py": "temporary folder",
    "upref_frameworks/trl/adapter.py": "temporary folder",
    "upref_frameworks/verl/from_rewards.py": "temporary folder",
    "upref_frameworks/verl/step.py": "temporary folder",
    "repro/fork.py": "standard output",
    "repro/mini/files.py": "folder that is renamed",
    "repro/mini/policy/models.py": "folder that is renamed",
    "repro/mini/policy/smollm2.py": "folder that is renamed",
    "repro/with_verl/addition.py": "made before the model that says that both are there",
    "repro/with_verl/cpu/toy.py": "made before the model that says that both are there",
    "repro/with_verl/data/prepare.py": "temporary folder",
    "repro/with_verl/pack.py": "folder that is made anew",
    "repro/with_verl/reward/grader.py": "standard output",
    "docs/make.py": "temporary folder",
    "docs/site/gather.py": "folder that is made anew",
    "docs/site/objectives.py": "folder that is made anew",
    "benchmarks/conformance.py": "temporary folder",
    "benchmarks/gpu/training.py": "temporary folder",
    "benchmarks/hidden.py": "/proc",
    "benchmarks/startup.py": "temporary folder",
}


WRITES_A_FILE = (
    "write_text",
    "write_bytes",
    "to_parquet",
    "save_pretrained",
    "imsave",
)
MAY_WRITE_TO_MEMORY = (
    "savefig",
    "savez",
    "savez_compressed",
    "save_file",
    "write_table",
    "dump",
)


def in_place(text: str):
    """Yield calls that leave half a file under its final name, if they are interrupted
    or the disk is full.
    """

    def is_for_writing(word):
        return re.fullmatch("'[wx]b?\\+?'", word)

    def is_memory(word):
        """Return whether an argument is no file: stdout, or a buffer."""
        buffer = r"(io\.(Bytes|String)IO|pa\.BufferOutputStream)\("
        is_buffer = re.search(rf"\b{re.escape(word)} = {buffer}", text)
        return word == "sys.stdout" or is_buffer

    for call in ast.walk(ast.parse(text)):
        if not isinstance(call, ast.Call):
            continue
        called = ast.unparse(call.func)
        if called == "ast.dump":
            continue  # text of a syntax tree, and no file
        name = called.rpartition(".")[2]
        words = [ast.unparse(x) for x in call.args]
        words += [ast.unparse(k.value) for k in call.keywords if k.arg == "mode"]
        if name in WRITES_A_FILE:
            yield name
        if name in ("open", "fdopen", "ZipFile") and any(map(is_for_writing, words)):
            yield name
        if name in MAY_WRITE_TO_MEMORY and not any(map(is_memory, words)):
            yield name
        if called == "torch.save":
            is_buffer = re.search(rf"\b{re.escape(words[1])} = io\.BytesIO", text)
            if not is_buffer:
                yield name


def test_every_file_is_written_whole_or_not_at_all():
    """Only the files of DRAFTS write under the final name; the search for such writes
    finds known ones.
    """
    found = set()
    for top in TOPS:
        for path in (ROOT / top).rglob("*.py"):
            if any(in_place(path.read_text(encoding="utf-8"))):
                found.add(path.relative_to(ROOT).as_posix())
    assert found == set(DRAFTS), sorted(found ^ set(DRAFTS))
    for bad in (
        "p.write_text(x)",
        "open(p, 'w')",
        "p.open('x')",
        "open(p, mode='wb')",
        "fig.savefig(p)",
        "torch.save(x, p)",
        "json.dump(x, f)",
    ):
        assert any(in_place(bad)), bad


def test_many_writers_of_one_file_leave_a_whole_one(tmp_path):
    """All write at once; each content is longer than what one call to the system
    writes.
    """
    contents = [str(i) * 3_000_000 for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            list(
                pool.map(lambda text: write_atomically(tmp_path / "x", text), contents)
            )
            assert (tmp_path / "x").read_text() in contents
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_what_a_killed_writer_left_goes_with_a_later_write(tmp_path):
    """Whatever clocks and process ids say: a draft that another container was writing
    went because no process here had its id."""
    left, living, other = (
        tmp_path / f".{name}.{n:016x}"
        for name, n in (("a[1]", 1), ("a[1]", 2), ("b", 1))
    )
    for path in (left, living, other):
        path.touch()
        os.utime(path, (0, 0))
    with locked(living):
        write_atomically(tmp_path / "a[1]", "x")
    assert {p.name for p in tmp_path.iterdir()} == {"a[1]", living.name, other.name}
    write_atomically(tmp_path / "a[1]", "y")
    assert not living.exists() and other.exists()


def test_a_pipe_and_a_link_stay_what_they_are(tmp_path):
    """Both became files: as root, /dev/null too."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True)
    write_atomically(pipe, "through the pipe")
    assert reader.communicate(timeout=300)[0] == "through the pipe" and pipe.is_fifo()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").write_text("old")
    link.symlink_to("folder/file")
    write_atomically(link, "new")
    assert link.is_symlink() and (tmp_path / "folder/file").read_text() == "new"


def test_two_that_collect_into_one_folder_lose_no_record(tmp_path):
    """One read the other's half-written state as damage, or wrote over its lines."""
    names = [f"{who}{n}" for who in "ab" for n in range(12)]
    for name in names:
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        (run / "settings.json").write_text("{}")
        (run / "done.json").write_text('{"seconds": {"all": 1}}')

    def collect(who):
        for n in range(12):
            records.collect(tmp_path / "runs", {f"{who}{n}"}, tmp_path / "results")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(collect, "ab"))
    assert sorted(records.load(tmp_path / "results")) == sorted(names)


def test_a_provenance_changed_after_the_end_is_refused(tmp_path):
    """Change the commit in `done.json` after its digest was taken."""
    facts = {"seconds": {"all": 1}, "commit": {"id": "0123"}}
    (tmp_path / "settings.json").write_text("{}")
    (tmp_path / "done.json").write_text(
        json.dumps(facts | {"digest": files.facts_digest(facts)})
    )
    assert records.record(tmp_path)["provenance"] == facts
    text = (tmp_path / "done.json").read_text()
    (tmp_path / "done.json").write_text(text.replace("0123", "0133"))
    with pytest.raises(
        InputError, match=r"done\.json is not what it was when the run ended"
    ):
        records.record(tmp_path)


# sha256 of the committed records of the experiments that have ended, by `sha256sum`
FINISHED = {
    "results/runs.jsonl": "1d4d007c3a31023bacf49247d857ac42eff545470bda7468016fbb472da1bdfe",
    "results/manifest.json": "dc42af25eb7581593ab876a0e70bc911447186d9cedc05e31382792606b89a84",
    "round2/results/runs.jsonl": "9418a783daa9c5b141cd4c53e936ceffd08c9a285093d401ffc8b89ea0d69e65",
    "round2/results/manifest.json": "fa18c0e24954c79b148d130aded96af8e65820f2bc12853816d037dee2b905d7",
    "stale/results/runs.jsonl": "e7049875ac888ee4f2d810f160714fbd049c450f8cfc0c92d266cee960a40116",
    "stale/results/manifest.json": "e5ebc498729ee2d55f72b8657d91eb182251aa617ed109b4e62df749226bf081",
}


def test_finished_records_stay_byte_for_byte():
    for name, digest in FINISHED.items():
        assert files.sha256(ROOT / "repro/mini" / name) == digest, name
