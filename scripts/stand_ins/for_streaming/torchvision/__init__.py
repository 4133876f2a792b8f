"""What Mosaic Streaming imports of torchvision for its data sets of images, none of which a benchmark uses."""
