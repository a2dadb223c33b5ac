"""The first program: each worker gathers everybody's rank, which shows that all of them communicate.

muster run -n 4 --scheduler -- python -m examples.nccl_allgather
"""

from muster import all_gather, get_rank, init
from muster.training.carrier import module_for

xp = module_for(init())  # CuPy on GPUs, where this is NCCL's AllGather; NumPy on CPUs
print(all_gather(xp.array([[get_rank()]], xp.float32)))
