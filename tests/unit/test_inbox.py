"""The inbox of the replica's thread: a message ends its wait, and so does a socket."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from math import inf
from typing import Any

import pytest

from apscheduler_tasklock._database.inbox import Inbox
from tests.support.socket_pairs import noting_pairs


class During:
    """A socket that does something when a wait begins to look at it."""

    def __init__(self, watched: socket.socket, do: Callable[[], object]) -> None:
        self._watched, self._do = watched, do

    def fileno(self) -> int:
        do, self._do = self._do, lambda: None
        do()
        return self._watched.fileno()


@pytest.fixture(params=["poll", "select"])
def inbox(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inbox[str]]:
    """An inbox that can wait, also where there is no ``poll``, as on Windows."""
    if request.param == "select":
        monkeypatch.delattr(select, "poll", raising=False)
    inbox: Inbox[str] = Inbox()
    inbox.open()
    yield inbox
    inbox.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A socket to wait for, and the other end of it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


Pair = tuple[socket.socket, socket.socket]


def taken(inbox: Inbox[str]) -> list[str]:
    messages: list[str] = []
    inbox.take_all(messages.append)
    return messages


def during(pair: Pair, do: Callable[[], object]) -> list[Any]:
    return [During(pair[0], do)]


def waited(inbox: Inbox[str], sockets: list[Any], *, writes: bool = False) -> bool:
    """Wait without a limit; fail if nothing ends the wait."""
    found: list[bool] = []

    def wait() -> None:
        found.append(inbox.wait(sockets, inf, writes=writes))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(60)
    assert found, "it waits for ever"
    return found[0]


def test_messages_are_taken_in_their_order(inbox: Inbox[str]) -> None:
    for message in "abc":
        inbox.put(message)
    assert list(inbox.messages) == [*"abc"]
    assert taken(inbox) == ["a", "b", "c"]
    assert taken(inbox) == []


def test_a_message_that_fails_leaves_the_next_ones_there(inbox: Inbox[str]) -> None:
    def fail(message: str) -> None:
        raise KeyError(message)

    for message in "ab":
        inbox.put(message)
    with pytest.raises(KeyError):
        inbox.take_all(fail)
    assert taken(inbox) == ["b"]


def test_a_message_that_is_there_is_not_waited_for(inbox: Inbox[str]) -> None:
    inbox.put("before")
    assert not waited(inbox, [])
    assert taken(inbox) == ["before"]


def test_a_message_that_comes_after_the_inbox_was_found_empty_ends_the_wait(
    inbox: Inbox[str], pair: Pair
) -> None:
    assert not waited(inbox, during(pair, lambda: inbox.put("late")))
    assert taken(inbox) == ["late"]


def test_a_message_of_another_thread_ends_the_wait(inbox: Inbox[str], pair: Pair) -> None:
    for number in range(100):
        putting = threading.Thread(target=inbox.put, args=[str(number)])
        assert not waited(inbox, during(pair, putting.start))
        putting.join(60)
        assert taken(inbox) == [str(number)]


def test_a_wait_after_one_that_a_message_has_ended_waits_again(
    inbox: Inbox[str], pair: Pair
) -> None:
    waits = 0
    for message in "ab":
        waited(inbox, during(pair, lambda message=message: inbox.put(message)))
        assert taken(inbox) == [message]
    answering = threading.Timer(0.05, pair[1].send, [b"answer"])
    answering.start()
    while not waited(inbox, [pair[0].fileno()]):
        waits += 1
    answering.join(60)
    assert waits == 0


def test_a_socket_that_can_be_read_ends_the_wait(inbox: Inbox[str], pair: Pair) -> None:
    assert waited(inbox, during(pair, lambda: pair[1].send(b"answer")))


def test_a_socket_is_seen_beside_a_message(inbox: Inbox[str], pair: Pair) -> None:
    def both() -> None:
        inbox.put("message")
        pair[1].send(b"answer")

    assert waited(inbox, during(pair, both))
    assert taken(inbox) == ["message"]


def test_a_socket_that_can_be_written_to_ends_the_wait_of_what_is_to_be_sent(
    inbox: Inbox[str], pair: Pair
) -> None:
    sockets = [pair[0].fileno()]
    assert not inbox.wait(sockets, 0.0)
    assert waited(inbox, sockets, writes=True)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 0.001])
def test_the_wait_ends_when_its_time_is_over(inbox: Inbox[str], seconds: float) -> None:
    assert not inbox.wait([], seconds)


@pytest.mark.skipif(sys.platform == "win32", reason="nothing forks there")
def test_what_a_forked_child_posts_does_not_wake_the_parent(inbox: Inbox[str], pair: Pair) -> None:
    sent: list[int] = []

    def put_in_child() -> None:
        pid = os.fork()
        if not pid:
            socket.socket.send = lambda *_: sent.append(1) or 1
            inbox.put("of the child")
            os._exit(len(sent) if taken(inbox) == ["of the child"] else 99)
        _, status = os.waitpid(pid, 0)
        sent.append(os.waitstatus_to_exitcode(status))

    inbox.wait(during(pair, put_in_child), 0.0)
    assert sent == [0]
    assert not inbox.messages


def test_a_message_to_a_closed_inbox_waits_until_it_is_opened_again() -> None:
    inbox: Inbox[str] = Inbox()
    inbox.put("before")
    inbox.open()
    inbox.close()
    inbox.put("between")
    inbox.open()
    try:
        assert not waited(inbox, [])
        assert taken(inbox) == ["before", "between"]
    finally:
        inbox.close()


def test_a_closed_inbox_has_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = noting_pairs(monkeypatch)
    inbox: Inbox[str] = Inbox()
    inbox.close()
    for _ in range(2):
        inbox.open()
        inbox.open()  # as after a caller that was interrupted before it closed
        inbox.close()
    assert len(opened) == 8
    assert [each.fileno() for each in opened] == [-1] * 8


def test_a_wake_up_that_comes_before_the_wait_ends_it(inbox: Inbox[str]) -> None:
    inbox.wake()
    assert not inbox.wait((), 600.0)
    assert not inbox.wait((), 0.0)
