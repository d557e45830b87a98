"""The application's Alembic environment; `include_name` is all that was added."""

import os

from alembic import context
from sqlalchemy import Column, Integer, MetaData, Table, Text, create_engine
from sqlalchemy.engine import make_url

from apscheduler_tasklock import include_name

metadata = MetaData()
Table("prices", metadata, Column("id", Integer, primary_key=True), Column("name", Text))

url = make_url(os.environ["TASKLOCK_DATABASE_URL"]).set(drivername="postgresql+psycopg")
with create_engine(url).connect() as connection:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        include_name=include_name,  # autogenerate leaves the task lock's tables alone
    )
    with context.begin_transaction():
        context.run_migrations()
