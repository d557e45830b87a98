"""``TaskLockScheduler``: the extension's public face, and the scheduler of each application."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  # so that its exit handler runs after `_shut_down_all`
import os
import threading
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar
from weakref import WeakSet

from apscheduler.schedulers.background import BackgroundScheduler
from flask import Flask, current_app, has_app_context

from apscheduler_tasklock._lock.forking import replace_in_each_child
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.draining import drain, end_on_sigterm, stop_claiming
from apscheduler_tasklock.errors import TaskLockOptionError, TaskLockSchemaError, raised_at_the_call
from apscheduler_tasklock.executor import TaskLockExecutor
from apscheduler_tasklock.flask import servers
from apscheduler_tasklock.flask.command import tasklock
from apscheduler_tasklock.flask.configuration import Configuration

logger = logger_of(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

EXTENSION = "tasklock"

# Limits the seconds between two checks whether the server has loaded the application.
_LOOK_INTERVAL = 0.05


class TaskLockScheduler:
    """A scheduler for Flask applications, which starts in each process that serves them.

    Each job runs once, however many processes there are, and in the application's
    context. An application is configured by ``app.config``: ``TASKLOCK_DATABASE_URL`` or else
    ``SQLALCHEMY_DATABASE_URI`` is the database, by default the environment's
    ``TASKLOCK_DATABASE_URL``; and ``TASKLOCK_FAILOVER`` and so on are options of
    :class:`~apscheduler_tasklock.TaskLockExecutor`.

    :param app: the application; without one, call :meth:`init_app`
    :raises TaskLockOptionError: the configuration has no database, or an invalid option
    """

    @raised_at_the_call
    def __init__(self, app: Flask | None = None) -> None:
        self._jobs: dict[str, dict[str, Any]] = {}
        self._schedulers: WeakSet[AppScheduler] = WeakSet()
        if app is not None:
            self.init_app(app)

    @raised_at_the_call
    def init_app(self, app: Flask) -> None:
        """Give an application a scheduler of its own, and the command ``flask tasklock``.

        The scheduler starts by itself where the application is served: in the workers of gunicorn,
        with ``flask run`` and ``app.run()``, and anywhere else with the first request. It does not
        start with other ``flask`` commands, in a process that only watches files or workers, or
        with the first request while ``app.testing`` is set.

        :raises TaskLockOptionError: the configuration has no database, or an invalid option
        """
        if EXTENSION in app.extensions:
            raise TaskLockOptionError(
                f"TaskLockScheduler: the application {app.name!r} has a scheduler already"
            )
        scheduler = AppScheduler(app, self._jobs)
        app.extensions[EXTENSION] = scheduler
        app.cli.add_command(tasklock)
        self._schedulers.add(scheduler)
        if scheduler.configuration.autostart:
            scheduler.start_when_served()

    def task(
        self,
        trigger: Any,
        *,
        id: str | None = None,  # noqa: A002  # APScheduler's name
        **options: Any,
    ) -> Callable[[Function], Function]:
        """Make a function a job of each application: a decorator.

        :param trigger: as in APScheduler's ``add_job``: ``"cron"``, ``"interval"``, ...
        :param id: the job's id, and so its task's name; by default the function's name
        :param options: further options of ``add_job``, such as ``minutes=5``
        :return: the decorator, which returns the function itself
        :raises TaskLockOptionError: another job has this id
        """

        @raised_at_the_call
        def decorate(function: Function) -> Function:
            self.add_job(function, trigger, id=id, **options)
            return function

        return decorate

    def add_job(
        self,
        func: Callable[..., Any] | str,
        trigger: Any = None,
        *,
        id: str | None = None,  # noqa: A002  # APScheduler's name
        **options: Any,
    ) -> None:
        """Add a job to each application, also to an application of a later :meth:`init_app`.

        To add and remove jobs while an application runs, use :attr:`apscheduler`.

        :param func: a function, or its reference such as ``"module:function"``
        :param trigger: as in APScheduler's ``add_job``: ``"cron"``, ``"interval"``, ...
        :param id: the job's id, and so its task's name; by default the function's name
        :param options: further options of ``add_job``, such as ``minutes=5``
        :raises TaskLockOptionError: another job has this id, or the job has no id
        """
        job_id = id or getattr(func, "__name__", None)
        if not job_id or job_id == "<lambda>":
            raise TaskLockOptionError(f"TaskLockScheduler: give the job of {func!r} an id")
        if job_id in self._jobs:
            raise TaskLockOptionError(
                f"TaskLockScheduler: there is a job {job_id!r} already; give one of them another id"
            )
        job = {"func": func, "trigger": trigger, "id": job_id, **options}
        for scheduler in list(self._schedulers):
            scheduler.apscheduler.add_job(**job)
        self._jobs[job_id] = job

    @property
    def apscheduler(self) -> BackgroundScheduler:
        """APScheduler's own scheduler of the current application, or of the only application.

        :meth:`shutdown` replaces it by a new scheduler.

        :raises TaskLockOptionError: there are several applications, and none is the current one
        """
        return self._of(None).apscheduler

    @property
    def executor(self) -> TaskLockExecutor:
        """The executor of :attr:`apscheduler`, such as for ``scheduler.executor.run_now("id")``.

        :raises TaskLockOptionError: as for :attr:`apscheduler`
        """
        return self._of(None).executor

    @raised_at_the_call
    def start(self, app: Flask | None = None) -> None:
        """Start the scheduler at once, unless it runs. Servers that are not recognised need this.

        A module may call this when it is imported, because the call does nothing under ``flask``
        commands except ``flask run``, in the reloader's process that only watches files, and in
        gunicorn's master.

        :param app: by default the current application, or the only one
        :raises TaskLockSchemaError: the task lock table is missing, old or not permitted
        :raises TaskLockOptionError: options of a job are invalid
        """
        scheduler = self._of(app)
        if not servers.may_serve():
            logger.debug("The scheduler is not started: this process does not serve")
            return
        scheduler.start()

    def shutdown(self, wait: bool = True, app: Flask | None = None) -> None:
        """Shut the scheduler down, if it runs here. It is also shut down when the process ends.

        :param wait: whether to let running jobs end first
        :param app: by default the current application, or the only one
        """
        self._of(app).shutdown(wait)

    def _of(self, app: Flask | None) -> AppScheduler:
        if app is None and has_app_context() and EXTENSION in current_app.extensions:
            app = current_app
        if app is not None and EXTENSION not in app.extensions:
            raise TaskLockOptionError(
                f"TaskLockScheduler: the application {app.name!r} has no scheduler; call init_app "
                "first"
            )
        found = list(self._schedulers) if app is None else [app.extensions[EXTENSION]]
        if len(found) != 1:
            raise TaskLockOptionError(
                "TaskLockScheduler: call init_app first"
                if not found
                else "TaskLockScheduler: which application? There are several: call it in an "
                "application's context, or pass app=..."
            )
        scheduler: AppScheduler = found[0]
        return scheduler


class AppScheduler:
    """The scheduler of one application.

    :param jobs: the extension's jobs, as arguments of ``add_job``, by their ids
    :ivar configuration: the application's configuration
    :ivar apscheduler: APScheduler's own scheduler; a shutdown replaces it by a new scheduler
    :ivar executor: the executor of that scheduler
    :cvar retry_interval: seconds between two tries to start while the tables are missing
    """

    retry_interval: ClassVar[float] = 30.0

    def __init__(self, app: Flask, jobs: dict[str, dict[str, Any]]) -> None:
        self._app = app
        self._jobs = jobs
        self.configuration = Configuration.of(app)
        self.apscheduler = self._make()
        self._started_in: int | None = None  # id of the process
        # Whether a thread or app.run() starts the scheduler, so that no request has to start it.
        self._is_wanted = False
        self._is_patched_too_late = False
        self._lock = threading.Lock()
        replace_in_each_child(self)

    def _make(self) -> BackgroundScheduler:
        configuration = self.configuration
        options = {"daemon": True, **configuration.scheduler_options}
        executor = ContextExecutor(
            configuration.executor_database, app=self._app, **configuration.executor_options
        )
        self.executor = executor
        executors = {**options.pop("executors", {}), "default": executor}
        made = BackgroundScheduler(executors=executors, **options)
        for job in self._jobs.values():
            made.add_job(**job)
        return made

    def start(self) -> None:
        """Start the scheduler, unless it runs in this process."""
        with self._lock:
            if self._started_in == os.getpid() or _ending.is_set() or self._is_patched_too_late:
                return
            # Added before the start, so that it is shut down if the process ends in the first job.
            _running.add(self)
            try:
                self.apscheduler.start()
            except BaseException:
                _running.discard(self)
                raise
            self._started_in = os.getpid()

    def shutdown(self, wait: bool = True) -> None:
        """Shut the scheduler down, if it runs in this process."""
        with self._lock:
            if self._started_in != os.getpid():
                return
            self._started_in = None
            _running.discard(self)
            stopping = self.apscheduler
            if not _ending.is_set():
                self.apscheduler = self._make()
        # Without the lock, because this waits for jobs, which may call `start` or `shutdown`.
        if stopping.running:  # `False` if the application has shut APScheduler's scheduler down
            stopping.shutdown(wait)

    def start_when_served(self) -> None:
        """Start the scheduler as soon as this process or a forked child serves the application."""
        command = servers.flask_command()
        if command is not None:
            if servers.command_serves(command):
                end_on_sigterm()
                self._app.before_request(self._start_with_request)
                self._start_in_thread(servers.command_has_loaded(command))
            return
        if servers.gunicorn_worker() is not None:
            self._start_in_thread(servers.gunicorn_worker_has_loaded)
        self._start_with_run()
        self._app.before_request(self._start_with_request)

    def _replace_in_child(self) -> None:
        """Start the scheduler if this process is gunicorn's worker with a preloaded application.

        Called in each forked child.
        """
        self._lock = threading.Lock()
        self._is_wanted = False
        if not servers.is_gunicorn_master():
            return
        self._is_patched_too_late = servers.is_patched_too_late()
        if self._is_patched_too_late:
            logger.error(
                "The scheduler of the application %r does not start: gunicorn has preloaded the "
                "application, and its worker is patched by gevent only after that. Leave "
                "preload_app out, or call gevent.monkey.patch_all() at the top of gunicorn.conf.py",
                self._app.name,
            )
        elif self.configuration.autostart:
            self._start_in_thread(servers.gunicorn_worker_has_loaded)

    def _start_with_run(self) -> None:
        run = self._app.run

        def start_and_run(
            host: Any = None,
            port: Any = None,
            debug: bool | None = None,
            *more: Any,
            **options: Any,
        ) -> None:
            if servers.run_only_watches(self._app, debug, options):
                self.shutdown()  # because the application may have called `start`
            else:
                end_on_sigterm()
                self._is_wanted = True
                self.start()
            run(host, port, debug, *more, **options)

        self._app.run = start_and_run  # type: ignore[method-assign]  # Flask has no such hook

    def _start_with_request(self) -> None:
        if not self._is_wanted and not self._app.testing:
            self._start_in_thread(lambda: True)

    def _start_in_thread(self, is_served: Callable[[], bool]) -> None:
        self._is_wanted = True
        threading.Thread(
            target=self._start_once, args=[is_served], name="tasklock start", daemon=True
        ).start()

    def _start_once(self, is_served: Callable[[], bool]) -> None:
        """Start the scheduler when the application is served; retry while the table is missing."""
        while not is_served():
            if _ending.wait(_LOOK_INTERVAL):
                return
        while not _ending.is_set():
            try:
                self.start()
            except TaskLockSchemaError as error:
                logger.error(
                    "The scheduler of the application %r does not start, and tries again in %g "
                    "sec: %s",
                    self._app.name,
                    self.retry_interval,
                    error,
                )
            except Exception:
                logger.exception(
                    "The scheduler of the application %r does not start: none of its jobs runs in "
                    "this process",
                    self._app.name,
                )
                return
            else:
                return
            _ending.wait(self.retry_interval)


class ContextExecutor(TaskLockExecutor):
    """Runs each job in a context of its application.

    :param app: the application
    """

    def __init__(self, database: Any, *, app: Flask, **options: Any) -> None:
        super().__init__(database, **options)
        self._app = app

    def wrap_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls the job's function in a new context of the application."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._app.app_context():
                return function(*args, **kwargs)

        return call


# The schedulers that run in this process, and whether the process is ending.
_running: set[AppScheduler] = set()
_ending = threading.Event()


def _shut_down_all() -> None:
    """Shut all schedulers of this process down, after their running jobs have ended."""
    _ending.set()
    # A scheduler that has not started yet has no running jobs, and does not start any more, because
    # `_ending` is set.
    schedulers = [each for each in list(_running) if each.apscheduler.running]
    for scheduler in schedulers:
        stop_claiming(scheduler.apscheduler)
    for scheduler in schedulers:
        drain(scheduler.apscheduler)
        scheduler.shutdown()


# Handlers run in reverse order of registration, so `_shut_down_all` runs before the interpreter
# closes its thread pools and waits for their jobs. A handler of `atexit` would run after that wait.
threading._register_atexit(_shut_down_all)  # type: ignore[attr-defined]  # not public
