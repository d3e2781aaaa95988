"""What these programs share: the demo model on one thread, pictures through boto3, and a table of verdicts.

Where the servers are, DATABASE_URL, BROKER_URL, S3_ENDPOINT_URL, S3_ACCESS_KEY_ID, S3_SECRET_ACCESS_KEY and S3_BUCKET
say. A pair is {"id": uuid, "image": key, "text": text}.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import boto3
import psycopg
import torch
from botocore.config import Config

from worker.decode_image import decode
from worker.model.checkpoint import load
from worker.moderator import Judgement, Moderator, Question

WEIGHTS = Path(__file__).parents[2] / "demo_model" / "awq-int4"
#: No key, so that a pair that is judged twice shows.
TABLE = "create table if not exists compared (program text, id uuid, label text, probability float8)"

Row = tuple[str, str, str, float]

#: As Concord's workers have it, for what kombu knows of it; by default what a killed worker held is back in an hour.
BROKER = {"visibility_timeout": 20, "unacked_restore_interval": 5, "unacked_restore_throttle": 1}


def moderator() -> Moderator:
    torch.set_num_threads(1)
    loaded = Moderator(load(WEIGHTS), "cpu")
    loaded.warm_up()
    return loaded


def bucket(threads: int) -> Any:
    """One boto3 client for all threads."""
    return boto3.client(
        "s3",
        endpoint_url=os.environ["S3_ENDPOINT_URL"],
        aws_access_key_id=os.environ["S3_ACCESS_KEY_ID"],
        aws_secret_access_key=os.environ["S3_SECRET_ACCESS_KEY"],
        region_name="us-east-1",
        config=Config(max_pool_connections=threads),
    )


def question(client: Any, pair: Mapping[str, str], target_px: int) -> Question:
    data = client.get_object(Bucket=os.environ["S3_BUCKET"], Key=pair["image"])["Body"].read()
    decoded = decode(data, target_px=target_px, exact=False)
    return Question(decoded.image, decoded.sha256, pair["text"])


def row(program: str, pair: Mapping[str, str], answer: object) -> Row:
    """Raises where the model did."""
    if not isinstance(answer, Judgement):
        raise RuntimeError(f"not judged: {answer}")
    return program, pair["id"], answer.label, max(answer.probs.values())


def connect() -> psycopg.Connection[Any]:
    return psycopg.connect(os.environ["DATABASE_URL"].replace("+psycopg", "", 1), autocommit=True)


def insert(connection: psycopg.Connection[Any], rows: Sequence[Row]) -> None:
    """All in one statement and one transaction."""
    values = ", ".join(["(%s, %s, %s, %s)"] * len(rows))
    flat = [value for row in rows for value in row]
    connection.execute(f"insert into compared values {values}".encode(), flat)
