"""The public names, for type checkers and for `__init__.py`, which reads this file: a name stands here alone."""

from .accelerate import accelerate as accelerate
from .from_processor import recipe as recipe
from .images import image_modality as image_modality
from .inputs import Inputs as Inputs
from .inputs import encode as encode
from .inputs import loss as loss
from .inputs import rounds as rounds
from .model_cost import cost as cost
from .trainer import TrainerMixin as TrainerMixin
from .trials import share_attention as share_attention
