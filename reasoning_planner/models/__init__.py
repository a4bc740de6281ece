"""The PyTorch reference models: the oracle of every runtime."""
