"""Whatever stands in the kernel log: drivers log what hardware and processes say, and processes may write into it."""

from __future__ import annotations

import itertools
from pathlib import Path

from hypothesis import strategies as st

from tests.fakes.fuzzing import AMOUNTS, changed, fuzz
from tests.fakes.kmsg import FALLEN, XID_31, XID_79, Node, read
from tests.fakes.pipeline import Pipeline

MESSAGES = (
    XID_31, XID_79, FALLEN,
    "NVRM: Xid (PCI:0000:3b:00): 63, pid=1, name=x, Row Remapper: New row (0x0000000012345678) marked for remapping",
    "NVRM: Xid (PCI:0000:3b:00): 94, pid=7, name=python, Contained: SM (0x1). RST: No, D-RST: No",
    "NVRM: Xid (PCI:0000:3b:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 03 (0x004505c6 0x00000000 0x00000000 0x0 0x0)",
    "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
    "mlx5_core 0000:17:00.0: temperature_warning_event:718:(pid 0): High temperature on sensors with bit set 0 1",
    "Out of memory: Killed process 4242 (python) total-vm:1kB, anon-rss:2kB, file-rss:0kB, shmem-rss:0kB, UID:1000",
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,task=python,pid=4242,uid=1000",
    "nvme nvme0: I/O 5 QID 3 timeout, aborting", "EXT4-fs error (device sda1): ext4_find_entry:1455: inode #2",
    "mce: [Hardware Error]: Machine check events logged", "INFO: task python:4242 blocked for more than 120 seconds.",
    "nfs: server files not responding, still trying", "CPU3: Core temperature above threshold, cpu clock throttled",
)  # fmt: skip
RECORDS = tuple(f"6,{n},{n}000000,-;{text}\n SUBSYSTEM=pci\n".encode() for n, text in enumerate(MESSAGES, start=1))
SEEDS: tuple[bytes, ...] = (
    b"6," + b"9" * 5000 + b",1,-;x\n",
    b"6,1," + b"9" * 100 + b",-;" + XID_31.encode() + b"\n",
    b"6,1,1,+;\\x0a\\x0a\n",
    b"-1,-1,-1,c;NVRM: Xid (PCI:0000:3b:00): 99999999999999999999, \xff\n",
    "6,1,1,-;NVRM: Xid (PCI:0000:3b:00): ²31\n".encode(),
    b"6,1,1000000,-;nfs: server files not responding, still tryi" + b"[" * 400 + b"\n",
    b"6,1,1000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=x, " + b"[" * 400 + b"\n",
)


@AMOUNTS
def test_no_record_is_a_bug(amount: int, memory_folder: Path) -> None:
    """Damaged, continued, from any facility: events, counts and incidents can be passed on."""
    numbers = itertools.count()

    def look(records: list[bytes]) -> None:
        node = Node(memory_folder / str(next(numbers) % 8))
        agent, pipeline = node.agent(injected=True), Pipeline()
        read(agent)
        for record in records:
            node.log.write_raw(record)
            node.clock.advance(1.0)
            pipeline.tick(node.clock.now, node.clock.wall(), {"kmsg": read(agent)})

    fuzz(look, st.lists(changed(*RECORDS), min_size=1, max_size=4), amount, [[seed] for seed in SEEDS])


@AMOUNTS
def test_no_position_is_a_bug(amount: int, memory_folder: Path) -> None:
    """The file with the last record read, damaged or of another program."""

    def look(content: bytes) -> None:
        node = Node(memory_folder)
        node.state.write_bytes(content)
        node.say(XID_31)
        read(node.agent())

    usual = b'{"boot_id": "boot-1", "sequence": 7}'
    fuzz(look, changed(usual), amount, [b'{"boot_id": "boot-1", "sequence": 1e999}', b"[" * 5000])
