"""Pictures out of S3: a real one, and a server of our own for what a real one does only on bad days."""

import contextlib
import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from datetime import timedelta
from pathlib import Path
from typing import Any

import botocore.credentials
import botocore.exceptions
import pytest

from tests.conftest import Bucket
from worker.errors import CodedError, ConcordError, ErrorCode, PairRejected, TryLater
from worker.images import Fetched, ImageStore, Location, parse_s3

#: Long enough that no honest answer is cut off, on a busy machine too.
TIMEOUT_S = 60.0
#: Where nothing answers, how long the tests wait until the store gives up.
SHORT_TIMEOUT_S = 0.8


def open_store(bucket: Bucket, **options: Any) -> ImageStore:
    defaults: dict[str, Any] = {
        "endpoint_url": bucket.endpoint_url,
        "region": bucket.region,
        "access_key_id": bucket.access_key_id,
        "secret_access_key": bucket.secret_access_key,
        "threads": 4,
        "timeout_s": TIMEOUT_S,
    }
    return ImageStore([bucket.name, "no-such-bucket"], **(defaults | options))


@pytest.fixture
def store(bucket: Bucket) -> Iterator[ImageStore]:
    with open_store(bucket) as store:
        yield store


def error_of(store: ImageStore, uri: str, kind: type[CodedError]) -> CodedError:
    with pytest.raises(kind) as caught:
        store.fetch(parse_s3(uri))
    assert 0 < len(caught.value.detail) <= 200
    return caught.value


# ---- s3://bucket/key ------------------------------------------------------------------------------------------------


def test_a_location_is_a_bucket_and_a_key_taken_as_it_stands() -> None:
    assert parse_s3("s3://shop/a/b c+%20.jpg") == Location("shop", "a/b c+%20.jpg")


@pytest.mark.parametrize(
    "uri",
    [
        "http://shop/a.jpg", "https://shop.s3.amazonaws.com/a.jpg", "file:///etc/passwd", "/etc/passwd", "", "s3:",
        "s3://", "s3://shop", "s3://shop/", "s3:///a.jpg", "S3://shop/a.jpg", "s3://shop//a.jpg", "s3://shop/a//b.jpg",
        "s3://shop/a/", "s3://shop/../a.jpg", "s3://shop/./a.jpg", "s3://shop/a\0.jpg", "s3://shop/a\n.jpg",
        "s3://shop/\ud800.jpg", "s3://shop/" + "é" * 513,
    ],
)  # fmt: skip
def test_anything_but_a_plain_s3_url_is_rejected(uri: str) -> None:
    with pytest.raises(PairRejected) as caught:
        parse_s3(uri)
    assert caught.value.code == ErrorCode.IMAGE_NOT_S3


# ---- A real S3 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["a.jpg", "folder/a b+c.jpg", "p%20q.jpg", "h#s?q.jpg", "é中😀.jpg", "t~*[]{}\"'.jpg", "x\\y.jpg", "..a/b.."]
)
def test_an_object_is_fetched_under_exactly_its_key(bucket: Bucket, store: ImageStore, key: str) -> None:
    uri = bucket.put(key, key.encode())
    fetched = store.fetch(parse_s3(uri))
    assert fetched.data == key.encode()
    assert fetched.etag == bucket.client.head_object(Bucket=bucket.name, Key=key)["ETag"].strip('"')


def test_a_missing_key_is_not_found(bucket: Bucket, store: ImageStore) -> None:
    error = error_of(store, f"s3://{bucket.name}/nothing.jpg", PairRejected)
    assert error.code == ErrorCode.IMAGE_NOT_FOUND


def test_a_bucket_off_the_list_is_not_even_asked_for(store: ImageStore) -> None:
    assert error_of(store, "s3://other/a.jpg", PairRejected).code == ErrorCode.BUCKET_NOT_ALLOWED


def test_a_missing_bucket_on_the_list_is_no_fault_of_the_pairs(store: ImageStore) -> None:
    error = error_of(store, "s3://no-such-bucket/a.jpg", TryLater)
    assert error.code == ErrorCode.IMAGE_FETCH_FAILED
    assert "no-such-bucket" in error.detail


