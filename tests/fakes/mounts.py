"""Tables of mounts as kernels print them."""

from __future__ import annotations

MOUNTINFO = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro
30 27 0:27 / /dev/shm rw - tmpfs tmpfs rw,size=24684096k
40 27 259:3 / /scratch rw,noatime - xfs /dev/nvme1n1 ro,attr2
41 27 259:3 /sub /srv/bind\\040mount rw,noatime - xfs /dev/nvme1n1 ro,attr2
50 27 0:51 / /data rw,relatime - nfs4 10.0.0.1:/export rw,vers=4.2,nconnect=8
51 27 0:52 / /lustre rw - lustre 10.0.0.2@o2ib:/scratch rw
52 27 0:53 / /bucket rw - fuse.s3fs s3fs rw
53 27 0:54 / /sys/fs/fuse/connections rw - fusectl fusectl rw
this line is nonsense
"""

MOUNTSTATS = """\
device proc mounted on /proc with fstype proc
device 10.0.0.1:/export mounted on /data with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.2,rsize=1048576
\tage:\t1234
\tbytes:\t11 22 33 44 5000 6000 7 8
\tRPC iostats version: 1.1  p/v: 100003/4 (nfs)
\txprt:\ttcp 0 0 2 0 0 47 47 0 49 0 2 12 3
\tper-op statistics
\t        NULL: 1 1 0 44 24 0 0 0 0
\t        READ: 100 103 2 17000 1048576 40 800 900 0
\t       WRITE: 7 7 0 100 200 1 14 21
\t     LOOKUP: not numbers

device /dev/nvme0n1p2 mounted on / with fstype ext4
"""
