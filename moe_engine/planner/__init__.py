"""What a run will cost, by arithmetic on its configuration: floating-point operations, parameters. No torch."""
