# SPDX-License-Identifier: Apache-2.0
"""Each entry that blames a framework has its maintainers' view beside it, or a draft of
an issue that asks.
"""

import re
from dataclasses import replace

from docs import drafts


def test_no_blaming_entry_is_without_a_view():
    found = drafts.views(drafts.blaming())
    assert [key for key, view in found.items() if view == drafts.NONE] == []


def test_an_entry_without_thread_words_or_draft_is_listed():
    entry = replace(drafts.blaming()[0], key="new-entry", thread="", words="")
    said = drafts.summary([entry])
    assert "1 none" in said
    assert f"none: new-entry: {entry.reason}" in said


def test_a_draft_is_of_an_entry_that_has_no_view():
    """A draft whose entry is gone, or has a thread by now, is taken out."""
    drafted = [key for issue in drafts.texts()["issue"] for key in issue["entries"]]
    found = drafts.views(drafts.blaming())
    assert len(drafted) == len({*drafted})
    assert [key for key in drafted if found.get(key) != drafts.DRAFT] == []


def test_the_pages_are_fresh():
    for file, text in drafts.pages().items():
        assert file.read_text(encoding="utf-8") == text, (
            f"{file}: run python -m docs.drafts --write"
        )


def test_a_draft_asks_and_accuses_nobody():
    for issue in drafts.texts()["issue"]:
        text = " ".join(issue["text"].split())
        assert "?" in text or "would" in text, f"{issue['title']}: it asks nothing"
        for sentence in re.split(r"(?<=[.?]) ", text):
            accuses = re.search(r"\b(wrong|broken|mistake|bug)\b", sentence)
            assert not accuses or " not " in sentence, f"{issue['title']}: {sentence}"


def test_the_command_counts_each_kind(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["drafts"])
    drafts.main()
    said = capsys.readouterr().out
    many, thread, words, draft, none = (int(n) for n in re.findall(r"\d+", said)[:5])
    assert many == thread + words + draft + none
    assert none == 0
