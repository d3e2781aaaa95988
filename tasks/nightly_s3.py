"""S3 as the nightly job needs it: listings, the manifest of a catalog, and the results at the end."""

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from tasks.settings import Settings
from worker.errors import ConcordError, first_line

#: Keys of a listing that are handed on at a time; S3 gives no more at once.
KEYS_PER_PAGE = 1_000
#: boto3's own attempts at one request.
ATTEMPTS = 5
READ_BYTES = 1 << 20


class S3Refused(ConcordError):
    """S3 has an answer, and it is no: the bucket is not there, or the keys do not open it."""


class S3Away(ConcordError):
    """S3 does not answer, or answers that it cannot."""


class Buckets:
    """A client for the nightly job's requests. Every method raises S3Refused and S3Away."""

    def __init__(self, settings: Settings) -> None:
        try:
            import boto3
            from botocore.config import Config
        except ModuleNotFoundError:
            raise ConcordError("the nightly job needs boto3: pip install '.[nightly]' in Concord's folder") from None
        secret = settings.s3_secret_access_key
        self.client = boto3.client(
            "s3",
            endpoint_url=settings.s3_endpoint_url,
            region_name=settings.s3_region or (None if settings.s3_access_key_id is None else "us-east-1"),
            aws_access_key_id=settings.s3_access_key_id,
            aws_secret_access_key=secret.get_secret_value() if secret else None,
            config=Config(retries={"mode": "standard", "total_max_attempts": ATTEMPTS}),
        )

    def listing(self, address: str) -> Iterator[list[tuple[str, str]]]:
        """Pages of (s3://bucket/key, ETag) of what lies under `s3://bucket/prefix`; nothing else is read."""
        bucket, prefix = split(address)
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=bucket, Prefix=prefix, PaginationConfig={"PageSize": KEYS_PER_PAGE}
        )
        with Answers(address):
            for page in pages:
                found = page.get("Contents", ())
                yield [(f"s3://{bucket}/{one['Key']}", one["ETag"].strip('"')) for one in found]

    def etag(self, address: str) -> str:
        """The ETag of one object."""
        bucket, key = split(address)
        with Answers(address):
            return str(self.client.head_object(Bucket=bucket, Key=key)["ETag"].strip('"'))

    def download(self, address: str, etag: str, into: IO[bytes]) -> None:
        """Copy an object of exactly this version, a piece at a time."""
        bucket, key = split(address)
        with Answers(address):
            body = self.client.get_object(Bucket=bucket, Key=key, IfMatch=f'"{etag}"')["Body"]
            while piece := body.read(READ_BYTES):
                into.write(piece)

    def upload(self, path: Path, address: str, content_type: str | None = None) -> None:
        """Copy a file to S3, in parts where it is large."""
        from boto3.exceptions import S3UploadFailedError

        bucket, key = split(address)
        with Answers(address):
            try:
                extra = {"ContentType": content_type} if content_type else None
                self.client.upload_file(str(path), bucket, key, ExtraArgs=extra)
            except S3UploadFailedError as error:
                raise error.__cause__ or error.__context__ or error from None


class Answers:
    """What S3 answers, as S3Refused or S3Away, with the address that was asked for."""

    def __init__(self, address: str) -> None:
        self.address = address

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, at: Any) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        if isinstance(error, ClientError):
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code = error.response.get("Error", {}).get("Code") or status
            if status >= 500 or status == 429:
                raise S3Away(f"{self.address}: S3 answered {code}") from None
            raise S3Refused(f"{self.address}: S3 answered {code}") from None
        if isinstance(error, BotoCoreError | OSError):
            raise S3Away(f"{self.address}: {first_line(error)}") from None


def split(address: str) -> tuple[str, str]:
    """Bucket and key, or prefix, of `s3://bucket/key`."""
    bucket, _, key = address.removeprefix("s3://").partition("/")
    return bucket, key
