"""Alembic's entry: migrates the connection that `db.migrations.upgrade` hands over."""

from alembic import context

from db.tables import METADATA, is_declared

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=METADATA,
    include_object=is_declared,
    compare_type=True,
    compare_server_default=False,
    transaction_per_migration=True,
)
with context.begin_transaction():
    context.run_migrations()
