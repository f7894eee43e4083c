"""The files of a log: found, opened, and known again, on this machine or on a remote store."""
