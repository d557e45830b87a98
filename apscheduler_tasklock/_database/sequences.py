"""Sequences of statements: generators, so that no thread has to wait between two statements."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeAlias, TypeVar

from apscheduler_tasklock._database.requests import Call, Outcome
from apscheduler_tasklock._shutdown import Closing
from apscheduler_tasklock.errors import TaskLockError

Result = TypeVar("Result")

# A function that sends a statement on a cursor in autocommit mode, and returns the answer.
Statement: TypeAlias = Callable[[Any], Any]
# A generator that yields statements. Its caller sends each answer into it, or throws each error
# into it. So the caller decides in which thread the code between two statements runs.
Statements: TypeAlias = Generator[Statement, Any, Result]


class SequenceRequest(Call[Any]):
    """A request for one statement of a sequence. It is sent once.

    :param report: called in the replica's thread with the outcome. Must not wait.
    """

    def __init__(
        self,
        statement: Statement,
        closing: Closing,
        report: Callable[[Outcome[Any]], object],
        **times: float,
    ) -> None:
        super().__init__(statement, closing, **times)
        self._report = report

    def finish(self, outcome: Outcome[Any]) -> None:
        """Report the outcome."""
        self._report(outcome)

    def abandon(self, error: Exception) -> None:
        """Report the error that :meth:`finish` has raised."""
        self._report(Outcome(error=error))


def next_statement(statements: Statements[Any], outcome: Outcome[Any] | None) -> Statement | None:
    """Continue a sequence; return its next statement, or ``None`` at its end.

    :param outcome: the outcome of the last statement; ``None`` at the beginning
    :raises Exception: the error that ends the sequence
    """
    try:
        if outcome is None:
            return next(statements)
        if outcome.error is not None:
            return statements.throw(outcome.error)
        return statements.send(outcome.answer)
    except StopIteration:
        return None


def ask_here(statements: Statements[Result], ask: Callable[[Statement], Any]) -> Result:
    """Send all statements of a sequence from this thread, and return its result.

    :param ask: sends one statement, and waits for its answer
    """
    try:
        statement = next(statements)
        while True:
            try:
                answer = ask(statement)
            except TaskLockError as error:
                statement = statements.throw(error)
            else:
                statement = statements.send(answer)
    except StopIteration as end:
        result: Result = end.value
        return result
