"""Imported last by the server of the tests' ranks: what it has imported is left out of its children's collections.

A collection that walks hundreds of thousands of old objects takes time, and copies their pages into the child.
"""

import gc

gc.collect()
gc.freeze()
