"""Predictions of whole servers stay as close to measured ones as they are: by engine and GPU.

Needs the measured runs of which HEXGEN2_MEASUREMENTS names the folder (serving_measured.csv.gz).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

MEASUREMENTS = Path(os.environ.get("HEXGEN2_MEASUREMENTS", ""), "serving_measured.csv.gz")
MOST_CLIENTS = 32
EVERY = 5

LINES = {}


@pytest.mark.skipif(not MEASUREMENTS.is_file(), reason="HEXGEN2_MEASUREMENTS names no folder with runs")
def test_errors_stay_below_their_lines():
    pass
