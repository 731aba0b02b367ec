"""What holds for all tests: none reads or writes the user's cache of measured times.

Processes that tests start inherit it.  A test of the cache itself names a folder of its own.
"""

from __future__ import annotations

import os

os.environ["PDCOMPILE_CACHE"] = "off"
