"""Suspects: pairs that may be what ended their worker.

Safety: creates only; takes no lock that an existing table would feel.
"""

from pathlib import Path

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    # As it stands: neither `:name` nor `%` means a parameter here.
    sql = Path(__file__).with_suffix(".sql").read_text()
    op.get_bind().exec_driver_sql(sql, execution_options={"no_parameters": True})
