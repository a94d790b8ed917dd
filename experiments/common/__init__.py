"""What the experiments share: images, training, runs side by side, tables and plots."""
