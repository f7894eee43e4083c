"""Tests of the executor need no GPU: Triton's kernels run in its interpreter."""

import os

# Triton looks at this when a kernel is defined, that is, when its module is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")
