"""Tables as a large installation has them, filled by a few statements of SQL."""

from __future__ import annotations

import psycopg

from apscheduler_tasklock import upgrade
from apscheduler_tasklock.demo.server import EmbeddedServer

# Seconds between two runs of each task.
PERIOD = 300

# One task in 100 is running, one in 1009 was left by a dead holder, one in 211 is paused.
RUNNING, DEAD, PAUSED = 100, 1009, 211
# One run in 53 failed, one in 10007 died with its holder.
FAILED, DIED = 53, 10007

# PostgreSQL's default, because the embedded server's own is smaller.
SETTINGS = {"shared_buffers": "128MB"}


def name(number: int) -> str:
    """Return the name of a task, from 0 on."""
    return f"reports:task {number:05}"


_NAME = "'reports:task ' || lpad(number::text, 5, '0')"

_TASKS = f"""
    INSERT INTO task_lock (
        task_name, started_at, locked_until, run_until, window_start, window_until, locked_by,
        claim_id, token, finished_at, deaths, handovers, handed_over, failover, runs, one_off, kind,
        schedule, due_at, overdue_at, overrun_at, recorded, succeeded_at, failed_at, failures,
        error_type, paused_until, paused_at)
    SELECT {_NAME}, began,
           COALESCE(ended, CASE WHEN is_dead THEN now() ELSE began + ten_minutes END),
           began + ten_minutes, began, began + interval '{PERIOD - 10} seconds',
           'replica-' || number %% %(replicas)s, gen_random_uuid(), 100000 + %(runs)s, ended, 0, 0,
           false, false, 'reports:job', false, 'schedule',
           '{{"type":"interval","length":[0,{PERIOD},0]}}', due, due + interval '60 seconds',
           began + ten_minutes, %(runs)s,
           CASE WHEN NOT failed THEN COALESCE(ended, began - interval '{PERIOD - 5} seconds') END,
           CASE WHEN number %% 3 = 0 OR failed THEN COALESCE(ended, began) END, failed::integer,
           CASE WHEN failed THEN 'ValueError' END,
           CASE WHEN number %% {PAUSED} = 0 THEN now() + interval '1 day' END,
           CASE WHEN number %% {PAUSED} = 0 THEN now() END
    FROM (SELECT *, CASE WHEN NOT is_running AND NOT is_dead
                         THEN began + interval '5 seconds' END AS ended,
                 began + interval '{PERIOD} seconds' AS due, interval '10 minutes' AS ten_minutes
          FROM (SELECT number, now() - (number * 7919 %% {PERIOD}) * interval '1 second' AS began,
                       number %% {RUNNING} = 1 AS is_running, number %% {DEAD} = 2 AS is_dead,
                       number %% {FAILED} = 0 AS failed
                FROM generate_series(0, %(tasks)s - 1) AS number) AS task) AS task
"""
# A ring of slots; its newest entry is in the last one. By run first, and by task then: that is the
# order in which the entries of tasks that run side by side get onto their pages.
_RUNS = f"""
    INSERT INTO task_lock_run
    SELECT task_name, CASE outcome WHEN 'ok' THEN 'runs' ELSE 'failures' END, slot,
           100000 + slot, began, began, began + interval '5 seconds',
           locked_by, 'schedule', outcome,
           CASE WHEN outcome = 'error' THEN 'ValueError' END,
           CASE WHEN outcome = 'error' THEN repeat('x', 100) END
    FROM (SELECT *, started_at
                    - (%(runs)s - slot - (finished_at IS NOT NULL)::integer)
                      * interval '{PERIOD} seconds' AS began,
                 CASE WHEN (number * 31 + slot * 17) %% {FAILED} = 0 THEN 'error'
                      WHEN (number * 31 + slot * 17) %% {DIED} = 1 THEN 'died'
                      ELSE 'ok' END AS outcome
          FROM (SELECT row_number() OVER (ORDER BY task_name) AS number, * FROM task_lock) AS task,
               generate_series(0, %(runs)s - 1) AS slot) AS run
    ORDER BY slot, task_name
"""
_REPLICAS = """
    INSERT INTO task_lock_replica
    SELECT 'replica-' || number, 'host', '1.0', now(), now() + interval '1 day',
           (SELECT array_agg(task_name ORDER BY task_name) FROM task_lock)
    FROM generate_series(0, %(replicas)s - 1) AS number
"""


def fill(server: EmbeddedServer, tasks: int, runs: int, replicas: int) -> None:
    """Create the tables and fill them.

    :param runs: how many of each task are in the run history
    :param replicas: how many live; each of them has all tasks
    """
    upgrade(server.url)
    wanted = {"tasks": tasks, "runs": runs, "replicas": replicas}
    with psycopg.connect(server.url, autocommit=True) as connection:
        for statement in (_TASKS, _RUNS, _REPLICAS):
            connection.execute(statement, wanted)
        connection.execute("VACUUM ANALYZE task_lock, task_lock_run, task_lock_replica")
