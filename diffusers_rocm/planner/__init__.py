"""What a mesh will cost before its GPUs are there: seconds of a step and memory of a rank, counted, then predicted."""
