"""Plans for trainers that people have: plain PyTorch, TorchRec, HugeCTR, Hugging Face."""
