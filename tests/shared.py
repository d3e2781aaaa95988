"""One migrated database for all tests that only fill its tables: emptying it is quicker than making another.

A test module says `database = emptied_database` and has it in the place of its own.
"""

from typing import Any

import pytest

from infra.local.postgres import OWNER
from tests.conftest import Database

NAME = "shared"
EMPTY = """
delete from verdict; delete from outbox; delete from run; delete from rejected_message; delete from model_version;
delete from suspect;
delete from batch; update retention set keep_months = null, rejected_days = null, run_days = null;
delete from catalog_state; delete from catalog_object; delete from catalog_item;
update relay_lease set holder = 'nobody', expires_at = '-infinity'
"""


@pytest.fixture
def emptied_database(stack: Any, _migrated: str) -> Database:
    """The shared database without a row in it but those that the migrations made."""
    stack.postgres.create_database(NAME, _migrated)
    with stack.postgres.connect(OWNER, NAME) as connection:
        connection.execute(EMPTY)
    return Database(owner_url=stack.postgres.url(OWNER, NAME), url=stack.postgres.url(database=NAME))
