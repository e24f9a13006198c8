"""Speed, measured: models of their real size with random weights, side by side in one run."""
