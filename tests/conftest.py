"""Property tests draw the same examples in every run, without deadlines, so that only a change of the code
can break them.

`HYPOTHESIS_PROFILE=explore` draws new examples, and many more where a test does not set their number;
`FUZZ_EXAMPLES=2000` does the same for whole commands (test_file_fuzz.py). Add failures that these find to a
test as an @example.
"""

import os
import signal
from pathlib import Path

from hypothesis import settings

os.environ["HEXGEN2_STRICT"] = "1"  # an illegal transition raises, in every process that a test starts
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # kernels for GPUs run on CPUs, if this is set before triton is imported
    )

# In a background job of a shell, Ctrl-C is ignored, and so it would be in every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=2000, derandomize=False, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
