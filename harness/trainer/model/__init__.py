"""The decoder in the form pipelines need: an ordered dictionary of layers, optional ends, a thin forward."""
