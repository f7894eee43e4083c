"""The cost model whose constants were measured on a machine: `fit.calibrate` finds them."""
