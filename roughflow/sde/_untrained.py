"""What a model is given, and does not learn."""

# For a field, as `eqx.field(metadata=GIVEN)`, whose arrays are not trained: data of a target, say. Nothing
# moves them, not even a decay of all weights.
GIVEN = {"given": True}
