"""Ports of this machine and others: who listens, and what is free."""

from __future__ import annotations

import socket

CONNECT_TIMEOUT = 5.0


def bind_problem(host: str, port: int) -> str | None:
    """Why a server cannot listen on (host, port), or None if it can; closes again at once."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(1)
    except (OSError, OverflowError) as error:
        return str(error)
    return None


def connect_problem(address: str) -> str | None:
    """Why nobody answers at "host:port", with or without ray://, or None if somebody does."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return "no host:port"
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT).close()
    except (OSError, OverflowError) as error:
        return str(error)
    return None


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
