"""The templates of deploy/slurm as users have them: the lines marked with << filled in, and nothing else changed."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "deploy/slurm"
USER, SECOND_USER = "nobody", "games"
"""Ordinary users, who exist wherever Slurm's packages for Debian do."""
_MARK = re.compile(r"\s+# <<.*$")


def adapted(template: str, **values: str) -> str:
    """The template with these values: of options of sbatch by their names, of variables of the shell by theirs.

    An option with the value "" is left out. Raises ValueError for one that the template does not want to be adapted.
    """
    lines = []
    for line in (FOLDER / template).read_text().splitlines():
        name = line.removeprefix("#SBATCH --").removeprefix("export ").partition("=")[0].replace("-", "_")
        if name in values and (_MARK.search(line) or name == "OPSD"):
            value = values.pop(name)
            if value:
                lines.append(f"{line.partition('=')[0]}={value}")
        else:
            lines.append(line)
    if left := values.keys() - {"OUTPUT"}:
        raise ValueError(f"{template} has nothing to be adapted called {', '.join(sorted(left))}")
    return "\n".join([*lines, ""])
