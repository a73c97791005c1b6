"""What the model can be asked for. Each skill makes a `Task` from a `Draw`, for training and for measuring alike."""
