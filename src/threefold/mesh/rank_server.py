"""Imported by servers that ranks and loaders' workers are forked from (`start_server`), and by nothing else."""

from threefold.mesh.local_ranks import serve

serve()
