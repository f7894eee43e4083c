"""Store cold rows that no kernel reads in place: narrow rows, and rows on a drive."""
