"""Tests over several processes use the cases of their neighbours."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "executor"))
