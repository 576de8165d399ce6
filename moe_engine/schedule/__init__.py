"""Pipeline schedules as data: what each rank runs, in which order; proven, timed and drawn before anything is trained.

`schedules.schedule` makes the lists, `check.check` proves them, `simulate.simulate` times them, `draw` shows them.
Pure Python: no torch, milliseconds.
"""
