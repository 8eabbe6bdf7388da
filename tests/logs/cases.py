"""The collected logs: what `threefold explain` must find in each, and where each comes from.

produced/: made by collect.py from programs that really fail here. public/: exact lines from public issue threads, for
what needs GPUs. unrelated/: lines of other programs, and of training that goes well.
examples.txt: a line of each error.
"""

from __future__ import annotations

from pathlib import Path

PRODUCED = {
    "gloo-connect": "gloo-connect",
    "gloo-interface": "gloo-connect",
    "gloo-timeout": "gloo-timeout",
    "peer-gone": "peer-gone",
    "uneven-epoch": "peer-gone",
    "join-exhausted": "uneven-inputs",
    "no-server": "rendezvous-refused",
    "nobody-joins": "rendezvous-timeout",
    "unknown-host": "unknown-host",
    "rendezvous-timeout": "rendezvous-timeout",
    "rendezvous-refused": "rendezvous-refused",
    "occupied-port": "address-in-use",
    "occupied-port-torchrun": "address-in-use",
    "no-variables": "missing-variables",
    "half-of-variables": "missing-variables",
    "not-initialized": "not-initialized",
    "initialized-twice": "initialized-twice",
    "backend-of-one-device": "no-nccl",
    "collective-mismatch": "collective-mismatch",
    "shape-mismatch": "collective-mismatch",
    "monitored-barrier": "gloo-timeout",
    "world-size-assertion": "world-size",
    "mesh-too-big": "world-size",
    "threefold-mesh": "world-size",
    "threefold-batch": "threefold",
    "mixed-dtensor": "mixed-dtensor",
    "clip-over-meshes": "different-meshes",
    "unused-parameters": "ddp-unused-parameters",
    "other-model": "ddp-different-models",
    "ready-twice": "ddp-ready-twice",
    "in-place": "in-place",
    "frozen": "no-gradient",
    "module-prefix": "state-dict-keys",
    "other-sizes": "state-dict-sizes",
    "dtype-mismatch": "dtype-mismatch",
    "index-out-of-range": "cuda-assert",
    "cpu-memory": "oom-killed",
    "killed-by-memory": "killed",
    "killed-in-spawn": "killed",
    "shared-memory": "shared-memory",
    "killed-worker": "loader-worker",
    "open-files": "open-files",
    "full-disk": "disk-full",
    "segmentation-fault": "segmentation-fault",
    "silent-exit": "child-failed",
    "own-error": "own-error",
    "stopped": "stopped",
    "unguarded-spawn": "unguarded-main",
    "no-compiler": "no-compiler",
    "no-cuda": "no-cuda",
    "no-flash-attention": "flash-attention",
    "hub-offline": "hub-unreachable",
    "hub-gated": "hub-access",
    "hub-not-found": "hub-not-found",
    "hub-forbidden": "hub-access",
    "hub-rate-limit": "hub-rate-limit",
    "unknown-architecture": "unknown-architecture",
    "pointer-instead-of-weights": "broken-weights",
}

# A line of each known error, as it stands in a log.
EXAMPLES = dict(
    line.split(": ", 1)
    for line in (Path(__file__).parent / "examples.txt")
    .read_text(encoding="utf-8")
    .splitlines()
)

# public/ERROR.log or public/ERROR--MORE.log: the name says what is to be found, the last line where it is from.
PUBLIC = {
    path.stem: path.stem.partition("--")[0]
    for path in sorted((Path(__file__).parent / "public").glob("*.log"))
}

UNRELATED = (
    "client",
    "compiler",
    "database",
    "git",
    "java",
    "node",
    "package-manager",
    "script",
    "secure-shell",
    "training-that-goes-well",
    "warnings-only",
    "web-server",
)
