"""Nightly runs: what a catalog's items were last judged as, and how far a run's planner has come.

Safety: new columns are nullable or have a constant default, so no table is rewritten; `outbox` is locked against writes
while the partial index, which no row is in yet, is made. Code of the version before runs on it: it names its columns,
and its rows of the outbox have no run_id.
"""

from pathlib import Path

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    # As it stands: neither `:name` nor `%` means a parameter here.
    sql = Path(__file__).with_suffix(".sql").read_text()
    op.get_bind().exec_driver_sql(sql, execution_options={"no_parameters": True})
