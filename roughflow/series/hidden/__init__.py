"""Partially observed series: hidden components, measurement errors, and other densities of the values.

A series is a `_state_space`. Its likelihood (`_likelihood`) is computed by the Kalman filter (`_kalman`) if
the model is linear, by a filter on a grid (`_grid`) if one component is hidden, and otherwise by particles
that are guided by the most likely states (`_particles`).
"""
