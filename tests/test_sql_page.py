"""docs/sql.md says what the migrated database says, and shows what its queries print."""

import re

import pytest
from sqlalchemy import create_engine

from db.reports import REPORTS
from infra.demo_nights import load, nights
from infra.sql_page import BEGIN, END, PAGE, SHOWN, renewed
from tests.conftest import Database

#: The two nights are always yesterday and the day before.
DAY = re.compile(r"\d{4}-\d{2}-\d{2}")


@pytest.fixture
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def test_the_page_is_what_the_database_says_and_prints(database: Database, page: str) -> None:
    """If it is not: `python -m infra.sql_page`."""
    engine = create_engine(database.owner_url)
    with engine.begin() as connection:
        load(connection)
    engine.dispose()
    made = renewed(page, database.owner_url)
    assert DAY.sub("DAY", page) == DAY.sub("DAY", made)


def test_every_view_is_in_the_dictionary_and_in_a_query(page: str) -> None:
    dictionary = page.partition(BEGIN)[2].partition(END)[0]
    queries = " ".join(one["sql"] for one in SHOWN.finditer(page))
    for name in REPORTS:
        assert f"### {name}\n" in dictionary
        assert f"report.{name}" in queries


def test_there_is_a_dozen_of_queries_and_each_shows_something(page: str) -> None:
    shown = list(SHOWN.finditer(page))
    assert len(shown) >= 12
    assert [one["sql"] for one in shown if "(0 rows)" in one["output"] or "row" not in one["output"]] == []
    assert len(shown) == len(re.findall(r"^```sql run$", page, re.MULTILINE))


def test_the_two_nights_differ_as_they_say() -> None:
    first, second = ({pair["ref"]: pair for pair in night} for night in nights())
    assert len(first) == 600
    assert len(first.keys() - second.keys()) == len(second.keys() - first.keys()) == 3
    assert 0 < sum(first[ref]["text"] != second[ref]["text"] for ref in first.keys() & second.keys()) < 60
