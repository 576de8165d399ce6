"""Running a schedule: one executor for every list of actions."""
