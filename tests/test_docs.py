"""The papers: what they name exists, what exists is named, links lead somewhere, and examples work."""

import ast
import base64
import importlib
import json
import re
import string
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
import typer

from db.originals import REUSED
from tasks import cli
from tasks.nightly_word import OF_THE_NIGHT
from tasks.settings import PASSED_ON, PREFIX, Settings
from tests.conftest import Database
from worker.decode_image import decode
from worker.errors import ErrorCode
from worker.messages import TEXT_REPLACED
from worker.messages import decode as decode_message
from worker.model.preprocess import OFF_LANGUAGE, TEXT_CUT
from worker.moderator import SHIPPED_POLICIES

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("worker", "tasks", "db", "infra")
#: Rooms that ARCHITECTURE.md names and says are not there yet.
NOT_YET = {"worker/runtime"}
#: What tells of a package index, taken apart, so that this file is not what it looks for.
HOSTS = (
    ("index", "[-_]url"),
    ("pyp", r"i\.(?:org|python)"),
    ("python", "hosted"),
    ("registry", r"\.npm"),
    ("/sim", "ple/"),
)
FIRST_FRAME = "first_frame"


def ours(*suffixes: str) -> list[Path]:
    """The project's own files with these suffixes: nothing hidden, built or installed."""
    found = (path for suffix in suffixes for path in ROOT.rglob(f"*{suffix}"))
    hidden = ("build", "dist", "data")
    return sorted(
        path
        for path in found
        if not any(part.startswith(".") or part in hidden for part in path.relative_to(ROOT).parts[:-1])
    )


