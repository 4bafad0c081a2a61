# SPDX-License-Identifier: Apache-2.0
"""Code of others is read from where it was fetched, and only what is named is run."""

from docs.fetched import Fetched


def test_of_fetched_code_only_what_is_named_is_run(tmp_path):
    (tmp_path / "theirs.py").write_text(
        "import nowhere\nraise SystemExit\n\nclass T:\n    @nowhere.jit\n    def half(self, x: nowhere.T):\n"
        "        y = x / two\n        return y\n"
    )
    assert Fetched(tmp_path).take("theirs.py", "T.half", two=2).half(None, 3.0) == 1.5
    assert Fetched(tmp_path).lines("theirs.py", 7, 7, x=5.0, two=2).y == 2.5
