"""NVIDIA's Xid catalogue: what each code means and calls for, and what the registers of NVLink errors add to that.

Actions follow the immediate resolutions of the catalogue for Hopper
(docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html); the bits are those of its workflows for NVLink errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final, NamedTuple


class XidAction(StrEnum):
    """What an Xid calls for. NVIDIA's names: RESTART_BM is ``reboot_node``, UPDATE_SWFW ``update_software``."""

    NONE = "none"
    IGNORE = "ignore"
    RESTART_APP = "restart_app"
    RESET_GPU = "reset_gpu"
    DRAIN_P2P = "drain_p2p"
    DRAIN_AND_RESET = "drain_and_reset"
    RECOVER_IMEX_DOMAIN = "recover_imex_domain"
    RESTART_VM = "restart_vm"
    REBOOT_NODE = "reboot_node"
    CHECK_MECHANICALS = "check_mechanicals"
    UPDATE_SOFTWARE = "update_software"
    WORKFLOW = "workflow"
    CONTACT_SUPPORT = "contact_support"


class XidInfo(NamedTuple):
    """A row of the catalogue."""

    action: XidAction
    description: str


_ROWS: Final[tuple[tuple[tuple[int, ...], XidAction, str], ...]] = (
    ((8,), XidAction.RESTART_APP, "the GPU stopped processing a channel"),
    ((11, 25, 32), XidAction.RESTART_APP, "invalid or corrupted commands in a push buffer"),
    ((13,), XidAction.RESTART_APP, "exception in a kernel: out-of-range address, illegal instruction or the like"),
    ((31,), XidAction.RESTART_APP, "page fault: access to an address that is not mapped"),
    ((39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)), XidAction.RESTART_APP, "copy engine error"),
    ((60,), XidAction.RESTART_APP, "security engine error"),
    ((68, 83, 84, 88, 89, 96, 97, 98), XidAction.RESTART_APP, "video decoder error"),
    ((69,), XidAction.RESTART_APP, "compute engine rejected a method"),
    ((80,), XidAction.RESTART_APP, "commands arrived corrupted at the GPU"),
    ((82, *range(99, 106)), XidAction.RESTART_APP, "JPEG decoder error"),
    ((86, 139), XidAction.RESTART_APP, "optical flow engine error"),
    ((94,), XidAction.RESTART_APP, "uncorrectable memory error, contained to the application that hit it"),
    ((14,), XidAction.IGNORE, "driver test event"),
    ((37, 38, 66, 67), XidAction.IGNORE, "context-switch firmware reported an error of the driver"),
    ((43,), XidAction.IGNORE, "the application's channel was reset after its own fault"),
    ((44,), XidAction.IGNORE, "fault during a context switch"),
    ((63,), XidAction.IGNORE, "memory row remapped, or its remapping recorded"),
    ((92,), XidAction.IGNORE, "high rate of corrected memory errors"),
    ((93,), XidAction.IGNORE, "the board's configuration memory was written more often than planned"),
    ((106, 107), XidAction.IGNORE, "test message of the management bus"),
    ((108, 137), XidAction.IGNORE, "access over NVLink refused; often the echo of a fault on a peer GPU"),
    ((121,), XidAction.IGNORE, "corrected error on the chip-to-chip link"),
    ((141,), XidAction.IGNORE, "CUDA fast-path error"),
    ((152, 153), XidAction.IGNORE, "deep-learning accelerator error"),
    ((157,), XidAction.IGNORE, "a faulty resource could not be retired"),
    ((160, 161), XidAction.IGNORE, "memory channel retirement"),
    ((46,), XidAction.RESET_GPU, "the GPU stopped processing"),
    ((62, 169), XidAction.RESET_GPU, "an internal microcontroller halted"),
    ((64,), XidAction.RESET_GPU, "a memory row could not be remapped"),
    ((95,), XidAction.RESET_GPU, "uncorrectable memory error that may have reached other applications"),
    ((109,), XidAction.RESET_GPU, "context switch timed out"),
    ((110,), XidAction.RESET_GPU, "security fault"),
    ((119,), XidAction.RESET_GPU, "the GPU system processor (GSP) does not answer the driver"),
    ((120,), XidAction.RESET_GPU, "the GPU system processor (GSP) failed"),
    ((136,), XidAction.RESET_GPU, "NVLink training failed"),
    ((140,), XidAction.RESET_GPU, "unrecovered ECC error"),
    ((143,), XidAction.RESET_GPU, "the GPU could not be initialised"),
    ((155,), XidAction.RESET_GPU, "NVLink went down"),
    ((156,), XidAction.RESET_GPU, "a faulty resource is retired at the next reset"),
    ((158, 167), XidAction.RESET_GPU, "fatal timeout inside the GPU or on PCIe"),
    ((79,), XidAction.REBOOT_NODE, "the GPU has fallen off the PCIe bus"),
    ((151,), XidAction.RESTART_VM, "confidential-computing key rotation failed"),
    ((54,), XidAction.CHECK_MECHANICALS, "auxiliary power is not connected"),
    ((78,), XidAction.UPDATE_SOFTWARE, "a virtual GPU could not be started"),
    ((45,), XidAction.WORKFLOW, "channels removed because of an earlier error or because the application was killed"),
    ((48, 171, 172), XidAction.RESET_GPU, "uncorrectable ECC error"),
    ((74,), XidAction.WORKFLOW, "NVLink error"),
    (tuple(range(144, 151)), XidAction.WORKFLOW, "NVLink 5 error"),
    ((154,), XidAction.WORKFLOW, "the driver changed what it asks for to recover"),
    ((159,), XidAction.WORKFLOW, "error on the coherent link to the processor"),
    ((162, 163), XidAction.IGNORE, "power smoothing was switched on or off"),
    ((164,), XidAction.IGNORE, "the hardware that smooths power is near the end of its life"),
    ((165,), XidAction.CONTACT_SUPPORT, "the hardware that smooths power has reached the end of its life"),
    ((166, 170), XidAction.CONTACT_SUPPORT, "NVLink was used before its encryption was set up"),
    ((168,), XidAction.CONTACT_SUPPORT, "errors in protected memory: less of it can be used"),
    ((142,), XidAction.CONTACT_SUPPORT, "video encoder error"),
    (
        (
            *range(1, 8),
            9,
            10,
            12,
            *range(15, 25),
            *range(26, 31),
            *range(33, 37),
            42,
            47,
            *range(49, 54),
            *range(55, 60),
            61,
            65,
            73,
            81,
            87,
            90,
            91,
            *range(111, 119),
            *range(122, 126),
            138,
        ),
        XidAction.CONTACT_SUPPORT,
        "listed by NVIDIA without a meaning",
    ),
)

