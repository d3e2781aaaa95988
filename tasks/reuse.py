"""Reuse: content that the same model judged before is answered from that verdict, and equal content of a batch is
judged once.

Equal is what has the same content hash. Scores alone are taken over: flags are the pair's own, and the decision is made
anew by the policy in force (tasks/settling.py).
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Engine

from db import originals
from db.originals import REUSED
from tasks.settling import Case, MadeBy
from tasks.storing import persist
from worker.moderator import Judgement

CONTENT_HASH_BYTES = 16


def content_hash(case: Case, made_by: MadeBy) -> bytes:
    """16 bytes over all that the scores depend on: equal content under an equal model scores equally."""
    assert case.picture is not None
    assert case.prepared is not None
    parts = [
        case.picture.decoded.sha256.hex(),
        case.picture.decoded.decode_mode,
        case.prepared.prompt.ids,  # the texts as scored, set into the prompt and cut
        made_by.digest,
    ]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=CONTENT_HASH_BYTES).digest()


def reuse(
    cases: Sequence[Case], days: float, engine: Engine, made_by: MadeBy, stopping: Callable[[], bool]
) -> list[Case]:
    """Answer what has a verdict that is younger than `days`; returns the cases that the model is to be asked.

    Repeats within the batch are not among those: `share` answers them. A case that is to be judged anew (`fresh`)
    always is. Raises Hold where the worker stops while the database is away.
    """
    if not days:
        return list(cases)
    hashes = {case.content_hash for case in cases if case.content_hash and not case.message.fresh}

    def look_up() -> dict[bytes, dict[str, Any]]:
        with engine.connect() as connection:
            return originals.find(connection, hashes, days=days, model_version_id=made_by.model_version_id)

    found = persist(look_up, stopping) if hashes else {}
    asked, seen = list[Case](), set[bytes | None]()
    for case in cases:
        if case.message.fresh:
            asked.append(case)
        elif case.content_hash in found:
            case.answer = answered(case, judgement_of(found[case.content_hash], made_by))
        elif case.content_hash not in seen:
            seen.add(case.content_hash)
            asked.append(case)
    return asked


def share(repeats: Sequence[Case], asked: Sequence[Case]) -> None:
    """Answer repeats as their like among those that the model was asked; what failed there fails here."""
    said = {case.content_hash: case.answer for case in asked}
    for case in repeats:
        answer = said[case.content_hash]
        case.answer = answered(case, answer) if isinstance(answer, Judgement) else answer


def answered(case: Case, judgement: Judgement) -> Judgement:
    """Another's judgement of the same content as this case's own. The model computed nothing for it."""
    assert case.prepared is not None
    prompt = case.prepared.prompt
    return replace(
        judgement,
        text_scored=prompt.text,
        premise_scored=prompt.premise,
        flags=(*prompt.flags, REUSED),
        tokens=0,
        padded_tokens=0,
    )


def judgement_of(row: Mapping[str, Any], made_by: MadeBy) -> Judgement:
    """The judgement that a verdict's row holds, but for what depends on the pair's own words."""
    return Judgement(
        label=row["label"],
        answer=row["answer"],
        probs={answer: row[f"p_{label}"] for answer, label in made_by.labels.items()},
        p_entailment=row["p_entailment"],
        p_contradiction=row["p_contradiction"],
        p_neutral=row["p_neutral"],
        text_scored="",
        premise_scored=None,
        flags=(),
    )
