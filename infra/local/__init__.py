"""Postgres, Redis and S3 as real servers on this machine, from PyPI wheels: no root, no containers, no downloads.

    from infra.local import Stack

    with Stack(Path(".concord")) as addresses:
        ...                      # addresses.database_url, .redis_url, .s3_endpoint_url

Everything lives under the one folder: data, logs, pid files, the ports and passwords chosen once (`state.json`),
and `env`, which the settings read. The servers are for development, tests and the demo; production has its own.
"""

from infra.local.process import LocalStackError, Server
from infra.local.stack import Addresses, ServerStatus, Stack

__all__ = ["Addresses", "LocalStackError", "Server", "ServerStatus", "Stack"]
