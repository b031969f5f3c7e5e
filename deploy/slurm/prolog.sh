#!/bin/sh
# Slurm's Prolog: no job starts on a node that is not fit for it. It is for nodes that one job has at a time: where jobs
# share a node, the processes of one count as left behind when the next one starts. slurm.conf:
#
#   Prolog=/etc/slurm/opsd/prolog.sh
#   PrologFlags=Alloc
#   BatchStartTimeout=180
#
# The quick profile takes one to two minutes on a node with GPUs. It gets 150 s and 15 more to end; BatchStartTimeout,
# and PrologEpilogTimeout if you set it, must be longer.
#
# A Prolog that fails drains the node and puts the job back into the queue, so it fails only for a node that failed.
# Where the preflight cannot be run or takes too long, the job starts and the system's log says so: the GPUs need torch
# (`deploy/install --train` or preflight.python), and checks that may be unable to run belong into preflight.optional.
# Slurm's own commands must not be called from here, so never add --act.
PATH=${PATH:-/usr/sbin:/usr/bin:/sbin:/bin} # Slurm sets none
export PATH
OPSD=${OPSD:-/opt/opsd/bin/opsd}
[ -x "$OPSD" ] || exit 0
report=/run/opsd-prolog-${SLURM_JOB_ID:-0}.json
said=$(timeout -k 15 150 "$OPSD" preflight --profile quick --quiet --json "$report" 2>&1)
code=$?
case $code in
    0) why= ;;
    1) logger -t opsd "this node failed its preflight, job ${SLURM_JOB_ID:-?} does not start; see $report"; exit 1 ;;
    124 | 137) why="the preflight took longer than 150 s" ;;
    *) why="the preflight ended with exit code $code: $said" ;;
esac
rm -f "$report"
[ -z "$why" ] || logger -t opsd "job ${SLURM_JOB_ID:-?} starts unchecked: $why"
exit 0
