"""What the database itself watches: whether an interval job's next run time is a right one."""

from __future__ import annotations

from tests.support.stored_jobs import GUARD

# How each line begins that tells of a wrong one.
IS_AHEAD, IS_BACK = "is pushed ahead by", "is set back to"

# The next run time of an interval is never further away than the interval, on the database's clock,
# whoever has set it; a second is left for the way there. And it never comes to what has been run.
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

# A next run time that falls without a user's change is refused; the others are told of.
WATCHES = GUARD + _WATCH

# Which lines of the server's log tell of something wrong.
SIGNS = ("falls from", IS_AHEAD, IS_BACK)
