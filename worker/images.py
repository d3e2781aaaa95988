"""Pictures out of S3: s3://bucket/key -> bytes; one error an item. `decode` (worker.decode_image) takes it from there.

A pair's own fault (a missing key, a forbidden bucket) is `PairRejected` and final; the fault of S3, of the
network or of this worker's set-up is `TryLater`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore.auth.boto3 import Boto3CredentialProvider
from obstore.exceptions import BaseError, GenericError
from obstore.store import S3Store

from worker.decode_image import MAX_PIXELS, DecodedImage, decode
from worker.errors import CodedError, ConcordError, ErrorCode, PairRejected, TryLater

if TYPE_CHECKING:
    from obstore.store import S3Config, S3Credential

__all__ = ["MAX_BYTES", "MAX_PIXELS", "DecodedImage", "Fetched", "ImageStore", "Location", "decode", "parse_s3"]

#: Larger objects are refused by their stated size, before a byte of the body is read: 32 MiB.
MAX_BYTES = 32 * 2**20
#: A fetch, all its attempts together, ends within this time.
TIMEOUT_S = 30.0
#: The first wait between attempts; doubled each time, until no attempt may start.
FIRST_BACKOFF_S = 0.1
#: botocore renews rotating credentials ten minutes before they expire at the latest, so a copy of this age is good.
CREDENTIALS_TTL = timedelta(minutes=5)
#: S3's limit for a key, in UTF-8.
MAX_KEY_BYTES = 1024
#: A key that is asked for to see whether a bucket answers; whether it exists does not matter.
PROBE_KEY = "concord-probe"
#: An error's detail is stored with the verdict: enough to understand it, no more.
MAX_DETAIL_CHARS = 200

#: An ETag is stored with the verdict; S3's have 32 characters, or a few more.
MAX_ETAG_CHARS = 200

T = TypeVar("T")

_NOT_PLAIN = (
    "a key with //, /./, /../, a slash at either end or control characters is not fetched: copy it to a plain key"
)


@dataclass(frozen=True)
class Location:
    """An object in S3. The key is taken as it stands: nothing in it is percent-decoded."""

    bucket: str
    key: str


@dataclass(frozen=True)
class Fetched:
    """An object's bytes and the ETag under which S3 gave them (without quotes, empty if S3 named none)."""

    data: bytes = field(repr=False)
    etag: str


def parse_s3(uri: str) -> Location:
    """Split `s3://bucket/key`.

    A key that the S3 client would normalise (an empty, `.` or `..` part, a slash at either end, control
    characters) is refused, because the client would fetch another object than the one named, or none.

    Raises PairRejected(IMAGE_NOT_S3).
    """
    scheme, separator, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme != "s3" or not separator or not bucket or not key:
        raise PairRejected(ErrorCode.IMAGE_NOT_S3, "an image is given as s3://bucket/key")
    if any(part in ("", ".", "..") for part in key.split("/")) or re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", key):
        raise PairRejected(ErrorCode.IMAGE_NOT_S3, _NOT_PLAIN)
    if len(key.encode()) > MAX_KEY_BYTES:
        raise PairRejected(ErrorCode.IMAGE_NOT_S3, f"the key is longer than {MAX_KEY_BYTES} bytes")
    return Location(bucket, key)


