"""Every setting, its default and what it does. The one module that reads the environment.

A setting `max_pairs` is the variable CONCORD_MAX_PAIRS, or a line of the file that CONCORD_ENV_FILE names
(`.concord/env`, which `concord local up` writes). The environment wins over the file.
"""

import os
import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from worker.errors import ConcordError

PREFIX = "CONCORD_"
#: Written by `concord local up`, read by every command that is run in the same folder.
DEFAULT_ENV_FILE = ".concord/env"

#: What programs need to find others, their files, their language and their clock.
PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR")

POSTGRES = "postgresql+psycopg://user:password@host/name"
REDIS = "redis://:password@host:6379/0"
REDIS_SCHEMES = ("redis", "rediss", "redis+socket", "sentinel")
#: A URL with one @ at most, behind the login, and no password among the options, where it would not be masked.
URL = (
    r"(?P<scheme>[\w+.-]+)://(?:[^@/?#\[\]]*@)?(?:[^@/?#:\[\]]*|\[[\da-fA-F:.]+\])(?::\d+)?"
    r"(?P<path>/[^@?#]*)?(?:\?(?!.*\bpassword=)[^@#]*)?"
)


class SettingsWrong(ConcordError):
    """A setting is missing or wrong."""


class Settings(BaseSettings):
    """See docs/settings.md, which a test holds to this table."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True)

    database_url: str | None = Field(None, repr=False, description=f"Postgres for workers and producers: {POSTGRES}")
    owner_database_url: str | None = Field(
        None, repr=False, description="The same database as its owner, for `concord db` and `concord erase` only"
    )
    broker_url: str | None = Field(None, repr=False, description=f"Redis, a database number of its own: {REDIS}")
    result_url: str | None = Field(None, repr=False, description="Where AsyncResult looks; the broker unless set")

    allowed_buckets: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Buckets that images may come from, separated by commas; no other is ever read"
    )
    s3_endpoint_url: str | None = Field(None, description="An S3 that is not Amazon's")
    s3_allow_http: bool = Field(False, description="Allow an http:// S3 on another machine; on this one it always is")
    s3_region: str | None = Field(None, description="S3 region; unset: the profile's, else us-east-1")
    s3_access_key_id: str | None = Field(None, description="Unset: boto3's own chain (profile, role, environment)")
    s3_secret_access_key: SecretStr | None = Field(None, description="Belongs to the key above")
    image_threads: int = Field(16, ge=1, description="Images fetched at a time, a worker process")
    image_timeout_s: float = Field(20, gt=0, description="Seconds for one image, retries included")
    max_image_bytes: int = Field(32_000_000, ge=1, description="Larger objects are rejected unread")
    max_image_pixels: int = Field(100_000_000, ge=1, description="Larger pictures are rejected from their header")
    exact_images: bool = Field(False, description="Decode very large JPEGs at full size, as the reference does")

    model_dir: Path | None = Field(None, description="Checkpoint folder; unset: the demo model, with a warning")
    recipe: Literal["fp32", "fp16", "bf16"] | None = Field(
        None,
        description="Run a checkpoint that is not quantized as it is, in this precision; unset: it must be quantized",
    )
    device: str = Field("auto", description="cuda, cuda:1, cpu; auto: the first GPU, else the CPU")
    torch_threads: int = Field(0, ge=0, description="Threads of torch on the CPU; 0: torch decides")

    max_pairs: int = Field(64, ge=1, le=4096, description="Pairs of a micro-batch")
    max_wait_ms: int = Field(50, ge=0, description="The longest that a lone message waits for company")
    max_inflight: int = Field(
        4, ge=1, le=16, description="Batches in work at a time, a worker process; one is kept for the live lane"
    )
    hang_limit_s: float = Field(120, gt=0, description="A batch longer than this in the model ends the worker")
    max_attempts: int = Field(5, ge=1, description="Attempts before a pair is failed")
    retry_delay_s: float = Field(10, ge=0, description="Before the second attempt; doubles with each further one")
    reuse_days: float = Field(
        7, ge=0, le=3_650, description="Content that was judged within these days is answered from that; 0: never"
    )

    live_window: int = Field(256, ge=1, description="Messages of the live lane that Redis holds at most")
    bulk_window: int = Field(512, ge=1, description="Messages of the bulk lane that Redis holds at most")
    relay_poll_ms: int = Field(500, ge=10, description="How often the relay looks for messages to publish")
    outbox_high_water: int = Field(20_000, ge=1, description="Messages in the outbox from which producers slow down")

    catalogs_file: Path | None = Field(None, description="The catalogs that are checked each night: a TOML file")
    report_dir: Path | None = Field(None, description="A folder that gets the page of each run at its end")
    report_s3: str | None = Field(
        None, pattern=r"^s3://[^/]+/", description="s3://bucket/prefix that gets it too, unless a catalog has `results`"
    )

    @field_validator("allowed_buckets", mode="before")
    @classmethod
    def split_commas(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("database_url", "owner_database_url")
    @classmethod
    def check_postgres(cls, url: str | None) -> str | None:
        if url and not scheme_of(url, POSTGRES).startswith("postgresql"):
            raise ValueError(f"Concord's database is Postgres: {POSTGRES}")
        return url

    @field_validator("broker_url", "result_url")
    @classmethod
    def check_redis(cls, url: str | None, info: ValidationInfo) -> str | None:
        if url and scheme_of(url, REDIS) not in REDIS_SCHEMES and info.field_name == "broker_url":
            raise ValueError(f"Concord's broker is Redis: {REDIS}")
        return url

    @field_validator("s3_endpoint_url")
    @classmethod
    def check_endpoint(cls, value: str | None) -> str | None:
        if value and "@" in value:
            raise ValueError("it holds a login; the keys are CONCORD_S3_ACCESS_KEY_ID and CONCORD_S3_SECRET_ACCESS_KEY")
        return value

    def need(self, name: str) -> str:
        """A setting that this command cannot do without. Raises SettingsWrong with what to do."""
        value = getattr(self, name)
        if not value:
            raise SettingsWrong(
                f"{PREFIX}{name.upper()} is not set. For a try on this machine run `concord local up`, "
                "which writes it; for your own servers see docs/deploy.md"
            )
        return str(value)


def scheme_of(url: str, form: str) -> str:
    """The scheme of a URL that all who read it will cut alike.

    Where a / or an @ stands in a password as it is, some look for the host, the port or the database in the password's
    second half, and name that half in their errors. Raises ValueError, which names no part of the URL.
    """
    match = re.fullmatch(URL, url)
    if match is None or (match["scheme"] in ("redis", "rediss") and not re.fullmatch(r"/?\d*", match["path"] or "")):
        raise ValueError(
            f"not of the form {form}. In a user's name or a password write %40 for @, %2F for /, %3A for :, "
            "%3F for ?, %23 for #, %5B for [, %5D for ] and %25 for %"
        )
    return match["scheme"]


def variable(name: str) -> str:
    """An environment variable that the file of catalogs names for a secret. Raises SettingsWrong."""
    value = os.environ.get(name)
    if not value:
        raise SettingsWrong(f"the environment variable {name}, which the file of catalogs names, is not set")
    return value


def passed_on() -> dict[str, str]:
    """The variables that a program which Concord starts may have: none that could hold a secret of Concord's."""
    return {name: os.environ[name] for name in PASSED_ON if name in os.environ}


@cache
def settings() -> Settings:
    """The settings of this process, read once. Raises SettingsWrong."""
    named = os.environ.get(f"{PREFIX}ENV_FILE")
    if named and not Path(named).exists():
        raise SettingsWrong(f"{PREFIX}ENV_FILE names {named}, which does not exist")
    try:
        return Settings(_env_file=DEFAULT_ENV_FILE if named is None else named)  # type: ignore[call-arg]
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        why = problem["msg"].removeprefix("Value error, ")
        raise SettingsWrong(f"{PREFIX}{str(problem['loc'][0]).upper()}: {why}") from None
