#!/bin/bash
# A machine in namespaces whose first process is systemd, with the units of a folder and nothing else. Called by
# systemd_machine.py: FOLDER has units, tools and settings; PYTHON, PACKAGES and CHECKOUT are what opsd runs from.
set -e
folder=$1 python=$2 packages=$3 checkout=$4
mount --make-rprivate /
mount -t tmpfs none /run
mkdir -p /run/systemd/system
mount -t tmpfs none /opt
mkdir -p /opt/{python,packages,checkout,opsd,tools}
mount --rbind "$python" /opt/python
mount --bind "$packages" /opt/packages
mount --bind "$checkout" /opt/checkout
mount --bind "$folder/tools" /opt/tools
mount --bind "$folder/opsd" /opt/opsd
mkdir -p /var/lib/opsd /etc/opsd
mount --bind "$folder/state" /var/lib/opsd
mount --bind "$folder/etc" /etc/opsd

mkdir /run/dev
mount -t tmpfs none /run/dev
for device in null:3 zero:5 full:7 random:8 urandom:9 kmsg:11; do
    mknod -m 666 "/run/dev/${device%:*}" c 1 "${device#*:}"
done
mkdir /run/dev/{shm,pts,mqueue}
mount -t tmpfs none /run/dev/shm
mkdir /run/dev/shm/opsd
mknod -m 666 /run/dev/nvidia0 c 195 0
ln -s /proc/self/fd /run/dev/fd
ln -s pts/ptmx /run/dev/ptmx
mount --move /run/dev /dev

mount -t tmpfs none /sys/fs/cgroup 2>/dev/null
if grep -q '^[0-9]*:[a-z]' /proc/self/cgroup; then
    for name in name=systemd devices pids; do
        mkdir "/sys/fs/cgroup/${name#name=}"
        mount -t cgroup -o "none,$name" none "/sys/fs/cgroup/${name#name=}" 2>/dev/null ||
            mount -t cgroup -o "$name" none "/sys/fs/cgroup/$name"
    done
else
    mount -t cgroup2 none /sys/fs/cgroup
fi
exec env -i container=other SYSTEMD_UNIT_PATH="$folder/units" SYSTEMD_LOG_TARGET=console PATH="$PATH" \
    /lib/systemd/systemd --system --unit=default.target --log-target=console --dump-core=0 --crash-shell=0
