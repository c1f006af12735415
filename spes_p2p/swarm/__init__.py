"""How peers meet: identity, records, claims, rosters, averaging, exchange. Knows tensors, not models."""

import sys
from importlib.util import find_spec, module_from_spec

# hivemind's own `__init__` imports its averager, experts and optimizers, which nothing here uses: 46 MB, half a second.
if "hivemind" not in sys.modules and (spec := find_spec("hivemind")) is not None:
    sys.modules["hivemind"] = module_from_spec(spec)
