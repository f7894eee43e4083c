"""Who holds which rows of which columns: a plan divided over processes."""
