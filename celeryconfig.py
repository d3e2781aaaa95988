"""Celery's settings, each for a reason. What a user may want to change is in tasks/settings.py."""

from kombu import Exchange, Queue

from tasks.settings import settings

_settings = settings()

broker_url = _settings.broker_url or "redis://127.0.0.1:6379/0"
result_backend = _settings.result_url or broker_url
imports = ("tasks.moderate",)

# Lanes are queues; Redis pops the first that has a message, so `live` goes before `bulk`.
# Each has an exchange of its own: without, Celery would bind both to the default one, and a message would go to both.
task_queues = tuple(Queue(lane, Exchange(lane), routing_key=lane) for lane in ("live", "bulk"))
task_default_queue = "live"
task_create_missing_queues = False

# JSON only: nothing is ever unpickled.
task_serializer = result_serializer = "json"
accept_content = result_accept_content = ["json"]

# Nobody waits for most results; a call asks for one with ignore_result=False.
task_ignore_result = True
result_expires = 86_400

# Batches run on threads, since the model releases the GIL and one process holds one model. Two threads more than
# batches, for what a connection that broke has left running.
worker_pool = "threads"
worker_concurrency = _settings.max_inflight + 2
worker_consumer = "worker.consumer:Consumer"
# The room for PAIRS of each lane (worker.lanes) is the limit; messages are of very different sizes.
worker_prefetch_multiplier = 1_000
worker_enable_prefetch_count_reduction = False

# Messages come back when the worker that holds them dies: it touches them every 5 s (worker.batching), so they are
# given to another after 20 s without a touch. kombu's defaults would take an hour, then 100 s more. The shortest
# visibility_timeout of any worker on a Redis database applies to all of them: give Concord a database of its own.
broker_transport_options = {
    "visibility_timeout": 20,
    "unacked_restore_interval": 5,
    "unacked_restore_throttle": 1,
    "unacked_mutex_expire": 10,
    # Redis pops the first lane that has a message, of those that are open.
    "queue_order_strategy": "worker.popping:OpenLanes",
    "socket_keepalive": True,
    # A Redis that accepts connections and never answers (a machine that froze) counts as away: a producer, whose pairs
    # are accepted by Postgres, does not stand still. Nothing waits longer in Redis than BRPOP, which ends every second.
    "socket_timeout": 5,
    "socket_connect_timeout": 5,
}
# The same for results: verdicts are stored by then, and nobody's batch waits for who asked to be told.
redis_socket_timeout = redis_socket_connect_timeout = 5
broker_connection_retry_on_startup = True
broker_connection_max_retries = None
# A Redis that answers and refuses (full, a replica, a disk that fails) is waited for like one that is away.
broker_channel_error_retry = True
worker_cancel_long_running_tasks_on_connection_loss = False
# SIGTERM lets batches end; there is nothing to wait for beyond that.
worker_soft_shutdown_timeout = 0

task_acks_late = True
worker_send_task_events = False
worker_hijack_root_logger = True
enable_utc = True
timezone = "UTC"
