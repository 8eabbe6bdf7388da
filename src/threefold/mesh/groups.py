"""The path under which version 0.1.0's examples imported the mesh."""

from threefold.mesh.mesh import Mesh as Mesh
from threefold.mesh.mesh import init_mesh as init_mesh
