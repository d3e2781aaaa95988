"""`shop`: an empty shop of the test's own."""

from collections.abc import Iterator

import pytest

from tests.conftest import Bucket, Database
from tests.nightly.shop import Shop, open_shop
from tests.shared import emptied_database

database = emptied_database


@pytest.fixture
def shop(database: Database, bucket: Bucket) -> Iterator[Shop]:
    shop = open_shop(database, bucket)
    yield shop
    shop.engine.dispose()
