"""The views of runs, which need what 0004 has of nights; an index of `verdict` goes that 0003 made another in place of.

Safety: needs `verdict` alone for a moment, and gives up after 5 seconds if somebody reads it for longer: that is why it
is not a part of 0003, whose work would be lost. The code of the version before runs on it.
"""

from pathlib import Path

from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    # As it stands: neither `:name` nor `%` means a parameter here.
    sql = Path(__file__).with_suffix(".sql").read_text()
    op.get_bind().exec_driver_sql(sql, execution_options={"no_parameters": True})
