"""`hexgen2 calibrate URL` times a running engine, and the fit predicts its step times."""

from __future__ import annotations

import numpy as np
from commands import hexgen2, installed
from served import KEY

from cost_model.coefficients import load_coefficients
from cost_model.measurements import measurements, read_rows


def test_a_running_engine_is_timed_and_fitted(server, model_folder, tmp_path):
    rows, fitted = tmp_path / "rows.csv", tmp_path / "mine.json"
    shape = ["--gpu", "CPU", "--model", str(model_folder), "--api-key", KEY]
    result = installed("calibrate", server.url, *shape, "--rows", str(rows), "-o", str(fitted))
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    assert "prefill of 1 at 128 tokens" in result.stderr and "decode of 1 at" in result.stderr
    timed = list(measurements(read_rows(rows)[1]))
    assert {row.step.phase for row in timed} == {"prefill", "decode"}
    found = load_coefficients(fitted)
    assert "CPU" in found.gpus and server.url in found.source
    ratios = [row.step.seconds_by(found) / row.seconds for row in timed]
    assert 0.4 < np.median(ratios) < 2.5


def test_an_engine_that_is_not_there(model_folder):
    result = hexgen2("calibrate", "http://127.0.0.1:9", "--gpu", "CPU", "--model", str(model_folder))
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert "cannot be reached" in result.stderr


def test_the_wrong_key(server, model_folder):
    shape = ["--gpu", "CPU", "--model", str(model_folder), "--api-key", "wrong"]
    result = hexgen2("calibrate", server.url, *shape)
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert "answered 401" in result.stderr


def test_what_the_engine_runs_must_be_said(server):
    result = hexgen2("calibrate", server.url, "--gpu", "CPU")
    assert result.returncode == 2 and "--model: is missing" in result.stderr
