"""The scheduler's own cost, and what its placement is worth. No model, no torch.

python -m benchmarks.scheduler --json FILE
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from benchmarks.command import command_line, finish, positive
from benchmarks.host_cost import host_costs, tick_costs
from benchmarks.placement import LONG_CONTEXT_LOADS, compare_placements
from benchmarks.report import table
from benchmarks.simulation import LONG_CONTEXT

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write it as JSON if asked to."""
    parser = command_line("scheduler", __doc__)
    parser.add_argument(
        "--rounds", type=positive, default=200, help="plans of each size (default 200)"
    )
    parser.add_argument(
        "--requests", type=positive, default=10_000, help="simulated (default 10000)"
    )
    parser.add_argument("--workers", type=positive, default=100, help="simulated (default 100)")
    arguments = parser.parse_args(argv)
    figures = host_costs(arguments.rounds) + tick_costs(arguments.rounds)
    requests, workers, cores = arguments.requests, arguments.workers, os.cpu_count() or 1
    figures += compare_placements(requests, workers, processes=cores)
    # Half as large: with fewer rows in each plan, the same requests take more of them.
    requests, workers = -(-requests // 2), -(-workers // 2)
    figures += compare_placements(
        requests, workers, loads=LONG_CONTEXT_LOADS, cost=LONG_CONTEXT, processes=cores
    )
    finish("scheduler", figures, table(figures), arguments)


if __name__ == "__main__":
    main()
