"""The proxy before S3: it hands everything on, signature and all, or spoils it in the way that it was told."""

from collections.abc import Iterator
from typing import Any

import boto3
import botocore.exceptions
import pytest
from botocore.config import Config

from infra.chaos import s3_proxy
from infra.chaos.s3_proxy import KINDS, S3Proxy, Trouble
from tests.conftest import Bucket
from worker.errors import ErrorCode, PairRejected, TryLater
from worker.images import ImageStore, Location

BODY = bytes(range(256)) * 200


@pytest.fixture
def proxy(bucket: Bucket) -> Iterator[S3Proxy]:
    bucket.put("picture", BODY)
    with S3Proxy(bucket.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def through(proxy: S3Proxy, bucket: Bucket) -> Iterator[Any]:
    """A client that asks once, by way of the proxy."""
    client = boto3.client(
        "s3",
        endpoint_url=proxy.endpoint_url,
        aws_access_key_id=bucket.access_key_id,
        aws_secret_access_key=bucket.secret_access_key,
        region_name=bucket.region,
        config=Config(retries={"total_max_attempts": 1}, read_timeout=10),
    )
    yield client
    client.close()


@pytest.fixture
def store(proxy: S3Proxy, bucket: Bucket) -> Iterator[ImageStore]:
    """What a worker reads pictures with, by way of the proxy."""
    keys = {"access_key_id": bucket.access_key_id, "secret_access_key": bucket.secret_access_key}
    with ImageStore([bucket.name], endpoint_url=proxy.endpoint_url, timeout_s=10, **keys) as store:
        yield store


def test_an_answer_passes_whole_and_the_signature_holds(
    proxy: S3Proxy, through: Any, store: ImageStore, bucket: Bucket
) -> None:
    answer = through.get_object(Bucket=bucket.name, Key="picture")
    assert answer["Body"].read() == BODY
    assert store.fetch(Location(bucket.name, "picture")).data == BODY
    assert store.fetch(Location(bucket.name, "picture")).etag == answer["ETag"].strip('"')
    assert through.head_object(Bucket=bucket.name, Key="picture")["ContentLength"] == len(BODY)
    assert proxy.done == {"passed": 4}


def test_what_is_not_there_is_not_there_behind_the_proxy_either(store: ImageStore, bucket: Bucket) -> None:
    with pytest.raises(PairRejected) as caught:
        store.fetch(Location(bucket.name, "other"))
    assert caught.value.code == ErrorCode.IMAGE_NOT_FOUND


@pytest.mark.parametrize(("how", "code"), [("500", "InternalError"), ("503", "SlowDown")])
def test_an_error_is_one_of_s3s_own(proxy: S3Proxy, through: Any, bucket: Bucket, how: str, code: str) -> None:
    with proxy.troubled(Trouble(how)), pytest.raises(botocore.exceptions.ClientError) as caught:
        through.get_object(Bucket=bucket.name, Key="picture")
    assert caught.value.response["Error"]["Code"] == code
    assert through.get_object(Bucket=bucket.name, Key="picture")["Body"].read() == BODY, "it is well again"


def test_a_reset_ends_the_connection(proxy: S3Proxy, through: Any, bucket: Bucket) -> None:
    closed = (botocore.exceptions.ConnectionClosedError, botocore.exceptions.EndpointConnectionError)
    with proxy.troubled(Trouble("reset")), pytest.raises(closed):
        through.get_object(Bucket=bucket.name, Key="picture")


def test_half_a_body_is_promised_whole(proxy: S3Proxy, through: Any, bucket: Bucket) -> None:
    broken = (botocore.exceptions.IncompleteReadError, botocore.exceptions.ResponseStreamingError)
    with proxy.troubled(Trouble("half")):
        answer = through.get_object(Bucket=bucket.name, Key="picture")
        assert answer["ContentLength"] == len(BODY)
        with pytest.raises(broken):
            answer["Body"].read()


def test_a_slow_answer_comes(proxy: S3Proxy, through: Any, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_proxy, "SLOW_S", 0.01)
    with proxy.troubled(Trouble("slow")):
        assert through.get_object(Bucket=bucket.name, Key="picture")["Body"].read() == BODY
    assert proxy.done == {"slow": 1}


@pytest.mark.parametrize("how", ["500", "503", "reset", "half"])
def test_a_worker_that_gets_nothing_else_tries_later_and_never_blames_the_pair(
    proxy: S3Proxy, bucket: Bucket, how: str
) -> None:
    keys = {"access_key_id": bucket.access_key_id, "secret_access_key": bucket.secret_access_key}
    with (
        ImageStore([bucket.name], endpoint_url=proxy.endpoint_url, timeout_s=1, **keys) as store,
        proxy.troubled(Trouble(how)),
        pytest.raises(TryLater) as caught,
    ):
        store.fetch(Location(bucket.name, "picture"))
    assert caught.value.code == ErrorCode.IMAGE_FETCH_FAILED


def test_a_worker_gets_its_picture_past_every_kind_of_trouble(
    proxy: S3Proxy, store: ImageStore, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_proxy, "SLOW_S", 0.01)
    with proxy.troubled(Trouble("mixed", 0.3)):
        for _ in range(30):
            assert store.fetch(Location(bucket.name, "picture")).data == BODY
    assert set(proxy.done) == {"passed", *KINDS}


def test_the_share_of_spoilt_answers_is_what_was_asked_for(proxy: S3Proxy) -> None:
    assert {proxy.fate() for _ in range(100)} == {"passed"}
    with proxy.troubled(Trouble("500", 0.4)):
        assert 300 < sum(proxy.fate() == "500" for _ in range(1_000)) < 500
