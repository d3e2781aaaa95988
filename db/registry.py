"""What verdicts are made by: model versions and policies, and the months that they can be stored for."""

import json
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sqlalchemy import Connection, text


def concord_version() -> str | None:
    """The version of Concord that runs here; None where it runs without having been installed."""
    try:
        return version("concord")
    except PackageNotFoundError:
        return None


REGISTER = """
insert into model_version as m (name, revision, recipe, weights_sha256, prompt, image_px, answers, concord_version,
                                torch_version)
values (:name, :revision, :recipe, :weights_sha256, :prompt, :image_px, cast(:answers as jsonb), :concord_version,
        :torch_version)
on conflict (name, revision, recipe, weights_sha256, prompt, image_px)
do update set last_started_at = now(), answers = excluded.answers, concord_version = excluded.concord_version,
              torch_version = excluded.torch_version
returning id
"""


def register_model(
    connection: Connection,
    *,
    name: str,
    revision: str,
    recipe: str,
    weights_sha256: str,
    prompt: str,
    image_px: int,
    answers: Mapping[str, str],
    concord_version: str | None = None,
    torch_version: str | None = None,
) -> int:
    """The id of this model version; written when a worker starts with it, together with that worker's versions."""
    parameters = {
        "name": name,
        "revision": revision,
        "recipe": recipe,
        "weights_sha256": weights_sha256,
        "prompt": prompt,
        "image_px": image_px,
        "answers": json.dumps(dict(answers)),
        "concord_version": concord_version,
        "torch_version": torch_version,
    }
    return int(connection.execute(text(REGISTER), parameters).scalar_one())


def newest_model(connection: Connection) -> dict[str, Any] | None:
    """The model version that a worker started with last."""
    newest = text("select * from model_version order by last_started_at desc limit 1")
    row = connection.execute(newest).mappings().first()
    return dict(row) if row else None


def model_version(connection: Connection, number: int) -> dict[str, Any] | None:
    """The model version of this id."""
    row = connection.execute(text("select * from model_version where id = :id"), {"id": number}).mappings().first()
    return dict(row) if row else None


POLICIES = """
select distinct on (name) name, version, polarity, review_at, reject_at from policy order by name, version desc
"""


def policies_in_force(connection: Connection) -> list[dict[str, Any]]:
    """The highest version of each policy."""
    return [dict(row) for row in connection.execute(text(POLICIES)).mappings()]


def make_partitions(connection: Connection) -> int:
    """Make the months ahead of `verdict` and `batch` where they are missing; returns how many were made."""
    return int(connection.execute(text("select make_partitions()")).scalar_one())


def oldest_verdict_time(connection: Connection) -> datetime:
    """The first moment that a verdict can be stored for."""
    moment: datetime = connection.execute(text("select oldest_verdict_time()")).scalar_one()
    return moment
