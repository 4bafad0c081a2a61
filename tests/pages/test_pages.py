# SPDX-License-Identifier: Apache-2.0
"""No page is stale: README and docs/ are what `python -m docs.make` would write now;
what they point to exists.
"""

import re
from pathlib import Path

import pytest

from docs import framework_pages, make
from upref_frameworks import names as frameworks
from upref_frameworks.ledger import read

ROOT = Path(__file__).parents[2]
TEXT = {str(page): (ROOT / page).read_text(encoding="utf-8") for page in make.PAGES}
NARRATIVE = TEXT["docs/verdicts.md"]


@pytest.mark.slow
@pytest.mark.parametrize("page", TEXT)
def test_it_is_fresh(page):
    assert make.written(TEXT[page]) == TEXT[page], f"run `python -m docs.make {page}`"


@pytest.mark.parametrize("page", TEXT)
def test_links_and_named_files_exist(page):
    """Links with their headings, scripts in commands, and modules after `python -m`."""
    for target in re.findall(r"\]\(([^)]+)\)", TEXT[page]):
        if target.startswith("http"):
            continue
        file, _, heading = target.partition("#")
        where = (ROOT / page).parent / file if file else ROOT / page
        assert where.exists(), target
        # in the site, the heading of an entry of the ledger
        if heading and file.endswith(".json"):
            assert heading in {e.key for e in read(where.stem)}, target
        elif heading:
            heads = re.findall(r"^#+ (.*)", where.read_text(encoding="utf-8"), re.M)
            assert heading in [
                re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in heads
            ], target
    for script in re.findall(
        r"(?:bash|python) ((?:repro|tests|figures|benchmarks|derivations)/\S+?\.(?:py|sh))",
        TEXT[page],
    ):
        assert (ROOT / script).exists(), script
    if page == "docs/reliability.md":
        return  # a record: its commands have the names of its commit
    for module in re.findall(
        r"python -m ((?:repro|benchmarks|docs)[\w.]*\w)", TEXT[page]
    ):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), (
            module
        )


@pytest.mark.parametrize("page", TEXT)
def test_tables_are_whole(page):
    """Every row has as many cells as its head, so that a | in a cell is escaped."""
    cells = 0
    for line in TEXT.get(page, page).splitlines():
        if not line.startswith("| "):
            cells = 0
            continue
        here = len(re.findall(r"(?<!\\)\|", line))
        cells = cells or here
        assert here == cells, line


@pytest.mark.slow
def test_the_tables_of_the_site_are_whole():
    """Each is printed, its rows are whole, and what it links to is there."""
    for name in make.ON_SITE:
        text = make.part(name)
        assert text.count("\n") > 5, name
        test_tables_are_whole(text)
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            found = target.startswith("http") or (ROOT / "docs" / target).exists()
            assert found, (name, target)


def test_every_table_of_the_site_stands_on_a_page():
    named = {name for text in TEXT.values() for name in make.MARKED.findall(text)}
    assert named >= make.ON_SITE.keys()
    page = "# A\n\n<!-- docs.proved.losses -->\nold\n<!-- end -->\n"
    assert "| loss | promise |" in make.for_site(page)
    assert "--print docs.proved.losses" in make.written(page)


def test_a_part_that_is_not_there_is_one_sentence(capsys):
    for words in (["--print"], ["--print", "nothing"], ["docs/nothing.md"]):
        assert make.main(*words) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_every_verdict_on_the_paper_is_there():
    _, rows = make._verdicts()
    assert len(rows) >= 20
    for row in rows:
        assert (
            f"| {row[0].strip()} | {row[1]} | {row[2]} | {row[3]} | {row[5]} |"
            in NARRATIVE
        )


def test_every_recorded_deviation_is_there():
    """On the page of its framework, which is what the committed JSON and the ledger
    say.
    """
    assert sorted(a["framework"] for a in framework_pages.audits()) == sorted(
        frameworks()
    )
    for a in framework_pages.audits():
        entries, page = (
            read(a["framework"]),
            framework_pages.pages()[f"frameworks/{a['framework']}"],
        )
        assert (
            all(f"### {e.key}\n" in page for e in entries)
            and "not recorded" not in page
        )
        recorded = {
            (e.reason, x.loss, x.micro_batches) for e in entries for x in e.evidence
        }
        assert recorded == {
            (w, r["label"], r["micro_batches"])
            for r in a["rows"]
            for w, _ in r["reasons"]
        }


def test_a_stale_page_is_seen():
    old = TEXT["docs/objectives.md"]
    assert make.written(old.replace("| `dapo` |", "| `dapper` |")) == old


def test_a_block_leaves_no_file_where_the_pages_are_made():
    make.written("```python\nopen('left_here.txt', 'w').close()\n```\n")
    assert not Path("left_here.txt").exists()


def test_what_a_block_prints_is_what_its_commands_print(tmp_path):
    file, console = (
        "```python\n# f.py\nx = 3\n```\n\n",
        "```console\n$ cat f.py; ls\nold\n```\n\n",
    )
    page = file + console + "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n"
    new = make.written(page)
    assert (
        "$ cat f.py; ls\n# f.py\nx = 3\nf.py\n```" in new
        and "```text\n2\n```" in new
        and "old" not in new
    )
