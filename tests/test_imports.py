"""Who may import whom. An import inside a function counts like any other."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.submit_env import environment

ROOT = Path(__file__).resolve().parent.parent
OURS = ("worker", "tasks", "db", "infra")

#: What the model and its quantization need: a machine for it has nothing else.
MODEL = {"torch", "numpy", "PIL", "tokenizers", "safetensors", "worker.model", "worker.quant", "worker.errors"}

#: A module or package, and what it may import beside the standard library. The longest name that fits a module counts.
RULES: dict[str, set[str]] = {
    "celeryconfig": {"kombu", "tasks.settings"},
    "worker": set(),
    "worker.errors": set(),
    "worker.messages": {"pydantic", "worker.errors"},
    "worker.kombu_guards": {"kombu", "redis"},
    "worker.lanes": set(),
    "worker.turns": set(),
    "worker.popping": {"kombu", "redis"},
    "worker.endings": {"celery"},
    "worker.delivery": {"celery", "worker.errors", "worker.kombu_guards"},
    "worker.batching": {
        "celery",
        "worker.delivery",
        "worker.endings",
        "worker.errors",
        "worker.lanes",
        "worker.popping",
    },
    "worker.consumer": {"celery", "worker.batching", "worker.delivery", "worker.errors", "worker.kombu_guards"},
    "worker.model": MODEL,
    "worker.quant": MODEL,
    "worker.weights": {"modelscope", "safetensors", "torch", "worker.model", "worker.errors"},
    "worker.image_containers": {"worker.errors"},
    "worker.decode_image": {"PIL", "numpy", "worker.errors", "worker.image_containers"},
    "worker.images": {"obstore", "boto3", "botocore", "PIL", "worker.decode_image", "worker.errors"},
    "worker.moderator": {"torch", "PIL", "worker.model", "worker.quant", "worker.messages", "worker.errors"},
    "worker.compare": {"rich", "worker.compare", "worker.moderator"} | MODEL,
    "db": {"sqlalchemy", "psycopg", "alembic", "db"},
    "tasks": {"tasks.app"},
    "tasks.settings": {"pydantic", "pydantic_settings", "worker.errors"},
    "tasks.app": {"celery", "worker.kombu_guards"},
    "tasks.high_water": {"sqlalchemy", "db", "worker.errors"},
    "tasks.submit": {
        "kombu",
        "sqlalchemy",
        "db",
        "tasks.app",
        "tasks.high_water",
        "tasks.settings",
        "worker.errors",
        "worker.messages",
    },
    "tasks.pairs_formats": {"worker.messages", "worker.errors"},
    "tasks.pairs_parquet": {"pyarrow", "tasks.pairs_formats", "worker.messages", "worker.errors"},
    "tasks.pairs_file": {
        "sqlalchemy",
        "db",
        "tasks.high_water",
        "tasks.pairs_formats",
        "tasks.pairs_parquet",
        "tasks.submit",
        "worker.errors",
        "worker.messages",
    },
    "tasks.submit_cli": {
        "typer",
        "rich",
        "sqlalchemy",
        "db",
        "tasks.console",
        "tasks.high_water",
        "tasks.pairs_file",
        "tasks.pairs_formats",
        "tasks.submit",
        "worker.errors",
    },
    "tasks.relay": {"kombu", "sqlalchemy", "db", "tasks.app", "tasks.submit", "worker.errors"},
    "tasks.settling": {"sqlalchemy", "db", "tasks.settings", "worker"},
    "tasks.reuse": {"sqlalchemy", "db", "tasks.settling", "tasks.storing", "worker.moderator"},
    "tasks.lone": {"sqlalchemy", "db", "tasks.settling", "tasks.storing", "worker.errors"},
    "tasks.storing": {"sqlalchemy", "tenacity", "db", "worker.errors", "worker.messages"},
    "tasks.scoring": {"torch", "tasks.settings", "tasks.pairs_file", "worker"},
    "tasks.precision": {
        "typer",
        "rich",
        "tasks.settings",
        "tasks.scoring",
        "worker.quant",
        "worker.compare",
        "worker.errors",
    },
    "tasks.reports": {
        "typer",
        "rich",
        "pyarrow",
        "sqlalchemy",
        "db",
        "tasks.console",
        "tasks.settings",
        "worker.errors",
    },
    "tasks.report": {
        "typer",
        "db",
        "tasks.console",
        "tasks.report_text",
        "tasks.report_writing",
        "tasks.reports",
        "tasks.settings",
        "worker.errors",
    },
    "tasks.report_text": {"rich", "db.run_report", "tasks.console"},
    "tasks.report_writing": {
        "sqlalchemy",
        "db",
        "tasks.nightly_s3",
        "tasks.report_page",
        "tasks.report_pictures",
        "tasks.settings",
        "worker.errors",
    },
    "tasks.report_pictures": {
        "PIL",
        "db.run_report",
        "tasks.settings",
        "worker.decode_image",
        "worker.errors",
        "worker.images",
    },
    "tasks.report_charts": {"pygal", "markupsafe", "db.run_report"},
    "tasks.report_page": {"jinja2", "markupsafe", "db.run_report", "tasks.report_charts", "tasks.report_pictures"},
    "tasks.catalogs": {"celery", "pydantic", "db", "tasks.settings", "worker.errors", "worker.messages"},
    "tasks.nightly_s3": {"boto3", "botocore", "tasks.settings", "worker.errors"},
    "tasks.nightly_sources": {
        "db",
        "tasks.catalogs",
        "tasks.nightly_s3",
        "tasks.pairs_file",
        "tasks.pairs_formats",
        "tasks.pairs_parquet",
        "tasks.settings",
        "worker.errors",
        "worker.messages",
    },
    "tasks.nightly_word": {"tenacity", "tasks.catalogs", "tasks.console", "tasks.settings", "worker.errors"},
    "tasks.nightly_end": {
        "pyarrow",
        "sqlalchemy",
        "db",
        "tasks.catalogs",
        "tasks.nightly_s3",
        "tasks.nightly_word",
        "tasks.report_writing",
        "tasks.settings",
        "tasks.storing",
        "worker.errors",
    },
    "tasks.nightly": {
        "sqlalchemy",
        "tenacity",
        "db",
        "tasks.catalogs",
        "tasks.nightly_end",
        "tasks.nightly_s3",
        "tasks.nightly_sources",
        "tasks.pairs_file",
        "tasks.settings",
        "tasks.storing",
        "tasks.submit",
        "worker.errors",
        "worker.messages",
    },
    "tasks.planner": {
        "celery",
        "sqlalchemy",
        "db",
        "tasks.catalogs",
        "tasks.nightly",
        "tasks.report_writing",
        "tasks.settings",
        "tasks.storing",
        "worker.errors",
    },
    "tasks.nightly_cli": {
        "typer",
        "rich",
        "sqlalchemy",
        "db",
        "tasks.catalogs",
        "tasks.console",
        "tasks.nightly",
        "tasks.nightly_sources",
        "tasks.settings",
        "worker.errors",
    },
    "tasks.moderate": {"torch", "celery", "sqlalchemy", "db", "tasks", "worker"},
    "tasks.console": {"rich"},
    "tasks.dead": {
        "typer",
        "rich",
        "sqlalchemy",
        "db",
        "tasks.console",
        "tasks.submit",
        "worker.errors",
        "worker.messages",
    },
    "tasks.cli": {"typer", "rich", "kombu", "sqlalchemy", "db", "tasks", "worker.errors", "worker.weights", "infra"},
    "infra.local": {"psutil", "psycopg", "redis", "boto3", "botocore", "infra.local", "worker.errors"},
}
#: What the command line's functions that may import infra are called: of `concord local ...`, `chaos` and `bench`.
MAY_START_SERVERS = ("local_", "chaos", "bench")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {
    name_of(path): path
    for path in [ROOT / "celeryconfig.py", *(path for package in OURS for path in (ROOT / package).rglob("*.py"))]
}


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules that are imported anywhere below, `from package import module` spelt out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield inside if inside in MODULES else str(node.module)


def allowed(module: str) -> set[str]:
    fitting = [name for name in RULES if module == name or module.startswith(f"{name}.")]
    return RULES[max(fitting, key=len)]


def may(name: str, rule: set[str]) -> bool:
    parts = name.split(".")
    return parts[0] in sys.stdlib_module_names or any(".".join(parts[: n + 1]) in rule for n in range(len(parts)))


def parsed(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


#: The rest of infra is tools for developers, which nothing may import but which may import anything.
RULED = sorted(name for name in MODULES if not name.startswith("infra") or name.startswith("infra.local"))


@pytest.mark.parametrize("module", RULED)
def test_a_module_imports_only_what_its_place_allows(module: str) -> None:
    rule = allowed(module)
    assert sorted({name for name in imported(parsed(module)) if not may(name, rule)}) == []


def test_the_rules_name_no_module_that_is_gone() -> None:
    assert [name for name in RULES if name not in MODULES] == []


def test_only_the_local_commands_import_the_local_servers() -> None:
    tree = parsed("tasks.cli")
    starters = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any(name.split(".")[0] == "infra" for name in imported(node))
    }
    assert starters
    assert all(name.startswith(MAY_START_SERVERS) for name in starters)
    top = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
    assert not [name for name in imported(top) if name.split(".")[0] == "infra"]


@pytest.mark.parametrize("module", [name for name in MODULES if not name.startswith("infra")])
def test_one_module_reads_the_environment(module: str) -> None:
    reads = [
        node
        for node in ast.walk(parsed(module))
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv"))
        or (isinstance(node, ast.ImportFrom) and node.module == "os")
        or (isinstance(node, ast.ImportFrom) and node.module == "pydantic_settings")
    ]
    assert bool(reads) == (module == "tasks.settings")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


LIGHT = ("celeryconfig", "tasks.submit", "tasks.pairs_file", "tasks.relay", "tasks.settings", "tasks.app", "tasks.cli",
         "tasks.planner")  # fmt: skip


def test_producers_and_the_relay_load_no_torch_not_even_through_others() -> None:
    heavy = ("torch", "numpy", "PIL", "boto3", "obstore", "tokenizers", "modelscope", "worker.model", "infra")
    code = f"import sys, {', '.join(LIGHT)}\nprint([name for name in {heavy!r} if name in sys.modules])"
    assert run(code).strip() == "[]"


def test_the_model_runs_where_nothing_but_its_five_packages_is_installed() -> None:
    """As on a GPU machine: whatever else this environment holds is hidden."""
    modules = [name for name in MODULES if name.startswith("worker.model")] + ["worker.moderator"]
    hidden = (
        "celery",
        "kombu",
        "redis",
        "boto3",
        "botocore",
        "obstore",
        "sqlalchemy",
        "psycopg",
        "modelscope",
        "onnxruntime",
    )
    code = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import {", ".join(modules)}
print("loaded")
"""
    assert run(code).strip() == "loaded"