CATALOGUE: Final[Mapping[int, XidInfo]] = {
    code: XidInfo(action, description) for codes, action, description in _ROWS for code in codes
}
"""Xid to its action and meaning; what is not in it calls for NVIDIA's support."""

UNKNOWN: Final = XidInfo(XidAction.CONTACT_SUPPORT, "not in the catalogue")

_HARMLESS: Final = sum(1 << bit for bit in (0, 23, 30))
_PARITY_1: Final = sum(1 << bit for bit in (4, 5))
_PARITY_3: Final = sum(1 << bit for bit in (0, 1, 2, 6))
_SIGNAL: Final = sum(1 << bit for bit in (21, 22))
_LINK: Final = sum(1 << bit for bit in (8, 9, 12, 16, 17, 24, 28))
"""Bits of the first and the third register of Xid 74, by NVIDIA's workflow for NVLink errors."""

_ENDS_PROGRAM: Final = {"RLW_REMAP": 0x3F, "RLW_SRC_TRACK": 0x0C}
"""Units of NVLink 5 and the bits of their error status that end the program without being fatal for the link."""

_NVLINK = re.compile(r"link (?P<link>\d+) ?\((?P<registers>0x[0-9a-f]+(?:, ?0x[0-9a-f]+)*)\)", re.IGNORECASE)
_NVLINK5 = re.compile(
    r"(?P<unit>[A-Z][A-Z0-9_/]*) +(?:Link +)?(?P<status>Non-?fatal|Fatal)\b.*?Link (?P<link>-?\d+)"
    r"(?: \(0x[0-9a-f]+ (?P<error>0x[0-9a-f]+))?",
    re.IGNORECASE,
)


def _nvlink(detail: str) -> XidInfo | None:
    """An error of NVLink 2 to 4, by the bits of its registers; Hopper fills the first, third, fourth and fifth."""
    if (match := _NVLINK.search(detail)) is None:
        return None
    registers = [int(register, 16) for register in match["registers"].split(",")]
    first, third = registers[0], registers[2] if len(registers) > 2 else 0
    link = f"NVLink error on link {int(match['link'])}"
    if first & _PARITY_1 or third & _PARITY_3:
        return XidInfo(XidAction.RESET_GPU, f"{link}: parity or ECC error in the GPU's link logic")
    if first & _SIGNAL:
        return XidInfo(XidAction.RESET_GPU, f"{link}: marginal signal; check the seating if it comes again")
    if first & _LINK:
        return XidInfo(XidAction.RESET_GPU, f"{link}: the link failed; check the seating if it comes again")
    if first and not first & ~_HARMLESS and not any(registers[1:]):
        return XidInfo(XidAction.IGNORE, f"{link}: status bits without a meaning of their own")
    return XidInfo(XidAction.WORKFLOW, f"{link}: registers that the catalogue does not explain")


def _nvlink5(detail: str) -> XidInfo | None:
    """An error of NVLink 5: it says itself whether it is fatal; some that are not end the program."""
    if (match := _NVLINK5.match(detail)) is None:
        return None
    unit = match["unit"].upper()
    what = f"NVLink 5 error on link {int(match['link'])}, {unit}"
    if match["status"].lower() == "fatal":
        return XidInfo(XidAction.RESET_GPU, f"{what}: fatal for the link")
    if int(match["error"] or "0", 16) & _ENDS_PROGRAM.get(unit, 0):
        return XidInfo(XidAction.RESTART_APP, f"{what}: the program's access was refused")
    return XidInfo(XidAction.IGNORE, f"{what}: not fatal")


_DECODERS: Final[Mapping[int, Callable[[str], XidInfo | None]]] = {
    74: _nvlink,
    **dict.fromkeys(range(144, 151), _nvlink5),
}


def decode(code: int, detail: str) -> XidInfo:
    """What an Xid with this text means: its registers, if it has any that the catalogue explains, else its code."""
    decoded = _DECODERS[code](detail) if code in _DECODERS else None
    return decoded or CATALOGUE.get(code, UNKNOWN)
