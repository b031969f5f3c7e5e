"""Stands for Slurm's commands: one node with one job of this user. An agent believes no rank page about its job."""

from __future__ import annotations

import os
import pwd
import sys
from pathlib import Path

_COMMAND = """#!{python} -ISu
import sys
name, arguments = sys.argv[0].rpartition("/")[2], sys.argv[1:]
values = {values!r}
if arguments == ["--version"]:
    print("slurm 24.11.5")
elif "--Format" in arguments:
    fields = arguments[arguments.index("--Format") + 1].split(",")
    wanted = (field.partition(":") for field in fields)
    print("".join(values[name][field] + separator for field, _, separator in wanted))
"""


def write_commands(folder: Path, node: str, job: str) -> Path:
    """Write sinfo, squeue and scontrol to ``folder``: the path to find them on."""
    times = dict.fromkeys(("SubmitTime", "StartTime", "EndTime"), "N/A")
    of_node = {"NodeList": node, "StateComplete": "allocated", "Timestamp": "Unknown", "User": "Unknown"}
    of_job = {
        "JobID": job, "State": "RUNNING", "Reason": "None", "UserName": pwd.getpwuid(os.getuid()).pw_name,
        "Partition": "gpu", "NodeList": node, "BatchHost": node, "RestartCnt": "0", "Name": "train",
    }  # fmt: skip
    values = {"sinfo": {**of_node, "Reason": "none", "Comment": ""}, "squeue": {**of_job, **times, "Comment": ""}}
    folder.mkdir()
    for name in ("sinfo", "squeue", "scontrol"):
        command = folder / name
        command.write_text(_COMMAND.format(python=os.path.realpath(sys.executable), values=values))
        command.chmod(0o755)
    return folder
