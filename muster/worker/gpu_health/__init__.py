"""The health of a GPU: the driver's readings and their interpretation, and a check of the GPU's results."""
