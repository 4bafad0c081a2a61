# SPDX-License-Identifier: Apache-2.0
"""The links of a release: UPREF_REPOSITORY=owner/name of the repository that it is
built from, on GitHub.

A package index shows README.md without the repository. Its links and pictures are made
absolute, at the tag of the version. Without UPREF_REPOSITORY no address is known: a
link becomes its text, a picture is left out, and there are no project URLs. No link is
dead.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?:|#)([^)]+)\)")


def absolute(text: str, repository: str, version: str) -> str:
    def link(found: re.Match[str]) -> str:
        picture, label, path = found.groups()
        if not repository:
            return "" if picture else label
        kind = "raw" if picture else "blob"
        return f"{picture}[{label}](https://github.com/{repository}/{kind}/v{version}/{path})"

    return LINK.sub(link, text)


class Links(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        repository = os.environ.get("UPREF_REPOSITORY", "")
        if repository and not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
            raise ValueError(
                f"UPREF_REPOSITORY is {repository!r}; give the owner and the name, as in owner/upref"
            )
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = absolute(text, repository, metadata["version"])
        metadata.setdefault("readme", {"content-type": "text/markdown", "text": text})
        if repository:
            owner, name = repository.split("/")
            home = f"https://github.com/{repository}"
            metadata["urls"] = {
                "Homepage": home,
                # .github/workflows/site.yml
                "Documentation": f"https://{owner}.github.io/{name}/",
                "Changelog": f"{home}/blob/main/CHANGELOG.md",
                "Issues": f"{home}/issues",
            }
