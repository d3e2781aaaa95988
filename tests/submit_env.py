"""A producer in this process: the settings and the Celery application pointed at a test's own servers, then back."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kombu import pools

from tasks.app import app
from tasks.settings import PREFIX, settings
from tasks.submit import engine, high_water

#: Where a test that names no Redis would look for one: nothing listens there.
NOWHERE = "redis://127.0.0.1:1/0"


def environment(**values: object) -> dict[str, str]:
    """This process's environment with these settings and no others, and no file of settings."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    return {**inherited, f"{PREFIX}ENV_FILE": "", **{f"{PREFIX}{name.upper()}": str(v) for name, v in values.items()}}


@contextmanager
def configured(**values: object) -> Iterator[None]:
    """`configured(database_url=..., broker_url=...)`: settings, connections and pools are made anew on both sides."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment(**values))
    broker = {name: app.conf[name] for name in ("broker_url", "result_backend")}
    forget()
    try:
        url = values.get("broker_url", NOWHERE)
        app.conf.update(broker_url=url, result_backend=url)
        yield
    finally:
        forget()
        app.conf.update(broker)
        os.environ.clear()
        os.environ.update(before)
        settings.cache_clear()


def forget() -> None:
    """Close what was made from the settings."""
    high_water.cache_clear()
    if engine.cache_info().currsize:
        engine().dispose()
        engine.cache_clear()
    settings.cache_clear()
    pools.reset()
    app._after_fork()
    # Celery makes its result backend once, with the addresses of that moment.
    app._local, app._backend_cache = threading.local(), None
