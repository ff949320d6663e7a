"""The trainer.

Waiting compute threads sleep instead of spinning: set here, before torch is first imported, since a spinning thread on cores
that are shared with engines and sandboxes makes every step several times slower.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
