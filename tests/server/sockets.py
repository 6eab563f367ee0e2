"""HTTP as bytes over a socket: what a client library would not send, and everything that comes back."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

from tests.server.conftest import Live

TEXTS, CHATS = "/v1/completions", "/v1/chat/completions"


def raw(body: Any, path: str = TEXTS, more: str = "") -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n"
    return (head + more + "\r\n").encode() + content


def connect(live: Live) -> socket.socket:
    host, port = live.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def until_closed(connection: socket.socket) -> bytes:
    """All that the server sends before it closes."""
    got = b""
    with contextlib.suppress(ConnectionResetError):  # it closed on bytes that it had not read
        while part := connection.recv(1 << 16):
            got += part
    return got


def talk(live: Live, *parts: bytes, leave_half: bool = False) -> bytes:
    with connect(live) as connection:
        for part in parts:
            connection.sendall(part)
        if leave_half:
            connection.shutdown(socket.SHUT_WR)
        return until_closed(connection)


def statuses(answers: bytes) -> list[int]:
    return [int(part[:3]) for part in answers.split(b"HTTP/1.1 ")[1:]]