class ImageStore:
    """Fetches pictures from the allowed buckets. Made once a process; every method may be called from any thread.

    Args:
        allowed_buckets: the only buckets that are read.
        endpoint_url: of an S3 other than AWS's; `http://` only on loopback unless `allow_http`.
        access_key_id, secret_access_key: fixed keys; without them boto3's chain is asked (environment, profile,
            role), and asked again as keys rotate.
        threads: how many objects are read at a time, and as many more that are urgent.
        timeout_s: one fetch ends within this time, whatever S3 does: one attempt may take half of it, and the
            last one starts in the first half.
        max_bytes: larger objects are refused unread.

    Raises ConcordError when there are no credentials, or the endpoint is not acceptable.
    """

    def __init__(
        self,
        allowed_buckets: Sequence[str],
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        access_key_id: str | None = None,
        secret_access_key: str | None = None,
        threads: int = 16,
        timeout_s: float = TIMEOUT_S,
        max_bytes: int = MAX_BYTES,
        allow_http: bool = False,
    ) -> None:
        _check_endpoint(endpoint_url, allow_http)
        credentials, region = _credentials(access_key_id, secret_access_key, region)
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._stores = {
            bucket: _open_bucket(bucket, endpoint_url, region, credentials, timeout_s) for bucket in allowed_buckets
        }
        self._closed = False
        self._threads = threads
        # What is urgent has threads of its own: it does not stand in line behind batches of a slow bucket.
        self._pools = {
            urgent: ThreadPoolExecutor(threads, thread_name_prefix="urgent-images" if urgent else "images")
            for urgent in (True, False)
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Start no more fetches and wait for those that run."""
        self._closed = True
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)

    def load_all(
        self, uris: Iterable[str], read: Callable[[Fetched], T], *, urgent: bool = False
    ) -> dict[str, T | CodedError]:
        """Fetch many and make something of each on the same threads: by address, what `read` made or what was raised.

        An address that is named twice is read once. `read` may raise CodedError. Nothing that is not urgent keeps what
        is urgent waiting.
        """
        distinct = list(dict.fromkeys(uris))
        loaded: dict[str, T | CodedError] = {}
        # Threads take the next address themselves from one iterator, which the interpreter's lock guards: a future for
        # each would cost a tenth of what a small GET does.
        waiting = iter(distinct)

        def load_some() -> None:
            for uri in waiting:
                if self._closed:
                    raise CancelledError
                loaded[uri] = self._load(uri, read)

        for done in [self._pools[urgent].submit(load_some) for _ in range(min(self._threads, len(distinct)))]:
            done.result()
        return {uri: loaded[uri] for uri in distinct}

    def fetch(self, location: Location) -> Fetched:
        """Read one object.

        Raises PairRejected (BUCKET_NOT_ALLOWED, IMAGE_NOT_FOUND, IMAGE_ACCESS_DENIED, IMAGE_EMPTY,
        IMAGE_TOO_LARGE, IMAGE_NOT_S3) when the pair names what cannot be read, and TryLater(IMAGE_FETCH_FAILED)
        when S3, the network or this worker's own set-up is at fault.
        """
        store = self._stores.get(location.bucket)
        if store is None:
            raise PairRejected(ErrorCode.BUCKET_NOT_ALLOWED, f"bucket {location.bucket!r} is not on the allow-list")
        last_start = time.monotonic() + self._timeout_s / 2
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                return self._read(store, location.key)
            except GenericError as error:  # 5xx, 429, a reset, a timeout, a short body
                if time.monotonic() + backoff_s >= last_start:
                    raise _fetch_error(error, location) from error
            except (BaseError, FileNotFoundError, ValueError) as error:
                raise _fetch_error(error, location) from error
            time.sleep(backoff_s)
            backoff_s *= 2

    def answers(self, bucket: str) -> bool:
        """Whether S3 has something to say about a key of this bucket, if only that there is none.

        A bucket that does not exist answers too: it is a mistake in the allow-list, which waiting does not mend.
        """
        store = self._stores.get(bucket)
        try:
            return store is None or self._read(store, PROBE_KEY) is not None
        except CodedError as error:
            return isinstance(error, PairRejected)
        except (BaseError, FileNotFoundError) as error:
            about_it = isinstance(_fetch_error(error, Location(bucket, PROBE_KEY)), PairRejected)
            return about_it or "<Code>NoSuchBucket</Code>" in str(error)

    def _load(self, uri: str, read: Callable[[Fetched], T]) -> T | CodedError:
        try:
            return read(self.fetch(parse_s3(uri)))
        except CodedError as error:
            return error

    def _read(self, store: S3Store, key: str) -> Fetched:
        result = obstore.get(store, key)
        meta = result.meta  # made anew each time that it is asked for
        size = meta["size"]
        if size == 0:
            raise PairRejected(ErrorCode.IMAGE_EMPTY, "the object has no bytes")
        if size > self._max_bytes:  # Dropping the result closes the connection: the body is never read.
            raise PairRejected(ErrorCode.IMAGE_TOO_LARGE, f"{size} bytes, at most {self._max_bytes} are read")
        # The body need not keep to what its header says: what comes first is all of it, or already more than that.
        data = bytes(next(iter(result.stream(min_chunk_size=size + 1)), b""))
        if len(data) != size:
            raise TryLater(ErrorCode.IMAGE_FETCH_FAILED, f"S3 announced {size} bytes and sent {len(data)} or more")
        return Fetched(data, (meta["e_tag"] or "").strip('"')[:MAX_ETAG_CHARS])


def _credentials(
    access_key_id: str | None, secret_access_key: str | None, region: str | None
) -> tuple[Callable[[], S3Credential], str]:
    if access_key_id and secret_access_key:
        fixed: S3Credential = {
            "access_key_id": access_key_id,
            "secret_access_key": secret_access_key,
            "expires_at": None,
        }
        return lambda: fixed, region or "us-east-1"
    try:
        provider = Boto3CredentialProvider(ttl=CREDENTIALS_TTL)
    except ValueError as error:
        raise ConcordError(
            "no S3 credentials: give an access key and its secret, or anything that boto3 finds (a profile, a role)"
        ) from error
    return provider, region or provider.config.get("region") or "us-east-1"


def _check_endpoint(endpoint_url: str | None, allow_http: bool) -> None:
    if endpoint_url is None:
        return
    endpoint = urlsplit(endpoint_url)
    loopback = endpoint.hostname in ("localhost", "127.0.0.1", "::1")
    if endpoint.scheme != "https" and not (endpoint.scheme == "http" and (loopback or allow_http)):
        raise ConcordError(f"the S3 endpoint {endpoint_url} must be https://, or http:// on this very machine")


def _open_bucket(
    bucket: str, endpoint_url: str | None, region: str, credentials: Callable[[], S3Credential], timeout_s: float
) -> S3Store:
    # Whatever is not said here the client would take from AWS_* variables, past the settings.
    config: S3Config = {
        "region": region,
        "skip_signature": False,
        "virtual_hosted_style_request": False,
        "s3_express": False,
    }
    if endpoint_url is not None:
        config["endpoint"] = config["aws_endpoint_url_s3"] = endpoint_url
    return S3Store(
        bucket,
        config=config,
        credential_provider=credentials,
        client_options={
            "allow_http": endpoint_url is not None and endpoint_url.startswith("http://"),
            "timeout": timedelta(seconds=timeout_s / 2),
            "read_timeout": timedelta(seconds=timeout_s / 4),
            "connect_timeout": timedelta(seconds=timeout_s / 4),
        },
        # The client retries only up to the response's headers; `fetch` retries those and the body's trouble alike.
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=timeout_s)},
    )


def _fetch_error(error: Exception, location: Location) -> CodedError:
    """The pair is rejected only for what S3 itself says about this very key.

    All else would hit every pair of the bucket alike and be final by mistake: expired credentials, a bucket on
    the allow-list that does not exist, a proxy's 403, another server's 404.
    """
    if isinstance(error, ValueError):
        return PairRejected(ErrorCode.IMAGE_NOT_S3, _NOT_PLAIN)
    message, _, _ = str(error).partition("\n\nDebug source:")
    # The client's message names the key before it quotes S3, and a key may look like an answer of S3's.
    answer = re.search(r"<Code>(\w+)</Code>", message.partition(location.key)[2] or message)
    match answer and answer[1]:
        case "NoSuchKey":
            return PairRejected(ErrorCode.IMAGE_NOT_FOUND, f"no such key in bucket {location.bucket}")
        case "AccessDenied" | "InvalidObjectState" as code:
            return PairRejected(ErrorCode.IMAGE_ACCESS_DENIED, f"S3 answered {code}")
        case "NoSuchBucket":
            detail = f"bucket {location.bucket} is on the allow-list but does not exist: create it, or correct the list"
        case str(code):
            detail = f"S3 answered {code}"
        case _:
            detail = message.partition("\n")[0][:MAX_DETAIL_CHARS]
    return TryLater(ErrorCode.IMAGE_FETCH_FAILED, detail)
