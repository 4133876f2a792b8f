"""Foreign loaders: samples that another loader has loaded, balanced between ranks ahead of the training step."""
