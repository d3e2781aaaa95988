"""Verdicts, the outbox and what they hang on.

Safety: creates only; takes no lock that an existing table would feel.
"""

from pathlib import Path

from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    # As it stands: neither `:name` nor `%` means a parameter here.
    sql = Path(__file__).with_suffix(".sql").read_text()
    op.get_bind().exec_driver_sql(sql, execution_options={"no_parameters": True})
