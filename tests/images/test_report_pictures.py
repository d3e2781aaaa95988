"""Thumbnails of a run's page: small, from S3, and where there is none the reason."""

import base64
import hashlib
import io
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from uuid import uuid4

import pytest
from PIL import Image

from db.run_report import Mismatch
from tasks.report_pictures import SIDE_PX, thumbnails
from tasks.settings import Settings
from tests.conftest import Bucket

NOW = datetime(2026, 3, 29, tzinfo=UTC)
PAIR = Mismatch(
    pair_id=uuid4(), ref="sku-1", image=None, text="a shoe", text_is_cut=False, premise=None, policy="catalog",
    polarity="should_hold", attributes={}, label="contradiction", p_entailment=0.1, p_contradiction=0.8, p_neutral=0.1,
    p_trouble=0.8, decision="review", flags=(), change="first_seen", is_new=False, earlier=None, decode_mode="exact",
    image_width=8, image_height=8, model_version_id=1, decided_at=NOW,
)  # fmt: skip


def settings(bucket: Bucket, **fields: object) -> Settings:
    about = {
        "s3_endpoint_url": bucket.endpoint_url, "s3_access_key_id": bucket.access_key_id,
        "s3_secret_access_key": bucket.secret_access_key, "allowed_buckets": (bucket.name,),
    }  # fmt: skip
    return Settings(**{**about, **fields})


def picture(width: int, height: int, form: str = "JPEG") -> bytes:
    packed = io.BytesIO()
    Image.linear_gradient("L").resize((width, height)).convert("RGB").save(packed, form)
    return packed.getvalue()


def of(*images: str | None) -> list[Mismatch]:
    return [replace(PAIR, image=image) for image in images]


@pytest.mark.parametrize(("size", "shown"), [((1200, 800), (160, 107)), ((40, 30), (40, 30)), ((300, 3000), (16, 160))])
def test_a_thumbnail_keeps_the_pictures_form_and_is_never_larger(
    bucket: Bucket, size: tuple[int, int], shown: tuple[int, int]
) -> None:
    address = bucket.put("a.jpg", picture(*size))
    (found,) = thumbnails(of(address), settings(bucket)).values()
    assert (found.width, found.height, found.reason) == (*shown, "")
    head, data = found.data_uri.split(",")
    assert head == "data:image/webp;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        assert image.size == shown
        assert max(image.size) <= SIDE_PX


def test_what_cannot_be_shown_has_its_reason_and_its_neighbours_are_shown(bucket: Bucket) -> None:
    whole = picture(64, 64)
    images = {
        "whole": bucket.put("whole.jpg", whole), "cut": bucket.put("cut.jpg", whole[:-9]),
        "page": bucket.put("page.jpg", b"<html>"), "gone": f"s3://{bucket.name}/gone.jpg",
        "forbidden": "s3://another/1.jpg", "no s3": "https://shop/1.jpg",
    }  # fmt: skip
    found = thumbnails(of(*images.values(), None), settings(bucket))
    reasons = {name: found[address].reason for name, address in images.items()}
    assert reasons.pop("whole") == ""
    assert all(reasons.values()) and len(set(reasons.values())) == len(reasons)
    assert "no such key" in reasons["gone"] and "allow-list" in reasons["forbidden"]
    assert [address for address, one in found.items() if one.data_uri] == [images["whole"]]


def test_a_picture_of_several_pairs_is_made_once_and_none_is_made_of_no_pairs(bucket: Bucket) -> None:
    address = bucket.put("a.jpg", picture(64, 64))
    assert list(thumbnails(of(address, address, None), settings(bucket))) == [address]
    assert thumbnails(of(None), settings(bucket)) == thumbnails([], settings(bucket)) == {}


def test_a_picture_that_was_replaced_since_it_was_judged_is_told_apart(bucket: Bucket) -> None:
    data = picture(64, 64)
    address = bucket.put("a.jpg", data)
    judged = [replace(PAIR, image=address, image_sha256=hashlib.sha256(data).digest())]
    assert not thumbnails(judged, settings(bucket))[address].is_other
    bucket.put("a.jpg", picture(32, 32))
    assert thumbnails(judged, settings(bucket))[address].is_other


@pytest.fixture
def silent_s3() -> Iterator[str]:
    """Takes connections and never answers."""
    with closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def test_an_s3_that_does_not_answer_holds_no_page_up(bucket: Bucket, silent_s3: str) -> None:
    images = [f"s3://{bucket.name}/{n}.jpg" for n in range(20)]
    found = thumbnails(of(*images), settings(bucket, s3_endpoint_url=silent_s3), time_limit_s=0.2)
    assert len(found) == 20
    assert all(one.reason and not one.data_uri for one in found.values())


def test_an_s3_that_may_not_be_asked_is_the_reason_of_all(bucket: Bucket) -> None:
    found = thumbnails(of("s3://shop/1.jpg"), settings(bucket, s3_endpoint_url="http://elsewhere.example"))
    assert "must be https://" in found["s3://shop/1.jpg"].reason


def test_a_picture_with_too_many_pixels_is_not_decoded(bucket: Bucket) -> None:
    address = bucket.put("a.png", picture(64, 64, "PNG"))
    assert "64 x 64" in thumbnails(of(address), settings(bucket, max_image_pixels=1000))[address].reason
