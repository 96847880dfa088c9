"""Fit the numbers of engines (cost_model/engines/engines.json) to published runs of their servers.

    python -m benchmarks.simulator.engine_fit --runs runs.csv.gz [-o engines.json]

The file has the columns of `hexgen2 estimate --runs` (docs/simulate.md) with measured_ttft_ms,
measured_tpot_ms and backend_version. The fit sees two thirds of the runs (serving_runs.py beside this file),
so that the others can check it (serving_accuracy.py --held-out), and takes about 12 minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.simulator.serving_runs import for_fitting
from cost_model.engines.model import ENGINES
from cost_model.engines.numbers import EngineFits, FittedEngine
from hexgen2.calibration.engines import all_linear_times, fit_engine
from hexgen2.calibration.runs import measured_runs
from hexgen2.estimation.runs import read_runs

SOURCE = (
    "runs of InferenceMAX and of AIConfigurator's validation: closed loops of 1 to 1,152 clients on H100, "
    "H200 and B200"
)

MOST_CLIENTS = 1200
"""Runs with more take minutes to simulate a dozen times."""
ROUNDS = 2
"""Times are linear in the numbers only near those that they were simulated with: the second round starts from
what the first has found."""


def progress(done: int, runs: int) -> None:
    """A line every 50 runs."""
    if done % 50 == 0 or done == runs:
        print(f"{done} of {runs}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, required=True, help="CSV file with measured runs")
    parser.add_argument("-o", "--output", type=Path, help="write the numbers here")
    asked = parser.parse_args()
    runs = [
        measured
        for measured in measured_runs(read_runs(asked.runs)[1])
        if for_fitting(measured) and measured.run.concurrency <= MOST_CLIENTS
    ]
    engines = {}
    for name in ENGINES:
        own = [measured for measured in runs if measured.run.engine == name]
        prior = found = FittedEngine()
        for _ in range(ROUNDS):
            linear = all_linear_times([measured.run for measured in own], found, progress=progress)
            found = fit_engine(own, linear, found, prior=prior)
        engines[name] = found
    text = EngineFits(source=SOURCE, engines=engines).to_json()
    if asked.output:
        asked.output.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
