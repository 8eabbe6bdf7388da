"""Imported by servers that ranks and loaders' workers are forked from (`start_server`), and by nothing else."""

from threefold.mesh.local_ranks import let_children_take_signals

let_children_take_signals()
