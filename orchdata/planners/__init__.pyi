"""The public names of `od.planners`: a name stands here alone."""

from .jobs import GpuKind as GpuKind
from .jobs import Job as Job
from .jobs import JobCell as JobCell
from .jobs import JobRun as JobRun
from .jobs import JobsPlan as JobsPlan
from .jobs import plan_jobs as plan_jobs
from .jobs import read_jobs as read_jobs
from .together import TogetherPlan as TogetherPlan
from .together import TogetherTable as TogetherTable
from .together import plan_together as plan_together
from .waves import Operators as Operators
from .waves import OperatorsRun as OperatorsRun
from .waves import WavesPlan as WavesPlan
from .waves import plan_waves as plan_waves
