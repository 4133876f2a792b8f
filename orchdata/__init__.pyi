"""The public names, for type checkers and for `__init__.py`, which reads this file: a name stands here alone."""

import types

from . import balancers as balancers
from . import hf as hf
from . import planners as planners
from . import torchtitan as torchtitan
from .balancers import CostModel as CostModel
from .balancers import MoE as MoE
from .balancers import PhaseCost as PhaseCost
from .balancers import TransformerCost as TransformerCost
from .batch.batch import Batch as Batch
from .batch.megatron import megatron_packed as megatron_packed
from .batch.rounds import Round as Round
from .batch.rounds import rounds as rounds
from .batch.tensors import Team as Team
from .building.collate import StepInfo as StepInfo
from .dataloader import DataLoader as DataLoader
from .dataset.mixture import Mixture as Mixture
from .dataset.mixture import Source as Source
from .dataset.shard_dataset import ShardDataset as ShardDataset
from .delivery.policy import ErrorPolicy as ErrorPolicy
from .engines.on_ray import RayEngine as RayEngine
from .loaders.errors import ContainerError as ContainerError
from .loaders.errors import DamagedIndexError as DamagedIndexError
from .loaders.errors import DataError as DataError
from .loaders.errors import FunctionError as FunctionError
from .loaders.errors import MissingIndexError as MissingIndexError
from .loaders.errors import OrchdataError as OrchdataError
from .loaders.errors import PackageError as PackageError
from .loaders.errors import ShardError as ShardError
from .loaders.errors import StaleIndexError as StaleIndexError
from .loaders.errors import StateError as StateError
from .loaders.errors import StepError as StepError
from .loaders.errors import StorageError as StorageError
from .loaders.errors import TooManyFailures as TooManyFailures
from .loaders.limits import Limits as Limits
from .loaders.modalities.audio import AudioPreprocessor as AudioPreprocessor
from .loaders.modalities.image import ImagePreprocessor as ImagePreprocessor
from .loaders.modalities.modality import ArraySpec as ArraySpec
from .loaders.modalities.modality import Modality as Modality
from .loaders.modalities.modality import PartSize as PartSize
from .loaders.modalities.modality import Slot as Slot
from .loaders.modalities.video.preprocessor import VideoPreprocessor as VideoPreprocessor
from .loaders.recipe import Recipe as Recipe
from .loaders.records import Media as Media
from .loaders.samples.sample import Sample as Sample
from .loaders.shards.container import Container as Container
from .loaders.shards.container import Shard as Shard
from .loaders.shards.container import ShardSource as ShardSource
from .loaders.shards.container import TextFiles as TextFiles
from .loaders.storage.files import Cache as Cache
from .loaders.text.preprocessor import TextPreprocessor as TextPreprocessor
from .loaders.text.template import ChatTemplate as ChatTemplate
from .order.order import Order as Order
from .order.order import Shuffle as Shuffle
from .order.order import shuffle_quality as shuffle_quality
from .planning.balance import Balance as Balance
from .planning.balance import Packed as Packed
from .planning.balance import Padded as Padded
from .planning.balance import Teams as Teams
from .planning.plan import Plan as Plan
from .planning.route import Route as Route
from .planning.route import make_route as make_route
from .post_balancing.loader import post_balance as post_balance
from .post_balancing.step import Part as Part
from .post_balancing.step import PostBatch as PostBatch
from .profiling.profile import Profile as Profile
from .profiling.profile import profile as profile
from .ranks.clip import clip_grad_norm_ as clip_grad_norm_
from .ranks.exchange import exchange as exchange
from .ranks.parallel import DataParallel as DataParallel
from .ranks.team_attention import TeamAttention as TeamAttention
from .showing import ShownSamples as ShownSamples
from .showing import show as show
from .testing import check_container as check_container
from .testing import check_engine as check_engine

__version__: str

def _views() -> types.ModuleType: ...
def _html(value: object) -> str: ...
