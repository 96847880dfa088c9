"""benchmarks/simulator/cost_model_accuracy.py on a few rows that are written here."""

from __future__ import annotations

import subprocess
import sys

ROWS = """\
# a comment
source,gpu,model,tp,phase,batch,input_len_or_context,measured_ms,kind,has_attention,comm,note
lab,A100-80G,llama2-70b,2,prefill,1,1024,380,direct,1,nvlink,
lab,A100-80G,llama2-70b,2,prefill,1,2048,690,direct,1,nvlink,
lab,A100-80G,llama2-70b,2,decode,1,576,55,direct,1,nvlink,
lab,T4,llama2-70b,2,decode,8,0,300,derived,0,pcie,
lab,L40,opt-30b,1,prefill,4,512,700,derived,0,none,
lab,A40,opt-30b,2,decode,4,0,60,derived,0,excluded,
lab,H900,llama2-70b,2,decode,1,576,5,direct,1,nvlink,
lab,H100,no-such-model,1,decode,1,576,5,direct,1,none,
"""


def test_it_compares_predictions_and_counts_what_it_skips(tmp_path):
    (tmp_path / "measured.csv").write_text(ROWS)
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.simulator.cost_model_accuracy", str(tmp_path / "measured.csv")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    assert "6 rows, 2 skipped: llama2-70b on H900 (1), no-such-model on H100 (1)" in ran.stdout
    assert all(column in ran.stdout for column in ("table1", "zero-fit", "left-out gpu", "shipped"))
    assert "Warning" not in ran.stderr
