"""A rank of a command other than training: it joins the mesh, works, and reports a failure once for all ranks."""

from __future__ import annotations

from collections.abc import Callable

from threefold.config.schema import Config
from threefold.errors import ThreefoldError
from threefold.mesh import environment
from threefold.mesh.mesh import Mesh, join_mesh
from threefold.mesh.topology import Topology
from threefold.run.failure import report_failure
from threefold.run.process import facts_of, quieten_libraries


def as_rank(config: Config, topology: Topology, work: Callable[[Mesh], int]) -> int:
    """Returns the exit code of `work` on the mesh, or of its failure."""
    quieten_libraries()
    info, asked = environment.current(), config.mesh
    mesh: Mesh | None = None
    try:
        mesh = join_mesh(
            topology,
            info,
            device=asked.device,
            timeout_s=asked.timeout_s,
            facts=facts_of(config),
        )
        code = work(mesh)
        mesh.barrier()
        mesh.close()
        return code
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        code = report_failure(error, mesh, info.rank)
        if isinstance(error, ThreefoldError) and mesh is not None:
            mesh.abandon()
        return code
