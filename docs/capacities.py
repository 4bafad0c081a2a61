# SPDX-License-Identifier: Apache-2.0
"""upref/capacities.toml: the Probability Capacity that `upref show` prints, so that it
needs no torch.

`python -m docs.capacities` writes it. An entry counts while the objective's file has
the digest `of`; for any other file `upref show` computes the table.
"""

from upref.cli.show import capacity_lines
from upref.description import CAPACITIES, digest, written
from upref.files import write_atomically

HEAD = """# SPDX-License-Identifier: Apache-2.0
# By `python -m docs.capacities`: Probability Capacity as `upref show` prints it, and a
# digest of the file of the objective.
"""


def capacities() -> str:
    """Return the whole file, with the table of every objective of upref/objectives."""
    parts = [HEAD]
    for name, objective in sorted(written().items()):
        of, text = digest(objective.file), capacity_lines(name)
        parts.append(f'[{name}]\nof = "{of}"\ntext = """\n{text}\n"""\n')
    return "\n".join(parts)


if __name__ == "__main__":
    write_atomically(CAPACITIES, capacities())
