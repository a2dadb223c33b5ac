"""Training with torch: what :mod:`muster` offers for it, in one place. Importing it imports torch."""

from muster.worker.pytorch.capture import CaptureError as CaptureError
from muster.worker.pytorch.capture import TrainingStep as TrainingStep
from muster.worker.pytorch.capture import capture_step as capture_step
from muster.worker.pytorch.data_parallel import DataParallel as DataParallel
from muster.worker.pytorch.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
from muster.worker.pytorch.state import TorchTrainingState as TorchTrainingState
from muster.worker.store.generations import Generation as Generation
from muster.worker.store.generations import on_new_generation as on_new_generation
