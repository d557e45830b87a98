"""What asks the database several things, one after the other, and waits for none of them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeAlias, TypeVar

from apscheduler_tasklock._database.deadline import Deadline
from apscheduler_tasklock._database.requests import Call, Outcome
from apscheduler_tasklock._database.side import Ticket
from apscheduler_tasklock.errors import TaskLockError

Result = TypeVar("Result")

# What asks on a cursor in autocommit mode, and returns the answer.
Statement: TypeAlias = Callable[[Any], Any]
# Yields what asks, and gets the answer, or has raised what went wrong. So what comes between two
# statements can be called wherever it belongs, and no thread waits.
Steps: TypeAlias = Generator[Statement, Any, Result]


class StepTicket(Ticket[Any]):
    """One statement on its way. It is sent once, if its turn comes in time.

    :param tell: called in the database's thread with what became of it. Must not wait.
    """

    def __init__(
        self,
        statement: Statement,
        deadline: Deadline,
        tell: Callable[[Outcome[Any]], object],
        **times: float,
    ) -> None:
        super().__init__(Call(statement), deadline, **times)
        self._deadline = deadline
        self._tell = tell

    @property
    def is_stopped(self) -> bool:
        """Whether whoever has sent it has stopped claiming."""
        return self._deadline.stopped

    def finish(self, outcome: Outcome[Any]) -> None:
        """Tell what became of it."""
        self._tell(outcome)

    def give_up(self, error: Exception) -> None:
        """Tell that its end has failed."""
        self._tell(Outcome(error=error))


def go_on(steps: Steps[Any], outcome: Outcome[Any] | None) -> Statement | None:
    """Return what is asked next, or ``None`` at the end.

    :param outcome: what became of what was asked last; ``None`` at the beginning
    :raises Exception: whatever ends the steps
    """
    try:
        if outcome is None:
            return next(steps)
        if outcome.error is not None:
            return steps.throw(outcome.error)
        return steps.send(outcome.answer)
    except StopIteration:
        return None


def ask_here(steps: Steps[Result], ask: Callable[[Statement], Any]) -> Result:
    """Ask all of it here, and return the result.

    :param ask: asks one statement, and waits for its answer
    """
    try:
        statement = next(steps)
        while True:
            try:
                answer = ask(statement)
            except TaskLockError as error:
                statement = steps.throw(error)
            else:
                statement = steps.send(answer)
    except StopIteration as end:
        result: Result = end.value
        return result
