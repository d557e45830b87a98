"""The pairs of sockets that the library opens."""

from __future__ import annotations

import socket

import pytest


def noting_pairs(monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    """Return a list that gets both sockets of each pair that is opened from now on."""
    opened: list[socket.socket] = []
    socketpair = socket.socketpair

    def note() -> tuple[socket.socket, socket.socket]:
        pair = socketpair()
        opened.extend(pair)
        return pair

    monkeypatch.setattr(socket, "socketpair", note)
    return opened
