"""Django under gunicorn, in one file.

In a project the scheduler belongs into ``wsgi.py``, which only servers import. From
``AppConfig.ready()`` every ``manage.py`` command would start one: ``migrate`` before there is a
table, and ``check`` or ``shell`` would claim jobs.

pip install "..[binary]" django gunicorn
export TASKLOCK_DATABASE_URL=postgresql://app:secret@localhost/app
apscheduler-tasklock upgrade
gunicorn django_app:application --workers 3
"""

import atexit
import os

from apscheduler.schedulers.background import BackgroundScheduler
from django.conf import settings
from django.core.wsgi import get_wsgi_application

from apscheduler_tasklock import TaskLockExecutor, current_lock

settings.configure(ALLOWED_HOSTS=["127.0.0.1"], ROOT_URLCONF=__name__, SECRET_KEY="an example")
urlpatterns: list[object] = []


def sync_prices() -> None:
    """Stand for the work that must not be done twice."""
    lock = current_lock()
    which = lock.run_time if lock is not None else "a run without a lock"  # where locks are off
    print(f"worker {os.getpid()} syncs prices for {which}\n", end="", flush=True)


scheduler = BackgroundScheduler(
    executors={"default": TaskLockExecutor(os.environ["TASKLOCK_DATABASE_URL"])}
)
scheduler.add_job(sync_prices, "interval", seconds=2, id="sync-prices")
scheduler.start()
atexit.register(scheduler.shutdown)  # what runs has ended by then; nothing is left behind

application = get_wsgi_application()
