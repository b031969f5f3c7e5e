"""Just enough of rpcbind for an NFS server and its clients in a user-mode Linux, where the real one does not start.

It accepts every registration and knows two ports (RFC 1833, version 2 of the protocol).
"""

from __future__ import annotations

import socket
import socketserver
import struct
import threading

PORTS = {100003: 2049, 100005: 20048}
VERSION, GETPORT = 2, 3


def answer(call: bytes) -> bytes:
    """The reply to one call (RFC 5531)."""
    version, procedure = struct.unpack(">II", call[16:24])
    if version != VERSION:
        return call[:4] + struct.pack(">7I", 1, 0, 0, 0, 2, VERSION, VERSION)
    credentials = 32 + int.from_bytes(call[28:32], "big")
    arguments = credentials + 8 + int.from_bytes(call[credentials + 4 : credentials + 8], "big")
    program = int.from_bytes(call[arguments : arguments + 4], "big")
    value = PORTS.get(program, 0) if procedure == GETPORT else 1
    return call[:4] + struct.pack(">5I", 1, 0, 0, 0, 0) + (struct.pack(">I", value) if procedure else b"")


class Records(socketserver.StreamRequestHandler):
    """Calls over a stream, each with its length before it."""

    def handle(self) -> None:
        """Answer until the other side has gone."""
        while head := self.rfile.read(4):
            reply = answer(self.rfile.read(int.from_bytes(head, "big") & 0x7FFFFFFF))
            self.wfile.write((len(reply) | 0x80000000).to_bytes(4, "big") + reply)


def main() -> None:
    """Serve on the port and the socket that everybody knows."""
    socketserver.ThreadingTCPServer.allow_reuse_address = True
    servers = (
        socketserver.ThreadingTCPServer(("127.0.0.1", 111), Records),
        socketserver.ThreadingUnixStreamServer("/run/rpcbind.sock", Records),
    )
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    with socket.socket(type=socket.SOCK_DGRAM) as packets:
        packets.bind(("127.0.0.1", 111))
        while True:
            call, sender = packets.recvfrom(1 << 14)
            packets.sendto(answer(call), sender)


if __name__ == "__main__":
    main()
