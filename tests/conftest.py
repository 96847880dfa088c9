"""Property tests draw the same examples in every run, and none has a deadline, so that a commit is judged by
what it changes and not by what else the machine does.

`HYPOTHESIS_PROFILE=explore` draws new ones, and many more where a test does not set their number;
`FUZZ_EXAMPLES=2000` does the same for whole commands (test_file_fuzz.py). What they find belongs in a test as
an @example.
"""

import os

from hypothesis import settings

os.environ["HEXGEN2_STRICT"] = "1"  # an illegal transition raises, in every process that a test starts

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=2000, derandomize=False, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
