"""The cost model with constants measured on a machine; `fit.calibrate` fits them."""
