"""Find, open and identify the files of a log, on this machine or on a remote store."""
