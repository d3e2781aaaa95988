"""The schema `report` and its reader, measured batches, and months that go by themselves.

Safety: two indexes are built on `verdict`, which keeps its writers waiting (workers wait, and nothing is lost) for as
long as that takes: about a minute for 10 million rows. Where that is too long, docs/deploy.md says how to build them
beforehand without a lock; this migration then finds them. All else is new. The code of the version before runs on it.
"""

from pathlib import Path

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    # As it stands: neither `:name` nor `%` means a parameter here.
    sql = Path(__file__).with_suffix(".sql").read_text()
    op.get_bind().exec_driver_sql(sql, execution_options={"no_parameters": True})
