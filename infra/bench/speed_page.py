"""Figures as tables, and docs/benchmarks/speed.md made of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: What tells of the run and not of the figures; `load` and the rest stand in the page's own words.
ABOUT = ("bench", "target", "met", "cpu", "cores", "python", "versions", "command", "commit", "date", "load", "notes")

PAGE = """# Speed

Each benchmark runs on real servers of its own on one machine: Postgres, Redis and S3 beside the workers, on the same
cores. Figures are ratios measured side by side in one run, or counts; what a second holds depends on the machine.
`make bench` measures all of them anew, `concord bench NAME` one: [cli.md](../cli.md#concord-bench).

| benchmark | measured | target | met |
|---|---|---|---|
{summary}
"""

SECTION = """
## {name}

{what}.

    {command}

{date}, commit {commit}. {cpu}, {cores} cores; Python {python}; {versions}. The load average was {before} at the start
and {after} at the end.

Target: {target}. {verdict}
{notes}
{tables}"""


@dataclass(frozen=True)
class Block:
    """A table; cells are text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    has_header: bool = True


def blocks(result: Mapping[str, Any]) -> Iterator[Block]:
    """The figures of a benchmark: plain ones in one table, each group in a table of its own."""
    figures = {name: value for name, value in result.items() if name not in ABOUT}
    yield from of_mapping("", figures)


def of_mapping(title: str, figures: Mapping[str, Any]) -> Iterator[Block]:
    plain = {name: value for name, value in figures.items() if not isinstance(value, Mapping | list)}
    groups = {name: value for name, value in figures.items() if value and isinstance(value, Mapping | list)}
    if plain:
        yield Block(title, ("figure", "value"), [(words(name), cell(value)) for name, value in plain.items()])
    for name, value in groups.items():
        inner = f"{title}, {words(name)}" if title else words(name)
        if isinstance(value, list) and not all(isinstance(one, Mapping) for one in value):
            yield Block(inner, (words(name),), [(cell(one),) for one in value])
        elif isinstance(value, list):
            yield of_rows(inner, value)
        elif all(isinstance(one, Mapping) and not nests(one) for one in value.values()):
            yield of_columns(inner, value)
        else:
            yield from of_mapping(inner, value)


def nests(figures: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping | list) for value in figures.values())


def of_rows(title: str, rows: Sequence[Mapping[str, Any]]) -> Block:
    """Rows of like figures; one that a row lacks stays empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[cell(row.get(name)) for name in names] for row in rows]
    return Block(title, [words(name) for name in names], cells)


def of_columns(title: str, columns: Mapping[str, Mapping[str, Any]]) -> Block:
    """Like figures of a few things: a row for each figure, a column for each thing."""
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    rows = [[words(name), *(cell(column.get(name)) for column in columns.values())] for name in names]
    return Block(title, ["", *map(str, columns)], rows)


def words(name: str) -> str:
    """`pairs_per_s` as one would say it."""
    for code, said in (("_per_cpu_s", " a CPU second"), ("_per_s", "/s"), ("_", " ")):
        name = name.replace(code, said)
    return name


def cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping | list):
        inside = value.items() if isinstance(value, Mapping) else enumerate(value, 1)
        return ", ".join(f"{words(str(name))} {cell(one)}" for name, one in inside)
    return str(value)


def page(results: Sequence[Mapping[str, Any]], whats: Mapping[str, str]) -> str:
    """The whole paper."""
    summary = "\n".join(
        f"| [{one['bench']}](#{one['bench']}) | {measured(one)} | {one['target']} | {cell(one['met'])} |"
        for one in results
    )
    return PAGE.format(summary=summary) + "".join(section(one, whats[one["bench"]]) for one in results)


def measured(result: Mapping[str, Any]) -> str:
    """The figures that a target is about, in a few words."""
    names = ("ratio", "ratio_to_bare_loop", "pairs_per_s", "gets_per_cpu_s", "p50_ms", "p99_ms")
    return ", ".join(f"{words(name)} {cell(result[name])}" for name in names if result.get(name) is not None)


def section(result: Mapping[str, Any], what: str) -> str:
    before, after = result["load"]
    notes = result.get("notes") or ()
    return SECTION.format(
        **{name: result[name] for name in ("command", "date", "commit", "cpu", "cores", "python", "target")},
        name=result["bench"],
        what=what[:1].upper() + what[1:],
        versions=", ".join(f"{package} {one}" for package, one in result["versions"].items()),
        before=before,
        after=after,
        verdict="It is met." if result["met"] else "**It is missed.**",
        notes="".join(f"\n{note}\n" for note in ([notes] if isinstance(notes, str) else notes)),
        tables="\n".join(map(markdown, blocks(result))),
    )


def markdown(block: Block) -> str:
    numbers = [all(row[n][:1].isdigit() for row in block.rows if row[n]) for n in range(len(block.columns))]
    lines = [f"**{block.title}**\n"] if block.title else []
    lines.append(f"| {' | '.join(column or ' ' for column in block.columns)} |")
    lines.append(f"|{'|'.join('--:' if number else '---' for number in numbers)}|")
    lines += [f"| {' | '.join(row)} |" for row in block.rows]
    return "\n".join(lines) + "\n"
