# SPDX-License-Identifier: Apache-2.0
"""Builds the site: `python -m docs.site [FOLDER]`, by default build/site.
FOLDER/html/index.html is its first page.

Any warning, any page whose code fails, any dead link ends it with exit status 1.
"""

import os
import shutil
import sys
import time
from pathlib import Path

from docs import notebooks
from docs.site import gather, links, picture
from upref.errors import InputError
from upref.files import own_folder
from upref_course import explorer

ROOT = Path(__file__).parents[2]


def build(folder: Path) -> list[str]:
    """Gather the sources, run Sphinx, follow every link.

    The site of before stays until the new one is whole but for its links.

    Args:
        folder: of the build; it is made, or one that this command made.

    Returns:
        What is wrong, a line each; [] if all is well.

    Raises:
        InputError: the folder has something else in it.
    """
    from sphinx.cmd.build import build_main

    own_folder(folder)
    source, html, new, old = (
        folder / name for name in ("source", "html", "new", "old")
    )
    if old.exists() and not html.exists():  # killed between the two names
        old.rename(html)
    for stale in (source, new, old, folder / "doctrees"):
        shutil.rmtree(stale, ignore_errors=True)
    gather.gather(source)
    os.environ["PYTHONPATH"] = str(ROOT)  # for the kernels that run pages
    strict = ["-W", "--keep-going", "-n", "-q", "-b", "html"]
    places = ["-d", str(folder / "doctrees"), str(source), str(new)]
    if build_main([*strict, *places]):
        return ["Sphinx had warnings or errors, above."]
    (new / "explorer").mkdir()
    explorer.write(new / "explorer" / "index.html")
    notebooks.write(new / "course")
    (new / "picture").mkdir()
    picture.write(new / "picture" / "index.html")
    if html.exists():  # until here the site of before stays
        html.rename(old)
    new.rename(html)
    shutil.rmtree(old, ignore_errors=True)
    return links.dead(html)


def main(folder: str = str(ROOT / "build" / "site")) -> int:
    """Build the site in a folder, and print what is wrong; return 1 if anything is, 2
    if the folder is another's or an option is unknown, else 0.
    """
    if folder.startswith("-"):
        print(__doc__, file=sys.stdout if folder in ("-h", "--help") else sys.stderr)
        return 0 if folder in ("-h", "--help") else 2
    begun, used = time.time(), os.times()
    try:
        wrong = build(Path(folder).resolve())
    except InputError as e:
        print(f"docs.site: {e}", file=sys.stderr)
        return 2
    now = os.times()
    cpu = sum(now[:4]) - sum(used[:4])
    pages = len(list(Path(folder, "html").rglob("*.html")))
    print(*wrong, sep="\n", end="\n" if wrong else "")
    took = f"{time.time() - begun:.0f} s, {cpu:.0f} s of CPU"
    print(f"{pages} pages in {folder}/html, {took}: {'NOT ' if wrong else ''}whole")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
