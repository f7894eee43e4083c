"""File formats, one module each, that read raw samples."""
