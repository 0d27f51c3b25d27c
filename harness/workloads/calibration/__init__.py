"""Measuring what a machine can do: what `meshscope calibrate` starts on each rank (docs/calibration.md)."""