PAPERS = ours(".md")
IDS = [str(path.relative_to(ROOT)) for path in PAPERS]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(path: Path, info: str) -> list[str]:
    """The fenced blocks of a paper whose opening line says exactly this."""
    return re.findall(rf"^```{re.escape(info)}\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def sections(name: str) -> dict[str, str]:
    """The parts of a paper by their `##` heading."""
    parts = re.split(r"^## (.+)$", read(name), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def commands() -> Iterator[tuple[str, Any]]:
    def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        inside = getattr(command, "commands", None)
        if inside is None:
            yield name, command
        for part, inner in (inside or {}).items():
            yield from walk(f"{name} {part}", inner)

    yield from walk("concord", typer.main.get_command(cli.cli))


# ---- What exists is named --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "command"), list(commands()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_command_and_every_option_is_explained(name: str, command: Any) -> None:
    section = sections("docs/cli.md")[name]
    options = [flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)]
    named = [option for option in options if option.startswith("--") and option != "--help"]
    assert [option for option in named if f"`{option}" not in section] == []
    assert re.search(rf"^    .*{name}\b", section, re.MULTILINE), "an example"


def test_the_paper_of_the_command_line_names_no_command_that_is_gone() -> None:
    assert {name for name in sections("docs/cli.md") if name.startswith("concord ")} == {name for name, _ in commands()}


def test_every_setting_is_explained_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(CONCORD_\w+)` \| (.*) \|$", read("docs/settings.md"), re.MULTILINE))
    assert set(rows) == {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    for name, field in Settings.model_fields.items():
        if isinstance(field.default, bool | int | float | str):
            written = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
            assert f"`{written}`" in rows[f"{PREFIX}{name.upper()}"], name


def test_no_paper_names_a_setting_that_is_gone() -> None:
    known = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields} | {f"{PREFIX}ENV_FILE", *OF_THE_NIGHT}
    named = {name for path in PAPERS for name in re.findall(r"CONCORD_[A-Z0-9_]*[A-Z0-9]", path.read_text())}
    assert named - known == set()


def test_what_a_nights_command_is_given_is_explained() -> None:
    paper = sections("docs/nightly.md")["In the morning"]
    assert [name for name in (*PASSED_ON, *OF_THE_NIGHT) if f"`{name}`" not in paper] == []


def test_every_error_code_is_explained_once() -> None:
    codes = re.findall(r"^\| `(\w+)` \|", sections("docs/submitting.md")["Error codes"], re.MULTILINE)
    assert sorted(codes) == sorted(ErrorCode)


def test_every_flag_status_label_and_policy_is_explained() -> None:
    paper = read("docs/submitting.md")
    words = {TEXT_CUT, OFF_LANGUAGE, TEXT_REPLACED, FIRST_FRAME, REUSED, "judged", "rejected", "failed"}
    words |= {"entailment", "contradiction", "neutral", *SHIPPED_POLICIES}
    assert [word for word in sorted(words) if f"| `{word}` |" not in paper] == []
    assert FIRST_FRAME in Path(decode.__code__.co_filename).read_text()


def test_the_readmes_tree_has_a_line_for_every_module_and_none_for_what_is_gone() -> None:
    folders: list[str] = []
    named = set()
    for line in sections("README.md")["The tree"].strip().strip("`").splitlines()[1:]:
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders[depth:] = [name.removesuffix("/")]
        named.add("/".join(folders))
        assert len(line.split()) > 1, f"{name} says nothing"
    modules = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert modules - named == set()
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_changelog_tells_of_the_version_that_is_packaged() -> None:
    version = tomllib.loads(read("pyproject.toml"))["project"]["version"]
    assert f"## [{version}]" in read("CHANGELOG.md")


# ---- What is named exists --------------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """The fragments that a paper's headings have on the usual hosts."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    drop = str.maketrans("", "", string.punctuation.replace("-", "").replace("_", ""))
    return {heading.lower().translate(drop).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("paper", PAPERS, ids=IDS)
def test_every_relative_link_leads_somewhere(paper: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", paper.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, fragment = target.partition("#")
        path = (paper.parent / name).resolve() if name else paper
        assert path.is_relative_to(ROOT), target
        assert path.exists(), target
        assert not fragment or fragment in anchors(path), target


@pytest.mark.parametrize("paper", PAPERS, ids=IDS)
def test_every_file_that_a_paper_names_is_there(paper: Path) -> None:
    pattern = rf"`((?:{'|'.join((*PACKAGES, 'tests', 'docs'))})/[\w./]*[\w/])`"
    named = set(re.findall(pattern, paper.read_text(encoding="utf-8")))
    # CONTRIBUTING.md names the next migration, whose number nobody knows.
    named = {name for name in named - NOT_YET if "000N" not in name}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_test_that_a_paper_names_is_there() -> None:
    architecture = re.findall(r"`(tests/[\w/]+\.py)`: ((?:`test_\w+`(?:, )?)+)", read("ARCHITECTURE.md"))
    assert architecture
    for file, names in architecture:
        for name in re.findall(r"test_\w+", names):
            assert f"def {name}(" in read(file), f"{name} is not in {file}"


def test_nothing_names_a_place_of_the_machine_that_it_was_written_on() -> None:
    places = re.compile(r"(?<![\w.:/])/(?:work|root|home|Users)/\w|[A-Z]:\\\\?Users")
    hosts = re.compile("|".join("".join(parts) for parts in HOSTS))
    for path in [*ours(".py", ".md", ".toml", ".sql", ".mako", ".svg", ".txt"), ROOT / "Makefile", ROOT / ".ci/run"]:
        text = path.read_text(encoding="utf-8")
        assert places.findall(text) + hosts.findall(text) == [], path.relative_to(ROOT)


# ---- Examples work ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paper", PAPERS, ids=IDS)
def test_every_python_example_compiles_and_imports_what_is_there(paper: Path) -> None:
    for example in blocks(paper, "python"):
        for node in ast.walk(ast.parse(example)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@pytest.mark.parametrize("paper", PAPERS, ids=IDS)
def test_every_json_example_is_json(paper: Path) -> None:
    for example in blocks(paper, "json"):
        json.loads(example)


def test_the_message_in_the_papers_is_one_that_a_worker_reads() -> None:
    entry, message = map(json.loads, blocks(ROOT / "docs/submitting.md", "json"))
    read = decode_message(message, now=datetime(2026, 1, 31, 12, tzinfo=UTC), oldest=datetime(2026, 1, 1, tzinfo=UTC))
    assert (len(read.pairs), read.refused) == (1, ())
    assert set(message) == {"v", "message_id", "submitted_at", "run_id", "source", "fresh", "attempts", "pairs"}
    args, kwargs, embed = json.loads(base64.b64decode(entry["body"]))
    assert (args[0]["v"], kwargs, embed) == (1, {}, {})
    assert UUID(entry["headers"]["id"])


@pytest.fixture
def owner(database: Database) -> Iterator[psycopg.Connection[Any]]:
    """The owner of a migrated database with the examples' own table, a failed verdict and a judged one."""
    url = database.owner_url.replace("+psycopg", "", 1)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            """
            create table product (sku text, image text, title text, changed_at timestamptz default now());
            insert into model_version (name, revision, recipe, weights_sha256, prompt, image_px, answers)
            values ('m', 'v1', 'none', '', '', 64, '{}');
            insert into verdict (submitted_at, pair_id, source, ref, message_id, lane, image, text, policy, status,
                                 error_code, label, decision, p_entailment, p_contradiction, p_neutral,
                                 policy_version, model_version_id)
            values (now(), new_uuid7(), 'default', 'sku-1', new_uuid7(), 'live', 's3://shop/1.jpg', 'a shoe', 'catalog',
                    'failed', 'image_fetch_failed', null, null, null, null, null, null, null),
                   (now(), new_uuid7(), 'default', 'sku-1', new_uuid7(), 'live', 's3://shop/1.jpg', 'a shoe', 'catalog',
                    'judged', null, 'contradiction', 'review', 0.04, 0.95, 0.01, 1, 1);
            """
        )
        yield connection


def test_the_sql_in_the_papers_runs(owner: psycopg.Connection[Any]) -> None:
    examples = [example for paper in PAPERS for example in blocks(paper, "sql run")]
    assert len(examples) >= 4
    for example in examples:
        owner.execute(example.encode())
    decided = owner.execute("select decision, policy_version from verdict where status = 'judged'").fetchall()
    assert decided == [("reject", 2)], "the re-decided verdict"
    accepted = owner.execute("select convert_from(body, 'UTF8')::jsonb from outbox order by created_at").fetchall()
    sources = [body.get("source", "default") for (body,) in accepted]
    assert sources == ["default", "emea"], "a pair in a transaction, and the changed ones"
    for (body,) in accepted:
        read = decode_message(body, now=datetime.now(UTC), oldest=datetime(2020, 1, 1, tzinfo=UTC))
        assert (len(read.pairs), read.refused) == (1, ())
