# SPDX-License-Identifier: Apache-2.0
"""Where this process listens, and a machine whose name is the address of its network."""

import os
import socket
import subprocess
from pathlib import Path

import pytest


def listening() -> list[str]:
    """Return the addresses at which this process waits for TCP connections, as
    hexadecimal ADDRESS:PORT of the kernel's tables.
    """
    mine = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            mine.add(os.readlink(descriptor))
        except OSError:  # the one that lists the folder
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, address, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in mine:
                found.append(address)
    return found


def on_a_network(*command: str, cwd: Path) -> subprocess.CompletedProcess:
    """Run the command where the host's name means the address of this machine's
    network, as on most clusters; return the completed process.

    The test is skipped where there is no network, or unshare may not name the host.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_route:
        try:
            any_route.connect(("192.0.2.1", 9))  # sends nothing
            address = any_route.getsockname()[0]
        except OSError:
            pytest.skip("this machine has no network")
    named = [
        "unshare",
        "--uts",
        "--map-root-user",
        "sh",
        "-c",
        'hostname "$0" && exec "$@"',
        address,
    ]
    if subprocess.run([*named, "true"], capture_output=True, check=False).returncode:
        pytest.skip("unshare may not name the host here")
    return subprocess.run(
        [*named, *command], cwd=cwd, capture_output=True, text=True, check=False
    )
