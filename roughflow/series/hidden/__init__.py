"""Partially observed series: hidden components, measurement errors, and other densities of the values.

A series is a `_state_space`. Its likelihood (`_likelihood`) is that of Kalman's filter (`_kalman`) if the
model is linear, of a filter on a grid (`_grid`) if one component is hidden, and otherwise an average over
draws of the hidden states around the most likely ones, or over particles guided by these (`_draws`).
"""
