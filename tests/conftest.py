import os

import torch


# The models are tiny, and other ranks want the cores: threads that wait for work by spinning cost more than they do,
# and so do the processes of their own in which ranks would compile.
torch.set_num_threads(1)
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
