"""End a job as its batch script would, when that script is dead. No command of Slurm does that, its library does.

``slurm_complete_job`` is public and open to the job's owner. The library is the one that scontrol is linked with. It
runs in a process of its own: it exits where it finds no configuration, and a call may block for ten seconds.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

LIBRARY = "libslurmfull.so"
NO_LIBRARY = 2
"""The exit code of the process if the library cannot be used."""


def command(plugin_dir: str, job: int, code: int) -> list[str]:
    """The command that ends ``job`` with the exit code ``code``; ``plugin_dir`` is Slurm's PluginDir."""
    found = (Path(folder) / LIBRARY for folder in plugin_dir.split(":"))
    library = next((path for path in found if path.exists()), Path(LIBRARY))
    return [sys.executable, "-P", "-m", "opsd.slurm.complete", str(library), str(job), str(code)]


def main(library: str, job: int, code: int) -> int:
    """Make the call; says on stderr why it failed."""
    try:
        slurm = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL, use_errno=True)  # its plugins need its symbols
        slurm.slurm_strerror.restype = ctypes.c_char_p
        call = slurm.slurm_complete_job
    except (OSError, AttributeError) as error:
        print(f"{library} cannot be used: {error}", file=sys.stderr)
        return NO_LIBRARY
    if hasattr(slurm, "slurm_init"):
        slurm.slurm_init(None)
    if call(ctypes.c_uint32(job), ctypes.c_uint32(code << 8)) == 0:
        return 0
    print(slurm.slurm_strerror(ctypes.get_errno()).decode(errors="replace"), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
