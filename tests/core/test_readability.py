# SPDX-License-Identifier: Apache-2.0
"""The figures of benchmarks.readability, counted by hand on a few lines."""

from benchmarks import readability

SOURCE = '''"""A module."""

square = lambda x: x * x  # fmt: skip


def area(width, ht):
    """Return the area.

    Args:
        width: in meters.
    """
    ab = width
    return ab * ht


def _hidden(value):
    return value
'''


def test_counts_of_a_few_lines():
    counts = readability.count_package({"shapes.py": SOURCE})
    # square, area, its two statements, _hidden and its return
    assert counts.code_lines == 6
    assert counts.named_lambdas == 1
    assert counts.format_skips == 1
    assert (counts.public_functions, counts.documented) == (1, 1)
    # square, x, area, width, ht, ab, _hidden, value
    assert counts.names == 8
    assert counts.short_names == 3  # x, ht, ab


def test_a_draw_has_twelve_long_functions_and_depends_on_its_seed():
    first, again, other = map(readability.draw_functions, (1, 1, 2))
    assert first == again != other and len(set(first)) == 12
    for place in first:
        file, _, line = place.partition(" ")[0].rpartition(":")
        text = (readability.ROOT / file).read_text(encoding="utf-8").splitlines()
        assert f"def {place.partition(' ')[2]}(" in text[int(line) - 1]


def test_tests_and_equations_are_left_out():
    files = {
        "tests/test_a.py": SOURCE,
        "a_test.py": SOURCE,
        "objectives/a.py": "zz = 1\n",
    }
    counts = readability.count_package(files)
    assert counts.code_lines == 1
    assert counts.names == 0
