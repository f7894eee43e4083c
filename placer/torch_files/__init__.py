"""Files that PyTorch writes, read without trusting them."""
