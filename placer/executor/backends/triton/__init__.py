"""The Triton backend and its kernels, for GPUs."""
