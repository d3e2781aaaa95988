"""The Celery side: the application, its one task, the producer, the relay and the command line.

`celery -A tasks worker` finds `app` here.
"""

from tasks.app import app

__all__ = ["app"]
