"""The script that a SageMaker container starts: it becomes `threefold train` on the config next to it.

It is copied into the job's source unchanged and imports nothing from threefold, so it runs before anything is known
about the container. The training toolkit and the SDK's own drivers start it in different ways: once per rank under
torchrun, or once per host; with hyperparameters as arguments, or without. Their variables are the same, so the script
ignores the arguments and reads SM_HPS.
"""

from __future__ import annotations

import json
import os
import sys

CONFIG = "config.yaml"
MASTER_PORT = "7777"


def command(environ: dict[str, str], folder: str) -> list[str]:
    """Returns what this process becomes: a rank (if a launcher started it), a single host's command, or torchrun."""
    train = ["-m", "threefold", "train", os.path.join(folder, CONFIG)]
    hosts = sorted(json.loads(environ.get("SM_HOSTS", "[]")))
    if "RANK" in environ or "OMPI_COMM_WORLD_RANK" in environ or len(hosts) < 2:
        return [sys.executable, *train]
    place = {
        "--nnodes": str(len(hosts)),
        "--nproc-per-node": str(max(1, int(environ.get("SM_NUM_GPUS") or 0))),
        "--node-rank": str(hosts.index(environ["SM_CURRENT_HOST"])),
        "--master-addr": hosts[0],
        "--master-port": MASTER_PORT,
    }
    options = [part for pair in place.items() for part in pair]
    return [sys.executable, "-m", "torch.distributed.run", *options, *train]


def fetch_secrets(environ: dict[str, str]) -> None:
    """Sets the variables whose values are in AWS Secrets Manager; the job's description has only their names."""
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
    # Ranks of a host share its network interface. In a container, gloo does not find the interface's name.
    if "SM_NETWORK_INTERFACE_NAME" in environ:
        environ.setdefault("GLOO_SOCKET_IFNAME", environ["SM_NETWORK_INTERFACE_NAME"])
    become = command(environ, os.path.dirname(os.path.abspath(__file__)))
    sys.stdout.flush()
    os.execve(become[0], become, environ)


if __name__ == "__main__":
    main()
