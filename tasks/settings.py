"""Every setting, its default and what it does. The one module that reads the environment.

A setting `max_pairs` is the variable CONCORD_MAX_PAIRS, or a line of the file that CONCORD_ENV_FILE names
(`.concord/env`, which `concord local up` writes). The environment wins over the file.
"""

import os
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from worker.errors import ConcordError

PREFIX = "CONCORD_"
#: Written by `concord local up`, read by every command that is run in the same folder.
DEFAULT_ENV_FILE = ".concord/env"


class SettingsWrong(ConcordError):
    """A setting is missing or wrong."""


class Settings(BaseSettings):
    """See docs/settings.md, which a test holds to this table."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True)

    database_url: str | None = Field(
        None, repr=False, description="Postgres for workers and producers: postgresql+psycopg://user:password@host/name"
    )
    owner_database_url: str | None = Field(
        None, repr=False, description="The same database as its owner, for `concord db upgrade` only"
    )
    broker_url: str | None = Field(
        None, repr=False, description="Redis, a database number of its own: redis://:password@host:6379/0"
    )
    result_url: str | None = Field(None, repr=False, description="Where AsyncResult looks; the broker unless set")

    allowed_buckets: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Buckets that images may come from, separated by commas; no other is ever read"
    )
    s3_endpoint_url: str | None = Field(None, description="An S3 that is not Amazon's")
    s3_allow_http: bool = Field(False, description="Allow an http:// S3 on another machine; on this one it always is")
    s3_region: str | None = Field(None, description="S3 region; unset: the profile's, else us-east-1")
    s3_access_key_id: str | None = Field(None, description="Unset: boto3's own chain (profile, role, environment)")
    s3_secret_access_key: SecretStr | None = Field(None, description="Belongs to the key above")
    image_threads: int = Field(16, ge=1, description="Images fetched and decoded at a time, a worker process")
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
    max_inflight: int = Field(2, ge=1, le=16, description="Batches in work at a time, a worker process")
    hang_limit_s: float = Field(120, gt=0, description="A batch longer than this in the model ends the worker")
    max_attempts: int = Field(5, ge=1, description="Attempts before a pair is failed")
    retry_delay_s: float = Field(10, ge=0, description="Before the second attempt; doubles with each further one")

    live_window: int = Field(256, ge=1, description="Messages of the live lane that Redis holds at most")
    bulk_window: int = Field(512, ge=1, description="Messages of the bulk lane that Redis holds at most")
    relay_poll_ms: int = Field(500, ge=10, description="How often the relay looks for messages to publish")

    @field_validator("allowed_buckets", mode="before")
    @classmethod
    def split_commas(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    def need(self, name: str) -> str:
        """A setting that this command cannot do without. Raises SettingsWrong with what to do."""
        value = getattr(self, name)
        if not value:
            raise SettingsWrong(
                f"{PREFIX}{name.upper()} is not set. For a try on this machine run `concord local up`, "
                "which writes it; for your own servers see docs/deploy.md"
            )
        return str(value)


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
        raise SettingsWrong(f"{PREFIX}{str(problem['loc'][0]).upper()}: {problem['msg']}") from None
