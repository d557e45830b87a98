"""Triggers by which the database watches the next run times of interval jobs."""

from __future__ import annotations

from tests.support.stored_jobs import GUARD

# Words in the log lines of wrong next run times.
IS_AHEAD, IS_BACK, IS_OFF = "is pushed ahead by", "is set back to", "is off its interval:"

# The interval is the row's own, so that it does not matter which version of the application has
# declared it. The next run time is at most one interval after the last run, or after now if run
# times have passed since; a second is for the way of the statement. It is after the last run. It is
# whole intervals after the last run or, if the trigger has a start of whole seconds, after that.
_WATCH = f"""
    CREATE FUNCTION watch() RETURNS trigger LANGUAGE plpgsql AS $$ DECLARE
        length interval := (NEW.trigger->'length'->>1)::int * interval '1 second';
        start timestamptz := NEW.trigger->>'start_date';
        since interval := NEW.next_run_time - CASE
            WHEN start = date_trunc('second', start) THEN start ELSE NEW.last_run_time END;
    BEGIN
        IF NEW.next_run_time - length
            > greatest(NEW.last_run_time, clock_timestamp() + interval '1 second')
        THEN
            RAISE WARNING 'next_run_time of % {IS_AHEAD} % at %',
                NEW.id, NEW.next_run_time - clock_timestamp(), clock_timestamp();
        END IF;
        IF NEW.next_run_time <= NEW.last_run_time THEN
            RAISE WARNING 'next_run_time of % {IS_BACK} %, after %',
                NEW.id, NEW.next_run_time, NEW.last_run_time;
        END IF;
        IF mod(extract(epoch FROM since)::numeric, extract(epoch FROM length)::numeric) <> 0 THEN
            RAISE WARNING 'next_run_time of % {IS_OFF} %, % after %',
                NEW.id, length, NEW.next_run_time, NEW.last_run_time;
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
SIGNS = ("falls from", IS_AHEAD, IS_BACK, IS_OFF)
