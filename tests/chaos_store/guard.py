"""Triggers by which the database watches the next run times of interval jobs."""

from __future__ import annotations

from tests.support.stored_jobs import GUARD

# Words in the log lines of wrong next run times.
IS_AHEAD, IS_BACK = "is pushed ahead by", "is set back to"

# The next run time of an interval job is never further away than its interval by the database's
# clock, with a second for the way of the statement, and is always after the last run time.
_WATCH = f"""
    CREATE FUNCTION watch() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF NEW.next_run_time > clock_timestamp() + interval '1 second'
            + (NEW.trigger->'length'->>1)::int * interval '1 second'
        THEN
            RAISE WARNING 'next_run_time of % {IS_AHEAD} % at %',
                NEW.id, NEW.next_run_time - clock_timestamp(), clock_timestamp();
        END IF;
        IF NEW.next_run_time <= NEW.last_run_time THEN
            RAISE WARNING 'next_run_time of % {IS_BACK} %, after %',
                NEW.id, NEW.next_run_time, NEW.last_run_time;
        END IF;
        RETURN NEW;
    END $$;
    CREATE TRIGGER watch BEFORE INSERT OR UPDATE ON task_lock_job FOR EACH ROW
    WHEN (NEW.trigger->>'type' = 'interval' AND NEW.next_run_time IS NOT NULL)
    EXECUTE FUNCTION watch();
"""

# A next run time that falls without a user's change is an error; others are warnings.
WATCHES = GUARD + _WATCH

# Words in lines of the server's log that are findings.
SIGNS = ("falls from", IS_AHEAD, IS_BACK)
