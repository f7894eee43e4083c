"""Read, write and lock files and folders: nothing is half written, nothing is unpickled."""
