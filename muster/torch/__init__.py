"""Training with torch: all that :mod:`muster` offers for it, in one place. Importing it imports torch."""

from muster.version import how_to_install

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    text = f"muster.torch needs torch. {how_to_install('torch')}."
    raise ModuleNotFoundError(text, name=error.name) from None

from muster.programs.generations import Generation as Generation
from muster.programs.generations import on_new_generation as on_new_generation
from muster.programs.keep_alive import keep_alive as keep_alive
from muster.torch.capture import CaptureError as CaptureError
from muster.torch.capture import TrainingStep as TrainingStep
from muster.torch.capture import capture_step as capture_step
from muster.torch.data_parallel import DataParallel as DataParallel
from muster.torch.in_place import InPlaceStep as InPlaceStep
from muster.torch.in_place import Resharded as Resharded
from muster.torch.in_place import steps as steps
from muster.torch.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
from muster.torch.snapshot_state import SnapshotTrainingState as SnapshotTrainingState
from muster.torch.snapshots import Snapshots as Snapshots
from muster.torch.state import TorchTrainingState as TorchTrainingState
