"""Migrations: one at a time, never waiting long for a lock, never by two processes at once."""

import time
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.engine import make_url

#: Two upgrades at once would both see the old version; any fixed number serves.
ADVISORY_LOCK = 0x434F4E43
#: A migration that cannot have its lock gives up and leaves the queue of readers behind it free.
LOCK_TIMEOUT_S = 5
#: Another upgrade runs: whether it has ended is asked this often.
ASK_AGAIN_S = 0.1
STATEMENT_TIMEOUT_S = 600


def alembic_config() -> Config:
    """Alembic's configuration, without an ini file."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config


def upgrade(owner_url: str, worker_url: str | None = None) -> str:
    """Bring the database to the newest version as its owner; returns that version.

    The login of `worker_url`, if it is another, is granted the role `concord_worker`. Raises SQLAlchemy's
    OperationalError where the database cannot be reached or a lock cannot be had in time.
    """
    engine = create_engine(owner_url)
    config = alembic_config()
    try:
        with engine.connect() as connection:
            connection.execute(text(f"set statement_timeout = '{STATEMENT_TIMEOUT_S}s'"))
            connection.execute(text(f"set lock_timeout = '{LOCK_TIMEOUT_S}s'"))
            connection.commit()
            take_turn(connection)
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            connection.commit()
            grant_worker(connection, owner_url, worker_url)
            version: str = connection.execute(text("select version_num from alembic_version")).scalar_one()
            connection.commit()
            return version
    finally:
        engine.dispose()


def take_turn(connection: Connection) -> None:
    """Wait until no other upgrade runs, and keep others waiting for as long as the connection lives.

    By asking again, in transactions of their own: one that stood open would be waited for by an index that the other
    upgrade builds concurrently, and both would wait for ever.
    """
    while not connection.execute(text("select pg_try_advisory_lock(:key)"), {"key": ADVISORY_LOCK}).scalar_one():
        connection.rollback()
        time.sleep(ASK_AGAIN_S)
    connection.commit()


def grant_worker(connection: Connection, owner_url: str, worker_url: str | None) -> None:
    """Let the workers' login do what workers do, and no more."""
    login = make_url(worker_url).username if worker_url else None
    if login and login != make_url(owner_url).username:
        name = connection.dialect.identifier_preparer.quote_identifier(login)
        connection.execute(text(f"grant concord_worker to {name}"))
