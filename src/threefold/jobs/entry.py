"""The script that a SageMaker container starts: it becomes `threefold train` on the config that lies beside it.

It is copied into the job's source as it is and imports nothing of threefold, so that it runs before anything is known
about the container. The training toolkit and the SDK's own drivers start it in different ways: once for each rank under
torchrun, or once on each host; with hyperparameters as arguments or without. Their variables are the same, so the
arguments are left alone and SM_HPS is what counts.
"""

from __future__ import annotations

import json
import os
import sys

CONFIG = "config.yaml"
MASTER_PORT = "7777"


def command(environ: dict[str, str], folder: str) -> list[str]:
    """What this process becomes: a rank where a launcher has started it, a single host's command, or torchrun."""
    train = ["-m", "threefold", "train", os.path.join(folder, CONFIG)]
    hosts = sorted(json.loads(environ.get("SM_HOSTS", "[]")))
    if "RANK" in environ or "OMPI_COMM_WORLD_RANK" in environ or len(hosts) < 2:
        return [sys.executable, *train]
    per_host = max(1, int(environ.get("SM_NUM_GPUS") or 0))
    place = {
        "--nnodes": str(len(hosts)),
        "--nproc-per-node": str(per_host),
        "--node-rank": str(hosts.index(environ["SM_CURRENT_HOST"])),
        "--master-addr": hosts[0],
        "--master-port": MASTER_PORT,
    }
    options = [part for pair in place.items() for part in pair]
    return [sys.executable, "-m", "torch.distributed.run", *options, *train]


def fetch_secrets(environ: dict[str, str]) -> None:
    """Sets the variables whose values lie in AWS Secrets Manager; the job's description has only their names."""
    names = json.loads(environ.pop("THREEFOLD_SECRETS", "{}"))
    if not names:
        return
    import boto3

    client = boto3.client("secretsmanager")
    for name, secret in names.items():
        environ[name] = client.get_secret_value(SecretId=secret)["SecretString"]


def main() -> None:
    environ = dict(os.environ)
    fetch_secrets(environ)
    # Several ranks of a host share its network interface's name, which gloo does not find by itself in a container.
    if "SM_NETWORK_INTERFACE_NAME" in environ:
        environ.setdefault("GLOO_SOCKET_IFNAME", environ["SM_NETWORK_INTERFACE_NAME"])
    become = command(environ, os.path.dirname(os.path.abspath(__file__)))
    sys.stdout.flush()
    os.execve(become[0], become, environ)


if __name__ == "__main__":
    main()
