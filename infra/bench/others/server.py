"""An HTTP batching server, LitServe: `python -m infra.bench.others.server PORT`.

64 requests, or what has come in 50 ms, are one call, which fetches, decodes and judges. Who asks keeps the answers.
"""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import litserve

from infra.bench.others import parts

THREADS = 16


class Judge(litserve.LitAPI):  # type: ignore[misc]
    def setup(self, device: str) -> None:
        self.moderator, self.client = parts.moderator(), parts.bucket(THREADS)
        self.target_px = self.moderator.checkpoint.configuration.patch_image_size
        self.pool = ThreadPoolExecutor(THREADS)

    def decode_request(self, request: dict[str, Any]) -> dict[str, Any]:
        return request

    def batch(self, inputs: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        return inputs

    def predict(self, pairs: Sequence[dict[str, Any]]) -> list[parts.Row]:
        questions = list(self.pool.map(lambda pair: parts.question(self.client, pair, self.target_px), pairs))
        answers = self.moderator.judge(questions)
        return [parts.row("LitServe", pair, answer) for pair, answer in zip(pairs, answers, strict=True)]

    def unbatch(self, output: list[parts.Row]) -> list[parts.Row]:
        return output

    def encode_response(self, output: parts.Row) -> dict[str, Any]:
        return {"row": output}


if __name__ == "__main__":
    server = litserve.LitServer(Judge(max_batch_size=64, batch_timeout=0.05), accelerator="cpu", timeout=120)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="warning")
