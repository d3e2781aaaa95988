"""The model in a bare loop over batches in memory, for a worker to be held against: `python -m infra.bench.bare`.

Waits on standard input for lines of JSON, `{"seconds": 5, "pictures": "decoded"}`, loops for that long, and answers
with `{"pairs": ..., "seconds": ..., "cpu_s": ...}`. "decoded": pictures as they come out of the decoder, so that a turn
of the loop is what a worker calls prepare and score; "encoded": their bytes, which are decoded first.
"""

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any

from infra.demo import HELDOUT, WEIGHTS

BATCH_PAIRS = 64
#: Batches that the loop goes through again and again.
BATCHES = 9
#: Statements about one picture stand together in the sample catalog.
TEXTS_A_PICTURE = 3


def sample_pairs() -> list[tuple[bytes, str]]:
    """The sample catalog's pictures and texts, in an order in which no two pairs of a batch share a picture."""
    rows = [json.loads(line) for line in HELDOUT.read_text().splitlines()]
    ordered = [row for start in range(TEXTS_A_PICTURE) for row in rows[start::TEXTS_A_PICTURE]]
    return [((HELDOUT.parent / row["image"]).read_bytes(), row["text"]) for row in ordered[: BATCHES * BATCH_PAIRS]]


def main() -> None:
    import torch

    from worker.decode_image import decode
    from worker.moderator import Moderator, Question
    from worker.quant.replay import load_gated

    torch.set_num_threads(1)
    moderator = Moderator(load_gated(WEIGHTS, torch.device("cpu")), "cpu")
    moderator.warm_up()
    unpack = partial(decode, target_px=moderator.checkpoint.configuration.patch_image_size, exact=False)
    catalog = sample_pairs()
    encoded = [data for data, _ in catalog]
    pictured = [(unpack(data), text) for data, text in catalog]
    decoded = [Question(picture.image, picture.sha256, text) for picture, text in pictured]

    def ask(place: int, from_bytes: bool) -> Sequence[Any]:
        here = slice(place * BATCH_PAIRS, (place + 1) * BATCH_PAIRS)
        if not from_bytes:
            return moderator.judge(decoded[here])
        again = zip(map(unpack, encoded[here]), decoded[here], strict=True)
        return moderator.judge([Question(picture.image, picture.sha256, one.text) for picture, one in again])

    def turn(seconds: float, from_bytes: bool) -> dict[str, float]:
        started, cpu, pairs = time.monotonic(), time.process_time(), 0
        for number in count():
            pairs += len(ask(number % BATCHES, from_bytes))
            if time.monotonic() - started >= seconds:
                break
        return {"pairs": pairs, "seconds": time.monotonic() - started, "cpu_s": time.process_time() - cpu}

    # As in a worker not on the main thread, whose memory glibc gives back to the system and fetches again all the time:
    # the loop would take a tenth longer there.
    with ThreadPoolExecutor(1) as thread:
        print("ready", flush=True)
        for line in sys.stdin:
            order = json.loads(line)
            told = thread.submit(turn, order["seconds"], order["pictures"] == "encoded").result()
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
