#!/bin/sh
# Slurm's Prolog: no job starts on a node that is not fit for it. slurm.conf:
#
#   Prolog=/etc/slurm/opsd/prolog.sh
#   PrologFlags=Alloc
#   BatchStartTimeout=60
#
# A Prolog that fails drains the node and puts the job back into the queue. Slurm's own commands must not be called
# from here. Checks that may be unable to run on your nodes belong into preflight.optional; a preflight that takes too
# long is no reason to refuse a job.
OPSD=${OPSD:-/opt/opsd/bin/opsd}
[ -x "$OPSD" ] || exit 0
timeout 45 "$OPSD" preflight --profile quick --quiet --json "/run/opsd-prolog-${SLURM_JOB_ID:-0}.json"
case $? in
    1) echo "print opsd: this node failed its preflight; see /run/opsd-prolog-${SLURM_JOB_ID:-0}.json" ; exit 1 ;;
    *) rm -f "/run/opsd-prolog-${SLURM_JOB_ID:-0}.json" ; exit 0 ;;
esac
