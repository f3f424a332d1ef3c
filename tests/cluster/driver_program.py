"""A driver to be killed: starts Ray and two ranks, prints the process numbers, and runs for ever."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))

import cluster_jobs

from zerotune.cluster import WorkerGroup
from zerotune.cluster.join import PlacementRequest, join


def main() -> int:
    try:
        with (
            join(PlacementRequest(procs_per_node=2, address="local")) as cluster,
            WorkerGroup.start(cluster) as group,
        ):

            def tell(rank: int, progress: object) -> None:
                if not told:
                    told.append(rank)
                    ours = psutil.Process().children(recursive=True)
                    print(json.dumps([(p.pid, p.create_time()) for p in ours]), flush=True)

            told: list[int] = []
            group.run(cluster_jobs.wait_for_ever, None, run_dir=sys.argv[1], on_progress=tell)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
