#!/bin/sh
# The first process of a user-mode Linux whose root is this machine's: an NFS server, two clients of it, and a program.
# What it changes lies in file systems of its own. Of its environment: UML_MODULES, and what nfs.py has written before.
mount -t proc proc /proc
mount -t sysfs sysfs /sys
for place in /run /var/lib /mnt; do mount -t tmpfs tmpfs "$place"; done
mkdir -p /var/lib/nfs/sm /var/lib/nfs/v4recovery /run/etc /run/root/lib/modules /mnt/export /mnt/a /mnt/b
touch /var/lib/nfs/etab /var/lib/nfs/rmtab
ip link set lo up

cp -a /etc/passwd /etc/group /etc/hosts /etc/nsswitch.conf /etc/protocols /etc/services /etc/ld.so* /etc/alternatives /run/etc/
cat > /run/etc/netconfig <<'END'
udp tpi_clts v inet udp - -
tcp tpi_cots_ord v inet tcp - -
local tpi_cots_ord - loopback - - -
END
mount --bind /run/etc /etc

ln -s "$UML_MODULES" "/run/root/lib/modules/$(uname -r)"
for module in nfsd nfsv3 nfsv4; do modprobe -d /run/root "$module"; done
mount -t nfsd nfsd /proc/fs/nfsd
"$PYTHON" "$HERE/rpcbind.py" &
sleep 2

mount /dev/ubda /mnt/export
echo 10 > /proc/fs/nfsd/nfsv4gracetime
echo 10 > /proc/fs/nfsd/nfsv4leasetime
exportfs -i -o rw,sync,fsid=0,no_root_squash,insecure,no_subtree_check 127.0.0.1:/mnt/export
rpc.mountd -p 20048
rpc.nfsd 8
sleep 2

for options in $OPTIONS; do
  case $options in vers=3*) source=127.0.0.1:/mnt/export ;; *) source=127.0.0.1:/ ;; esac
  mount.nfs "$source" /mnt/a -o "$options,nosharecache" && mount.nfs "$source" /mnt/b -o "$options,nosharecache"
  "$PYTHON" "$HERE/looks.py" "$options"
  umount /mnt/a /mnt/b
done
poweroff -f