@pytest.mark.parametrize("wrong", [{"access_key_id": "stranger"}, {"secret_access_key": "guess-guess"}])
def test_keys_that_s3_does_not_know_are_no_fault_of_the_pairs(bucket: Bucket, wrong: dict[str, str]) -> None:
    uri = bucket.put("a.jpg", b"picture")
    with open_store(bucket, **wrong) as store:
        error = error_of(store, uri, TryLater)
    assert error.code == ErrorCode.IMAGE_FETCH_FAILED
    assert "guess" not in error.detail
    assert bucket.secret_access_key not in error.detail


def test_an_object_without_bytes_is_empty(bucket: Bucket, store: ImageStore) -> None:
    assert error_of(store, bucket.put("a.jpg", b""), PairRejected).code == ErrorCode.IMAGE_EMPTY


def test_the_size_limit_is_in_bytes_and_inclusive(bucket: Bucket) -> None:
    with open_store(bucket, max_bytes=1000) as store:
        assert len(store.fetch(parse_s3(bucket.put("a.jpg", bytes(1000)))).data) == 1000
        assert error_of(store, bucket.put("b.jpg", bytes(1001)), PairRejected).code == ErrorCode.IMAGE_TOO_LARGE


def test_many_are_fetched_in_order_each_with_its_own_error(bucket: Bucket, store: ImageStore) -> None:
    uris = [bucket.put(f"{number}.jpg", bytes([number])) for number in range(1, 20)]
    uris[3:3] = [f"s3://{bucket.name}/nothing.jpg", "s3://other/a.jpg"]
    results = list(store.load_all(uris, lambda fetched: fetched).values())
    assert [error.code for error in results[3:5] if isinstance(error, CodedError)] == [
        ErrorCode.IMAGE_NOT_FOUND,
        ErrorCode.BUCKET_NOT_ALLOWED,
    ]
    pictures = [result.data for result in results[:3] + results[5:] if isinstance(result, Fetched)]
    assert pictures == [bytes([number]) for number in range(1, 20)]


def test_boto3s_own_sources_are_used_where_no_keys_are_given(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    profile = f"[shop]\naws_access_key_id={bucket.access_key_id}\naws_secret_access_key={bucket.secret_access_key}\n"
    (tmp_path / "credentials").write_text(profile)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "shop")
    with open_store(bucket, access_key_id=None, secret_access_key=None) as store:
        assert store.fetch(parse_s3(bucket.put("a.jpg", b"picture"))).data == b"picture"


def test_no_credentials_at_all_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("boto3.Session.get_credentials", lambda session: None)
    with pytest.raises(ConcordError, match="no S3 credentials"):
        ImageStore(["shop"], endpoint_url="http://127.0.0.1:1")


def test_the_environment_does_not_change_what_the_arguments_say(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = bucket.put("a.jpg", b"picture")
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1",
        "AWS_ACCESS_KEY_ID": "stranger",
        "AWS_SECRET_ACCESS_KEY": "guess",
        "AWS_SESSION_TOKEN": "token",
        "AWS_REGION": "eu-nowhere-1",
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
        "AWS_S3_EXPRESS": "true",
    }.items():
        monkeypatch.setenv(name, value)
    with open_store(bucket) as store:
        assert store.fetch(parse_s3(uri)).data == b"picture"


@pytest.mark.parametrize("endpoint", ["http://10.0.0.1:9000", "http://s3.example.com", "ftp://127.0.0.1", "127.0.0.1"])
def test_plain_http_is_for_this_machine_alone(endpoint: str) -> None:
    with pytest.raises(ConcordError, match="https"):
        ImageStore(["shop"], endpoint_url=endpoint, access_key_id="key", secret_access_key="secret")
    if endpoint.startswith("http:"):
        ImageStore(["shop"], endpoint_url=endpoint, access_key_id="k", secret_access_key="s", allow_http=True).close()


# ---- A server of our own --------------------------------------------------------------------------------------------

Answer = Callable[[socket.socket], None]


