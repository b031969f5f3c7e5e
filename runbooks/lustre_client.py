"""The client of a shared file system has lost data in flight, or Lustre's has crashed."""

from __future__ import annotations

from opsd.runbooks.lib.kernel_faults import HOUR_S, Row, kernel_runbook

ROWS = (
    Row("network_filesystem_crashed", "the Lustre client has crashed ({cause})", critical=True),
    Row(
        "network_filesystem_evicted",
        "{server} has evicted the client ({fs})",
        about="server",
        within_s=HOUR_S,
    ),
)

RUNBOOK = kernel_runbook(
    "lustre_client",
    ROWS,
    """
# A client of a shared file system was evicted, or has crashed

## Meaning
A server of Lustre or CephFS has evicted this client: it had not answered for too long, and what it had not written yet
was thrown away. Or a server of NFSv4 has ended the lease of this client, or did not give a lock back. Or Lustre's
client has hit an assertion (`LBUG`), after which every access hangs until the node is booted. A connection that is lost
and restored is none of these; while it is lost, `storage_slow` says so. Failed requests (`rc = -107`) and time-outs of
LNet are quoted as evidence.

## Impact
Reads and writes that were in flight fail with an I/O error, so that a rank may crash or a file may be incomplete.
After an LBUG processes hang and cannot be killed.

## Diagnosis
1. `opsd incidents show ID`: which server.
2. `journalctl -k --since -1hour | grep -iE "lustre|lnet"`: time-outs before it point to the network, many clients at
   once to the server.
3. `df -h /scratch`: whether the file system answers now.
4. `opsd checkpoint list FOLDER`: checkpoints that were being written at that time must be verified before use.

## Mitigation
- Evicted: the client reconnects by itself; verify or repeat what was being written.
- LBUG: drain and reboot the node. Tell those who run the file system the line with `ASSERTION`.

## What opsd does by itself
- observe: opens the incident; resolves it after a reboot, or after an hour (LBUG: a day) without such a message.
- recommend: the same, and notifies.
- act: after an LBUG a run on several nodes with a spare swaps this node for it, and the node is drained if
  policy.drain allows it.
""",
    component="storage",
    beside="network_filesystem_error",
    advice=": verify what was being written at that time",
    cost="reads and writes in flight have failed",
    first=("journalctl -k --since -1hour",),
)
