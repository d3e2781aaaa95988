"""The Celery application: settings in celeryconfig.py, the task in tasks/moderate.py, which only workers load."""

from celery import Celery

from worker import kombu_guards

kombu_guards.install()

app = Celery("concord")
app.config_from_object("celeryconfig")
