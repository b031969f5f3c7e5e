"""The readme of sdist and wheel, which the package index shows away from the repository: its links are whole URLs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<path>(?![a-z]+:|#)[^)]+)\)")


class Readme(MetadataHookInterface):
    """Makes the field readme of README.md."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the field; pictures come as files, everything else as GitHub shows it, both of this release."""
        source = metadata["urls"]["Source"]
        release = f"v{metadata['version']}"
        raw = source.replace("github.com", "raw.githubusercontent.com")

        def whole(link: re.Match[str]) -> str:
            base = f"{raw}/{release}" if link["picture"] else f"{source}/blob/{release}"
            return f"{link['picture']}[{link['text']}]({base}/{link['path']})"

        text = _LINK.sub(whole, (Path(self.root) / "README.md").read_text(encoding="utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
