# SPDX-License-Identifier: Apache-2.0
"""Where the process groups of a check listen: on this machine alone."""

import socket

LOOPBACK = "lo", "lo0"  # Linux, macOS


def on_loopback() -> dict[str, str]:
    """Return the environment in which gloo listens on the loopback interface. Without
    it gloo takes the address of the host's name.

    Returns:
        GLOO_SOCKET_IFNAME; nothing on a machine without that interface.
    """
    loopback_names = [name for _, name in socket.if_nameindex() if name in LOOPBACK]
    return {"GLOO_SOCKET_IFNAME": loopback_names[0]} if loopback_names else {}
