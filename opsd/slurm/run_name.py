"""The name of a run that a Slurm job is for. Pure."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Mapping

LONGEST = 63
_DIGEST = 6


def run_name(environ: Mapping[str, str]) -> str:
    """One name for all starts of the job: its own, with the task's number in an array.

    What a run may not be called by, blanks and umlauts for instance, is replaced; a digest keeps such names apart.
    """
    name = environ.get("SLURM_JOB_NAME", "")
    task = environ.get("SLURM_ARRAY_TASK_ID", "")
    suffix = f"-{task}" if task else ""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", plain).lstrip("._-").rstrip("-")
    if not plain:
        plain = "job"
    if plain != name or len(plain) + len(suffix) > LONGEST:
        digest = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:_DIGEST]
        plain = f"{plain[: LONGEST - len(suffix) - _DIGEST - 1]}-{digest}"
    return plain + suffix
