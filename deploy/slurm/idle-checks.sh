#!/bin/sh
# Tests idle nodes under load, each once in seven days, by jobs that give way to any other job at once. For cron, as root,
# on one machine that may submit jobs:
#
#   */10 * * * * root /etc/slurm/opsd/idle-checks.sh
#
# It needs a partition of all nodes whose jobs are preempted by those of all others. slurm.conf:
#
#   PreemptType=preempt/partition_prio
#   PreemptMode=REQUEUE
#   PartitionName=checks Nodes=ALL PriorityTier=0 AllowGroups=root State=UP
#
# and a PriorityTier of 1 (the default) or more for the others. Others of different tiers would preempt each other as well:
# give them PreemptMode=OFF if they must not. These are jobs and not HealthCheckProgram, which has no
# allocation: Slurm would start a job beside a test that loads the GPUs. A test that was cancelled counts for nothing, and its
# node is due again. One that failed drains the node, within policy.max_drained_share: try PROFILE on one node by hand first.
# Where the topology is known, nodes below two leaf switches also measure the network between them, each pair of switches
# once in seven days; one that was not well comes again with other nodes (`opsd nodes due --pairs --json` shows it).
PARTITION=${PARTITION:-checks}
COUNT=${COUNT:-2}            # tests that a call begins; 2 every ten minutes reach 2,016 nodes in seven days
PROFILE=${PROFILE:-standard} # policy.return_profile
TIME=${TIME:-60}             # minutes that a test may take
OPSD=${OPSD:-/opt/opsd/bin/opsd}
PAIRS=${PAIRS:-1}            # ways between leaf switches that a call measures; 1 reaches all of 45 switches; 0: none
NETWORK=${NETWORK:-$OPSD}    # an opsd with torch (deploy/install --train), for those; a job without it counts as a measurement
NAME=opsd-idle-check

# The number of GPUs that all of these nodes have. A step has none that it does not ask for: srun(1), --gres.
gpus_of() {
    sinfo --noheader --Node --nodes="$1" --format=%G | awk -F, '{
        gsub(/\([^)]*\)/, ""); n = 0
        for (i = 1; i <= NF; i++) if ($i ~ /^gpu:/) { k = split($i, part, ":"); n += part[k] }
        if (NR == 1 || n < least) least = n
    } END { if (least > 0) print least }'
}

scancel --quiet --name="$NAME" --state=PENDING --user="$(id -un)"
"$OPSD" nodes due --partition "$PARTITION" --count "$COUNT" | while read -r node; do
    sbatch --quiet --job-name="$NAME" --partition="$PARTITION" --nodelist="$node" --exclusive --mem=0 --no-requeue \
        --time="$TIME" --output=/dev/null --chdir=/ --wrap="exec $OPSD preflight --profile $PROFILE --act --quiet"
done
[ "$PAIRS" -gt 0 ] || exit 0
"$OPSD" nodes due --pairs --partition "$PARTITION" --count "$PAIRS" | while read -r nodes; do
    gpus=$(gpus_of "$nodes")
    sbatch --quiet --job-name="$NAME" --partition="$PARTITION" --nodelist="$nodes" --nodes=2 --ntasks-per-node=1 \
        --exclusive --mem=0 --no-requeue --time="$TIME" --output=/dev/null --chdir=/ \
        --wrap="exec srun ${gpus:+--gres=gpu:$gpus} $NETWORK preflight network --note"
done
