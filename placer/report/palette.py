"""Colours, markers and patterns that all pictures and pages share, told apart without colour too.

The colours are those of Okabe and Ito, "Color Universal Design" (2008), which people with any kind
of colour vision tell apart; https://jfly.uni-koeln.de/color/.
"""

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, VERMILION, YELLOW, GREY = "#56B4E9", "#D55E00", "#F0E442", "#8A94A0"

SERIES = (BLUE, ORANGE, GREEN, PINK, SKY, VERMILION, YELLOW, GREY)
"""In the order in which pictures take them; the last one stands for black."""

HBM, DRAM = BLUE, ORANGE
STEP, BOUND = BLUE, VERMILION

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""Of matplotlib, one for each of `SERIES`."""

HATCHES = ("", "//", "..", "\\\\", "xx", "--", "++", "oo")
"""Of matplotlib's bars, one for each of `SERIES`."""

INK, MUTED, FAINT = "#1f2933", "#6b7785", "#d5dbe1"
"""Text, text beside it, and lines, on white."""
