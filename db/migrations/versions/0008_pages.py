"""Views of runs, models, policies and batches, of which a run's page is made, and the versions that a worker runs.

Safety: adds two columns without a default to `model_version`, a table of a few rows, which is locked for a moment; and
views. The code of the version before runs on it, and leaves the two columns empty.
"""

from pathlib import Path

from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    # As it stands: neither `:name` nor `%` means a parameter here.
    sql = Path(__file__).with_suffix(".sql").read_text()
    op.get_bind().exec_driver_sql(sql, execution_options={"no_parameters": True})
