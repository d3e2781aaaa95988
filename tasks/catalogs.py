"""The catalogs that are checked each night: one TOML file, read and checked as a whole. docs/nightly.md explains it.

[shop]
query = "select sku as ref, image, title as text from product"
dsn = "env:SHOP_DSN"
images = ["s3://shop/"]
schedule = "30 2 * * *"
time_zone = "Europe/Berlin"
"""

import re
import tomllib
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

from celery.schedules import ParseException, crontab
from pydantic import BaseModel, ConfigDict, Field, SecretStr, StringConstraints, ValidationError, model_validator
from pydantic import field_validator as checks

from db.catalog_source import SqlSource
from tasks.settings import Settings, SettingsWrong, variable
from worker.errors import ConcordError
from worker.messages import MAX_NAME_CHARS

LOOPBACK = ("localhost", "127.0.0.1", "::1")
#: Kinds of manifests, by the end of their names.
MANIFESTS = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz", ".parquet")

S3Address = Annotated[str, StringConstraints(pattern=r"^s3://[^/]+/")]


class CatalogsWrong(ConcordError):
    """The file of catalogs is missing or wrong."""


class Catalog(BaseModel):
    """One catalog. `name` is its table's name in the file, and the `source` of its pairs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME_CHARS)]
    query: str | None = None
    table: str | None = None
    manifest: S3Address | None = None
    dsn: SecretStr | None = None
    statement_timeout_s: int = Field(60, ge=1)
    patience_s: float = Field(600, ge=0)
    images: list[S3Address]
    sample: float = Field(0.01, ge=0, le=1)
    lane: Literal["bulk", "live"] = "bulk"
    pairs_ahead: int = Field(20_000, ge=64)
    model_version: int | None = None
    schedule: str | None = None
    time_zone: ZoneInfo = ZoneInfo("UTC")
    compare_by: list[str] = Field(["category", "seller"], max_length=20)
    results: S3Address | None = None
    webhook: SecretStr | None = None
    command: Annotated[list[str], Field(min_length=1)] | None = None

    @checks("time_zone", mode="before")
    @classmethod
    def known_zone(cls, value: object) -> object:
        if isinstance(value, str):
            try:
                return ZoneInfo(value)
            except (KeyError, ValueError, OSError):
                raise ValueError(f"{value!r} is no time zone; write one like Europe/Berlin") from None
        return value

    @checks("schedule")
    @classmethod
    def five_fields(cls, value: str | None) -> str | None:
        if value is not None:
            cron(value)
        return value

    @checks("manifest")
    @classmethod
    def known_kind(cls, value: str | None) -> str | None:
        if value is not None and not value.endswith(MANIFESTS):
            raise ValueError(f"a manifest's name ends with {', '.join(MANIFESTS)}")
        return value

    @checks("table")
    @classmethod
    def plain_table(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[^.\0]+(\.[^.\0]+)?", value):
            raise ValueError("write the table as name or schema.name")
        return value

    @model_validator(mode="after")
    def one_source(self) -> Self:
        if sum(one is not None for one in (self.query, self.table, self.manifest)) != 1:
            raise ValueError("give exactly one of query, table and manifest")
        if self.manifest and self.dsn:
            raise ValueError("a manifest has no dsn")
        return self

    def sql_source(self, settings: Settings) -> SqlSource:
        """The query or table, with its DSN looked up: Concord's own database unless another is given."""
        dsn = secret(self.dsn) if self.dsn else settings.need("database_url")
        return SqlSource(dsn, self.query, self.table, self.name, self.statement_timeout_s)

    def webhook_url(self) -> str | None:
        """The webhook, looked up. Raises CatalogsWrong where it is neither https:// nor on this very machine, or no
        address at all.
        """
        if self.webhook is None:
            return None
        url = secret(self.webhook)
        try:
            parts = urlsplit(url)
            is_plain = re.fullmatch(r"[!-~]+", url) and "@" not in parts.netloc and parts.port != 0
        except ValueError:
            is_plain = False
        if not is_plain:
            # Errors of the HTTP client would quote a part of it.
            raise CatalogsWrong(f"[{self.name}] webhook: no address, or one with a user or a space in it")
        if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in LOOPBACK):
            raise CatalogsWrong(f"[{self.name}] webhook: only https://, or http:// on this very machine")
        return url

    def local_date(self, now: datetime) -> str:
        """The date of a night that begins now, in the catalog's own zone."""
        return now.astimezone(self.time_zone).date().isoformat()


def cron(schedule: str) -> crontab:
    """`minute hour day-of-month month day-of-week`, on a clock without a zone. Raises ValueError."""
    fields = schedule.split()
    if len(fields) != 5:
        raise ValueError("a schedule has five fields: minute hour day-of-month month day-of-week")
    try:
        return crontab.from_string(" ".join(fields))
    except ParseException as error:
        raise ValueError(f"not a schedule: {error}") from None


def secret(value: SecretStr) -> str:
    """What a secret stands for: `env:NAME`, `file:PATH`, or itself. Raises ConcordError."""
    kind, colon, place = value.get_secret_value().partition(":")
    if colon and kind == "env":
        return variable(place)
    if colon and kind == "file":
        try:
            return Path(place).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise CatalogsWrong(f"the file {place} of a secret: {error.strerror}") from None
    return value.get_secret_value()


def read_catalogs(path: Path) -> dict[str, Catalog]:
    """All catalogs of the file by name. Raises CatalogsWrong, which names the line or the field."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CatalogsWrong(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CatalogsWrong(f"{path}: {error}") from None
    found = {}
    for name, fields in tables.items():
        if not isinstance(fields, dict):
            raise CatalogsWrong(f"{path}: {name} stands outside any catalog; each is a table, such as [shop]")
        try:
            found[name] = Catalog(**{**fields, "name": name})
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, problem["loc"]))
            raise CatalogsWrong(f"{path}: [{name}] {where + ': ' if where else ''}{problem['msg']}") from None
    return found


def catalogs(settings: Settings) -> dict[str, Catalog]:
    """The catalogs of this installation. Raises SettingsWrong and CatalogsWrong."""
    if settings.catalogs_file is None:
        raise SettingsWrong("CONCORD_CATALOGS_FILE is not set: it names the file of catalogs, see docs/nightly.md")
    return read_catalogs(settings.catalogs_file)


def catalog_named(settings: Settings, name: str) -> Catalog:
    """One of them. Raises CatalogsWrong with the names that there are."""
    known = catalogs(settings)
    if name not in known:
        raise CatalogsWrong(f"there is no catalog {name!r}; there are {', '.join(sorted(known)) or 'none'}")
    return known[name]
