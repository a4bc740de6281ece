"""Sensor input to arrays: images, frames of reference, ego history, the observation at t0."""
