"""Plans for trainers that people have: TorchRec, HugeCTR, Hugging Face."""
