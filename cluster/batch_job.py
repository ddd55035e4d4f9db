"""`python -m cluster.batch_job`: `loopmesh batch` for where only Python is at hand.

ray job submit --working-dir . -- python -m cluster.batch_job --input IN --output OUT
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from cluster import cli

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one batch; its exit code (see cluster/batch.py)."""
    return cli.main(["batch", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
