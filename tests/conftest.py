import torch


# The models are tiny, and other ranks want the cores: threads that wait for work by spinning cost more than they do.
torch.set_num_threads(1)
