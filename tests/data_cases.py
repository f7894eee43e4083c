"""What tests of logs share."""

from typing import Any

import pytest

from placer.data import open_log
from placer.errors import DataError


def refused(message: str, log: Any, *format: Any, **how: Any) -> str:
    """Check that a log cannot be opened; return what is said of it, in which `message` is found."""
    with pytest.raises(DataError, match=message) as error:
        open_log(log, *format, **how)
    return str(error.value)
