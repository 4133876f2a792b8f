"""The public names of `od.planners`: a name stands here alone."""

from .cluster import Assumed as Assumed
from .cluster import Cluster as Cluster
from .layout import Layout as Layout
from .layout import Module as Module
from .layout import Placement as Placement
from .run import Choice as Choice
from .run import RunPlan as RunPlan
from .run import plan_run as plan_run
from .search import Cell as Cell
from .search import cells as cells
from .simulation import Simulation as Simulation
from .simulation import simulate as simulate
from .workload import Columns as Columns
from .workload import Workload as Workload
