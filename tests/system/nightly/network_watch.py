"""Run a command in a network of its own, and write down every name and every address beyond the machine that it asks for.

    unshare --net --mount --pid --mount-proc --fork python tests/system/nightly/network_watch.py report.json python script.py

In that network every address leads to the loopback, where nobody listens but a name server that knows no name. What comes by
is written to ``report.json`` as ``{"asked": [names], "sent": [addresses beyond 127.0.0.0/8], "status": exit status}``. Packets of
every process inside are seen, whatever it is written in.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

EVERY_KIND = 3
"""``ETH_P_ALL``."""
IPV4, IPV6 = b"\x08\x00", b"\x86\xdd"


def build_network() -> None:
    """Have every address lead to the loopback, which names itself as name server, for this namespace only."""
    resolver = Path(tempfile.mkdtemp()) / "resolv.conf"
    resolver.write_text("nameserver 127.0.0.1\noptions timeout:2 attempts:1\n")
    for command in (
        "ip link set lo up",
        "ip route add local default dev lo src 127.0.0.1",
        "ip -6 route add local default dev lo || true",  # a kernel without it has no way out there either
        f"mount --bind {resolver} /etc/resolv.conf",
    ):
        subprocess.run(command, shell=True, check=True, stderr=subprocess.DEVNULL)


def answer_names(server: socket.socket, note: Callable[[str], None]) -> None:
    """Note each name that is asked for, and answer that there is none."""
    while True:
        query, asker = server.recvfrom(4096)
        labels, at = [], 12
        while query[at]:
            labels.append(query[at + 1 : at + 1 + query[at]].decode("ascii", "replace"))
            at += 1 + query[at]
        note(".".join(labels))
        server.sendto(query[:2] + b"\x81\x83" + query[4:6] + bytes(6) + query[12 : at + 5], asker)


def see_packets(tap: socket.socket, note: Callable[[str], None]) -> None:
    """Note each address that is not this machine's and that something is sent to."""
    while True:
        frame = tap.recv(2048)
        kind, packet = frame[12:14], frame[14:]
        if kind == IPV4 and packet[16] != 127:
            note(socket.inet_ntoa(packet[16:20]))
        elif kind == IPV6 and packet[24:40] != bytes(15) + b"\x01":
            note(socket.inet_ntop(socket.AF_INET6, packet[24:40]))


def main() -> None:
    """Run the command and write the report; ends with the command's status."""
    report, *command = sys.argv[1:]
    build_network()
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 53))
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERY_KIND))
    tap.bind(("lo", EVERY_KIND))
    asked: list[str] = []
    sent: list[str] = []
    threading.Thread(target=answer_names, args=(server, asked.append), daemon=True).start()
    threading.Thread(target=see_packets, args=(tap, sent.append), daemon=True).start()
    status = subprocess.run(command, check=False).returncode
    Path(report).write_text(json.dumps({"asked": sorted(set(asked)), "sent": sorted(set(sent)), "status": status}))
    sys.exit(status)


if __name__ == "__main__":
    main()
