"""Settings of the project in which django-apscheduler's tests run; its release has none."""

import json
import os

from psycopg.conninfo import conninfo_to_dict

_URL = conninfo_to_dict(json.loads(os.environ["TASKLOCK_FOREIGN"])["database"])

SECRET_KEY = "of these tests"
USE_TZ = True
TIME_ZONE = "UTC"
APSCHEDULER_RUN_NOW_TIMEOUT = 15
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django_apscheduler",
    "apscheduler_tasklock.django",
]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _URL["dbname"],
        "USER": _URL.get("user", ""),
        "PASSWORD": _URL.get("password", ""),
        "HOST": _URL.get("host", ""),
        "PORT": str(_URL.get("port", "")),
        # The run counts the rows of the task lock there, so it is kept.
        "TEST": {"NAME": _URL["dbname"]},
    }
}
