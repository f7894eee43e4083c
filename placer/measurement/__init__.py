"""Measure step times of plans on this machine, for many cases, and keep them in files."""

from placer.measurement.cases import QUICK as QUICK
from placer.measurement.cases import Case as Case
from placer.measurement.cases import Effort as Effort
from placer.measurement.cases import Measured as Measured
from placer.measurement.cases import Setting as Setting
from placer.measurement.cases import random_cases as random_cases
from placer.measurement.machine import Dataset as Dataset
from placer.measurement.machine import Measurement as Measurement
from placer.measurement.machine import collect as collect
from placer.measurement.machine import repeated as repeated
from placer.measurement.measure import Measurer as Measurer
from placer.measurement.measure import measure_plan as measure_plan
