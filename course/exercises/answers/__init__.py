"""A reference answer for each exercise. Look after you have tried."""
