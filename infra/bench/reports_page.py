"""The paper of infra/bench/reports.py: what it measured, as Markdown."""

import statistics
from collections.abc import Mapping
from typing import Any

from infra.bench.verdict_years import VERDICTS_A_REF

#: A load average at the start above this is not the benchmark's own.
IDLE_LOAD = 1.0
#: Values that stand in the page as they are.
SAID = (
    "command", "date", "commit", "cpu", "cores", "postgres", "shared_buffers", "python", "load", "load_at_end",
)  # fmt: skip

PAGE = """# Reports, measured

{rows:,} verdicts over twelve months, {gigabytes:.1f} GB with their indexes, made in SQL in {seconds} s
(`infra/bench/verdict_years.py`): a nightly run each day, live pairs of two shops, each ref judged some {again} times.
One question a view, as it stands in `infra/bench/reports.py`.

    {command}

{date}, commit {commit}. {cpu}, {cores} cores; Postgres {postgres} as `concord local` starts it, with
{shared_buffers} of shared buffers; Python {python}. The load average was {load} at the start and {load_at_end} at the
end{beside}.

## Every view, one day and 30 days

Seconds until the last row is here, the first time and at once again. The aim was 2 s for one day and 10 s for
30 days. Months are the partitions that EXPLAIN ANALYZE shows as read.

| view | days | rows | first, s | again, s | months read | within the aim |
|---|--:|--:|--:|--:|---|---|
{questions}

`run_changes` looks each pair's last verdict up, from the newest month backwards, and reads a month only where the
newer ones do not have the ref. It is meant for one run; 30 days of it are 30 runs. `review_queue` looks for later
verdicts in the later months, which are empty. `model_comparison` reads the months of both sides.

## Dropping a month

Median milliseconds of `drop_expired_month()`, for months of {many_rows:,} verdicts and for months of {few_rows:,}.

| months | detaching and dropping | commit |
|---|--:|--:|
{dropped}

Detaching and dropping, for which `verdict` is needed alone, takes the same time whatever the month holds. What grows
with it is the commit, which gives the files back to the file system.
"""


def page(result: Mapping[str, Any]) -> str:
    """The whole paper."""
    many, few = result["dropped_ms"]["many"], result["dropped_ms"]["few"]
    return PAGE.format(
        rows=result["filled"]["rows"],
        gigabytes=result["filled"]["bytes"] / 1e9,
        seconds=result["filled"]["seconds"],
        again=VERDICTS_A_REF,
        beside=": other work ran beside" if result["load"] > IDLE_LOAD else "",
        questions="\n".join(map(question, result["asked"])),
        many_rows=result["filled"]["rows"] // 12,
        few_rows=result["few_rows"] // 12,
        dropped="\n".join(
            f"| {what} | {statistics.median(before for before, _ in spent):.0f}"
            f" | {statistics.median(commit for _, commit in spent):.0f} |"
            for what, spent in (("large", many), ("small", few))
        ),
        **{name: result[name] for name in SAID},
    )


def question(one: Mapping[str, Any]) -> str:
    """A row of the table."""
    within = "yes" if max(one["first_s"], one["again_s"]) <= one["wanted_s"] else "no"
    months = ", ".join(f"`{month}`" for month in one["months"])
    if len(one["months"]) > 4:
        months = f"{len(one['months'])}, back to `{one['months'][0]}`"
    return (
        f"| `{one['view']}` | {one['days']} | {one['rows']:,} | {one['first_s']:.2f} | {one['again_s']:.2f} "
        f"| {months} | {within} |"
    )
