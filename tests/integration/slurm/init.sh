# The first process of a host: makes its mounts, says its process id as its parents see it, and lives until its standard
# input ends. Run by bash, which also reaps what daemons leave behind. Arguments: host name, folder of the cluster.
set -eu
hostname "$1"
read -r pid _ </proc/self/stat
mount -t proc proc /proc
mount -t tmpfs -o size=256m tmpfs /dev/shm
mount -t tmpfs -o size=64m tmpfs /mnt
mount -t tmpfs tmpfs /run
mkdir /run/munge
mount --bind "$2/munge" /run/munge
ip link set lo up
echo "$pid"
read -r _ || true
