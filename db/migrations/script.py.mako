"""${message}.

Safety: say which locks it takes, how long it holds them, and that yesterday's code runs on the new schema.
"""

from alembic import op

revision = "${up_revision}"
down_revision = ${repr(down_revision)}


def upgrade() -> None:
    ${upgrades if upgrades else "pass"}