class Server:
    """Answers one request a connection, each with the next of `answers`, the last one for ever."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.requests: list[bytes] = []
        self._answers = itertools.chain(answers, itertools.repeat(answers[-1]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection:
                request = connection.recv(65536)
                if not request:
                    return
                self.requests.append(request)
                next(self._answers)(connection)

    def close(self) -> None:
        """An empty request is the sign to end."""
        socket.create_connection(self._listener.getsockname()).close()
        self._thread.join()
        self._listener.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., tuple[ImageStore, Server]]]:
    closing: list[Any] = []

    def start(*answers: Answer, **options: Any) -> tuple[ImageStore, Server]:
        server = Server(answers)
        defaults: dict[str, Any] = {
            "access_key_id": "key",
            "secret_access_key": "very-secret",
            "timeout_s": TIMEOUT_S,
            "threads": 2,
        }
        store = ImageStore(["shop"], endpoint_url=server.endpoint_url, **(defaults | options))
        closing.extend([store, server])
        return store, server

    yield start
    for each in closing:
        each.close()


def says(status: int, body: bytes = b"", length: int | None = None) -> Answer:
    head = f'HTTP/1.1 {status} X\r\nETag: "e"\r\nConnection: close\r\nContent-Length: {length or len(body)}\r\n\r\n'
    return lambda connection: connection.sendall(head.encode() + body)


def refuses(status: int, code: str) -> Answer:
    return says(status, f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode())


def resets(connection: socket.socket) -> None:
    says(200, b"half", length=100_000)(connection)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


OK = says(200, b"picture")
BAD_DAYS = {
    "internal error": refuses(500, "InternalError"),
    "slow down": refuses(503, "SlowDown"),
    "too many requests": says(429),
    "reset in the body": resets,
    "short body": says(200, b"half", length=1000),
    "no answer": lambda connection: None,
}


@pytest.mark.parametrize("answer", BAD_DAYS.values(), ids=BAD_DAYS)
def test_a_passing_fault_is_retried(serve: Any, answer: Answer) -> None:
    store, server = serve(answer, answer, OK)
    assert store.fetch(Location("shop", "a.jpg")) == Fetched(b"picture", "e")
    assert len(server.requests) == 3


@pytest.mark.parametrize("answer", BAD_DAYS.values(), ids=BAD_DAYS)
def test_a_lasting_fault_is_tried_again_later(serve: Any, answer: Answer) -> None:
    store, server = serve(answer, timeout_s=SHORT_TIMEOUT_S)
    error = error_of(store, "s3://shop/a.jpg", TryLater)
    assert error.code == ErrorCode.IMAGE_FETCH_FAILED
    assert "very-secret" not in error.detail
    assert len(server.requests) > 1


def test_a_server_that_says_nothing_is_left_after_a_while(serve: Any) -> None:
    released = threading.Event()

    def holds(connection: socket.socket) -> None:
        released.wait()

    store, _ = serve(holds, timeout_s=SHORT_TIMEOUT_S)
    try:
        assert error_of(store, "s3://shop/a.jpg", TryLater).code == ErrorCode.IMAGE_FETCH_FAILED
    finally:
        released.set()


def test_an_s3_that_is_down_is_tried_again_later() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
    keys: dict[str, Any] = {"access_key_id": "key", "secret_access_key": "secret"}
    with ImageStore(["shop"], endpoint_url=endpoint, timeout_s=SHORT_TIMEOUT_S, **keys) as store:
        assert error_of(store, "s3://shop/a.jpg", TryLater).code == ErrorCode.IMAGE_FETCH_FAILED


@pytest.mark.parametrize(
    ("answer", "kind", "code"),
    [
        (refuses(403, "AccessDenied"), PairRejected, ErrorCode.IMAGE_ACCESS_DENIED),
        (refuses(404, "NoSuchKey"), PairRejected, ErrorCode.IMAGE_NOT_FOUND),
        # What follows is not about this key: it would reject every pair of the bucket, for good.
        (refuses(403, "ExpiredToken"), TryLater, ErrorCode.IMAGE_FETCH_FAILED),
        (refuses(403, "RequestTimeTooSkewed"), TryLater, ErrorCode.IMAGE_FETCH_FAILED),
        (refuses(404, "NoSuchBucket"), TryLater, ErrorCode.IMAGE_FETCH_FAILED),
        (says(403, b"<html>a proxy</html>"), TryLater, ErrorCode.IMAGE_FETCH_FAILED),
        (says(404, b"<html>another server</html>"), TryLater, ErrorCode.IMAGE_FETCH_FAILED),
        (says(401), TryLater, ErrorCode.IMAGE_FETCH_FAILED),
    ],
)
def test_a_refusal_is_asked_for_once(serve: Any, answer: Answer, kind: type[CodedError], code: ErrorCode) -> None:
    store, server = serve(answer)
    assert error_of(store, "s3://shop/a.jpg", kind).code == code
    assert len(server.requests) == 1


@pytest.mark.parametrize("key", ["e", "Code", "<Code>NoSuchBucket<", "<Code>NoSuchBucket</Code>", "a: <Code>b</Code>"])
def test_a_key_that_looks_like_an_answer_is_not_taken_for_one(serve: Any, key: str) -> None:
    missing, _ = serve(refuses(404, "NoSuchKey"))
    with pytest.raises(PairRejected) as caught:
        missing.fetch(Location("shop", key))
    assert caught.value.code == ErrorCode.IMAGE_NOT_FOUND
    proxied, _ = serve(says(404, b"<html>another server</html>"))
    with pytest.raises(TryLater):
        proxied.fetch(Location("shop", key))


def test_ten_gigabytes_are_refused_unread(serve: Any) -> None:
    # Only these few bytes ever come: reading on would end in an error of the connection instead.
    store, server = serve(says(200, b"begin", length=10_000_000_000))
    assert error_of(store, "s3://shop/a.jpg", PairRejected).code == ErrorCode.IMAGE_TOO_LARGE
    assert len(server.requests) == 1


def sends(head: str, *body: bytes) -> Answer:
    """An answer whose header and body need not agree."""

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # The client leaves when it has enough.
            connection.sendall(f'HTTP/1.1 {head}\r\nETag: "e"\r\nConnection: close\r\n\r\n'.encode())
            for part in body:
                connection.sendall(part)

    return answer


ENDLESS = (b"100000\r\n" + bytes(0x100000) + b"\r\n",) * 200
CHUNKED = "Content-Length: 7\r\nTransfer-Encoding: chunked"
LYING: dict[str, Answer] = {
    "a body beyond its length": sends(f"200 X\r\n{CHUNKED}", b"e\r\npicturepicture\r\n0\r\n\r\n"),
    "a body without an end": sends(f"200 X\r\n{CHUNKED}", *ENDLESS),
    "no length": sends("200 X", b"picture"),
    "a length below zero": sends("200 X\r\nContent-Length: -7", b"picture"),
    "a length of words": sends("200 X\r\nContent-Length: seven", b"picture"),
    "two lengths": sends("200 X\r\nContent-Length: 7\r\nContent-Length: 8", b"picture"),
    "a length beyond numbers": sends(f"200 X\r\nContent-Length: {2**64}", b"picture"),
    "another protocol": sends("SSH-2.0"),
}


@pytest.mark.parametrize("answer", LYING.values(), ids=LYING)
def test_a_body_that_is_not_what_was_announced_is_no_fault_of_the_pairs(serve: Any, answer: Answer) -> None:
    store, _ = serve(answer, timeout_s=SHORT_TIMEOUT_S)
    error = error_of(store, "s3://shop/a.jpg", TryLater)
    assert error.code == ErrorCode.IMAGE_FETCH_FAILED
    assert not store.answers("shop")


def test_of_a_body_without_an_end_no_more_is_read_than_was_announced(serve: Any) -> None:
    sent: list[int] = []

    def answer(connection: socket.socket) -> None:
        sends(f"200 X\r\n{CHUNKED}")(connection)
        with contextlib.suppress(OSError):
            for part in ENDLESS:
                connection.sendall(part)
                sent.append(len(part))

    store, _ = serve(answer)
    assert "announced 7 bytes" in error_of(store, "s3://shop/a.jpg", TryLater).detail
    assert sum(sent) < 50_000_000, "what the connection buffers, not 200 MB"


def test_an_object_that_changes_between_two_fetches_is_read_as_it_is_then(bucket: Bucket) -> None:
    """There is no question before the fetch whose answer could be out of date: its own header states the size."""
    limit = 1_000
    with open_store(bucket, max_bytes=limit) as store:
        for size, code in ((limit, None), (limit + 1, ErrorCode.IMAGE_TOO_LARGE), (0, ErrorCode.IMAGE_EMPTY)):
            uri = bucket.put("grows.jpg", b"x" * size)
            if code is None:
                assert len(store.fetch(parse_s3(uri)).data) == size
            else:
                assert error_of(store, uri, PairRejected).code == code


def test_a_long_etag_is_cut(serve: Any) -> None:
    store, _ = serve(lambda connection: connection.sendall(
        b'HTTP/1.1 200 X\r\nETag: "' + b"e" * 50_000 + b'"\r\nConnection: close\r\nContent-Length: 7\r\n\r\npicture'
    ))  # fmt: skip
    assert store.fetch(Location("shop", "a.jpg")) == Fetched(b"picture", "e" * 200)


def test_an_object_named_twice_is_read_once(serve: Any) -> None:
    store, server = serve(OK)
    loaded = store.load_all([f"s3://shop/{key}" for key in ("a.jpg", "b.jpg", "a.jpg")], lambda fetched: fetched.data)
    assert list(loaded) == ["s3://shop/a.jpg", "s3://shop/b.jpg"]
    assert len(server.requests) == 2


def test_a_store_that_is_closed_starts_no_more_fetches(serve: Any) -> None:
    store, server = serve(OK, threads=1)
    closing = threading.Thread(target=store.close)

    def read(fetched: Fetched) -> None:
        closing.start()
        while not store._closed:  # `close` itself returns only when this has.
            time.sleep(0.001)

    with pytest.raises(CancelledError):
        store.load_all([f"s3://shop/{name}.jpg" for name in "abc"], read)
    closing.join()
    assert len(server.requests) == 1


def test_what_is_urgent_does_not_wait_for_what_is_not(serve: Any) -> None:
    store, _ = serve(OK, threads=1)
    read_urgently = threading.Event()

    def wait(fetched: Fetched) -> bool:
        return read_urgently.wait(timeout=30)

    slow = threading.Thread(target=store.load_all, args=(["s3://shop/a.jpg"], wait))
    slow.start()
    try:
        assert store.load_all(["s3://shop/b.jpg"], lambda fetched: fetched.data, urgent=True)
        assert slow.is_alive()
    finally:
        read_urgently.set()
        slow.join()


@pytest.mark.parametrize(
    ("answer", "answers"),
    [
        ("NoSuchKey", True),
        ("AccessDenied", True),
        ("NoSuchBucket", True),
        ("ExpiredToken", False),
        ("SlowDown", False),
    ],
)
def test_a_bucket_answers_when_s3_speaks_about_its_keys(serve: Any, answer: str, answers: bool) -> None:
    store, _ = serve(refuses(404, answer), timeout_s=SHORT_TIMEOUT_S)
    assert store.answers("shop") is answers


def test_what_reading_an_object_raises_is_its_own_error(serve: Any) -> None:
    def read(fetched: Fetched) -> None:
        raise PairRejected(ErrorCode.IMAGE_CORRUPT, "not a picture")

    store, _ = serve(OK)
    (error,) = store.load_all(["s3://shop/a.jpg"], read).values()
    assert isinstance(error, PairRejected)


def test_rotated_keys_are_taken_up(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Rotating:
        names = iter(["monday", "tuesday"])

        def get_frozen_credentials(self) -> botocore.credentials.ReadOnlyCredentials:
            return botocore.credentials.ReadOnlyCredentials(next(self.names), "secret", "session-token")

    monkeypatch.setattr("boto3.Session.get_credentials", lambda session: Rotating())
    monkeypatch.setattr("worker.images.CREDENTIALS_TTL", timedelta(0))
    store, server = serve(OK, access_key_id=None, secret_access_key=None)
    for _ in range(2):
        store.fetch(Location("shop", "a.jpg"))
    assert b"Credential=monday/" in server.requests[0]
    assert b"Credential=tuesday/" in server.requests[1]
    assert b"session-token" in server.requests[1]


def test_credentials_that_cannot_be_had_now_are_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    class Away:
        def get_frozen_credentials(self) -> None:
            raise botocore.exceptions.CredentialRetrievalError(provider="role", error_msg="away")

    monkeypatch.setattr("boto3.Session.get_credentials", lambda session: Away())
    with ImageStore(["shop"], endpoint_url="http://127.0.0.1:1", timeout_s=SHORT_TIMEOUT_S) as store:
        assert error_of(store, "s3://shop/a.jpg", TryLater).code == ErrorCode.IMAGE_FETCH_FAILED
