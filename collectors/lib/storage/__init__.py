"""Disks, mounts and NFS clients."""
