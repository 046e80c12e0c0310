"""`python -m peer`: the same as `gossamer`."""

from __future__ import annotations

import sys

from peer.cli import main

if __name__ == "__main__":
    sys.exit(main())
