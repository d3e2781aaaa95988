"""Settings: where they come from, what a wrong one is told, and that no secret is shown."""

import ast
import re
from pathlib import Path

import pytest

from tasks.settings import PREFIX, Settings, SettingsWrong, settings
from tests.submit_env import configured

SECRETS = {
    "database_url": "postgresql+psycopg://user:pa55word@host/name",
    "owner_database_url": "postgresql+psycopg://owner:pa55word@host/name",
    "broker_url": "redis://:pa55word@host:6379/0",
    "result_url": "redis://:pa55word@host:6379/1",
    "s3_secret_access_key": "pa55word",
}


def test_without_anything_set_there_is_a_default_for_all_but_the_servers() -> None:
    with configured():
        chosen = settings()
    assert (chosen.database_url, chosen.broker_url, chosen.s3_secret_access_key) == (None, None, None)
    assert chosen.allowed_buckets == ()
    assert (chosen.max_pairs, chosen.max_wait_ms, chosen.max_inflight) == (64, 50, 4)


def test_every_setting_says_what_it_does() -> None:
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


def test_settings_are_read_once() -> None:
    with configured(max_pairs=7):
        assert settings() is settings()
        assert settings().max_pairs == 7


def write_file(folder: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    (folder / "env").write_text(content)
    monkeypatch.setenv(f"{PREFIX}ENV_FILE", str(folder / "env"))
    settings.cache_clear()


def test_a_file_gives_settings_and_the_environment_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with configured(max_wait_ms=9):
        write_file(tmp_path, monkeypatch, "CONCORD_MAX_PAIRS='7'\nCONCORD_MAX_WAIT_MS=8\nSOMETHING_ELSE=1\n")
        assert (settings().max_pairs, settings().max_wait_ms) == (7, 9)


def test_a_file_that_is_named_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with configured():
        monkeypatch.setenv(f"{PREFIX}ENV_FILE", str(tmp_path / "typo"))
        with pytest.raises(SettingsWrong, match="typo"):
            settings()


def test_the_file_of_the_local_servers_is_read_in_the_folder_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with configured():
        monkeypatch.delenv(f"{PREFIX}ENV_FILE")
        monkeypatch.chdir(tmp_path)
        assert settings().broker_url is None
        (tmp_path / ".concord").mkdir()
        (tmp_path / ".concord" / "env").write_text("CONCORD_BROKER_URL='redis://here:1/0'\n")
        settings.cache_clear()
        assert settings().broker_url == "redis://here:1/0"


@pytest.mark.parametrize(
    ("written", "read"), [("", ()), ("shop", ("shop",)), ("shop, archive ,,", ("shop", "archive"))]
)
def test_buckets_are_separated_by_commas(written: str, read: tuple[str, ...]) -> None:
    with configured(allowed_buckets=written):
        assert settings().allowed_buckets == read


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_pairs", "many"),
        ("max_pairs", "0"),
        ("max_inflight", "17"),
        ("max_wait_ms", "-1"),
        ("hang_limit_s", "0"),
        ("exact_images", "perhaps"),
    ],
)
def test_a_wrong_value_is_a_sentence_that_names_the_variable_and_not_the_value_of_another(
    name: str, value: str
) -> None:
    with configured(**{name: value}, **SECRETS), pytest.raises(SettingsWrong) as caught:
        settings()
    said = str(caught.value)
    assert said.startswith(f"CONCORD_{name.upper()}: ")
    assert "\n" not in said
    assert "pa55word" not in said


@pytest.mark.parametrize("password", ["zq/xjv", "zq@xjv", "zq#xjv", "zq?xjv", "zq[xjv", "77/xjv", "77?zq@xjv"])
@pytest.mark.parametrize("name", ["database_url", "owner_database_url", "broker_url", "result_url"])
def test_a_password_that_is_not_percent_encoded_is_refused_and_no_part_of_it_is_shown(name: str, password: str) -> None:
    scheme = "postgresql+psycopg" if "database" in name else "redis"
    with configured(**{name: f"{scheme}://user:{password}@host:1/0"}), pytest.raises(SettingsWrong) as caught:
        settings()
    said = str(caught.value)
    assert said.startswith(f"CONCORD_{name.upper()}: not of the form {scheme}://")
    assert "%2F for /" in said
    assert not [part for part in re.split(r"\W", password) if part in said]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("broker_url", "redis://:secret@host:secret/0", "not of the form"),
        ("broker_url", "redis://:secret@host:1/secret", "not of the form"),
        ("broker_url", "redis//:secret@host:1/0", "not of the form"),
        ("broker_url", "redis://host:1/0?password=secret", "not of the form"),
        ("broker_url", "redis://:a@host:1/0;redis://:secret@host:2/0", "not of the form"),
        ("broker_url", "amqp://user:secret@host", "Concord's broker is Redis"),
        ("database_url", "mysql://user:secret@host/name", "Concord's database is Postgres"),
        ("s3_endpoint_url", "https://key:secret@host", "CONCORD_S3_ACCESS_KEY_ID"),
    ],
)
def test_an_address_of_another_form_is_refused_unseen(name: str, value: str, says: str) -> None:
    with configured(**{name: value}), pytest.raises(SettingsWrong, match=says) as caught:
        settings()
    assert "secret@" not in str(caught.value) and ":secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("broker_url", "redis://:p%40ss:w%2Frd@host:6379/0"),
        ("broker_url", "rediss://user:password@[::1]:6379/15?ssl_cert_reqs=required"),
        ("broker_url", "redis+socket:///run/redis.sock?virtual_host=1"),
        ("broker_url", "redis://host"),
        ("database_url", "postgresql+psycopg://user:p%40ss@/name?host=/run/postgresql"),
        ("database_url", "postgresql://host:5432/name?sslmode=verify-full&sslrootcert=/etc/ca.pem"),
        ("result_url", "db+postgresql://user:password@host/name"),
        ("result_url", "file:///var/results"),
        ("s3_endpoint_url", "https://s3.internal:8443"),
    ],
)
def test_addresses_of_other_forms_are_taken_as_they_are(name: str, value: str) -> None:
    with configured(**{name: value}):
        assert getattr(settings(), name) == value


def test_what_is_missing_is_named_with_what_to_do() -> None:
    with configured(), pytest.raises(SettingsWrong, match=r"CONCORD_DATABASE_URL is not set.*concord local up"):
        settings().need("database_url")
    with configured(database_url="postgresql://host/name"):
        assert settings().need("database_url") == "postgresql://host/name"


def test_no_secret_stands_in_the_repr() -> None:
    with configured(**SECRETS):
        chosen = settings()
    assert chosen.s3_secret_access_key is not None
    assert chosen.s3_secret_access_key.get_secret_value() == "pa55word"
    assert "pa55word" not in repr(chosen) + str(chosen)


def test_celery_takes_its_limits_from_the_settings() -> None:
    """A thread more than batches for each of: a message to record, a message to put off."""
    tree = ast.parse((Path(__file__).resolve().parent.parent / "celeryconfig.py").read_text())
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert names & set(Settings.model_fields) == {"broker_url", "result_url", "max_inflight"}
