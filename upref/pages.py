# SPDX-License-Identifier: Apache-2.0
"""Where a page of the documentation is, for messages: an installed wheel has no pages."""

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlparse


def locate_page(page: str) -> str:
    """Locate a page of the repository: its file in the checkout that upref was installed
    from, else its address on the site.

    Args:
        page: from the top of the repository, for example "docs/dump.md".

    Returns:
        A path, an address, or the name of the page where no address is known.
    """
    try:
        installed = distribution("upref-rl")
    except PackageNotFoundError:
        links = {}
        source = ""
    else:
        urls = installed.metadata.get_all("Project-URL") or []
        links = dict(url.split(", ", 1) for url in urls)
        source = json.loads(installed.read_text("direct_url.json") or "{}").get(
            "url", ""
        )
    checkouts = [Path(__file__).parents[1]]
    source_path = unquote(urlparse(source).path)
    if source_path:
        checkouts.append(Path(source_path))
    for checkout in checkouts:
        if (checkout / page).exists():
            return str(checkout / page)
    site = links.get("Documentation", "")
    if site and page.startswith("docs/"):
        return site + page.removeprefix("docs/").removesuffix(".md") + ".html"
    return f"{page} in the repository of upref"
