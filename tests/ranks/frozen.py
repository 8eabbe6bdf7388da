"""Imported last by the server of the tests' ranks: what it has imported is left out of its children's collections.

A collection that walks hundreds of thousands of old objects takes time, and copies their pages into the child.
"""

import gc

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

# Its thousand patterns are compiled at the first call, in each process that loads, saves or adapts a model.
get_checkpoint_conversion_mapping("llama")
gc.collect()
gc.freeze()
